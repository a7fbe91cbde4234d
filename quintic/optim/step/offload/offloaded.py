"""The state in host memory that a bucket borrows while it is stepped, and its passes over the batches.

Those are the things that its passes read and write: momentum for the directions, masters for the weights, AdamW's state
for its whole update, in parts.

A bucket's state is often a part of a parameter's: some matrices of a bank, some heads. The passes then get blocks of
weights, gradients and state in place of whole tensors, so that no more is loaded than is stepped.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.kernels.dispatch import is_dense
from quintic.optim.groups.group import Group
from quintic.optim.layout.packing import in_memory_order
from quintic.optim.layout.views import View
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.members import BucketMember, block_of
from quintic.optim.plan.offload_size import offloaded_entries
from quintic.optim.rules.rule import EXP_AVG, MOMENTUM, STEP
from quintic.optim.rules.table import PARAM_SHAPED_STATE
from quintic.optim.state.state import master_key
from quintic.optim.step.offload.transfers import BufferPool, TransferBatch
from quintic.optim.step.operands import BucketCache, Operands
from quintic.optim.step.torch_backend import UpdateBackend
from quintic.optim.step.triton_backend import with_one_gradient_dtype

__all__ = ["BLOCKS", "OffloadedAdamW", "OffloadedBackend", "OffloadedMatrices", "offloaded_state"]

# AdamW's parts begin at multiples of this many entries, which every kernel likes.
_MULTIPLE = 64

States = Sequence[Mapping[str, Tensor]]


class _Blocks(View):
    """The view of tensors that are blocks already."""

    def blocks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensor."""
        return (tensor,)


BLOCKS = _Blocks()
"""The view of what passes over a borrowed bucket get."""


class OffloadedMatrices:
    """The state that a bucket of matrices borrows: momentum, and masters where there are any."""

    def __init__(self, bucket: Bucket, group: Group) -> None:
        self._bucket, self._view = bucket, group.view
        self._key: object = None
        self._keys: list[str] = []
        self._members: tuple[BucketMember, ...] = ()
        self.batches: list[TransferBatch] = []
        self.cache = BucketCache()
        """Memory of the passes over blocks; everything else is the bucket's."""

    def of_pass(self, number: int) -> list[TransferBatch]:
        """Return the batches for the directions (0), or for the weights (1)."""
        return self.batches[number : number + 1]

    def prepare(self, members: tuple[BucketMember, ...], params: Sequence[Tensor] | None, states: States) -> None:
        """Get ready for a step of some members, given their state on the host."""
        master = master_key(states[0]) if states else None
        self._keys = [MOMENTUM] if master is None else [MOMENTUM, master]
        columns = [[state[key] for state in states] for key in self._keys] if states else []
        key = members, [list(map(Tensor.data_ptr, column)) for column in columns]
        if key != self._key:
            self.batches = [TransferBatch(self._blocks(column, members)) for column in columns]
            self._key = key
            self._members = ()

    def operands(self, active: Operands, device_views: Sequence[Sequence[Tensor]]) -> Operands:
        """Return blocks of the members' tensors, with the state on the device."""
        if self._bucket.kernels == "triton":
            active = with_one_gradient_dtype(active)  # of whole tensors: blocks would not keep their strides
        params = self._blocks(active.params, active.members)
        if not self._members:
            rows = zip(active.members, params, strict=True)
            self._members = tuple(
                replace(member, block=0, start=0, piece=None, num_matrices=block.shape[0]) for member, block in rows
            )
        return Operands(
            self._members,
            params,
            self._blocks(active.gradients, active.members),
            [dict(zip(self._keys, values, strict=True)) for values in zip(*device_views, strict=True)],
            active.num_matrices,
        )

    def _blocks(self, tensors: Sequence[Tensor], members: Sequence[BucketMember]) -> list[Tensor]:
        return [block_of(tensor, member, self._view) for tensor, member in zip(tensors, members, strict=True)]


