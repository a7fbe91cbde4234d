"""MuonEq: rows or columns of directions get equal norms before they are orthogonalised (arXiv 2603.28254).

For a direction u (m, n) with rows u_i of mean square norm r^2 = |u|^2 / m, and columns in the same way,

    rows        u_i <- u_i r / |u_i|                       the paper's default, "R"; nanochat has this form
    columns     the same for columns                       "C"
    both        u_ij <- u_ij r c / (|u_i| |u^j|)           "RC", with the norms of both before the change

and the momentum, the polar step and the write are Muon's. The factors r and c, which the paper leaves out, keep the
size of directions; the polar step is the same without them. A row of zeros stays zero.

Source: MuonEq, arXiv 2603.28254; equilibration to the mean row norm as in nanochat (A. Karpathy), commit 92d63d4.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels
from quintic.optim.numeric.sums import divided_by_norms, frobenius_norms, norms, scaled
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.stages import MatrixStage, StageOptions

__all__ = ["MUONEQ", "Equalize", "equalizing_factors"]

_DIMS = {"rows": (-1,), "columns": (-2,), "both": (-1, -2)}


@dataclass(frozen=True)
class Equalize(MatrixStage):
    """Gives the rows, the columns, or both, of matrices equal norms."""

    label = "equalize"

    of: Literal["rows", "columns", "both"] = "rows"

    def __post_init__(self) -> None:
        """Raise a ValueError for other values."""
        if self.of not in _DIMS:
            raise ValueError(f"Equalize(of={self.of!r}): choose 'rows', 'columns' or 'both'")

    def apply(
        self, matrices: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Return the matrices (b, m, n) with equal norms, and no factors."""
        result = matrices
        # Norms of rows and columns are those before the change.
        for factors in [equalizing_factors(matrices, dim, options.kernels) for dim in _DIMS[self.of]]:
            result = scaled(result, factors)
        return result, None


def equalizing_factors(matrices: Tensor, dim: int, kernels: Kernels) -> Tensor:
    """Return the factors that give all rows (dim -1), or columns, of matrices (b, m, n) their root mean square norm."""
    wide = torch.promote_types(matrices.dtype, torch.float32)
    norm = norms(matrices, dim, wide, kernels=kernels)  # (b, m, 1) for the rows, dim -1; (b, 1, n) for the columns
    mean = frobenius_norms(norm, kernels=kernels) / math.sqrt(max(1, norm.shape[-3 - dim]))  # (b, 1, 1)
    return divided_by_norms(mean, norm)


MUONEQ = UpdateRule(title="MuonEq", before=(Equalize(),))
