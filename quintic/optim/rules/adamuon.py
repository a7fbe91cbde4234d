"""AdaMuon: element-wise second moments of orthogonalised directions (Chongjie Si, Debing Zhang, Wei Shen).

One step of a matrix w (m, n) with gradient g, in the symbols of `update.py`:

    m <- m + (1 - mu)(g - m)                       the momentum of every Muon rule
    o  = polar factor of sign(u)                   signs of the direction: its size counts for nothing
    v <- v + (1 - beta)(o^2 - v)                   for each entry; `normalize_beta`
    a  = o / (sqrt(v) + 1e-8)
    w <- w - lr wd w - lr 0.2 sqrt(m n) a / |a|    |a| the Frobenius norm: the update has the RMS of AdamW's, 0.2

v is not corrected for its start at zero: the same factor on all of its entries cancels in a / |a|.

Source: AdaMuon, arXiv 2507.11005, algorithm 1. The paper's momentum is a sum in place of an average, which has the same
signs; it has no Nesterov look-ahead, which is `nesterov=False` here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintic.optim.rules.rule import MOMENTUM_DIRECTION, MatrixStage, StageOptions, StateSpec, UpdateRule
from quintic.optim.rules.sums import norms, sums

__all__ = ["ADAMUON"]

SECOND_MOMENT = "element_second_moment"

_EPS = 1e-8


@dataclass(frozen=True)
class Signs(MatrixStage):
    """The signs of directions."""

    label = "signs"

    def apply(
        self, matrices: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor | None]:
        """See `MatrixStage`."""
        return matrices.sign(), None


@dataclass(frozen=True)
class ElementSecondMoment(MatrixStage):
    """Updates over the roots of their second moments, rescaled to the norm of an orthogonal matrix."""

    label = "normalize elements"
    state = (StateSpec(SECOND_MOMENT, "average", "param"),)
    averages = ("normalize_beta",)
    temporaries = 4

    def apply(
        self, matrices: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor | None]:
        """See `MatrixStage`."""
        moment = state[SECOND_MOMENT]  # (b, m, n)
        o = matrices.to(moment.dtype)
        moment.lerp_(o.square(), 1 - float(options.normalize_beta))
        normalized = o / moment.sqrt().add_(_EPS)
        # Rows, then their sum: an order of addition that does not depend on b.
        norm = sums(norms(normalized, -1).square(), -2).sqrt()  # (b, 1, 1)
        # The norm of an orthogonal matrix; with the rule's scale, 0.2 sqrt(max(m, n)), it becomes 0.2 sqrt(m n).
        side = math.sqrt(min(matrices.shape[1:]))
        return normalized.mul_(side / norm.clamp_min(torch.finfo(norm.dtype).tiny)), None


ADAMUON = UpdateRule(
    title="AdaMuon",
    algorithm="muon",
    direction=MOMENTUM_DIRECTION,
    before=(Signs(),),
    after=(ElementSecondMoment(),),
    scale="match_rms_adamw",
)
