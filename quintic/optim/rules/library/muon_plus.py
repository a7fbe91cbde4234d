"""Muon+: orthogonalised updates are normalised once more (arXiv 2602.21545).

The polynomials of the polar step leave singular values between about 0.7 and 1.2, and rows and columns of uneven
norms. For an update o (m, n), with k = min(m, n),

    frobenius   o <- o sqrt(k) / |o|                       the norm of an exactly orthogonal matrix; nanochat's form
    rows        equal norms for all rows, then as above
    columns     equal norms for all columns, then as above
    columns_rows    columns, then rows, then as above      the paper's best ("col-row")

The paper's rows and columns have norm one; here all forms keep the Frobenius norm of an orthogonal matrix, a factor
that depends on the shape alone, so that learning rates tuned for Muon and `adjust_lr` keep their meaning.

Source: Muon+, arXiv 2602.21545; the Frobenius form as in nanochat (A. Karpathy), commit 92d63d4.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from quintic.optim.numeric.sums import divided_by_norms, frobenius_norms, scaled
from quintic.optim.rules.library.muoneq import Equalize, equalizing_factors
from quintic.optim.rules.library.normuon import NeuronSecondMoment
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.stages import MatrixStage, StageOptions

__all__ = ["MUON_PLUS", "NANOCHAT", "Renormalize"]

_DIMS = {"frobenius": (), "rows": (-1,), "columns": (-2,), "columns_rows": (-2, -1)}


@dataclass(frozen=True)
class Renormalize(MatrixStage):
    """Normalises updates to the Frobenius norm of an orthogonal matrix, and before that rows or columns."""

    label = "renormalize"

    to: Literal["frobenius", "rows", "columns", "columns_rows"] = "columns_rows"

    def __post_init__(self) -> None:
        """Raise a ValueError for other values."""
        if self.to not in _DIMS:
            raise ValueError(f"Renormalize(to={self.to!r}): choose {', '.join(map(repr, _DIMS))}")

    def apply(
        self, matrices: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Return the normalised updates (b, m, n), and no factors."""
        result = matrices
        for dim in _DIMS[self.to]:
            result = scaled(result, equalizing_factors(result, dim, options.kernels))
        side, norm = math.sqrt(min(matrices.shape[1:])), frobenius_norms(result, kernels=options.kernels)
        return scaled(result, divided_by_norms(side, norm)), None


MUON_PLUS = UpdateRule(title="Muon+", after=(Renormalize(),))

# What nanochat's master trains with since July 2026.
NANOCHAT = UpdateRule(title="nanochat", before=(Equalize(),), after=(Renormalize("frobenius"), NeuronSecondMoment()))
