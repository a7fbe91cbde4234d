"""The batches of offloaded state that each pass of a bucket needs on the device.

    Muon     momentum for the directions, then masters, if any, for the weights
    AdamW    moments and masters of one piece of the bucket, for its whole update; then the next piece

A bucket often has only some matrices of a parameter, of a bank or of heads. The passes then get blocks of weights,
gradients and state instead of whole tensors, so that no more state is loaded than is stepped.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.kernels.dispatch import is_dense
from quintic.optim.groups.group import Group
from quintic.optim.layout.packing import in_memory_order
from quintic.optim.layout.pieces import Piece, block_of
from quintic.optim.layout.views import View
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.offload_size import offloaded_entries
from quintic.optim.rules.rule import EXP_AVG, MOMENTUM, STEP
from quintic.optim.rules.table import PARAM_SHAPED_STATE
from quintic.optim.state.state import master_key
from quintic.optim.step.offload.transfers import BufferPool, TransferBatch
from quintic.optim.step.operands import BucketCache, Operands
from quintic.optim.step.torch_backend import UpdateBackend
from quintic.optim.step.triton_backend import with_one_gradient_dtype

__all__ = ["BLOCKS", "OffloadedAdamW", "OffloadedBackend", "OffloadedMatrices", "offloaded_state"]

# AdamW's pieces begin at multiples of this many entries, so that kernels find them aligned.
_MULTIPLE = 64

States = Sequence[Mapping[str, Tensor]]


class _Blocks(View):
    """The view of tensors that are blocks already."""

    def blocks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensor."""
        return (tensor,)


BLOCKS = _Blocks()
"""The view of the blocks that passes get instead of parameters."""


class OffloadedMatrices:
    """The batches of a bucket of matrices: momentum, and masters if there are any."""

    def __init__(self, bucket: Bucket, group: Group) -> None:
        self._bucket, self._view = bucket, group.view
        self._key: object = None
        self._keys: list[str] = []
        self._members: tuple[Piece, ...] = ()
        self.batches: list[TransferBatch] = []
        # Cached values of the passes over blocks; other values are in the bucket's own cache.
        self.cache = BucketCache()

    def of_pass(self, number: int) -> list[TransferBatch]:
        """Return the batches for the directions (0), or for the weights (1)."""
        return self.batches[number : number + 1]

    def prepare(self, members: tuple[Piece, ...], params: Sequence[Tensor] | None, states: States) -> None:
        """Make the batches for a step of some members, given their state on the host; unchanged ones are kept."""
        master = master_key(states[0]) if states else None
        self._keys = [MOMENTUM] if master is None else [MOMENTUM, master]
        columns = [[state[key] for state in states] for key in self._keys] if states else []
        key = members, [list(map(Tensor.data_ptr, column)) for column in columns]
        if key != self._key:
            self.batches = [TransferBatch(self._blocks(column, members)) for column in columns]
            self._key = key
            self._members = ()

    def operands(self, active: Operands, device_views: Sequence[Sequence[Tensor]]) -> Operands:
        """Return the members' matrices as operands, with the state on the device."""
        # Gradients are cast as whole tensors, since blocks would not keep their strides.
        if self._bucket.kernels == "triton":
            active = with_one_gradient_dtype(active)
        params = self._blocks(active.params, active.members)
        # Members whose tensors are the blocks themselves; the same objects in every step, for caches.
        if not self._members:
            rows = zip(active.members, params, strict=True)
            self._members = tuple(
                replace(member, matrices=tuple(range(len(block))), box=None) for member, block in rows
            )
        return Operands(
            self._members,
            params,
            self._blocks(active.gradients, active.members),
            [dict(zip(self._keys, values, strict=True)) for values in zip(*device_views, strict=True)],
            active.num_matrices,
        )

    def _blocks(self, tensors: Sequence[Tensor], members: Sequence[Piece]) -> list[Tensor]:
        return [block_of(tensor, member, self._view) for tensor, member in zip(tensors, members, strict=True)]


class OffloadedBackend:
    """The backend of an offloaded bucket: an `UpdateBackend` that has its state on the device while it runs."""

    def __init__(self, backend: UpdateBackend, batches: Sequence[tuple[BufferPool, TransferBatch]]) -> None:
        self._backend, self._batches = backend, batches

    def directions(self) -> Tensor:
        """Advance the momentum; return the directions (b, m, n)."""
        pool, batch = self._batches[0]
        with pool.use(batch):
            return self._backend.directions()

    def apply(self, update: Tensor, factors: Tensor) -> None:
        """Write the weights."""
        # Without masters the weights need no state.
        if len(self._batches) == 1:
            self._backend.apply(update, factors)
            return
        pool, batch = self._batches[1]
        with pool.use(batch):
            self._backend.apply(update, factors)


