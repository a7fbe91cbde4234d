"""Hyperball (MuonH): weights keep their Frobenius norm, and updates are relative to it (arXiv 2606.16899).

One step of a matrix w with the norm r that it had at the first step, and an orthogonalised update u:

    v   = w - lr r u / |u|
    w  <- r v / |v|

There is no weight decay, since the norm is fixed, and `adjust_lr` has no effect, since the update's norm is: lr is the
angle of a step. A matrix multiplier (`lr_multipliers`) multiplies lr.

A matrix of zeros has no norm to keep. It gets the one that PyTorch's initialisation would give it, r = sqrt(m / 3), and
grows by steps of lr r until it has reached it: as long as |w| < r, w <- v min(1, r / |v|).

Source: Hyperball (K. Wen et al.), arXiv 2606.16899. Zero matrices are this library's addition; there they are an error.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintic.optim.numeric.sums import divided_by_norms, frobenius_norms
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.stages import StageOptions, StateSpec, WeightStage

__all__ = ["HYPERBALL", "Hyperball", "without_scale"]

RADIUS = "radius"

# A matrix whose norm is shorter than its radius by more than rounding has not grown to it yet.
_GROWN = 1 - 1e-3


def without_scale(m: int, n: int) -> float:
    """Return 1: the scale of rules that set the size of updates themselves."""
    return 1.0


@dataclass(frozen=True)
class Hyperball(WeightStage):
    """Steps along a sphere of matrices with one norm."""

    label = "keep norms"
    state = (StateSpec(RADIUS, "wide", "matrix"),)
    numbers = "matrix"

    def apply(
        self, weights: Tensor, updates: Tensor, scales: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the factors of weights and updates, (b, 1, 1) each; keep the radius at the first step."""
        u, radius, kernels = updates.to(weights.dtype), state[RADIUS], options.kernels
        norm = frobenius_norms(weights, kernels=kernels)
        initial = torch.where(norm > 0, norm, math.sqrt(weights.shape[1] / 3))
        radius.copy_(torch.where(radius > 0, radius, initial))
        rate = divided_by_norms(scales * radius * options.lr, frobenius_norms(u, kernels=kernels))
        keep = divided_by_norms(radius, frobenius_norms(weights - rate * u, kernels=kernels))
        keep = torch.where(norm < _GROWN * radius, keep.clamp_max(1.0), keep)
        return keep, keep * rate


HYPERBALL = UpdateRule(title="Hyperball", constrain=Hyperball(), scale=without_scale)
