"""Loads state from host memory to the device for each bucket's computation, and stores it back (`offload=True`).

    begin      before a step: takes the order in which buckets will need their state; nothing is copied yet
    backend    a bucket of matrices: has momentum loaded to compute directions, and masters to write weights
    parts      a bucket of AdamW: yields pieces of it, one at a time, with all state of the piece on the device
    finish     the host waits until everything is stored, before it reads state itself

`state/placement.py` decides which state is in host memory. `offloaded.py` decides which tensors a bucket loads as one
batch. Batches pass through a few buffers on the device (`transfers.BufferPool`): one batch is loaded while the
batch before it is used. If the same buckets are stepped, a batch has the same address on the device at every step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import local_tensor
from quintic.optim.layout.pieces import block_of
from quintic.optim.plan.bucket import Bucket, Sharded
from quintic.optim.plan.offload_size import Offloaded, buffers
from quintic.optim.plan.plan import Plan
from quintic.optim.rules.device import is_capturing
from quintic.optim.state.placement import planned_state
from quintic.optim.state.shards import ShardedState, sharded_parameters, state_of_shard
from quintic.optim.step.offload.offloaded import (
    BLOCKS,
    OffloadedAdamW,
    OffloadedBackend,
    OffloadedMatrices,
    offloaded_state,
)
from quintic.optim.step.offload.transfers import BufferPool, Copies, TransferBatch
from quintic.optim.step.operands import BucketCache, Operands, State
from quintic.optim.step.torch_backend import UpdateBackend

__all__ = ["Offload", "OffloadedPart", "ScheduledStage"]


class ScheduledStage(NamedTuple):
    """One entry of a step's schedule: a bucket, and the stage that it enters."""

    number: int
    """The number of the bucket in the plan."""
    active: Operands
    """The members of the bucket that have a gradient."""
    stage: int | None
    """0 started, 1 computed, 2 finished (`plan/schedule.py`); None for a bucket without messages."""


class OffloadedPart(NamedTuple):
    """A piece of a bucket of AdamW parameters, with its state on the device."""

    active: Operands
    """The entries of the piece: weights, gradients and state."""
    cache: BucketCache
    """Kept tables for these entries; a piece has its own."""
    members: slice
    """Positions of the bucket's members with entries in the piece, for example to find their flags in a mask."""


