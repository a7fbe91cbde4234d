"""Brings offloaded state to the device for each bucket's computation, and back to host memory.

    begin      before a step: the order in which buckets will need their state; nothing is copied yet
    backend    a bucket of matrices: its momentum is on the device for the directions, its masters for the weights
    parts      a bucket of AdamW: piece by piece, with all state of a piece
    finish     the host waits until everything is stored, before it reads state itself

`placement.py` decides which state is in host memory, `offloaded.py` which tensors a bucket loads together. These
batches pass through a few buffers on the device (`transfers.BufferPool`): one is loaded while the one before it is
used. Their addresses on the device are the same in every step of the same buckets.
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
from quintic.optim.plan.bucket import Bucket, Sharded
from quintic.optim.plan.members import block_of
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
    """One entry of a step's schedule: a bucket, and the stage that it is moved to."""

    number: int
    """The number of the bucket in the plan."""
    active: Operands
    stage: int | None
    """The number of the stage, 0 to 2, of a bucket with collectives; None for a bucket without."""


class OffloadedPart(NamedTuple):
    """A piece of a bucket of AdamW parameters, with its state on the device."""

    active: Operands
    cache: BucketCache
    members: slice
    """The members of the bucket that its entries belong to."""


class Offload:
    """The offloaded state of one plan's buckets, and the buffers that it passes through.

    `state` is the state of all parameters, in host memory where it is offloaded; it may be empty before the first step.
    """

    def __init__(self, plan: Plan, groups: Sequence[Group], state: State) -> None:
        self._groups, self._state = groups, state
        self._hosted: dict[int, OffloadedMatrices | OffloadedAdamW] = {}
        self._copies: dict[torch.device, Copies] = {}
        # By device and pass: 0 for directions, 1 for weights.
        self._pools: dict[tuple[torch.device, int], BufferPool] = {}
        buckets = []
        sharded = sharded_parameters(groups)
        for number, bucket in enumerate(plan):
            group = groups[bucket.group]
            if group.offload:
                self._hosted[number] = offloaded_state(bucket, group)
                bucket = replace(bucket, offloaded=_size(bucket, group, sharded))
            buckets.append(bucket)
        # The plan, whose buckets have the sizes of their offloaded state.
        self.plan = replace(plan, buckets=tuple(buckets))

    def begin(self, scheduled: Iterable[ScheduledStage]) -> None:
        """Register the schedule of a step, so that batches can be loaded ahead. Nothing is copied yet.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        # For each pool the batches in the order of their use.
        sequences: dict[tuple[torch.device, int], list[TransferBatch]] = {}
        for number, active, stage in scheduled:
            hosted, bucket = self._hosted.get(number), self.plan.buckets[number]
            if hosted is None:
                continue
            if is_capturing(bucket.device):
                raise RuntimeError(
                    f"{bucket.name}: its optimizer state is in host memory, and a CUDA graph is being captured, which "
                    f"would not load it; call optimizer.offload(False) before the capture"
                )
            # Batches are made at a bucket's first use in the step, and needed in one or two of its stages.
            stages = _stages(bucket)
            if stage == stages[0]:
                if isinstance(bucket, Sharded):
                    states = _states_of(bucket, self._groups[bucket.group].params, self._state)
                    hosted.prepare(bucket.members, None, states)
                else:
                    hosted.prepare(active.members, active.params, active.states)
            for of_pass, its_stage in enumerate(stages):
                if stage == its_stage:
                    sequences.setdefault((bucket.device, of_pass), []).extend(hosted.of_pass(of_pass))
        for key, pool in self._pools.items():
            pool.begin(sequences.pop(key, []))
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
        """Return a backend for some members of a bucket that has their state on the device while it runs.

        `make` makes the backend that computes, from operands that are matrices already, their group and a cache.
        """
        hosted, device = self._hosted[number], self.plan.buckets[number].device
        assert isinstance(hosted, OffloadedMatrices)
        pools = [self._pools[device, kind] for kind, _ in enumerate(hosted.batches)]
        device_views = [pool.device_views(batch) for pool, batch in zip(pools, hosted.batches, strict=True)]
        backend = make(hosted.operands(active, device_views), replace(group, view=BLOCKS), hosted.cache, step_mask)
        return OffloadedBackend(backend, list(zip(pools, hosted.batches, strict=True)))

    def parts(self, number: int, active: Operands) -> Iterator[OffloadedPart]:
        """Yield the pieces of a bucket of AdamW; a piece's state is on the device until the next is taken."""
        hosted, device = self._hosted[number], self.plan.buckets[number].device
        assert isinstance(hosted, OffloadedAdamW)
        pool = self._pools[device, 0]
        for piece in hosted.pieces:
            with pool.use(piece.batch):
                yield OffloadedPart(piece.operands(active, pool.device_views(piece.batch)), piece.cache, piece.members)

    def is_offloaded(self, number: int) -> bool:
        """Return whether a bucket's state is in host memory."""
        return number in self._hosted

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """Let the current streams read and write the state in host memory within the block; the host does not wait."""
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
        if device not in self._copies:
            self._copies[device] = Copies(device)
        offloaded = [b.offloaded for b in self.plan if b.offloaded is not None and b.device == device]
        number, size = buffers(offloaded, kind)
        return BufferPool(self._copies[device], size, max(1, number))


def _states_of(bucket: Bucket, params: Sequence[Tensor], state: State) -> list[dict[str, Tensor]]:
    """Return this rank's state of each member of a bucket."""
    if isinstance(bucket, Sharded):
        owned = [(shard, params[shard.index]) for shard in bucket.local]
        return [state_of_shard(state[param], shard, param) for shard, param in owned]
    states = [state[params[member.index]] for member in bucket.members]
    return [{key: local_tensor(value) for key, value in of_param.items()} for of_param in states]


def _size(bucket: Bucket, group: Group, sharded: Mapping[Tensor, ShardedState]) -> Offloaded:
    """Return the sizes of a bucket's offloaded state, computed with meta tensors in place of state."""
    params = group.params
    members = [local_tensor(params[member.index]) for member in bucket.members]
    state = {}
    for param in {params[member.index] for member in bucket.members}:
        state[param] = planned_state(param, group, sharded[param].local if param in sharded else None)
    hosted = offloaded_state(bucket, group)
    states = _states_of(bucket, params, state)
    hosted.prepare(bucket.members, members, states)
    batches = hosted.of_pass(0), hosted.of_pass(1)
    directions, weights = (max((batch.size for batch in of_pass), default=0) for of_pass in batches)
    # State that stages on whole matrices need passes through no buffer: the step copies it to a batch, and back.
    whole = sum(
        block_of(state[spec.name], member, group.view).nbytes
        for spec in group.rule.matrix_state
        for member, state in zip(bucket.members, states, strict=True)
    )
    num_bytes = sum(batch.num_bytes for batch in chain(*batches)) + whole
    return Offloaded(num_bytes, directions, weights, len(batches[0]))


def _stages(bucket: Bucket) -> tuple[int | None, int | None]:
    """Return the stages in which a bucket computes directions, and writes weights."""
    if isinstance(bucket, Sharded):
        return 1, 1
    return (0, 2) if bucket.needs_comm else (None, None)
