"""State of 8 bits whose groups lie on several ranks, as where tensor parallelism cuts 512 columns into 171.

A rank that has some entries of a group can neither read them, as the exponent is in the bytes of all eight, nor store
them, as the exponent is that of the largest. So in a step such averages are float32: before the buckets every rank
gathers the bytes, reads the groups, and keeps its piece; after them it gathers the values, stores the groups, and keeps
its bytes. Rounding the whole tensor gives the bits of one device. A parameter that was not stepped keeps its bytes: its
averages are still the ones that were read.

For each average it costs three gathers of the whole tensor and float32 values during a step, and for all other
parameters nothing.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from quintic.optim.comms.collectives import this_rank
from quintic.optim.comms.communicators import Communicators
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Layout, local_tensor, numel_of
from quintic.optim.numeric.int8_state import PIECE, PIECE_BYTES, read_packed, store_packed_
from quintic.optim.rules.rule import STEP
from quintic.optim.state.parameters import Parameter, all_parameters
from quintic.optim.state.placement import shares_groups

__all__ = ["CutState", "cut_state_of", "storing_bytes"]

State = Mapping[Tensor, Mapping[str, Tensor]]


def cut_state_of(groups: Sequence[Group], state: State, communicators: Communicators) -> "CutState | None":
    """Return the state as steps see it, None if no groups of 8-bit state are cut.

    Args:
        groups: the parameter groups.
        state: the state of their parameters, as it is kept.
        communicators: the optimizer's process groups.
    """
    # The usual case: no layout is looked at.
    if not any(group.state_dtype == "int8" for group in groups):
        return None
    everything = all_parameters(groups, communicators)
    frozen = {group.params[index] for group in groups for index in group.idle}
    trained = [one for one in everything if one.is_here and one.param not in frozen]
    cut = [one for one in trained if shares_groups(one.param, one.group, one.layout)]
    # Messages of several sets of ranks in one order on all ranks.
    return CutState(sorted(cut, key=lambda one: one.ranks), state) if cut else None


def storing_bytes(layout: Layout) -> int:
    """Return the temporary bytes of storing an average of 8 bits whose groups lie on the ranks of a layout."""
    entries = math.prod(layout.shape)
    largest = max(numel_of(layout.box_of(rank)) for rank in layout.ranks)
    # The gather: pieces of all ranks in float32, each as long as the longest, and the whole.
    gathering = 4 * len(layout.ranks) * largest + 4 * entries
    # Rounding: the whole, the bytes of before and after, the values that were before, and a mark where they changed.
    rounding = (4 + 1 + 1 + 4 + 1) * entries + PIECE_BYTES * min(entries, PIECE)
    return max(gathering, rounding)


class CutState(State):
    """The state of all parameters as steps see it: with averages in float32 where groups are cut.

    `state` keeps bytes. Within `of_step` this mapping has float32 tensors in their place, which are valid only there.

    Args:
        cut: the parameters whose groups are cut; the same ones in the same order on all of their ranks.
        state: the state of all parameters, as it is kept.
    """

    def __init__(self, cut: Sequence[Parameter], state: State) -> None:
        self._cut, self._state = cut, state
        self._wide = {one.param: _without_memory(one) for one in cut}
        """Parameter -> name -> this rank's piece of the average in float32. The objects stay, since caches refer to
        them, and have memory during a step only."""

    @property
    def workspace_bytes(self) -> int:
        """Return the temporary bytes of a step: averages in float32, and the largest whole one as it is stored."""
        wide = sum(piece.numel() * piece.itemsize for pieces in self._wide.values() for piece in pieces.values())
        # Only a layout cuts groups.
        return wide + max(storing_bytes(one.layout) for one in self._cut if one.layout is not None)

    def __getitem__(self, param: Tensor) -> Mapping[str, Tensor]:
        wide = self._wide.get(param)
        return self._state[param] if wide is None else {**self._state[param], **wide}

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    @contextmanager
    def of_step(self, steps_waited: Sequence[int]) -> Iterator[None]:
        """Provide the averages of groups that are due, and store them unless the step fails; all ranks must call it."""
        due = [one for one in self._cut if steps_waited[one.group.number] == 0]
        try:
            for one in due:
                self._read(one)
            yield
            for one in due:
                for key, average in self._wide[one.param].items():
                    self._store(one, key, average)
        finally:
            for one in due:
                for wide in self._wide[one.param].values():
                    wide.untyped_storage().resize_(0)

    def _read(self, one: Parameter) -> None:
        for key, wide in self._wide[one.param].items():
            # This rank's piece of the values that whole groups stand for, float32.
            values = one.of_groups(read_packed, local_tensor(self._state[one.param][key]))
            wide.untyped_storage().resize_(wide.numel() * wide.itemsize)
            if wide.numel():  # an empty piece may have another shape
                wide.copy_(values)

    def _store(self, one: Parameter, key: str, average: Tensor) -> None:
        # The averages of all ranks in the parameter's whole shape, then their bytes; this rank keeps its own.
        state = self._state[one.param]
        whole, kept = one.whole(average), local_tensor(state[key])
        before = one.whole(kept)
        stored = torch.empty_like(before)
        # Second moments are rounded by AdamW's count of steps, which the step has increased.
        store_packed_(stored, whole, state.get(STEP))
        # A step changes averages, unless all are zero. Without one the bytes stay: tiny values, whose float32
        # arithmetic underflows, would get other bytes if stored again. Bits are compared, since NaN equals nothing.
        is_stepped = (whole.view(torch.int32) != read_packed(before).view(torch.int32)).any()
        if kept.numel():
            kept.copy_(one.piece(torch.where(is_stepped, stored, before), this_rank()))


# Tensors made in inference mode could not be changed outside of it.
@torch.inference_mode(False)
def _without_memory(one: Parameter) -> dict[str, Tensor]:
    averages = {}
    for key in one.group.rule.packed_state:
        averages[key] = torch.empty_like(local_tensor(one.param), dtype=torch.float32)
        averages[key].untyped_storage().resize_(0)
    return averages
