"""Rules that hold back the growth of weights without fixing their norms.

For a matrix w, its orthogonalised update u with the factor f from `adjust_lr`, and v = w - lr wd w - lr f u:

    RadialBrake       w <- v t / |v|    with t = |w| + s (|v| - |w|)
    RelativeUpdate    w <- w - lr wd w - lr |w| u / |u|

RadialBrake lets through a share s of the change of the norm: `outward` where it grows, `inward` where it shrinks.
RelativeUpdate makes every step as long as lr times the weight, as Hyperball does, and does not project: `adjust_lr` has
no effect, and `weight_decay` should be 0, since it shrinks weights exponentially. A matrix of zeros counts as one of
the norm sqrt(m / 3) there, which PyTorch's initialisation would give it.

Source: the brake is of modded-nanogpt pull request 294 (user nilin), May 2026, which takes the change of the norm to
first order in lr; here it is exact, as in Emerging-Optimizers (NVIDIA), which has both.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintic.optim.numeric.sums import divided_by_norms, frobenius_norms
from quintic.optim.rules.library.hyperball import without_scale
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.stages import StageOptions, WeightStage

__all__ = ["RADIAL_BRAKE", "RELATIVE_UPDATE", "RadialBrake", "RelativeUpdate"]


@dataclass(frozen=True)
class RadialBrake(WeightStage):
    """Lets norms of weights change by a share of the change that a step would make."""

    label = "brake norms"
    numbers = "matrix"

    outward: float = 0.5
    inward: float = 1.0

    def __post_init__(self) -> None:
        """Raise a ValueError for shares out of range."""
        if not (0 <= self.outward <= 1 and 0 <= self.inward <= 1):
            raise ValueError(f"{self}: outward and inward must lie in [0, 1]")

    def apply(
        self, weights: Tensor, updates: Tensor, scales: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the factors of weights and updates, (b, 1, 1) each."""
        before = frobenius_norms(weights, kernels=options.kernels)
        keep, rate = torch.ones_like(before) - options.lr * options.weight_decay, scales * options.lr
        after = frobenius_norms(keep * weights - rate * updates.to(weights.dtype), kernels=options.kernels)
        share = torch.where(after > before, self.outward, self.inward)
        factor = divided_by_norms(before + share * (after - before), after)
        # A matrix of zeros has no radius to brake.
        factor = torch.where(before > 0, factor, 1.0)
        return keep * factor, rate * factor


@dataclass(frozen=True)
class RelativeUpdate(WeightStage):
    """Makes updates as long as lr times the weight."""

    label = "relative updates"
    numbers = "matrix"

    def apply(
        self, weights: Tensor, updates: Tensor, scales: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the factors of weights and updates, (b, 1, 1) each."""
        norm, length = (frobenius_norms(one, kernels=options.kernels) for one in (weights, updates))
        norm = torch.where(norm > 0, norm, math.sqrt(weights.shape[1] / 3))
        rate = divided_by_norms(scales * norm * options.lr, length)
        return torch.ones_like(norm) - options.lr * options.weight_decay, rate


RADIAL_BRAKE = UpdateRule(title="radial brake", constrain=RadialBrake())
RELATIVE_UPDATE = UpdateRule(title="relative update", constrain=RelativeUpdate(), scale=without_scale)
