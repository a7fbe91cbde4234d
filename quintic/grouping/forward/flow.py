"""Follows the output features of a model's weights through one forward pass.

1. A weight starts with the index of each of its entries (`Trail.coordinates`), which its views keep.
2. A product of a weight and activations gives each entry of the result a label: the output feature that it is.
3. A reshape, slice or permutation of the tensor is done to its labels, too, so that any interleaving of queries and
   keys is recognised. Features that are added to each other, as by rotary positions, are noted as joined.
4. Labels end in the next product, or in an operation that mixes features. The set of features that ends together is
   noted as arrived, and what is joined to it: the sets of a fused weight are disjoint.

Beside labels, a tensor has its sources: the weights whose features it holds in any form. Their outputs are consumed if
a later weight is multiplied with them. A tensor that depends on weights and constants only is fixed.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["LARGEST", "Flow", "Usage"]

_INPUT, _LOOKED_UP = -1, -2
"""Sources of tensors that no matrix has made: inputs, also joined with a weight; rows of tables."""

LARGEST = 1 << 24
"""Entries of a tensor of integers: features of larger tensors are not followed, their weights are one matrix; larger
inputs lose their values."""

_MOST_JOINED = 8
"""Weights whose features are still followed where they are joined."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PRODUCTS = _names("mm addmm bmm baddbmm _grouped_mm mv addmv")
# Beside the views of PyTorch.
_MOVES = _names("_unsafe_view unsafe_split unsafe_split_with_sizes flip roll repeat pixel_shuffle pixel_unshuffle")
_SAME = _names(
    "clone _to_copy _softmax _safe_softmax _log_softmax cumsum native_dropout masked_fill tril triu constant_pad_nd"
)
_NORM = re.compile("(batch|layer|group|rms)_norm")
_REDUCTIONS = _names("max mean sum amax amin var std logsumexp prod")
_POOL = re.compile("pool|upsample")
_RECURRENT = re.compile("lstm|gru|rnn")
_LOOKUPS = _names("embedding _embedding_bag _embedding_bag_forward_only index index_select gather take")
# The position of the dimension among the arguments of operations that choose.
_CHOICES = {"topk": 2, "argmax": 1, "sort": 1, "argsort": 1, "kthvalue": 2, "_softmax": 1, "_safe_softmax": 1}
_ADDITIONS = _names("add sub rsub where lerp maximum minimum masked_fill copy")


@dataclass(slots=True, eq=False)
class Usage:
    """The uses of one weight in the pass."""

    name: str
    shape: tuple[int, ...]
    is_layer: bool
    """The weight of a linear layer, which is a matrix also where constants are multiplied with it."""
    rows: int = 0
    """Output features; 0 while nothing was multiplied with the weight."""
    columns: int = 0
    """Input features."""
    kinds: set[str] = field(default_factory=set)
    """`product`, `convolution`, `depthwise`, `recurrent`, `norm`, `added`, `factor` (multiplied entry by entry),
    `table` (rows are looked up, joined, or compared as learned queries), `constants` (multiplied with constants), or
    `other`."""
    is_stacked: bool = True
    """A weight of three dimensions is a stack of matrices along its first one."""
    transposed: set[bool] = field(default_factory=set)
    arrived: dict[bytes, Tensor] = field(default_factory=dict)
    """The sets of output features that ended together, as masks."""
    joined: dict[bytes, Tensor] = field(default_factory=dict)
    """Pairs of output features that were added to each other, (2, pairs)."""
    consumed: bool = False
    """A weight was multiplied with features of this one."""
    compared: bool = False
    """Activations were multiplied with each other along its output features, as queries with keys."""
    returned: bool = False
    """The model returns features of this weight."""
    chooses: bool = False
    """Features are sorted, or the largest are chosen, by their index."""
    weighs: bool = False
    """A softmax runs over the output features, or one output feature is multiplied onto several others."""
    space: set[int] = field(default_factory=set)
    """The weights whose outputs are added to, or multiplied with, this one's."""


