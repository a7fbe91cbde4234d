"""Brings state from host memory to the device while a bucket is computed, and stores it there again (`offload=True`).

Before a step `Offload.begin` gets the order in which buckets will be computed. From then on each computation with state
in host memory, a pass of a `BucketPiece`, goes through these phases:

    load      host -> device, on a stream for loads: one computation ahead, into a buffer whose last store is over
    compute   within `with piece.loaded(...)`, on the current stream, which waits for the load
    store     device -> host, on a stream for stores, which waits for the computation

Each pass (`offload_size.DIRECTIONS`, `WEIGHTS`) has three buffers on the device, and its computations take them in
turn: one is loaded, one computed and one stored. What holds throughout:

- The host waits for the device only in `finish`, before it reads state itself; streams wait for each other's events.
- Host memory is not loaded while stores into it are under way: loads of a step start after the stores of the last one.
- A step that steps the same members uses the same addresses on the device, so that tables of addresses are kept.
- The plan decides which entries are loaded at a time, and a step only leaves out members without a gradient: the
  buffers that the plan reckons with are always enough.

`pieces.py` finds the tensors to load, and `transfers.py` has streams, events and buffers.
`state/placement.py` decides which state is in host memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from quintic.kernels.dispatch import is_dense
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import local_tensor
from quintic.optim.layout.pieces import Piece
from quintic.optim.plan.bucket import Bucket, Sharded
from quintic.optim.plan.offload_size import DIRECTIONS, WEIGHTS, MemberEntries, Offloaded, adamw_pieces, buffers
from quintic.optim.plan.plan import Plan
from quintic.optim.rules.device import is_capturing
from quintic.optim.rules.rule import EXP_AVG, PARAM_SHAPED_STATE
from quintic.optim.state.placement import planned_state
from quintic.optim.state.shards import ShardedState, sharded_parameters, state_of_shard
from quintic.optim.step.offload.pieces import BucketPiece
from quintic.optim.step.offload.transfers import BufferPool, Copies, TransferBatch
from quintic.optim.step.operands import Operands, State

__all__ = ["Offload"]


class Offload:
    """Loads and stores the offloaded state of one plan's buckets, through buffers on the devices.

    Args:
        plan: the plan, without the sizes of offloaded state.
        groups: the parameter groups.
        state: the state of all parameters, in host memory where it is offloaded; it may be empty before the first step.
    """

    def __init__(self, plan: Plan, groups: Sequence[Group], state: State) -> None:
        self._groups, self._state = groups, state
        sharded = sharded_parameters(groups)
        buckets = []
        for bucket in plan:
            group = groups[bucket.group]
            # Offload is an option of groups, so a plan may have buckets with and without it.
            buckets.append(replace(bucket, offloaded=_planned(bucket, group, sharded)) if group.offload else bucket)
        # The same plan, with its pieces and the size of its offloaded state in each bucket.
        self.plan = replace(plan, buckets=tuple(buckets))
        # Index of a bucket -> its pieces in this step, and the members and addresses of state that they were made for.
        self._pieces: dict[int, list[BucketPiece]] = {}
        self._made_for: dict[int, object] = {}
        # Device -> its streams, and by pass its buffers. All are made at the first step.
        self._copies: dict[torch.device, Copies] = {}
        self._pools: dict[torch.device, dict[int, BufferPool]] = {}

    def begin(self, order: Iterable[tuple[int, int | None]], operands: Mapping[int, Operands]) -> None:
        """Take the order of a step, so that state can be loaded ahead of its use. Nothing is copied yet.

        Args:
            order: the index of a bucket and the phase that it enters: 0 started, 1 computed, 2 finished
                (`plan/schedule.py`); None for a bucket without messages, which has only one phase.
            operands: by index of a bucket the members with a gradient.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        # (device, pass) -> batches in the order of their use.
        sequences: dict[tuple[torch.device, int], list[TransferBatch]] = {}
        for number, phase in order:
            bucket = self.plan.buckets[number]
            if not self.is_offloaded(number):
                continue
            if is_capturing(bucket.device):
                raise RuntimeError(
                    f"{bucket.name}: its optimizer state is in host memory, and a CUDA graph is being captured, which "
                    f"would not load it; call optimizer.offload(False) before the capture"
                )
            phases = _phases_of_passes(bucket)
            # State is looked up at the first phase that needs it.
            if phase == phases[DIRECTIONS]:
                self._prepare(number, operands[number])
            for of_pass in (DIRECTIONS, WEIGHTS):
                if phase == phases[of_pass]:
                    for piece in self._pieces[number]:
                        if of_pass in piece.batches:
                            sequences.setdefault((bucket.device, of_pass), []).append(piece.batches[of_pass])
        for device, of_pass in sequences:
            if of_pass not in self._pools.setdefault(device, {}):
                self._pools[device][of_pass] = self._new_pool(device, of_pass)
        # Pools that are not used in this step begin, too, with no batches.
        for device, pools in self._pools.items():
            for of_pass, pool in pools.items():
                pool.begin(sequences.get((device, of_pass), []))

    def pieces(self, number: int) -> Sequence[BucketPiece]:
        """Return the pieces of a bucket in this step, to be computed in this order; a bucket of matrices has one."""
        return self._pieces[number]

    def is_offloaded(self, number: int) -> bool:
        """Return whether a bucket's state is in host memory."""
        return self.plan.buckets[number].offloaded is not None

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

    def _prepare(self, number: int, active: Operands) -> None:
        """Make the pieces of a bucket for a step, unless members and addresses have not changed."""
        bucket = self.plan.buckets[number]
        group = self._groups[bucket.group]
        assert bucket.offloaded is not None
        members = active.members
        states: Sequence[Mapping[str, Tensor]] = active.states
        # Operands of sharded state come only with the mean gradients, after this: take all owned pieces.
        if isinstance(bucket, Sharded):
            members, states = bucket.members, _states_of(bucket, group.params, self._state)
        addresses = [
            value.data_ptr() for state in states for name, value in state.items() if name in PARAM_SHAPED_STATE
        ]
        if self._made_for.get(number) != (members, addresses):
            pools = self._pools.setdefault(bucket.device, {})
            self._pieces[number] = [
                BucketPiece(bucket, group, entries, members, states, pools)
                for entries in _present_pieces(bucket.offloaded, bucket.members, members)
            ]
            self._made_for[number] = members, addresses

    def _new_pool(self, device: torch.device, of_pass: int) -> BufferPool:
        """Return buffers for the batches of one pass, as many and as large as the plan has reckoned with."""
        if device not in self._copies:
            self._copies[device] = Copies(device)
        # Buckets on one device use the same buffers in turn, so the largest batch of any of them decides the size.
        offloaded = [b.offloaded for b in self.plan if b.offloaded is not None and b.device == device]
        number, size = buffers(offloaded, of_pass)
        return BufferPool(self._copies[device], size, max(1, number))


