"""Aurora: polar factors whose rows, along the longer side, have equal norms.

The polar factor of a tall direction u (m, n), m > n, has orthonormal columns, while its rows may have any norms up to
one: some neurons hardly learn. Aurora looks for factors d_i of the rows of u whose polar factor has rows of equal
norms, in a few rounds:

    d_i  = 1 / |u_i|
    o    = polar factor of diag(d) u
    d_i <- d_i (n / m / |o_i|^2)^p             before each further round; n / m is the mean of |o_i|^2

Columns take the place of rows in wide matrices. Square ones, whose polar factors have unit rows, take one round
without factors. A row of zeros stays zero.

Source: Aurora (tilde research), github.com/tilde-research/aurora-release, July 2026: two rounds, p = 1/2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quintic.optim.numeric.sums import divided_by_norms, norms
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.stages import PolarStage

__all__ = ["AURORA", "BalancedPolar"]


@dataclass(frozen=True)
class BalancedPolar(PolarStage):
    """Orthogonalises matrices several times, each time with better balanced rows, or columns of wide ones."""

    num_rounds: int = 2
    power: float = 0.5

    def __post_init__(self) -> None:
        """Raise a ValueError for numbers out of range."""
        if self.num_rounds < 1 or self.power <= 0:
            raise ValueError(f"{self}: need num_rounds >= 1 and power > 0")

    def rounds_of(self, m: int, n: int) -> int:
        """Return the number of rounds: one for square matrices."""
        return 1 if m == n else self.num_rounds

    def apply(self, matrices: Tensor, orthogonalize: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the balanced polar factors (b, m, n)."""
        m, n = matrices.shape[1:]
        if m == n:
            return orthogonalize(matrices)
        # The shorter side is orthogonal in any case; d scales rows, or columns, along the longer one.
        dim, share = (-1, n / m) if m > n else (-2, m / n)
        wide = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
        d = divided_by_norms(1.0, norms(wide, dim))  # (b, m, 1) or (b, 1, n)
        for _ in range(self.num_rounds - 1):
            o = orthogonalize((wide * d).to(matrices.dtype))
            # Squared norms have the mean `share`: rows above it get a smaller d in the next round.
            square = norms(o, dim, torch.promote_types(o.dtype, wide.dtype)).square()
            d = d * divided_by_norms(share, square).pow(self.power)
        return orthogonalize((wide * d).to(matrices.dtype))


AURORA = UpdateRule(title="Aurora", polar=BalancedPolar())