@dataclass(slots=True, eq=False)
class Trail:
    """Where a tensor comes from."""

    labels: dict[int, Tensor] = field(default_factory=dict)
    """For each weight whose features are known: the feature of each entry, -1 for none."""
    sources: frozenset[int] = frozenset()
    coordinates: tuple[int, list[Tensor]] | None = None
    """If the tensor is a weight or a view of it: for each dimension of the weight, the index of each entry."""
    is_fixed: bool = False
    """It depends on weights and constants only."""


class Flow(TorchDispatchMode):
    """A mode under which each operation on tensors is followed; `usages` has the result."""

    supports_higher_order_operators = True

    def __init__(self, fake: Any, weights: Iterable[tuple[Usage, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.usages: list[Usage] = []
        self._trails: dict[int, tuple[Tensor, Trail]] = {}
        self._written: dict[int, tuple[Tensor, frozenset[int]]] = {}
        for number, (usage, weight) in enumerate(weights):
            self.usages.append(usage)
            shape = usage.shape
            axes = [
                torch.arange(size, dtype=torch.int32).view(-1, *(1,) * (len(shape) - axis - 1)).expand(shape)
                for axis, size in enumerate(shape)
            ]
            self.put(weight, Trail(coordinates=(number, axes), is_fixed=True))

    def put(self, tensor: Tensor, trail: Trail) -> None:
        """Set the trail of a tensor, which is kept so that no other gets its id."""
        self._trails[id(tensor)] = tensor, trail

    def put_input(self, tensor: Tensor) -> None:
        """Say that a tensor comes from outside."""
        self.put(tensor, Trail(sources=frozenset({_INPUT})))

    def returned(self, tensor: Tensor) -> None:
        """Say that the model returns a tensor."""
        trail = self._trail(tensor)
        if trail is not None:
            self._end(trail)
            for number in trail.sources:
                if number >= 0:
                    self.usages[number].returned = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on fake tensors, and follow it."""
        kwargs = kwargs or {}
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if given and not any(map(_is_fake, given)):
            # Integers have values, which may be numbers of tokens or places of images. Numbers made of them have none.
            out = func(*args, **kwargs)
            out = tree_map(lambda one: self.fake.from_tensor(one) if _has_no_values(one) else one, out)
            if any(self._trail(one) is not None for one in given):  # bytes of an image
                for one in tree_leaves(out):
                    self.put_input(one)
            return out
        if func is torch.ops.aten.index.Tensor:
            args = args[0], _as_places(args[1])
        with self.fake:
            if func is torch.ops.aten._grouped_mm.default:
                # The kernel does not take all dtypes. A stack of weights is on the right.
                out = args[0].new_empty([*args[0].shape[:-1], args[1].shape[-1]])
            else:
                out = func(*args, **kwargs)
        if not given and isinstance(out, Tensor) and not _has_no_values(out) and out.numel() <= LARGEST:
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            known = [trail for trail in map(self._trail, given) if trail is not None]
            self._opaque(func.name(), args, known)
            for value in tree_leaves(out):
                if isinstance(value, Tensor):
                    self.put(value, Trail(sources=_sources_of(known)))
        else:
            self._follow(func, args, kwargs, given, out)
        return out

    def launched(self, tensors: Sequence[Tensor]) -> None:
        """Follow a kernel that reads some of these tensors and fills the others, which nothing has written yet."""
        trails = [trail for trail in map(self._trail, tensors) if trail is not None]
        self._opaque("", (), trails)
        self._note_weights("", trails, False)
        for tensor in [tensor for tensor in tensors if self._trail(tensor) is None] or tensors:
            self._write(tensor, _sources_of(trails))

    def _write(self, tensor: Tensor, sources: frozenset[int]) -> None:
        """Note weights whose features were written into a tensor's memory, also for other views of it."""
        key = _storage(tensor)
        # Kept, so that no other tensor gets the address.
        self._written[key] = tensor, self._written.get(key, (tensor, frozenset()))[1] | sources

    def _trail(self, tensor: Any) -> Trail | None:
        if not isinstance(tensor, Tensor):
            return None
        trail = self._trails.get(id(tensor), (None, None))[1]
        written = self._written.get(_storage(tensor)) if self._written else None
        if written is None:
            return trail
        return Trail(trail.labels if trail else {}, written[1] | (trail.sources if trail else frozenset()))

    def _follow(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], out: Any) -> None:
        name = func._schema.name.partition("::")[2]
        base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        outs = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
        trails = [self._trail(tensor) for tensor in given]
        known = [trail for trail in trails if trail is not None]
        if not known or not outs or base.endswith("_like") or base.startswith(("new_", "empty", "bernoulli")):
            return
        if base in _PRODUCTS:
            return self._product(base, args, outs[0])
        weight = self._trail(args[1]) if "convolution" in base else None
        if weight is not None and weight.coordinates is not None:
            return self._convolution(args, weight.coordinates[0], outs[0])
        first = trails[0]
        if first is not None and first.coordinates is not None and base in _LOOKUPS:
            number, axes = first.coordinates
            if len(axes) == 3 and outs[0].shape[-2:] == axes[0].shape[-2:]:  # matrices of a stack
                chosen = number, [axis[0].expand(outs[0].shape) for axis in axes]
                return self.put(outs[0], Trail(coordinates=chosen, is_fixed=True))
            self.usages[number].kinds.add("table")
            return self.put(outs[0], Trail(sources=frozenset({_LOOKED_UP})))
        is_view = func.is_view or base in _MOVES or (base in _SAME and len(known) == 1 and base not in _CHOICES)
        if first is not None and is_view:
            return self._view(base, func, args, kwargs, first, outs)
        if base in _CHOICES:
            self._choice(base, args, kwargs, first)
        sources = _sources_of(known)
        is_pointwise = torch.Tag.pointwise in func.tags or base in _ADDITIONS
        self._note_weights(base, trails, is_pointwise)
        if any(trail.coordinates is not None for trail in known) and not all(trail.is_fixed for trail in known):
            sources |= {_INPUT}
        labels: dict[int, Tensor] = {}
        if _NORM.search(base):
            labels, sources = (first.labels, first.sources) if first is not None else ({}, sources)
        elif is_pointwise or base in _SAME:
            labels = self._pointwise(base, given, trails, outs[0])
        elif base in ("cat", "stack"):
            labels = self._cat(func, args, kwargs, trails)
        elif base in _REDUCTIONS or _POOL.search(base):
            labels = self._reduced(base, args, kwargs, first, outs[0])
        else:
            self._opaque(base, args, known)
        # A weight that is scaled or cast by constants only is still this weight.
        whole = next((trail.coordinates for trail in known if trail.coordinates is not None), None)
        is_fixed = all(trail.is_fixed for trail in known)
        for value in outs:
            if is_fixed and whole is not None and is_pointwise and value.shape == whole[1][0].shape:
                self.put(value, Trail(coordinates=whole, is_fixed=True))
            elif value.is_floating_point() or value.is_complex():
                self.put(value, Trail(labels if value is outs[0] else {}, sources, is_fixed=is_fixed))
        if func._schema.is_mutable and sources:
            self._write(given[0], sources)

    def _end(self, trail: Trail) -> None:
        """Note the features of a tensor as a set that goes one way."""
        for number, labels in trail.labels.items():
            self._arrive(number, labels)

    def _arrive(self, number: int, labels: Tensor) -> None:
        mask = self._mask(number, labels)
        self.usages[number].arrived[mask.numpy().tobytes()] = mask

    def _mask(self, number: int, labels: Tensor) -> Tensor:
        labels = _without_repeats(labels)
        mask = torch.zeros(self.usages[number].rows + 1, dtype=torch.bool)
        mask[labels.reshape(-1).long()] = True  # -1 is the last entry
        return mask[:-1]

    def _consume(self, trail: Trail | None, by: int) -> None:
        if trail is not None:
            self._end(trail)
            for number in trail.sources - {by, _INPUT, _LOOKED_UP}:
                self.usages[number].consumed = True

    def _opaque(self, base: str, args: Any, known: Sequence[Trail]) -> None:
        """Take an operation for one that mixes its inputs, as attention and recurrent layers do."""
        for trail in known:
            if _RECURRENT.search(base):
                self._consume(trail, _INPUT)
            else:
                self._end(trail)
        if "attention" in base:
            for trail in filter(None, map(self._trail, args[:2])):
                if trail.coordinates is not None:
                    self.usages[trail.coordinates[0]].kinds.add("table")
                for number in trail.labels:
                    self.usages[number].compared = True

    def _note_weights(self, base: str, trails: Sequence[Trail | None], is_pointwise: bool) -> None:
        """Note weights that are added, multiplied entry by entry, or joined to activations."""
        if base in _SAME or (is_pointwise and all(trail is None or trail.is_fixed for trail in trails)):
            return
        kinds = {"cat": "table", "stack": "table", "mul": "factor", "div": "factor"}
        kind = "added" if base in _ADDITIONS else kinds.get(base, "other")
        kind = "norm" if _NORM.search(base) else "recurrent" if _RECURRENT.search(base) else kind
        for trail in trails:
            if trail is not None and trail.coordinates is not None and not (len(trails) == 1 and is_pointwise):
                self.usages[trail.coordinates[0]].kinds.add(kind)

    # ---------- features

    def _view(self, base: str, func: Any, args: Any, kwargs: Any, first: Trail, outs: Sequence[Tensor]) -> None:
        """Do the operation on the integers, too."""

        def moved(labels: Tensor) -> list[Tensor] | None:
            labels = labels.detach()  # operations in place change the tensor object
            if base == "view_as_real":
                return [labels.unsqueeze(-1).expand(outs[0].shape)]
            if base in _SAME:
                return [labels] * len(outs) if labels.shape == outs[0].shape else None
            try:
                if base in ("view", "_unsafe_view"):
                    # A copy of the labels of a large weight would fill the memory.
                    is_copy = base == "_unsafe_view" and labels.numel() > LARGEST and not labels.is_contiguous()
                    return None if is_copy else [labels.reshape(outs[0].shape)]
                found = func(labels, *args[1:], **kwargs)
            except (RuntimeError, TypeError, NotImplementedError):
                return None
            every = list(found) if isinstance(found, tuple | list) else [found]
            return every if [one.shape for one in every] == [one.shape for one in outs] else None

        made = [Trail({}, first.sources, is_fixed=first.is_fixed) for _ in outs]
        for number, labels in first.labels.items():
            if base == "view_as_complex":  # two features become one number
                parts: list[Tensor] | None = [self._joined(number, labels.unbind(-1))]
            else:
                parts = moved(labels)
            if parts is None:
                self._arrive(number, labels)
                continue
            for trail, part in zip(made, parts, strict=True):
                trail.labels[number] = part
        if first.coordinates is not None:
            axes = [moved(axis) for axis in first.coordinates[1]]
            if any(axis is None for axis in axes):
                self.usages[first.coordinates[0]].kinds.add("other")
            else:
                for index, trail in enumerate(made):
                    trail.coordinates = first.coordinates[0], [axis[index] for axis in axes if axis is not None]
        for value, trail in zip(outs, made, strict=True):
            self.put(value, trail)

    def _pointwise(
        self, base: str, given: Sequence[Tensor], trails: Sequence[Trail | None], out: Tensor
    ) -> dict[int, Tensor]:
        pairs = [(tensor, trail) for tensor, trail in zip(given, trails, strict=True) if trail is not None]
        moving = [trail for _, trail in pairs if not trail.is_fixed]
        is_sum = base in _ADDITIONS
        if base == "mul" and len(given) > 1:
            for tensor, trail in pairs:
                self._weighing(tensor, trail, out)
        # Tensors that are added to each other, or multiplied, lie in the same space.
        if len(moving) > 1 and (is_sum or base in ("mul", "div")):
            for trail in moving:
                for number in trail.labels or (trail.sources if len(trail.sources) <= 4 else ()):
                    if number >= 0:
                        self.usages[number].space.update(*(other.sources for other in moving if other is not trail))
        kept: dict[int, Tensor] = {}
        for number in dict.fromkeys(number for trail in moving for number in trail.labels):
            every = [trail.labels[number].expand(out.shape) for trail in moving if number in trail.labels]
            # Inputs as they came are constants: positions, masks. One number for all features scales them.
            others = [
                trail
                for tensor, trail in pairs
                if not (trail.is_fixed or number in trail.labels or trail.sources <= {number, _INPUT})
                and not _is_scale(tensor, every, out)
            ]
            is_new = all(
                (trail.labels and len(trail.sources) <= 3) or trail.sources <= {_LOOKED_UP, _INPUT} for trail in others
            )
            # Two halves multiplied with each other are two matrices; rotary positions add them and make one.
            masks = [] if is_sum or len(every) == 1 else [self._mask(number, labels) for labels in every]
            is_one = not masks or any(bool((masks[0] & mask).any()) for mask in masks[1:])
            if is_one and (not others or (is_sum and is_new)):
                kept[number] = self._joined(number, every)
            else:
                for labels in every:
                    self._arrive(number, labels)
        return kept

    def _joined(self, number: int, every: Sequence[Tensor]) -> Tensor:
        """Note that labels of one shape name the same features, and return the first of them."""
        first = every[0]
        for labels in every[1:]:
            # Once for all examples and positions.
            alike = [axis for axis in range(first.ndim) if not (_varies(first, axis) or _varies(labels, axis))]
            one, two = _first(first, alike), _first(labels, alike)
            if torch.equal(one, two):
                continue
            rows, is_pair = self.usages[number].rows, (one >= 0) & (two >= 0)
            pairs = (one[is_pair].long() * rows + two[is_pair]).unique()
            self.usages[number].joined[pairs.numpy().tobytes()] = torch.stack([pairs // rows, pairs % rows])
            first = torch.where(one < 0, two, one).expand(first.shape)
        return first

    def _weighing(self, tensor: Tensor, trail: Trail, out: Tensor) -> None:
        """Find output features that are multiplied onto several others: a gate for each head, or for each expert."""
        for number, labels in trail.labels.items():
            usage = self.usages[number]
            if usage.rows * 2 > usage.columns:
                continue
            if int(self._mask(number, labels).sum()) < usage.rows and usage.rows * 4 > usage.columns:
                continue
            last = max(_varying(labels, out), default=-1)
            shape = (1,) * (out.ndim - tensor.ndim) + tuple(tensor.shape)
            # Over two dimensions, these are the places of an image, where each channel is scaled.
            if sum(shape[axis] == 1 < out.shape[axis] for axis in range(last + 1, out.ndim)) == 1:
                usage.weighs = True

    def _choice(self, base: str, args: Any, kwargs: Any, trail: Trail | None) -> None:
        place = _CHOICES[base]
        # Without a dimension, `argmax` is taken over all entries.
        axis = args[place] if len(args) > place else kwargs.get("dim", None if base == "argmax" else -1)
        if trail is None or not isinstance(axis, int) or isinstance(axis, bool):
            return
        for number, labels in trail.labels.items():
            usage = self.usages[number]
            if not _varies(labels, axis):
                # Weights that are compared with positions, to choose some of them, are learned queries.
                if "softmax" in base and not usage.is_layer:
                    usage.kinds.add("table")
            elif "softmax" not in base:
                usage.chooses = True
            elif usage.rows * 2 <= usage.columns:
                usage.weighs = True

    def _cat(self, func: Any, args: Any, kwargs: Any, trails: Sequence[Trail | None]) -> dict[int, Tensor]:
        moving = [trail for trail in trails if trail is not None and trail.sources]
        numbers = dict.fromkeys(number for trail in moving for number in trail.labels)
        if len(numbers) > _MOST_JOINED:
            for trail in moving:
                self._end(trail)
            return {}
        kept: dict[int, Tensor] = {}
        for number in numbers:
            every = [trail.labels.get(number) if trail is not None else None for trail in trails]
            if any(number in trail.sources and number not in trail.labels for trail in moving):
                # Features that an unknown operation took come back to the others.
                self._arrive(number, torch.arange(self.usages[number].rows))
            filled = [
                torch.full(value.shape, -1, dtype=torch.int32) if labels is None else labels
                for labels, value in zip(every, args[0], strict=True)
            ]
            kept[number] = func(filled, *args[1:], **kwargs)
        return kept

    def _reduced(self, base: str, args: Any, kwargs: Any, trail: Trail | None, out: Tensor) -> dict[int, Tensor]:
        """Return the features of a mean over positions; those over which it is taken end."""
        kept: dict[int, Tensor] = {}
        axes = args[1] if len(args) > 1 else kwargs.get("dim")
        for number, labels in (trail.labels if trail is not None else {}).items():
            if _POOL.search(base):
                ndim = 1 if base.endswith("1d") else 3 if "3d" in base else 2
                kept[number] = _first(labels, range(-ndim, 0)).expand(out.shape)
            elif axes is not None and out.numel():
                over = [axes] if isinstance(axes, int) else list(axes)
                if over and not any(_varies(labels, axis) for axis in over):
                    kept[number] = _first(labels, over).reshape(out.shape)
        return kept

    # ---------- products

    def _product(self, base: str, args: Any, out: Tensor) -> None:
        added, left, right = args[:3] if base in ("addmm", "baddbmm", "addmv") else (None, *args[:2])
        one, two = self._trail(left), self._trail(right)
        if two is not None and two.coordinates is not None:
            if one is not None and one.coordinates is not None:
                self.usages[one.coordinates[0]].kinds.add("table")
                one = None
            return self._weight_product(*two.coordinates, one, out, is_right=True)
        if one is not None and one.coordinates is not None:
            return self._weight_product(*one.coordinates, two, out, is_right=False)
        for trail, axis in ((one, -1), (two, -2 if right.ndim > 1 else 0)):
            if trail is not None:
                for number, labels in trail.labels.items():
                    usage = self.usages[number]
                    usage.compared |= not usage.chooses and _varies(labels, axis)
                self._end(trail)
        known = [trail for trail in (one, two, self._trail(added)) if trail is not None]
        self.put(out, Trail(sources=_sources_of(known)))

    def _weight_product(
        self, number: int, axes: Sequence[Tensor], trail: Trail | None, out: Tensor, *, is_right: bool
    ) -> None:
        usage = self.usages[number]
        if (trail is None or trail.is_fixed) and not usage.is_layer:
            # One-hot rows and positions pick from a table.
            usage.kinds.add("constants")
            return self.put(out, Trail(sources=frozenset({_INPUT}), is_fixed=True))
        ndim = axes[0].ndim
        if ndim < 2:  # one row of the weight
            usage.kinds.add("factor")
            self._consume(trail, number)
            return self.put(out, Trail(sources=frozenset({_INPUT})))
        usage.kinds.add("product")
        made, summed = (ndim - 1, max(ndim - 2, 0)) if is_right else (max(ndim - 2, 0), ndim - 1)
        usage.is_stacked &= not (len(axes) == 3 and (_varies(axes[0], made) or _varies(axes[0], summed)))
        outputs = [axis for axis, index in enumerate(axes) if _varies(index, made)]
        inputs = [axis for axis, index in enumerate(axes) if _varies(index, summed)]
        if outputs and inputs:
            usage.transposed.add(min(inputs) < min(outputs))
        # The output feature of each entry along the axis that stays, counted in the order in which it is stored.
        feature = torch.zeros(axes[0].shape[made], dtype=torch.int32)
        for axis in outputs:
            index = axes[axis].movedim(made, 0).reshape(axes[axis].shape[made], -1)[:, 0]
            feature = feature * usage.shape[axis] + index
        rows = math.prod(usage.shape[axis] for axis in outputs)
        # Multiplied from both sides, a weight keeps the features of the first product.
        usage.rows = usage.rows or rows
        usage.columns = usage.columns or axes[0].shape[summed]
        self._consume(trail, number)
        if not is_right and out.ndim > 1:
            feature = feature.unsqueeze(-1)
        is_followed = out.numel() <= LARGEST and usage.rows == rows
        self.put(out, Trail({number: feature.expand(out.shape)} if is_followed else {}, frozenset({number})))

    def _convolution(self, args: Any, number: int, out: Tensor) -> None:
        images = self._trail(args[0])
        usage, channels, groups = self.usages[number], out.shape[1], args[8]
        if groups > 1 and groups == args[0].shape[1]:
            # Each channel by itself: features stay the same.
            usage.kinds.add("depthwise")
            images = images or Trail()
            kept = images.labels if channels == groups else {}
            labels = {other: _first(one, range(2, out.ndim)).expand(out.shape) for other, one in kept.items()}
            return self.put(out, Trail(labels, images.sources))
        usage.kinds.add("convolution")
        usage.rows, usage.columns = channels, args[1].numel() // max(1, channels)
        self._consume(images, number)
        feature = torch.arange(channels, dtype=torch.int32).view(-1, *(1,) * (out.ndim - 2)).expand(out.shape)
        self.put(out, Trail({number: feature} if out.numel() <= LARGEST else {}, frozenset({number})))


def _sources_of(trails: Iterable[Trail]) -> frozenset[int]:
    return frozenset[int]().union(*(trail.sources for trail in trails))


def _is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no data."""
    return hasattr(tensor, "fake_mode")


def _has_no_values(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _as_places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the places that masks choose, whose number is known where the masks have values."""
    places: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool or _is_fake(index):
            places.append(index)
        else:
            places += index.nonzero(as_tuple=True)
    return places


def _is_scale(tensor: Tensor, every: Sequence[Tensor], out: Tensor) -> bool:
    """Return whether a factor has one entry for all features in some labels."""
    shape = (1,) * (out.ndim - tensor.ndim) + tuple(tensor.shape)
    return all(shape[axis] == 1 for labels in every for axis in _varying(labels, out))


def _varying(labels: Tensor, out: Tensor) -> list[int]:
    """Return the axes of a result along which there are different features."""
    labels = labels.expand(out.shape)
    return [axis for axis in range(out.ndim) if _varies(labels, axis)]


def _varies(labels: Tensor, axis: int) -> bool:
    """Return whether entries along an axis are different features."""
    if not labels.ndim or labels.shape[axis] < 2 or labels.stride(axis) == 0:
        return False
    labels = _without_repeats(labels)
    return bool((labels.narrow(axis, 0, 1) != labels).any())


def _without_repeats(labels: Tensor) -> Tensor:
    """Return one of the entries that `expand` repeats: coordinates of large weights are mostly such."""
    return _first(labels, [axis for axis in range(labels.ndim) if labels.stride(axis) == 0 and labels.shape[axis] > 1])


def _first(labels: Tensor, axes: Iterable[int]) -> Tensor:
    """Return the labels at the first index along some axes, such as the places of an image."""
    for axis in axes:
        labels = labels.narrow(axis, 0, 1)
    return labels


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
