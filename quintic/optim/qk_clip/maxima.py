"""QK-clip on several ranks: the largest logit of each head over all ranks, for all layers in one all-reduce.

Every rank sees other tokens, and under tensor parallelism only some of the heads. It sends the maxima that it has seen
and -inf for the others. NaN becomes +inf before the reduction, because libraries differ in the maximum of NaN and a
number; `LayerClip.factors` treats NaN and +inf alike.

Ranks may pass different layers to a step, or none, but every rank must run the same collectives. So every step reduces
a list of layers that all ranks have agreed on, in one vector:

    [maxima of layer 0 (num_heads,), ..., maxima of the last layer, has a new layer, has no new layer]

The last two numbers tell whether any rank has a layer that is not in the list, and whether any rank has none:

1. A rank with a new layer waits for the two numbers. If every rank has a new layer, all of them wait and extend the
   list at once, through the host, and reduce again.
2. Otherwise the ranks without a new layer have gone on. Every rank reads the first of the two numbers at its next
   step, by when the value has arrived; all extend the list then, and the maxima of the new layer, which were kept,
   take part in that step.
3. A step without logits sends -inf for all layers and waits for nothing.
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
    """The dtype of the maxima: float32, or float64 if a parameter is float64."""


class LocalMaxima(NamedTuple):
    """The largest logits of a layer's heads that this rank has seen."""

    spec: LayerSpec
    maxima: Tensor
    """(num_heads,) in the spec's dtype, -inf for heads that this rank has not seen."""