class Offload:
    """Loads and stores the offloaded state of one plan's buckets, through buffers on the devices.

    Args:
        plan: the plan, without the sizes of offloaded state.
        groups: the parameter groups.
        state: the state of all parameters, in host memory where it is offloaded; it may be empty before the first step.
    """

    def __init__(self, plan: Plan, groups: Sequence[Group], state: State) -> None:
        self._groups, self._state = groups, state
        # Number of a bucket with offloaded state -> its batches.
        self._hosted: dict[int, OffloadedMatrices | OffloadedAdamW] = {}
        self._copies: dict[torch.device, Copies] = {}
        # (device, pass) -> buffers. Pass 0 computes directions, or the whole update of AdamW; pass 1 writes weights.
        self._pools: dict[tuple[torch.device, int], BufferPool] = {}
        buckets = []
        sharded = sharded_parameters(groups)
        for number, bucket in enumerate(plan):
            group = groups[bucket.group]
            # Offload is an option of groups, so a plan may have buckets with and without it.
            if group.offload:
                self._hosted[number] = offloaded_state(bucket, group)
                bucket = replace(bucket, offloaded=_size(bucket, group, sharded))
            buckets.append(bucket)
        # The same plan, with the size of its offloaded state in each bucket.
        self.plan = replace(plan, buckets=tuple(buckets))

    def begin(self, scheduled: Iterable[ScheduledStage]) -> None:
        """Take the schedule of a step, so that batches can be loaded ahead of their use. Nothing is copied yet.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        # For each pool its batches, in the order of their use.
        sequences: dict[tuple[torch.device, int], list[TransferBatch]] = {}
        for number, active, stage in scheduled:
            hosted, bucket = self._hosted.get(number), self.plan.buckets[number]
            # The state of this bucket is on the device already.
            if hosted is None:
                continue
            if is_capturing(bucket.device):
                raise RuntimeError(
                    f"{bucket.name}: its optimizer state is in host memory, and a CUDA graph is being captured, which "
                    f"would not load it; call optimizer.offload(False) before the capture"
                )
            # A bucket needs its batches in one or two of its stages. They are made at the first of these.
            stages = _stages(bucket)
            if stage == stages[0]:
                # Operands of sharded state come only with the mean gradients, after this: take all owned pieces.
                if isinstance(bucket, Sharded):
                    states = _states_of(bucket, self._groups[bucket.group].params, self._state)
                    hosted.prepare(bucket.members, None, states)
                else:
                    hosted.prepare(active.members, active.params, active.states)
            for of_pass, its_stage in enumerate(stages):
                if stage == its_stage:
                    sequences.setdefault((bucket.device, of_pass), []).extend(hosted.of_pass(of_pass))
        # Pools that are not used in this step begin, too, with no batches.
        for key, pool in self._pools.items():
            pool.begin(sequences.pop(key, []))
        # Now only sequences without a pool are left, as at the first step.
        for key, batches in sequences.items():
            self._pools[key] = self._new_pool(*key)
            self._pools[key].begin(batches)

    def backend(
        self,
        number: int,
        active: Operands,
        group: Group,
        step_mask: Tensor | None,
        make: Callable[[Operands, Group, BucketCache, Tensor | None], UpdateBackend],
    ) -> UpdateBackend:
        """Return a backend for a bucket of matrices, which has their state on the device while it computes.

        Args:
            number: the bucket's position in the plan.
            active: the members to step.
            group: their group.
            step_mask: () or (matrices,) int32 on the device; None if all are stepped.
            make: returns the backend that computes, given operands, group, cache and mask. These operands are matrices
                already and not parameters, and the group has the view for them.
        """
        hosted, device = self._hosted[number], self.plan.buckets[number].device
        assert isinstance(hosted, OffloadedMatrices)
        pools = [self._pools[device, kind] for kind, _ in enumerate(hosted.batches)]
        device_views = [pool.device_views(batch) for pool, batch in zip(pools, hosted.batches, strict=True)]
        # `device_views` are the places of the state in the buffers, where it is while a pass runs.
        backend = make(hosted.operands(active, device_views), replace(group, view=BLOCKS), hosted.cache, step_mask)
        return OffloadedBackend(backend, list(zip(pools, hosted.batches, strict=True)))

    def parts(self, number: int, active: Operands) -> Iterator[OffloadedPart]:
        """Yield the pieces of a bucket of AdamW; a piece has its state on the device until the next is asked for."""
        hosted, device = self._hosted[number], self.plan.buckets[number].device
        assert isinstance(hosted, OffloadedAdamW)
        pool = self._pools[device, 0]
        for piece in hosted.pieces:
            # Leaving the context stores the piece, which overlaps with the update of the next one.
            with pool.use(piece.batch):
                yield OffloadedPart(piece.operands(active, pool.device_views(piece.batch)), piece.cache, piece.members)

    def is_offloaded(self, number: int) -> bool:
        """Return whether a bucket's state is in host memory."""
        return number in self._hosted

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """Return a context in which the current streams may read and write the state in host memory.

        The streams wait for earlier stores, and later loads wait for the streams; the host waits for nothing.
        """
        for copies in self._copies.values():
            copies.wait(copies.stored)
        yield
        for copies in self._copies.values():
            copies.stored = copies.mark()

    def finish(self) -> None:
        """Wait, on the host, until everything is stored."""
        for copies in self._copies.values():
            copies.finish()

    def _new_pool(self, device: torch.device, kind: int) -> BufferPool:
        """Return buffers for the batches of one pass, 0 or 1, as many and as large as the plan has reckoned with."""
        if device not in self._copies:
            self._copies[device] = Copies(device)
        # Buckets on one device use the same buffers in turn, so the largest batch of any of them decides the size.
        offloaded = [b.offloaded for b in self.plan if b.offloaded is not None and b.device == device]
        number, size = buffers(offloaded, kind)
        return BufferPool(self._copies[device], size, max(1, number))


def _states_of(bucket: Bucket, params: Sequence[Tensor], state: State) -> list[dict[str, Tensor]]:
    """Return the state of each member of a bucket, local tensors or pieces of them."""
    if isinstance(bucket, Sharded):
        owned = [(shard, params[shard.index]) for shard in bucket.members]
        return [state_of_shard(state[param], shard, param) for shard, param in owned]
    states = [state[params[member.index]] for member in bucket.members]
    return [{key: local_tensor(value) for key, value in of_param.items()} for of_param in states]


def _size(bucket: Bucket, group: Group, sharded: Mapping[Tensor, ShardedState]) -> Offloaded:
    """Return the sizes of a bucket's offloaded state, computed with meta tensors in place of state."""
    params = group.params
    # Tensors of all members, and state on the meta device, which has shapes and no memory.
    members = [local_tensor(params[member.index]) for member in bucket.members]
    state = {}
    for param in {params[member.index] for member in bucket.members}:
        state[param] = planned_state(param, group, sharded[param].local if param in sharded else None)
    # Make the batches as a step would, and measure them.
    hosted = offloaded_state(bucket, group)
    states = _states_of(bucket, params, state)
    hosted.prepare(bucket.members, members, states)
    batches = hosted.of_pass(0), hosted.of_pass(1)
    directions, weights = (max((batch.size for batch in of_pass), default=0) for of_pass in batches)
    # State that stages on whole matrices need uses no buffer: the step itself copies it to the device and back.
    whole = sum(
        block_of(state[spec.name], member, group.view).nbytes
        for spec in group.rule.matrix_state
        for member, state in zip(bucket.members, states, strict=True)
    )
    num_bytes = sum(batch.num_bytes for batch in chain(*batches)) + whole
    return Offloaded(num_bytes, directions, weights, len(batches[0]))


def _stages(bucket: Bucket) -> tuple[int | None, int | None]:
    """Return the two stages in which a bucket computes directions and writes weights (`ScheduledStage.stage`)."""
    # Owners of sharded state have whole matrices: they do both between the two messages.
    if isinstance(bucket, Sharded):
        return 1, 1
    return (0, 2) if bucket.needs_comm else (None, None)
