"""QK-clip on several ranks: the largest logit of each head over all of them, for all layers in one all-reduce.

Every rank looks at other tokens, and under tensor parallelism at some of the heads. It gives what it has seen; what it
has not seen is -inf, which never is the maximum. NaN becomes +inf before the reduction, because what the maximum of NaN
and a number is differs between libraries; for `LayerClip.factors` the two are the same.

Ranks may give different layers, or none, but all must take part in the same collectives. So they agree, through the
host, on the layers whose maxima every step reduces. Two more numbers of the all-reduce say whether any rank has a layer
that is not among these, and whether any has none. A rank that has one waits for these numbers: if all ranks have one,
they agree at once. Otherwise the ranks without a new layer have gone on, and read the numbers one step later, when that
no longer makes them wait; then all agree, and the maxima that came too early count in that step. A step without logits
sends these numbers, with the maxima of the layers known by then, and waits for nothing.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quintic.optim.comms.collectives import Pending, ProcessGroup, all_gather_values, group_ranks, start_all_max
from quintic.optim.rules.device import HostCopy, host_tensor, is_capturing, upload

__all__ = ["Layer", "LayerSpec", "LocalMaxima", "Maxima"]

Layer: TypeAlias = str | int


class LayerSpec(NamedTuple):
    """The facts about a layer that ranks must agree on."""

    num_heads: int
    names: tuple[str, ...]
    """The names of the parameters that are scaled."""
    dtype: torch.dtype
    """In which the maxima are taken: float32, or float64 for such parameters."""


class LocalMaxima(NamedTuple):
    """The largest logits of a layer's heads that one rank has seen."""

    spec: LayerSpec
    maxima: Tensor
    """(num_heads,) in the dtype of the spec, -inf for heads that this rank has not seen."""


