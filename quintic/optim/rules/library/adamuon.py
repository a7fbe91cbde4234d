"""AdaMuon: element-wise second moments of orthogonalised directions (Chongjie Si, Debing Zhang, Wei Shen).

One step of a matrix w (m, n) with gradient g, in the symbols of `update.py`:

    m <- m + (1 - mu)(g - m)                       the momentum of every Muon rule
    o  = polar factor of sign(u)                   u is the direction: m, or with `nesterov` the look-ahead
    v <- v + (1 - beta)(o^2 - v)                   for each entry; beta is the option `normalize_beta`
    a  = o / (sqrt(v) + 1e-8)
    w <- w - lr wd w - lr 0.2 sqrt(m n) a / |a|    |a| is the Frobenius norm, and m and n are the sizes here

The last line gives updates a root mean square of 0.2, about that of AdamW's updates. v starts at zero and needs no
bias correction: but for the 1e-8 it would be one factor on all entries, which cancels in a / |a|.

Source: AdaMuon, arXiv 2507.11005, algorithm 1. The paper's momentum is a sum in place of an average, which has the
same signs. The paper has no Nesterov look-ahead: set `nesterov=False` to follow it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from quintic.optim.numeric.sums import divided_by_norms, frobenius_norms
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.stages import MatrixStage, StageOptions, StateSpec

__all__ = ["ADAMUON"]

SECOND_MOMENT = "element_second_moment"

# Added to sqrt(v), so that entries that have always been zero divide 0 by this and not by 0.
_EPS = 1e-8


@dataclass(frozen=True)
class Signs(MatrixStage):
    """Replaces directions by their signs, -1, 0 or 1, before the polar step."""

    label = "signs"

    def apply(
        self, matrices: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Return the signs, (b, m, n), and no factors."""
        return matrices.sign(), None


@dataclass(frozen=True)
class ElementSecondMoment(MatrixStage):
    """Divides updates by the roots of their second moments, and scales them to the norm of an orthogonal matrix."""

    label = "normalize elements"
    state = (StateSpec(SECOND_MOMENT, "average", "param"),)
    averages = ("normalize_beta",)

    def apply(
        self, matrices: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Return the scaled updates, (b, m, n), and no factors; advance the second moment."""
        moment = state[SECOND_MOMENT]  # (b, m, n)
        o = matrices.to(moment.dtype)
        moment.lerp_(o.square(), 1 - float(options.normalize_beta))
        normalized = o / moment.sqrt().add_(_EPS)
        norm = frobenius_norms(normalized, kernels=options.kernels)  # (b, 1, 1)
        # An orthogonal (m, n) matrix has this norm. The rule's scale multiplies it by 0.2 sqrt(max(m, n)), which makes
        # 0.2 sqrt(m n).
        side = math.sqrt(min(matrices.shape[1:]))
        return normalized.mul_(divided_by_norms(side, norm)), None


ADAMUON = UpdateRule(
    title="AdaMuon",
    before=(Signs(),),
    after=(ElementSecondMoment(),),
    scale="match_rms_adamw",
)