def _phases_of_passes(bucket: Bucket) -> tuple[int | None, int | None]:
    """Return the phases in which a bucket makes its passes `DIRECTIONS` and `WEIGHTS` (`Offload.begin`)."""
    # Owners of sharded state have whole matrices: they do both between the two messages.
    if isinstance(bucket, Sharded):
        return 1, 1
    return (0, 2) if bucket.needs_comm else (None, None)


def _states_of(bucket: Bucket, params: Sequence[Tensor], state: State) -> list[dict[str, Tensor]]:
    """Return the state of each member of a bucket, local tensors or pieces of them."""
    if isinstance(bucket, Sharded):
        owned = [(shard, params[shard.index]) for shard in bucket.members]
        return [state_of_shard(state[param], shard, param) for shard, param in owned]
    states = [state[params[member.index]] for member in bucket.members]
    return [{key: local_tensor(value) for key, value in of_param.items()} for of_param in states]


def _present_pieces(
    offloaded: Offloaded, planned: Sequence[Piece], members: Sequence[Piece]
) -> Iterator[list[MemberEntries]]:
    """Yield the plan's pieces that have any of `members`, reduced to these; positions are those in `members`."""
    # Members with a gradient are the plan's own objects.
    places = {id(member): place for place, member in enumerate(members)}
    for piece in offloaded.pieces:
        entries = [(places[id(planned[n])], run) for n, run in piece if id(planned[n]) in places]
        if entries:
            yield entries


def _planned(bucket: Bucket, group: Group, sharded: Mapping[Tensor, ShardedState]) -> Offloaded:
    """Return a bucket's pieces, and the sizes of its offloaded state, from meta tensors in place of state."""
    # State on the meta device has shapes and strides, and no memory.
    params = [group.params[member.index] for member in bucket.members]
    state = {
        param: planned_state(param, group, sharded[param].local if param in sharded else None)
        for param in dict.fromkeys(params)
    }
    states = _states_of(bucket, group.params, state)
    pieces: list[tuple[MemberEntries, ...]] = []
    if bucket.rule.orthogonalizes and params:
        pieces = [tuple((number, None) for number, _ in enumerate(params))]
    elif params:
        # Sharded parameters have no gaps: a rank owns ranges of their memory.
        has_gaps = not isinstance(bucket, Sharded) and not all(is_dense(local_tensor(param)) for param in params)
        numels = [of_member[EXP_AVG].numel() for of_member in states]
        pieces = list(adamw_pieces(group, bucket.dtype, numels, has_gaps=has_gaps))
    # Make the batches as a step would, and measure them.
    made = [BucketPiece(bucket, group, piece, bucket.members, states, {}) for piece in pieces]
    directions, weights = (
        [piece.batches[of_pass] for piece in made if of_pass in piece.batches] for of_pass in (DIRECTIONS, WEIGHTS)
    )
    return Offloaded(
        num_bytes=sum(batch.num_bytes for batch in [*directions, *weights]),
        directions=max((batch.size for batch in directions), default=0),
        weights=max((batch.size for batch in weights), default=0),
        pieces=tuple(pieces),
    )
