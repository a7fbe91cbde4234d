"""QK-clip on several ranks: the largest logit of each head over all of them, for all layers in one all-reduce.

Every rank looks at other tokens, and under tensor parallelism at some of the heads. It gives what it has seen; what it
has not seen is -inf, which never is the maximum. NaN becomes +inf before the reduction, because what the maximum of NaN
and a number is differs between libraries; for `LayerClip.factors` the two are the same.

Ranks may give different layers, or none, but all must take part in the same collectives. So they agree on the layers:
in the first step in which anybody gives one, through the host; after that every step reduces all of these layers, and
one number more that says whether a rank has another layer by now. The host reads that number one step later, when it
does not wait for it, and then the ranks agree again. Nothing is lost: maxima of such a layer count in that step.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quintic.optim.comms import Pending, ProcessGroup, all_gather_values, group_ranks, start_all_max
from quintic.optim.device_memory import HostCopy, is_capturing, upload

__all__ = ["Layer", "Maxima", "Seen", "Slot"]

Layer: TypeAlias = str | int


class Slot(NamedTuple):
    """What ranks must agree on about a layer."""

    num_heads: int
    names: tuple[str, ...]
    """Of the parameters that are scaled."""


class Seen(NamedTuple):
    """What one rank has seen of a layer."""

    slot: Slot
    maxima: Tensor
    """(num_heads,) float32, -inf for heads that this rank has not seen."""


class Maxima:
    """The largest logits of the layers that some ranks share, kept from step to step.

    Args:
        group: the ranks; None for this one alone.
        device: on which they communicate.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self.slots: dict[Layer, Slot] = {}
        """The layers that are reduced; the same on all ranks."""
        self._unseen: dict[Layer, Tensor] = {}
        self._late: dict[Layer, Seen] = {}
        self._somebody_is_late: HostCopy | None = None
        self._late_flags = tuple(upload(torch.tensor([value], device="cpu"), device) for value in (0.0, 1.0))
        self._pending: Pending | None = None
        self._alone: dict[Layer, Tensor] = {}

    def start(self, seen: Mapping[Layer, Seen], problem: ValueError | None = None) -> ValueError | None:
        """Begin to reduce. All ranks must call it in every step, whatever they have seen.

        Args:
            seen: of this rank.
            problem: what is wrong on this rank. The other ranks hear of it where all agree on layers.

        Returns:
            What is wrong on any rank, as far as this one knows; then nothing is reduced. It is not raised here, because
            other ranks may wait for this one elsewhere, too.
        """
        if self._group is None:
            self.slots = {layer: found.slot for layer, found in seen.items()}
            self._alone = {layer: found.maxima for layer, found in seen.items()}
            return problem
        if self._pending is not None:  # the last step raised before its end
            self._pending.wait()
            self._pending = None
        seen = _together(self._late, seen)
        if not self.slots or self._is_somebody_late():
            try:
                self._agree(seen, problem, self._group)
            except ValueError as error:
                problem = problem or error
        if problem is not None:
            return problem
        self._late = {layer: found for layer, found in seen.items() if layer not in self.slots}
        if self.slots:
            parts = [seen[layer].maxima if layer in seen else self._unseen[layer] for layer in self.slots]
            maxima = torch.cat([part.to(self._device) for part in parts]).nan_to_num(math.inf, math.inf, -math.inf)
            values = torch.cat([maxima, self._late_flags[bool(self._late)]])
            self._pending = start_all_max(values, self._group)
        return None

    def finish(self) -> dict[Layer, Tensor]:
        """Return the maxima over all ranks, by layer; the host does not wait. All ranks must call it after `start`."""
        if self._group is None:
            return self._alone
        if self._pending is None:
            return {}
        values, self._pending = self._pending.wait(), None
        if not is_capturing(values.device):  # a replay tells the host nothing
            self._somebody_is_late = HostCopy(values[-1:])
        sizes = [slot.num_heads for slot in self.slots.values()]
        return dict(zip(self.slots, values[:-1].split(sizes), strict=True))

    def _is_somebody_late(self) -> bool:
        found = self._somebody_is_late
        return found is not None and not is_capturing(self._device) and any(found.read())

    def _agree(self, seen: Mapping[Layer, Seen], problem: ValueError | None, group: ProcessGroup) -> None:
        """Add the layers that any rank has seen to those that are reduced. All ranks must call it; waits.

        Raises:
            ValueError: another rank has a problem, or ranks differ in what they say of a layer; nothing was changed.
        """
        new = {layer: found.slot for layer, found in seen.items() if layer not in self.slots}
        text = None if problem is None else str(problem)
        everyone = dict(zip(group_ranks(group), all_gather_values((text, new), group), strict=True))
        for rank, (theirs, _) in everyone.items():
            if theirs is not None:
                raise ValueError(f"on rank {rank}: {theirs}")
        found: dict[Layer, tuple[int, Slot]] = {}
        for rank, (_, slots) in everyone.items():
            for layer, slot in slots.items():
                first, expected = found.setdefault(layer, (rank, slot))
                if slot.num_heads != expected.num_heads:
                    raise ValueError(
                        f"qk_logits[{layer!r}] has {expected.num_heads} maxima on rank {first} and {slot.num_heads} on "
                        f"rank {rank}; every rank must give one for each query head of the layer, and those of some "
                        f"heads as a DTensor"
                    )
                if slot.names != expected.names:
                    raise ValueError(
                        f"qk_logits[{layer!r}] means {', '.join(expected.names)} on rank {first} and "
                        f"{', '.join(slot.names)} on rank {rank}; name parameters alike on all ranks"
                    )
        # In one order on all ranks.
        for layer in sorted(found, key=lambda layer: (isinstance(layer, int), str(layer))):
            slot = found[layer][1]
            self.slots[layer] = slot
            self._unseen[layer] = upload(torch.full((slot.num_heads,), -math.inf, device="cpu"), self._device)


def _together(late: Mapping[Layer, Seen], seen: Mapping[Layer, Seen]) -> dict[Layer, Seen]:
    """Return what was seen in either."""
    found = {**late, **seen}
    for layer in late.keys() & seen.keys():
        maxima = torch.maximum(late[layer].maxima, seen[layer].maxima.to(late[layer].maxima.device))
        found[layer] = seen[layer]._replace(maxima=maxima)
    return found
