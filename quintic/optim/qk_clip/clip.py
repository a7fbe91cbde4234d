"""QK-clip: scale the query and key weights of heads whose attention logits grew past a threshold (MuonClip).

A logit is a product of a query and a key, so it grows with the square of their weights, and Muon's full-rank updates
let it grow faster than AdamW's do. QK-clip takes the largest logit S_h of each head h in the forward pass, and after
the update scales the head's weights such that the same input would give min(S_h, t), t being the threshold:

    gamma_h = min(1, t / S_h)                     the factor that the logits of head h need

| attention    | queries                     | keys                                          | not scaled           |
|--------------|-----------------------------|-----------------------------------------------|----------------------|
| multi-head   | sqrt(gamma_h)               | sqrt(gamma_h)                                 | values               |
| grouped      | gamma_h / s_g               | s_g: least sqrt(gamma_h) of its query heads   | values               |
| multi-latent | sqrt(gamma_h); rotary ones: | in the up-projection: sqrt(gamma_h)           | values; the rotary   |
|              | gamma_h                     |                                               | key of all heads     |

A shared key shrinks as far as its worst head needs, and the queries of its other heads grow by as much: every head's
logits end at exactly min(S_h, t), and a head below the threshold keeps its attention. Scaling its query by
sqrt(gamma_h) = 1 instead (`grouped="sqrt"`) would flatten it because of a neighbour.

Phases of a step:
    layers.py   find a layer's query and key rows in its parameters, once per layer
    maxima.py   take the maxima over ranks, (num_heads,) per layer
    clip.py     turn maxima into factors, (features,) per parameter, on the device and without waiting for it
    step.py     multiply the rows that this rank holds, and send them on where other ranks have copies
A logit here is q.k times the softmax scale, before any soft cap or additive bias.

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
from quintic.optim.numeric.numbers import is_count, is_number
from quintic.optim.qk_clip.layers import PROJECTIONS, Features, HeadSearch, Role, Scaled

__all__ = ["LayerClip", "QKClip", "RowFactors"]

Grouped = Literal["exact", "sqrt"]


class RowFactors(NamedTuple):
    """The factors of one parameter: `factor`, (param.shape[dim],) float32 or float64, along dimension `dim`."""

    factor: Tensor
    dim: int

    def within(self, box: Box) -> "RowFactors":
        """Return the factors of a box of the parameter, (box size along `dim`,)."""
        start, stop = box[self.dim]
        return RowFactors(self.factor[start:stop], self.dim)

    def factor_for_range(self, start: int, stop: int, param: Tensor) -> Tensor:
        """Return the factors of the entries [start, stop) of a parameter without gaps, in memory order.

        The result is (stop - start,). Temporary memory is that of the result plus less than two strides and two sizes
        of the dimension.
        """
        size, stride = param.shape[self.dim], max(1, param.stride(self.dim))
        # In memory every factor stands for `stride` entries in a row, and the `size` factors repeat. `first` and `last`
        # count such rows from the beginning of the parameter, `begin` is the start of the repetition around `first`.
        first, last = start // stride, -(-stop // stride)
        begin = first // size * size
        repeated = self.factor.to(param.device).repeat(-(-last // size) - first // size)[first - begin : last - begin]
        spread = repeated.unsqueeze(1).expand(-1, stride).reshape(-1)  # ((last - first) * stride,)
        # The range may begin and end within such a row.
        return spread[start - first * stride : stop - first * stride]

    def over(self, tensor: Tensor) -> Tensor:
        """Return the factors on the tensor's device, in a shape that broadcasts over it: size 1 except along `dim`."""
        shape = [1] * tensor.ndim
        shape[self.dim] = -1
        return self.factor.to(tensor.device).view(shape)


