"""Muown: Muon on the directions of a weight's rows, AdamW on their norms (arXiv 2605.10797).

A weight is w_i = a_i v_i / |v_i|, row by row, with magnitudes a and a direction v. Kept for each row are a, c = |v_i|,
and Adam's two moments of a. One step, with g_i the rows of the gradient, e_i = w_i / a_i:

    h_i  = <g_i, e_i>                          the gradient of a_i
    m   <- m + (1 - mu)(a / c (g - h e) - m)   momentum, for each row; u = m, or ahead with `nesterov`
    v_i  = c_i e_i - lr f o_i                  o is the polar factor of u, f = 0.2 sqrt(max(m, n))
    a   <- a - lr Adam(h),  a <- a - lr wd a
    c_i  = |v_i|,  w_i <- a_i v_i / |v_i|

Updates of directions are of the size of AdamW's, so lr is AdamW's; `weight_decay` should be 0, since Muon's is far too
large for magnitudes. Momentum is of whole rows: it averages gradients that were rounded as directions are when sent.

Source: Muown (K. Lion et al.), arXiv 2605.10797, whose momentum has no look-ahead: set `nesterov=False` to follow it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintic.optim.numeric.sums import norms
from quintic.optim.rules.library.row_directions import LEAST, ROW_GRADIENT, ROW_LENGTH, ROW_MAGNITUDE, RowDirections
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.stages import StageOptions, StateSpec, WeightStage, WholeGradient

__all__ = ["MUOWN", "Magnitudes"]

_MEAN, _SQUARE = StateSpec("row_exp_avg", "wide", "rows"), StateSpec("row_exp_avg_sq", "wide", "rows")
_STEPS = StateSpec("row_step", "wide", "matrix")


@dataclass(frozen=True)
class Magnitudes(WeightStage):
    """Steps magnitudes by Adam, and rows along their directions."""

    label = "row magnitudes"
    state = (ROW_MAGNITUDE, ROW_LENGTH, ROW_GRADIENT, _MEAN, _SQUARE, _STEPS)
    numbers = "rows"

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def apply(
        self, weights: Tensor, updates: Tensor, scales: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the factors of weights and updates, (b, m, 1) each."""
        a, c, h, mean, square, steps = (state[spec.name] for spec in self.state)
        beta1, beta2 = self.betas
        steps += 1
        mean.lerp_(h, 1 - beta1)
        square.lerp_(h.square(), 1 - beta2)
        adam = mean / (1 - beta1**steps) / ((square / (1 - beta2**steps)).sqrt() + self.eps)
        # Weights are a_i v_i / |v_i| before and after: a and c of before are needed for v.
        old, length = a.clone(), c.clone()
        a -= adam * options.lr
        a -= a * options.lr * options.weight_decay
        a.copy_(torch.where(a.abs() < LEAST, LEAST, a))
        rate = scales * options.lr
        v = weights * (length / old) - rate * updates.to(weights.dtype)
        c.copy_(norms(v, -1, kernels=options.kernels).clamp_min(LEAST))
        return a / c * length / old, a / c * rate


MUOWN = UpdateRule(
    title="Muown", direction=WholeGradient(), before=(RowDirections(),), constrain=Magnitudes(), scale="match_rms_adamw"
)
