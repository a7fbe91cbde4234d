"""EMA-Nesterov: gradients are taken ahead of the weights, along an average of their steps (arXiv 2605.25395).

The paper's iteration, for an optimizer's step A, with a rate d and a look-ahead c,

    x'  = A(x + c e)                           gradients are taken at y = x + c e
    e'  = d e + (1 - d)(x' - x)

is kept here in terms of y, the values of the model's weights between steps: with s = A(y) - y, the step that
Muon makes (decay included),

    e  <- d e + (1 - d)(s + c e)
    y  <- y + s + c e

The paper turns c on after a warm-up, and off in the last quarter. Here c is constant: e begins at zero and, being an
average of steps, follows a falling learning rate down. Evaluations see y, which differs from x by c e.

Source: EMA-Nesterov (C.-Y. Yau et al.), arXiv 2605.25395; d = 0.99 as in their modded-nanogpt pull request 308.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.stages import DriftStage, StageOptions, StateSpec

__all__ = ["EMA_NESTEROV", "Lookahead"]

STEPS = "lookahead_buffer"


@dataclass(frozen=True)
class Lookahead(DriftStage):
    """Moves weights ahead along an average of their steps."""

    label = "look ahead"
    state = (StateSpec(STEPS, "wide", "param"),)

    rate: float = 0.99
    ahead: float = 0.3

    def __post_init__(self) -> None:
        """Raise a ValueError for numbers out of range."""
        if not 0 <= self.rate < 1 or self.ahead < 0:
            raise ValueError(f"{self}: need 0 <= rate < 1 and ahead >= 0")

    def apply(self, step: Tensor, state: Mapping[str, Tensor], options: StageOptions) -> Tensor:
        """Return c e, and advance the average e."""
        e = state[STEPS]
        # d e + (1 - d)(s + c e)
        e.mul_(self.rate + (1 - self.rate) * self.ahead).add_(step, alpha=1 - self.rate)
        return e * self.ahead


EMA_NESTEROV = UpdateRule(title="EMA-Nesterov", drift=Lookahead())