@dataclass(frozen=True)
class LayerClip:
    """One attention layer, ready to be clipped: only names and sizes, no tensors. Made by `QKClip.resolve`."""

    layer: str
    # Query heads come in `num_kv_heads` groups of equal size, in order; the heads of a group share a key.
    num_heads: int
    num_kv_heads: int
    threshold: float
    grouped: Grouped
    parameters: tuple[Scaled, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameters that `factors` scales."""
        return tuple(scaled.name for scaled in self.parameters)

    def check(self, max_logits: Tensor) -> None:
        """Check that there is one maximum per query head; the ValueError names the layer."""
        if max_logits.shape != (self.num_heads,):
            raise ValueError(
                f"qk_logits[{self.layer!r}] has shape {tuple(max_logits.shape)}; "
                f"it needs one maximum for each of the {self.num_heads} query heads"
            )

    @torch.no_grad()
    def factors(self, max_logits: Tensor) -> dict[str, RowFactors]:
        """Return the factors of each parameter, by name, on the device of `max_logits` and without waiting for it.

        Args:
            max_logits: (num_heads,) largest logit per query head, any floating dtype; float64 gives float64 factors.
                A head whose maximum is at most the threshold, NaN or infinite gets factors of exactly 1, because a
                non-finite forward pass does not tell how large its logits should be.

        Raises:
            ValueError: another number of heads than the layer was resolved with.
        """
        self.check(max_logits)
        # gamma, (num_heads,), is 1 for heads below the threshold; a comparison with NaN is false.
        maxima = max_logits.to(torch.promote_types(max_logits.dtype, torch.float32))
        exceeds = (maxima > self.threshold) & maxima.isfinite()
        gamma = (self.threshold / maxima).masked_fill(~exceeds, 1.0)
        root = gamma.sqrt().view(self.num_kv_heads, -1)  # (key heads, query heads of each)
        key = root.amin(dim=1, keepdim=True)  # s_g, (key heads, 1)
        # gamma_h / s_g, written such that a head with a key of its own gets sqrt(gamma_h) to the last bit.
        query = root * (root / key) if self.grouped == "exact" else root
        # From one factor per head to one per output feature; weight and bias have equal rows and thus one vector.
        by_role: dict[Role, Tensor] = {"query": query, "key": key, "rotary": gamma, "none": gamma.new_ones(1)}
        expanded = {rows: _expand(rows, by_role) for rows in {scaled.rows for scaled in self.parameters}}
        return {scaled.name: RowFactors(expanded[scaled.rows], scaled.dim) for scaled in self.parameters}


def _expand(rows: Features, by_role: Mapping[Role, Tensor]) -> Tensor:
    """Return one factor per output feature, (features,), by repeating each head's factor over the head's features."""
    pieces = []
    for role, size in rows.segments:
        heads = by_role[role].flatten()
        # "none" has the single factor 1, for every group of features.
        heads = heads.expand(rows.groups) if role == "none" else heads
        per_group = heads.view(rows.groups, -1, 1)  # (groups, heads of a group, 1)
        pieces.append(per_group.expand(-1, -1, size // per_group.shape[1]).flatten(1))  # (groups, size)
    # Within a group the segments follow each other: (groups, features of a group), flattened.
    return torch.cat(pieces, dim=1).flatten()


@dataclass(frozen=True)
class QKClip:
    """Options of QK-clip; give it to `quintic.Muon(..., qk_clip=QKClip())`.

    Args:
        threshold: largest logit, after the softmax scale, that a head may have.
        grouped: how heads that share a key are scaled. `"exact"`: each head's logits end at min(S, threshold);
            `"sqrt"`: queries take sqrt(gamma_h), which also shrinks the logits of heads that share a key with a larger
            one.
        parts: which parts of a fused weight's `Split` are query and key; `(0, 2)` for query, gate, key, value. None:
            by the `names` of the `Split`, which `param_groups` sets for models it knows; without names the first two.
        rope_dim: rotary channels of a head in multi-latent attention; None reads them off the down-projection.
        layouts: shell-style pattern on parameter names -> how the weight stores its features, where Muon's view does
            not say: `Split(...)` of a fused weight that Muon takes as one `Matrix()`, or of a query projection with a
            gate (its first part is the query); `Matrix(transposed=True)` for (in, out) storage.
        names: projections with other names -> a name that is known, e.g. `{"theta": "q_proj", "phi": "k_proj"}`.
        process_group: ranks over which the maxima of each head are taken: every rank that sees other tokens, has other
            heads, or holds pieces of the layers. None: the ranks that share the layer's parameters (the mesh of a
            `DTensor`, the `process_group` of `comms`). Required if ranks see other tokens but the optimizer cannot
            know that they share the parameters: plain tensors with `comms="none"`, as under DDP.

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
        # Checked when the options are made, since a wrong one would not show before the first large logit.
        if not is_number(self.threshold, least=math.ulp(0.0)):
            raise ValueError(f"QKClip: threshold={self.threshold!r} must be a positive, finite number")
        if self.grouped not in ("exact", "sqrt"):
            raise ValueError(f"QKClip: grouped={self.grouped!r} must be 'exact' or 'sqrt'")
        if self.parts is not None:
            are_numbers = isinstance(self.parts, Sequence) and all(is_count(part, least=0) for part in self.parts)
            if not are_numbers or len(self.parts) != 2 or self.parts[0] == self.parts[1]:
                raise ValueError(f"QKClip: parts={self.parts!r} must be two different part numbers, of query and key")
            # A list becomes a tuple, which can be hashed and compared.
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
            views: Muon's view of each parameter, by name; tells where queries and keys are in a fused weight.

        Raises:
            ValueError: the layer was not found or is ambiguous, sizes do not fit, a fused weight has no `Split`, or a
                normalisation follows the projections, which undoes any scaling of them.
        """
        # The search is the expensive phase; `QKStep` calls it once per layer and keeps the result.
        options = self.parts, self.rope_dim, self.layouts, self.names
        num_kv_heads, parameters = HeadSearch(layer, shapes, num_heads, views or {}, *options).heads()
        return LayerClip(str(layer), num_heads, num_kv_heads, self.threshold, self.grouped, parameters)