class Maxima:
    """The largest logits of the layers that some ranks share, from step to step; without a group this rank is alone."""

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self.specs: dict[Layer, LayerSpec] = {}
        """The layers that are reduced; the same on all ranks."""
        self._neg_inf: dict[Layer, Tensor] = {}
        self._deferred: dict[Layer, LocalMaxima] = {}
        self._new_layer_flag: HostCopy | None = None
        """Whether a rank had a new layer in the last step."""
        # Whether this rank has a new layer, and whether it has none.
        self._flags = tuple(upload(host_tensor(flags, torch.float32), device) for flags in ([0, 1], [1, 0]))
        self._pending: Pending | None = None
        self._received: Tensor | None = None
        self._local: dict[Layer, Tensor] = {}

    def start(self, seen: Mapping[Layer, LocalMaxima], problem: ValueError | None = None) -> ValueError | None:
        """Begin to reduce what this rank has seen. All ranks must call it in every step, whatever they have seen.

        Waits for the device only if this rank has seen a layer that is not reduced yet. Returns what is wrong on any
        rank, as far as this one knows; then nothing may be scaled. It is not raised here, because other ranks may wait
        for this one elsewhere, too.
        """
        if self._group is None:
            self.specs = {layer: one.spec for layer, one in seen.items()}
            self._local = {layer: one.maxima for layer, one in seen.items()}
            return problem
        self._take()  # what is left of a step that raised before its end
        seen = _together(self._deferred, seen)
        is_news_old = (
            self._new_layer_flag is not None and not is_capturing(self._device) and any(self._new_layer_flag.read())
        )
        if is_news_old:
            problem = self._agree(seen, problem, self._group)
            if problem is not None:
                return problem
        new = {layer: one for layer, one in seen.items() if layer not in self.specs}
        has_news = bool(new) or problem is not None
        if has_news and is_capturing(self._device):
            raise RuntimeError(
                f"qk_logits has layers that no step had before ({', '.join(map(repr, new))}): make a step with them "
                f"before a CUDA graph is captured"
            )
        self._reduce(seen, has_news, self._group)
        if has_news and self._have_all_news():
            self._take()
            problem = self._agree(seen, problem, self._group)
            if problem is None:
                new = {}
                self._reduce(seen, False, self._group)
        if problem is None:
            self._deferred = new
        return problem

    def finish(self) -> dict[Layer, Tensor]:
        """Return the maxima over all ranks, by layer; the host does not wait. All ranks must call it after `start`."""
        if self._group is None:
            return self._local
        values = self._take()
        if values is None:
            return {}
        sizes = [spec.num_heads for spec in self.specs.values()]
        rows = zip(self.specs.items(), values[:-2].split(sizes), strict=True)
        # Where one layer has float64, all travel as such.
        return {layer: maxima.to(spec.dtype) for (layer, spec), maxima in rows}

    def _reduce(self, seen: Mapping[Layer, LocalMaxima], has_news: bool, group: ProcessGroup) -> None:
        maxima = [
            (seen[layer].maxima if layer in seen else self._neg_inf[layer])
            .to(self._device, spec.dtype)
            .nan_to_num(math.inf, math.inf, -math.inf)
            for layer, spec in self.specs.items()
        ]
        self._pending = start_all_max(torch.cat([*maxima, self._flags[has_news]]), group)

    def _take(self) -> Tensor | None:
        """Return the reduced maxima, if there are any, and begin to bring to the host whether a layer is new."""
        values, self._received = self._received, None
        if self._pending is not None:
            values, self._pending = self._pending.wait(), None
        if values is not None and not is_capturing(values.device):  # a replay tells the host nothing
            self._new_layer_flag = HostCopy(values[-2:-1])
        return values

    def _have_all_news(self) -> bool:
        """Return whether every rank has a new layer; waits."""
        assert self._pending is not None
        self._received, self._pending = self._pending.wait(), None
        return bool(self._received[-1] == 0)

    def _agree(
        self, seen: Mapping[Layer, LocalMaxima], problem: ValueError | None, group: ProcessGroup
    ) -> ValueError | None:
        """Add the layers that any rank has seen to those that are reduced. All ranks must call it; waits.

        Returns what is wrong on any rank, or that ranks differ in what they say of a layer: nothing was changed then.
        """
        new = {layer: one.spec for layer, one in seen.items() if layer not in self.specs}
        text = None if problem is None else str(problem)
        everyone = dict(zip(group_ranks(group), all_gather_values((text, new), group), strict=True))
        for rank, (theirs, _) in everyone.items():
            if theirs is not None:
                return problem or ValueError(f"on rank {rank}: {theirs}")
        first_specs: dict[Layer, tuple[int, LayerSpec]] = {}
        for rank, (_, specs) in everyone.items():
            for layer, spec in specs.items():
                first, expected = first_specs.setdefault(layer, (rank, spec))
                if spec.num_heads != expected.num_heads:
                    return ValueError(
                        f"qk_logits[{layer!r}] has {expected.num_heads} maxima on rank {first} and {spec.num_heads} on "
                        f"rank {rank}; every rank must give one for each query head of the layer, and those of some "
                        f"heads as a DTensor"
                    )
                if spec.names != expected.names:
                    return ValueError(
                        f"qk_logits[{layer!r}] means {', '.join(expected.names)} on rank {first} and "
                        f"{', '.join(spec.names)} on rank {rank}; name parameters alike on all ranks"
                    )
        # In one order on all ranks.
        for layer in sorted(first_specs, key=lambda layer: (isinstance(layer, int), str(layer))):
            spec = first_specs[layer][1]
            self.specs[layer] = spec
            self._neg_inf[layer] = upload(host_tensor([-math.inf] * spec.num_heads, spec.dtype), self._device)
        return None


def _together(late: Mapping[Layer, LocalMaxima], seen: Mapping[Layer, LocalMaxima]) -> dict[Layer, LocalMaxima]:
    """Return the largest logits of the layers that either has."""
    together = {**late, **seen}
    for layer in late.keys() & seen.keys():
        maxima = torch.maximum(late[layer].maxima, seen[layer].maxima.to(late[layer].maxima.device))
        together[layer] = seen[layer]._replace(maxima=maxima)
    return together
