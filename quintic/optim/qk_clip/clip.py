"""QK-clip: scale the query and key weights of heads whose attention logits grew past a threshold (MuonClip).

A logit is a product of a query and a key, so it grows with the square of their weights, and Muon's full-rank updates
let it grow faster than AdamW's do. QK-clip looks at the largest logit S_h of each head h in the forward pass, and
after the update scales the head's weights such that the same input would give min(S_h, t), t being the threshold:

    gamma_h = min(1, t / S_h)                     the factor that the logits of head h need

| attention    | queries                     | keys                                          | left alone           |
|--------------|-----------------------------|-----------------------------------------------|----------------------|
| multi-head   | sqrt(gamma_h)               | sqrt(gamma_h)                                 | values               |
| grouped      | gamma_h / s_g               | s_g: least sqrt(gamma_h) of those that share  | values               |
| multi-latent | sqrt(gamma_h); rotary part: | in the up-projection: sqrt(gamma_h)           | values; the rotary   |
|              | gamma_h                     |                                               | key that all share   |

A shared key shrinks as far as its worst head needs, and the queries of its other heads grow by as much: every head's
logits end at exactly min(S_h, t), and a head below the threshold keeps its attention. Scaling its query by
sqrt(gamma_h) = 1 instead (`grouped="sqrt"`) would flatten it because of a neighbour.

Which rows those are is found by `layers.py`, once per layer; here is the arithmetic, on the device and without
waiting for it; `maxima.py` brings the maxima of several ranks together, `step.py` scales what a rank holds.
Logits are those of q.k times the softmax scale, before any soft cap or additive bias.

Source: Kimi K2, arXiv 2507.20534, section 2.1 and algorithm 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from quintic.optim.comms.collectives import ProcessGroup
from quintic.optim.layout.layouts import Box
from quintic.optim.layout.views import Matrix, Split, View
from quintic.optim.qk_clip.layers import PROJECTIONS, Features, HeadSearch, Role, Scaled
from quintic.optim.rules.numbers import is_count, is_number

__all__ = ["LayerClip", "QKClip", "RowFactors"]

Grouped = Literal["exact", "sqrt"]


class RowFactors(NamedTuple):
    """The factors of one parameter: `factor`, (size of `dim`,) float32 or float64, along dimension `dim`."""

    factor: Tensor
    dim: int

    def within(self, box: Box) -> "RowFactors":
        """Return the factors of a box of the parameter."""
        start, stop = box[self.dim]
        return RowFactors(self.factor[start:stop], self.dim)

    def factor_for_range(self, start: int, stop: int, param: Tensor) -> Tensor:
        """Return the factors of some entries of the parameter, which has no gaps: (entries,), in the order of memory.

        Temporary memory: that of the result, and less than two strides and two sizes of the dimension.
        """
        size, stride = param.shape[self.dim], max(1, param.stride(self.dim))
        first, last = start // stride, -(-stop // stride)
        begin = first // size * size
        # Dimensions before this one repeat the factors, those after it repeat each of them.
        repeated = self.factor.to(param.device).repeat(-(-last // size) - first // size)[first - begin : last - begin]
        spread = repeated.unsqueeze(1).expand(-1, stride).reshape(-1)
        return spread[start - first * stride : stop - first * stride]

    def over(self, tensor: Tensor) -> Tensor:
        """Return the factor on the device of what it is for, in a shape that spreads over it."""
        shape = [1] * tensor.ndim
        shape[self.dim] = -1
        return self.factor.to(tensor.device).view(shape)


@dataclass(frozen=True)
class LayerClip:
    """One attention layer, ready to be clipped: names and sizes alone. Made by `QKClip.resolve`."""

    layer: str
    num_heads: int
    num_kv_heads: int
    threshold: float
    grouped: Grouped
    parameters: tuple[Scaled, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameters that `factors` speaks of."""
        return tuple(scaled.name for scaled in self.parameters)

    def check(self, max_logits: Tensor) -> None:
        """Reject another number of maxima than the layer has query heads; the ValueError names the layer."""
        if max_logits.shape != (self.num_heads,):
            raise ValueError(
                f"qk_logits[{self.layer!r}] has shape {tuple(max_logits.shape)}; "
                f"it needs one maximum for each of the {self.num_heads} query heads"
            )

    @torch.no_grad()
    def factors(self, max_logits: Tensor) -> dict[str, RowFactors]:
        """Return the factors of each parameter, by name, on the device of `max_logits` and without waiting for it.

        Args:
            max_logits: (num_heads,) largest logit per query head, any floating dtype; of float64 the factors are, too.
                A head whose maximum is at most the threshold, NaN or infinite gets factors of exactly 1: a broken
                forward pass teaches nothing.

        Raises:
            ValueError: another number of heads than the layer was resolved with.
        """
        self.check(max_logits)
        maxima = max_logits.to(torch.promote_types(max_logits.dtype, torch.float32))
        exceeds = (maxima > self.threshold) & maxima.isfinite()
        gamma = (self.threshold / maxima).masked_fill(~exceeds, 1.0)
        root = gamma.sqrt().view(self.num_kv_heads, -1)  # (key heads, query heads of each)
        key = root.amin(dim=1, keepdim=True)
        # gamma_h / s_g, written such that a head with a key of its own gets sqrt(gamma_h) to the last bit.
        query = root * (root / key) if self.grouped == "exact" else root
        by_role: dict[Role, Tensor] = {"query": query, "key": key, "rotary": gamma, "none": gamma.new_ones(1)}
        expanded = {rows: _expand(rows, by_role) for rows in {scaled.rows for scaled in self.parameters}}
        return {scaled.name: RowFactors(expanded[scaled.rows], scaled.dim) for scaled in self.parameters}