class Maxima:
    """Reduces maxima over the ranks of one process group, step after step; without a group, over this rank only."""

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        # The agreed list of layers that every step reduces; the same on all ranks.
        self.specs: dict[Layer, LayerSpec] = {}
        # (num_heads,) of -inf for each layer of the list.
        self._neg_inf: dict[Layer, Tensor] = {}
        # Maxima of new layers, kept for the step in which the list is extended.
        self._deferred: dict[Layer, LocalMaxima] = {}
        # Whether a rank had a new layer in the last step.
        self._new_layer_flag: HostCopy | None = None
        # The two numbers at the end of the vector, without and with a new layer on this rank.
        self._flags = tuple(upload(host_tensor(flags, torch.float32), device) for flags in ([0, 1], [1, 0]))
        self._pending: Pending | None = None
        self._received: Tensor | None = None
        # Without a group, the maxima of this rank.
        self._local: dict[Layer, Tensor] = {}

    def start(self, seen: Mapping[Layer, LocalMaxima], problem: ValueError | None = None) -> ValueError | None:
        """Begin to reduce the maxima that this rank has seen. All ranks must call it in every step, with logits or not.

        Waits for the device only if this rank has seen a layer that is not in the list yet. Returns an error of any
        rank, as far as it is known here; then nothing may be scaled. The caller raises it after starting the reductions
        of all groups, so that no rank waits in vain for this one.
        """
        # One rank: nothing to reduce.
        if self._group is None:
            self.specs = {layer: one.spec for layer, one in seen.items()}
            self._local = {layer: one.maxima for layer, one in seen.items()}
            return problem
        self._take()  # finish the reduction of a step that raised before its end
        seen = _merge_maxima(self._deferred, seen)
        # Case 2: the last step's number says that a rank had a new layer. All ranks read it here, and extend the list.
        is_news_old = (
            self._new_layer_flag is not None and not is_capturing(self._device) and any(self._new_layer_flag.read())
        )
        if is_news_old:
            problem = self._agree(seen, problem, self._group)
            if problem is not None:
                return problem
        # An error counts as news, so that the ranks come to exchange it in `_agree`.
        new = {layer: one for layer, one in seen.items() if layer not in self.specs}
        has_news = bool(new) or problem is not None
        if has_news and is_capturing(self._device):
            raise RuntimeError(
                f"qk_logits has layers that no step had before ({', '.join(map(repr, new))}): make a step with them "
                f"before a CUDA graph is captured"
            )
        self._reduce(seen, has_news, self._group)
        # Case 1: every rank has a new layer, so all are here and can extend the list now.
        if has_news and self._have_all_news():
            self._take()
            problem = self._agree(seen, problem, self._group)
            # The list is longer now: reduce again, with the new layers.
            if problem is None:
                new = {}
                self._reduce(seen, False, self._group)
        # New layers that could not be reduced now take part in the next step.
        if problem is None:
            self._deferred = new
        return problem

    def finish(self) -> dict[Layer, Tensor]:
        """Return each layer's (num_heads,) maxima over all ranks. All ranks must call it after `start`; none waits."""
        if self._group is None:
            return self._local
        values = self._take()
        if values is None:
            return {}
        sizes = [spec.num_heads for spec in self.specs.values()]
        rows = zip(self.specs.items(), values[:-2].split(sizes), strict=True)
        # The vector has the widest dtype of all layers; give each layer its own again.
        return {layer: maxima.to(spec.dtype) for (layer, spec), maxima in rows}

    def _reduce(self, seen: Mapping[Layer, LocalMaxima], has_news: bool, group: ProcessGroup) -> None:
        """Start the all-reduce of the vector that the head of this module shows."""
        # NaN and +inf become +inf; -inf stays.
        maxima = [
            (seen[layer].maxima if layer in seen else self._neg_inf[layer])
            .to(self._device, spec.dtype)
            .nan_to_num(math.inf, math.inf, -math.inf)
            for layer, spec in self.specs.items()
        ]
        self._pending = start_all_max(torch.cat([*maxima, self._flags[has_news]]), group)

    def _take(self) -> Tensor | None:
        """Return the reduced vector, if one is pending, and start to copy its new-layer number to the host."""
        values, self._received = self._received, None
        if self._pending is not None:
            values, self._pending = self._pending.wait(), None
        # A CUDA graph's replay copies nothing to the host, so a capture must not set this.
        if values is not None and not is_capturing(values.device):
            self._new_layer_flag = HostCopy(values[-2:-1])
        return values

    def _have_all_news(self) -> bool:
        """Return whether every rank has a new layer; waits for the device."""
        assert self._pending is not None
        self._received, self._pending = self._pending.wait(), None
        # The last number is the maximum of "has no new layer".
        return bool(self._received[-1] == 0)

    def _agree(
        self, seen: Mapping[Layer, LocalMaxima], problem: ValueError | None, group: ProcessGroup
    ) -> ValueError | None:
        """Extend the list of layers by the new ones of all ranks. All ranks must call it; waits for all of them.

        Returns an error of any rank, or one about a layer that ranks describe differently; the list is unchanged then.
        """
        # Exchange errors and new layers through the host; an error of any rank is an error on all.
        new = {layer: one.spec for layer, one in seen.items() if layer not in self.specs}
        text = None if problem is None else str(problem)
        everyone = dict(zip(group_ranks(group), all_gather_values((text, new), group), strict=True))
        for rank, (theirs, _) in everyone.items():
            if theirs is not None:
                return problem or ValueError(f"on rank {rank}: {theirs}")
        # Compare each layer with the first rank that has it.
        first_specs: dict[Layer, tuple[int, LayerSpec]] = {}
        for rank, (_, specs) in everyone.items():
            for layer, spec in specs.items():
                first, expected = first_specs.setdefault(layer, (rank, spec))
                if spec.num_heads != expected.num_heads:
                    return ValueError(
                        f"qk_logits[{layer!r}] has {expected.num_heads} maxima on rank {first} and {spec.num_heads} on "
                        f"rank {rank}; every rank must give one for each query head of the layer, or a DTensor if it "
                        f"has only some of the heads"
                    )
                if spec.names != expected.names:
                    return ValueError(
                        f"qk_logits[{layer!r}] means {', '.join(expected.names)} on rank {first} and "
                        f"{', '.join(spec.names)} on rank {rank}; name parameters alike on all ranks"
                    )
        # Sorted, since the list and thus the vector must have one order on all ranks.
        for layer in sorted(first_specs, key=lambda layer: (isinstance(layer, int), str(layer))):
            spec = first_specs[layer][1]
            self.specs[layer] = spec
            self._neg_inf[layer] = upload(host_tensor([-math.inf] * spec.num_heads, spec.dtype), self._device)
        return None


def _merge_maxima(late: Mapping[Layer, LocalMaxima], seen: Mapping[Layer, LocalMaxima]) -> dict[Layer, LocalMaxima]:
    """Return kept and new maxima, by layer; where a layer has both, the larger of the two for each head."""
    together = {**late, **seen}
    for layer in late.keys() & seen.keys():
        maxima = torch.maximum(late[layer].maxima, seen[layer].maxima.to(late[layer].maxima.device))
        together[layer] = seen[layer]._replace(maxima=maxima)
    return together
