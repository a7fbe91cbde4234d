"""Two-rate momentum: the direction mixes a fast and a slow average of gradients.

One step of a gradient g, with rates f < s and the share a of the fast average:

    p <- p + (1 - f)(g - p)                    fast, kept in `momentum_buffer`
    q <- q + (1 - s)(g - q)                    slow, kept in `slow_momentum_buffer`
    m  = a p + (1 - a) q
    u  = (1 - mu) g + mu m     (or m)          mu is the option `momentum`; m without `nesterov`

A single average forgets at one rate: it is either quick to turn or steady. The sum of two has a long tail and a
quick head. The polar step and the write are Muon's.

Source: "bi-Maxwell momentum" (user orange4664), modded-nanogpt pull request 340, optimization track, July 2026: the
share 0.4385; it begins at step 1000 there, here at the first. The rates are this library's, see the benchmark of rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintic.optim.rules.rule import MOMENTUM, UpdateRule
from quintic.optim.rules.stages import GradientStage, StageOptions, StateSpec

__all__ = ["TWO_RATE", "TwoRateMomentum"]

SLOW = "slow_momentum_buffer"


@dataclass(frozen=True)
class TwoRateMomentum(GradientStage):
    """Momentum as the mixture of two averages."""

    label = "two-rate momentum"
    # The slow one is never bfloat16, which could not follow its rate.
    state = (StateSpec(MOMENTUM, "average", "param"), StateSpec(SLOW, "wide", "param"))

    fast: float = 0.9
    slow: float = 0.98
    share: float = 0.4385

    def __post_init__(self) -> None:
        """Raise a ValueError for rates or a share out of range."""
        if not 0 <= self.fast <= self.slow < 1 or not 0 <= self.share <= 1:
            raise ValueError(f"{self}: need 0 <= fast <= slow < 1, and a share in [0, 1]")

    def apply(self, gradient: Tensor, state: Mapping[str, Tensor], options: StageOptions) -> Tensor:
        """Return the direction, and advance both averages."""
        p, q = state[MOMENTUM], state[SLOW]
        p.lerp_(gradient, 1 - self.fast)
        q.lerp_(gradient, 1 - self.slow)
        m = torch.lerp(q, p, self.share)
        return gradient + (m - gradient) * options.momentum if options.nesterov else m


TWO_RATE = UpdateRule(title="two-rate momentum", direction=TwoRateMomentum())