def _expand(rows: Features, by_role: Mapping[Role, Tensor]) -> Tensor:
    """Return one factor per output feature, (features,): each head's, as often as the head has features."""
    pieces = []
    for role, size in rows.segments:
        heads = by_role[role].flatten()
        heads = heads.expand(rows.groups) if role == "none" else heads
        per_group = heads.view(rows.groups, -1, 1)
        pieces.append(per_group.expand(-1, -1, size // per_group.shape[1]).flatten(1))
    return torch.cat(pieces, dim=1).flatten()


@dataclass(frozen=True)
class QKClip:
    """Options of QK-clip; give it to `quintic.Muon(..., qk_clip=QKClip())`.

    Args:
        threshold: largest logit, after the softmax scale, that a head may have.
        grouped: heads that share a key. `"exact"`: each head's logits end at min(S, threshold); `"sqrt"`: queries take
            sqrt(gamma_h) alone, which also shrinks the logits of heads that share a key with a larger one.
        parts: which parts of a fused weight's `Split` are query and key; `(0, 2)` for query, gate, key, value. None: as
            its `names` say, which `param_groups` sets for the models that it knows; without names the first two.
        rope_dim: rotary channels of a head in multi-latent attention; None reads them off the down-projection.
        layouts: shell-style pattern on parameter names -> how the weight stores its features, where Muon's view does
            not say: `Split(...)` of a fused weight that Muon takes as one `Matrix()`, or of a query projection with a
            gate (its first part is the query); `Matrix(transposed=True)` for (in, out) storage.
        names: projections with other names -> a name that is known, e.g. `{"theta": "q_proj", "phi": "k_proj"}`.
        process_group: ranks over which the maxima of each head are taken: those that saw other tokens or have other
            heads, and all that hold a part of the layers. None: those that share the layer's parameters (the mesh of a
            `DTensor`, the `process_group` of `comms`). Must be given where ranks that saw other tokens hold parameters
            of which the optimizer does not know that they are shared: plain tensors with `comms="none"`, as under DDP.

    Raises:
        ValueError: an option out of range.

    Source: Kimi K2, arXiv 2507.20534, algorithm 1, with tau = 100.
    """

    threshold: float = 100.0
    grouped: Grouped = "exact"
    parts: tuple[int, int] | None = None
    rope_dim: int | None = None
    layouts: Mapping[str, View] = field(default_factory=dict, hash=False)
    names: Mapping[str, str] = field(default_factory=dict, hash=False)
    process_group: ProcessGroup | None = field(default=None, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "QKClip":
        """Return itself: process groups cannot be copied, and nothing here changes."""
        return self

    def __post_init__(self) -> None:
        if not is_number(self.threshold, least=math.ulp(0.0)):
            raise ValueError(f"QKClip: threshold={self.threshold!r} must be a positive, finite number")
        if self.grouped not in ("exact", "sqrt"):
            raise ValueError(f"QKClip: grouped={self.grouped!r} must be 'exact' or 'sqrt'")
        if self.parts is not None:
            are_numbers = isinstance(self.parts, Sequence) and all(is_count(part, least=0) for part in self.parts)
            if not are_numbers or len(self.parts) != 2 or self.parts[0] == self.parts[1]:
                raise ValueError(f"QKClip: parts={self.parts!r} must be two different part numbers, of query and key")
            object.__setattr__(self, "parts", tuple(self.parts))
        if self.rope_dim is not None and not is_count(self.rope_dim, least=0):
            raise ValueError(f"QKClip: rope_dim={self.rope_dim!r} must be an integer of at least 0, or None")
        if not isinstance(self.layouts, Mapping):
            raise ValueError(f"QKClip: layouts={self.layouts!r} must be a mapping from patterns to views")
        if not isinstance(self.names, Mapping):
            raise ValueError(f"QKClip: names={self.names!r} must be a mapping from names to known ones")
        for pattern, layout in self.layouts.items():
            if not isinstance(layout, Matrix | Split):
                raise ValueError(f"QKClip: layouts[{pattern!r}]={layout!r} must be a quintic.Split or quintic.Matrix")
        for name, known in self.names.items():
            if known not in PROJECTIONS:
                raise ValueError(f"QKClip: names[{name!r}]={known!r} is not one of {', '.join(sorted(PROJECTIONS))}")

    def resolve(
        self,
        layer: str | int,
        shapes: Mapping[str, torch.Size],
        num_heads: int,
        views: Mapping[str, View] | None = None,
    ) -> LayerClip:
        """Find the query and key parameters of one attention layer.

        Args:
            layer: name of the attention module (or of a module with one attention inside), e.g.
                `"model.layers.3.self_attn"`; or the number of its layer, where the names have it once.
            shapes: every parameter of the optimizer, by name, with its whole shape.
            num_heads: query heads.
            views: what Muon takes each parameter for; says where queries and keys are in a fused weight.

        Raises:
            ValueError: nothing found, more than one found, sizes that do not fit, a fused weight without a `Split`, or
                a normalisation after the projections, which undoes any scaling of them.
        """
        options = self.parts, self.rope_dim, self.layouts, self.names
        num_kv_heads, parameters = HeadSearch(layer, shapes, num_heads, views or {}, *options).heads()
        return LayerClip(str(layer), num_heads, num_kv_heads, self.threshold, self.grouped, parameters)