class OffloadedBackend:
    """Passes over a bucket, see `UpdateBackend`, that have their state on the device while they run."""

    def __init__(self, backend: UpdateBackend, batches: Sequence[tuple[BufferPool, TransferBatch]]) -> None:
        self._backend, self._batches = backend, batches

    def directions(self) -> Tensor:
        """Advance the momentum; return the directions (b, m, n)."""
        pool, batch = self._batches[0]
        with pool.use(batch):
            return self._backend.directions()

    def apply(self, update: Tensor, factors: Tensor) -> None:
        """Step the weights."""
        if len(self._batches) == 1:
            self._backend.apply(update, factors)
            return
        pool, batch = self._batches[1]
        with pool.use(batch):
            self._backend.apply(update, factors)


class _Range(NamedTuple):
    """Entries of one member: all of them, or a run of its memory."""

    number: int
    run: slice | None


class _Piece:
    """Ranges of consecutive members of a bucket of AdamW parameters, stepped together, and their state."""

    def __init__(self, ranges: Sequence[_Range], states: States) -> None:
        self._ranges = ranges
        self._keys = [key for key in states[0] if key in PARAM_SHAPED_STATE]
        self.members = slice(ranges[0].number, ranges[-1].number + 1)
        self.batch = TransferBatch([_entries(states[number][key], run) for number, run in ranges for key in self._keys])
        self.cache = BucketCache()
        # Kept, so that tables of addresses stay valid.
        self._again = {n: torch.empty_like(states[n][STEP]) for n, run in ranges if run is not None and run.start}

    def operands(self, active: Operands, device_views: Sequence[Tensor]) -> Operands:
        """Return these entries of the members' tensors, with the state on the device."""
        given = iter(device_views)
        members, params, gradients = [], [], []
        states: list[Mapping[str, Tensor]] = []
        for number, run in self._ranges:
            member, state = active.members[number], active.states[number]
            # The step is counted with the first entries; here it is counted again, to no effect.
            step = state[STEP]
            if number in self._again:
                step = torch.sub(step, 1, out=self._again[number])
            members.append(member if run is None else replace(member, piece=(run,)))
            params.append(_entries(active.params[number], run))
            gradients.append(_entries(active.gradients[number], run))
            states.append({STEP: step, **{key: next(given) for key in self._keys}})
        return Operands(tuple(members), params, gradients, states, 0)


def _entries(tensor: Tensor, run: slice | None) -> Tensor:
    return tensor if run is None else in_memory_order(tensor)[run]


class OffloadedAdamW:
    """The state that a bucket of AdamW parameters borrows, piece by piece."""

    def __init__(self, bucket: Bucket, group: Group) -> None:
        limit = offloaded_entries(group, bucket.dtype)
        assert limit is not None
        self._limit = max(limit // _MULTIPLE, 1) * _MULTIPLE
        self._key: object = None
        self.pieces: list[_Piece] = []

    def of_pass(self, number: int) -> list[TransferBatch]:
        """Return everything, in order, for the first pass: there are no matrices to wait for before a second one."""
        return [] if number else [piece.batch for piece in self.pieces]

    def prepare(self, members: tuple[BucketMember, ...], params: Sequence[Tensor] | None, states: States) -> None:
        """Get ready for a step of some members, given their state on the host, and their tensors if they have gaps."""
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
        """Yield the ranges that are stepped together. Only members that exceed the limit are cut."""
        ranges: list[_Range] = []
        free = self._limit
        for number, numel in enumerate(numels):
            if numel <= self._limit or not dense[number]:
                if numel > free and ranges:
                    yield ranges
                    ranges, free = [], self._limit
                ranges.append(_Range(number, None))
                free = max(0, free - numel) // _MULTIPLE * _MULTIPLE
                continue
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
    """Return the batches of a bucket of a group with state in host memory; none before it is prepared."""
    return OffloadedMatrices(bucket, group) if bucket.rule.orthogonalizes else OffloadedAdamW(bucket, group)
