"""The momentum of Muown, along the directions of a weight's rows (arXiv 2605.10797; the whole step is in `muown.py`).

With the rows w_i of a weight, their magnitudes a_i, e_i = w_i / a_i, the lengths c_i = |v_i| of directions, and rows
g_i of the gradient:

    h_i  = <g_i, e_i>                          the gradient of a_i, kept for its step
    m   <- m + (1 - mu)(a / c (g - h e) - m)   momentum, for each row; u = m, or ahead with `nesterov`

Magnitudes and lengths begin as the norms of the rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintic.optim.numeric.sums import norms, sums
from quintic.optim.rules.rule import MOMENTUM
from quintic.optim.rules.stages import WEIGHT, MatrixStage, StageOptions, StateSpec

__all__ = ["LEAST", "ROW_GRADIENT", "ROW_LENGTH", "ROW_MAGNITUDE", "RowDirections"]

ROW_MAGNITUDE, ROW_LENGTH = StateSpec("row_magnitude", "wide", "rows"), StateSpec("row_length", "wide", "rows")
ROW_GRADIENT = StateSpec("row_gradient", "wide", "rows")
LEAST = 1e-12  # of magnitudes and lengths: rows of zeros begin with it, and grow as Adam moves it


@dataclass(frozen=True)
class RowDirections(MatrixStage):
    """Momentum of the gradient with respect to the directions of rows."""

    label = "row directions"
    state = (StateSpec(MOMENTUM, "average", "param"), ROW_MAGNITUDE, ROW_LENGTH, ROW_GRADIENT)
    averages = ("momentum",)
    reads_weights = True

    def apply(
        self, matrices: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Return the momentum (b, m, n), and no factors; note the gradients of magnitudes."""
        weights, magnitude, length = state[WEIGHT], state[ROW_MAGNITUDE.name], state[ROW_LENGTH.name]
        norm = norms(weights, -1, kernels=options.kernels).clamp_min(LEAST)
        # Zeros before the first step, which begins with magnitudes and lengths of the weight itself.
        for kept in (magnitude, length):
            kept.copy_(torch.where(length == 0, norm, kept))
        g, e, m = matrices.to(weights.dtype), weights / magnitude, state[MOMENTUM]
        h = sums(g * e, -1)  # (b, m, 1)
        state[ROW_GRADIENT.name].copy_(h)
        gradient = magnitude / length * (g - h * e)
        m += (gradient - m) * (1 - options.momentum)
        return gradient + (m - gradient) * options.momentum if options.nesterov else m.clone(), None