class _Range(NamedTuple):
    """Entries of the member with a number: all of them, or a range of its memory."""

    number: int
    run: slice | None


class _Piece:
    """A piece of a bucket of AdamW parameters: ranges of consecutive members, stepped together, and their state."""

    def __init__(self, ranges: Sequence[_Range], states: States) -> None:
        self._ranges = ranges
        self._keys = [key for key in states[0] if key in PARAM_SHAPED_STATE]
        self.members = slice(ranges[0].number, ranges[-1].number + 1)
        self.batch = TransferBatch([_entries(states[number][key], run) for number, run in ranges for key in self._keys])
        self.cache = BucketCache()
        # Step counts for ranges that do not begin their member, see `operands`; kept, so that their addresses stay.
        self._again = {n: torch.empty_like(states[n][STEP]) for n, run in ranges if run is not None and run.start}

    def operands(self, active: Operands, device_views: Sequence[Tensor]) -> Operands:
        """Return the entries of the members' tensors as operands, with the state on the device."""
        given = iter(device_views)
        members, params, gradients = [], [], []
        states: list[Mapping[str, Tensor]] = []
        for number, run in self._ranges:
            member, state = active.members[number], active.states[number]
            # The update of a member's first range increases its step count. Later ranges get a copy that is one less,
            # so that they compute with the same count.
            step = state[STEP]
            if number in self._again:
                step = torch.sub(step, 1, out=self._again[number])
            members.append(member if run is None else replace(member, box=((run.start, run.stop),)))
            params.append(_entries(active.params[number], run))
            gradients.append(_entries(active.gradients[number], run))
            states.append({STEP: step, **{key: next(given) for key in self._keys}})
        return Operands(tuple(members), params, gradients, states, 0)


def _entries(tensor: Tensor, run: slice | None) -> Tensor:
    return tensor if run is None else in_memory_order(tensor)[run]


class OffloadedAdamW:
    """The batches of a bucket of AdamW parameters, one for each piece."""

    def __init__(self, bucket: Bucket, group: Group) -> None:
        limit = offloaded_entries(group, bucket.dtype)
        assert limit is not None
        self._limit = max(limit // _MULTIPLE, 1) * _MULTIPLE
        self._key: object = None
        self.pieces: list[_Piece] = []

    def of_pass(self, number: int) -> list[TransferBatch]:
        """Return all batches, in order, for pass 0, which does the whole update; none for pass 1."""
        return [] if number else [piece.batch for piece in self.pieces]

    def prepare(self, members: tuple[Piece, ...], params: Sequence[Tensor] | None, states: States) -> None:
        """Make the pieces for a step of some members, given their state on the host; unchanged ones are kept.

        `params` are their tensors; None if these have no gaps in memory.
        """
        key = (
            members,
            [value.data_ptr() for state in states for name, value in state.items() if name in PARAM_SHAPED_STATE],
        )
        if key != self._key:
            dense = [True] * len(members) if params is None else list(map(is_dense, params))
            numels = [state[EXP_AVG].numel() for state in states]
            self.pieces = [_Piece(ranges, states) for ranges in self._divided(numels, dense)]
            self._key = key

    def _divided(self, numels: Sequence[int], dense: Sequence[bool]) -> Iterator[list[_Range]]:
        """Yield the ranges of each piece. Only members that are larger than the limit, and without gaps, are split."""
        ranges: list[_Range] = []
        free = self._limit
        for number, numel in enumerate(numels):
            # Whole, in this piece or the next.
            if numel <= self._limit or not dense[number]:
                if numel > free and ranges:
                    yield ranges
                    ranges, free = [], self._limit
                ranges.append(_Range(number, None))
                free = max(0, free - numel) // _MULTIPLE * _MULTIPLE
                continue
            # In ranges that fill up this piece and further ones.
            start = 0
            while start < numel:
                if not free:
                    yield ranges
                    ranges, free = [], self._limit
                stop = min(start + free, numel)
                ranges.append(_Range(number, slice(start, stop)))
                free = (free - (stop - start)) // _MULTIPLE * _MULTIPLE
                start = stop
        if ranges:
            yield ranges


def offloaded_state(bucket: Bucket, group: Group) -> OffloadedMatrices | OffloadedAdamW:
    """Return the offloaded state of a bucket, which has no batches before it is prepared for a step."""
    return OffloadedMatrices(bucket, group) if bucket.rule.orthogonalizes else OffloadedAdamW(bucket, group)
