"""State in host memory: which of it a bucket has on its device while it is stepped, and when.

`placement.py` says what lies in host memory. A bucket borrows what its passes read and write: momentum for the
directions, masters for the weights, AdamW's state for its whole update, in parts. Loans pass through a few buffers
(`transfers.Ring`), each loaded while the one before it is used. What is borrowed has the same addresses in every step
that steps the same buckets.

A bucket's state is often a part of a parameter's: some matrices of a bank, some heads. The passes then get blocks of
weights, gradients and state in place of whole tensors, so that no more is loaded than is stepped.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.kernels.dispatch import is_dense
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import local_tensor
from quintic.optim.layout.packing import in_memory_order
from quintic.optim.layout.views import View
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.members import Member, block_of
from quintic.optim.plan.offload_size import Offloaded, buffers, offloaded_entries
from quintic.optim.plan.plan import Plan
from quintic.optim.rules.device_memory import is_capturing
from quintic.optim.state.parts import CUT_KEYS, state_of_part
from quintic.optim.state.placement import planned_state
from quintic.optim.state.sharded_state import Divided, divided_parameters
from quintic.optim.state.state import master_key
from quintic.optim.step.device_passes import DeviceMemory, with_one_gradient_dtype
from quintic.optim.step.offload.transfers import Copies, Loan, Ring, copies_for
from quintic.optim.step.operands import Operands, State
from quintic.optim.step.updates import Passes

__all__ = ["Offload", "OffloadedPart", "Visit"]

# AdamW's parts begin at multiples of this many entries, which every kernel likes.
_MULTIPLE = 64

States = Sequence[Mapping[str, Tensor]]


class Visit(NamedTuple):
    """One of the times that a step turns to a bucket, in the order in which it does."""

    number: int
    """Of the bucket in the plan."""
    active: Operands
    stage: int | None
    """Which of the three parts of a bucket with collectives; None for a bucket without."""


class OffloadedPart(NamedTuple):
    """Some entries of AdamW's parameters that are stepped together."""

    active: Operands
    memory: DeviceMemory
    members: slice
    """Which of the bucket's members they belong to."""


class Offload:
    """The state in host memory of one plan's buckets, and the buffers that it passes through.

    Args:
        plan: of the groups.
        groups: parameter groups.
        state: of their parameters, in its place; there need be none before the first step.
    """

    def __init__(self, plan: Plan, groups: Sequence[Group], state: State) -> None:
        self._groups, self._state = groups, state
        self._hosted: dict[int, _Matrices | _Vectors] = {}
        self._copies: dict[torch.device, Copies] = {}
        self._rings: dict[tuple[torch.device, int], Ring] = {}
        """For directions (0) and for weights (1) of each device."""
        buckets = []
        divided = divided_parameters(groups)
        for number, bucket in enumerate(plan):
            group = groups[bucket.group]
            if group.offload:
                self._hosted[number] = _hosted(bucket, group)
                bucket = replace(bucket, offloaded=_size(bucket, group, divided))
            buckets.append(bucket)
        self.plan = replace(plan, buckets=tuple(buckets))
        """The plan, with what is offloaded."""

    def begin(self, visits: Iterable[Visit]) -> None:
        """Say what a step does, and in which order. Nothing is copied yet.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        sequences: dict[tuple[torch.device, int], list[Loan]] = {}
        for number, active, stage in visits:
            hosted, bucket = self._hosted.get(number), self.plan.buckets[number]
            if hosted is None:
                continue
            if is_capturing(bucket.device):
                raise RuntimeError(
                    f"{bucket.name}: its optimizer state is in host memory, and a CUDA graph is being captured, which "
                    f"would not bring it; call optimizer.offload(False) before the capture"
                )
            first, last = _stages(bucket)
            if stage == first:
                if bucket.sharding is None:
                    hosted.prepare(active.members, active.params, active.states)
                else:
                    hosted.prepare(bucket.members, None, self._states(bucket))
                sequences.setdefault((bucket.device, 0), []).extend(hosted.directions)
            if stage == last:
                sequences.setdefault((bucket.device, 1), []).extend(hosted.weights)
        for key, ring in self._rings.items():
            ring.begin(sequences.pop(key, []))
        for key, loans in sequences.items():
            self._rings[key] = self._new_ring(*key)
            self._rings[key].begin(loans)

    def passes(
        self,
        number: int,
        active: Operands,
        group: Group,
        stepped: Tensor | None,
        make: Callable[[Operands, Group, DeviceMemory, Tensor | None], Passes],
    ) -> Passes:
        """Return passes over a bucket that borrow what they need.

        Args:
            number: of the bucket.
            active: its members, at least one.
            group: its parameter group.
            stepped: flags for `make`.
            make: returns the passes over other operands, of another view, with the memory that belongs to them.
        """
        hosted, device = self._hosted[number], self.plan.buckets[number].device
        assert isinstance(hosted, _Matrices)
        rings = [self._rings[device, kind] for kind, _ in enumerate(hosted.loans)]
        twins = [ring.twins(loan) for ring, loan in zip(rings, hosted.loans, strict=True)]
        passes = make(hosted.operands(active, twins), replace(group, view=_BLOCKS), hosted.memory, stepped)
        return _BorrowingPasses(passes, list(zip(rings, hosted.loans, strict=True)))

    def parts(self, number: int, active: Operands) -> Iterator[OffloadedPart]:
        """Yield the parts of a bucket of AdamW parameters, each with its state borrowed until the next is asked for."""
        hosted, device = self._hosted[number], self.plan.buckets[number].device
        assert isinstance(hosted, _Vectors)
        ring = self._rings[device, 0]
        for piece in hosted.pieces:
            with ring.use(piece.loan):
                yield OffloadedPart(piece.operands(active, ring.twins(piece.loan)), piece.memory, piece.members)

    def is_offloaded(self, number: int) -> bool:
        """Return whether a bucket's state is in host memory."""
        return number in self._hosted

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """Let work on the current streams read and write the state in host memory; the host does not wait."""
        for copies in self._copies.values():
            copies.wait(copies.stored)
        yield
        for copies in self._copies.values():
            copies.stored = copies.mark()

    def finish(self) -> None:
        """Let the host wait until everything is stored."""
        for copies in self._copies.values():
            copies.finish()

    def _new_ring(self, device: torch.device, kind: int) -> Ring:
        if device not in self._copies:
            self._copies[device] = copies_for(device)
        found = [b.offloaded for b in self.plan if b.offloaded is not None and b.device == device]
        number, size = buffers(found, kind)
        return Ring(self._copies[device], size, max(1, number))

    def _states(self, bucket: Bucket) -> list[dict[str, Tensor]]:
        """Return the state of each member as this rank has it on the host."""
        return _states_of(bucket, self._groups[bucket.group].params, self._state)


def _states_of(bucket: Bucket, params: Sequence[Tensor], state: State) -> list[dict[str, Tensor]]:
    """Return what this rank has of the state of each member of a bucket."""
    if bucket.sharding is None:
        found = [state[params[member.index]] for member in bucket.members]
        return [{key: local_tensor(value) for key, value in of_param.items()} for of_param in found]
    owned = [(part, params[part.index]) for part in bucket.sharding.owned]
    return [state_of_part(state[param], part, param) for part, param in owned]


def _hosted(bucket: Bucket, group: Group) -> "_Matrices | _Vectors":
    return _Matrices(bucket, group) if bucket.algorithm == "muon" else _Vectors(bucket, group)


def _size(bucket: Bucket, group: Group, divided: Mapping[Tensor, Divided]) -> Offloaded:
    """Return how much state of a bucket is in host memory; there need be none yet."""
    params = group.params
    members = [local_tensor(params[member.index]) for member in bucket.members]
    state = {}
    for param in {params[member.index] for member in bucket.members}:
        state[param] = planned_state(param, group, divided[param].own if param in divided else None)
    hosted = _hosted(bucket, group)
    hosted.prepare(bucket.members, members, _states_of(bucket, params, state))
    return hosted.size()


def _stages(bucket: Bucket) -> tuple[int | None, int | None]:
    """Return in which of its stages a bucket makes directions, and in which it steps weights."""
    if bucket.sharding is not None:
        return 1, 1
    return (0, 2) if bucket.travels else (None, None)


class _Blocks(View):
    """Of tensors that are blocks already."""

    def blocks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensor."""
        return (tensor,)


_BLOCKS = _Blocks()


class _Matrices:
    """What a bucket of matrices borrows: momentum, and masters where there are any."""

    def __init__(self, bucket: Bucket, group: Group) -> None:
        self._bucket, self._view = bucket, group.view
        self._key: object = None
        self._keys: list[str] = []
        self._members: tuple[Member, ...] = ()
        self.loans: list[Loan] = []
        self.memory = DeviceMemory()
        """Of the passes over blocks; everything else is the bucket's."""

    @property
    def directions(self) -> list[Loan]:
        """Return what is needed for the directions."""
        return self.loans[:1]

    @property
    def weights(self) -> list[Loan]:
        """Return what is needed for the weights."""
        return self.loans[1:]

    def size(self) -> Offloaded:
        """Return how much that is of the members prepared for."""
        sizes = [loan.size for loan in self.loans] + [0, 0]
        return Offloaded(sum(loan.num_bytes for loan in self.loans), sizes[0], sizes[1])

    def prepare(self, members: tuple[Member, ...], params: Sequence[Tensor] | None, states: States) -> None:
        """Get ready for a step of some members, given their state on the host."""
        master = master_key(states[0]) if states else None
        self._keys = ["momentum_buffer"] if master is None else ["momentum_buffer", master]
        columns = [[state[key] for state in states] for key in self._keys] if states else []
        key = members, [list(map(Tensor.data_ptr, column)) for column in columns]
        if key != self._key:
            self.loans = [Loan(self._blocks(column, members)) for column in columns]
            self._key = key
            self._members = ()

    def operands(self, active: Operands, twins: Sequence[Sequence[Tensor]]) -> Operands:
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
            [dict(zip(self._keys, found, strict=True)) for found in zip(*twins, strict=True)],
            active.num_matrices,
        )

    def _blocks(self, tensors: Sequence[Tensor], members: Sequence[Member]) -> list[Tensor]:
        return [block_of(tensor, member, self._view) for tensor, member in zip(tensors, members, strict=True)]


class _BorrowingPasses:
    """Passes over a bucket, see `updates.Passes`, that have their state on the device while they run."""

    def __init__(self, passes: Passes, loans: Sequence[tuple[Ring, Loan]]) -> None:
        self._passes, self._loans = passes, loans

    def directions(self) -> Tensor:
        """Advance the momentum; return the directions (b, m, n)."""
        ring, loan = self._loans[0]
        with ring.use(loan):
            return self._passes.directions()

    def apply(self, update: Tensor, factors: Tensor) -> None:
        """Step the weights."""
        if len(self._loans) == 1:
            self._passes.apply(update, factors)
            return
        ring, loan = self._loans[1]
        with ring.use(loan):
            self._passes.apply(update, factors)


class _Range(NamedTuple):
    """Entries of one member: all of them, or a run of its memory."""

    number: int
    run: slice | None


class _Piece:
    """What is stepped together of a bucket of AdamW parameters.

    Args:
        ranges: of consecutive members.
        states: of all members, on the host.
    """

    def __init__(self, ranges: Sequence[_Range], states: States) -> None:
        self._ranges = ranges
        self._keys = [key for key in states[0] if key in CUT_KEYS]
        self.members = slice(ranges[0].number, ranges[-1].number + 1)
        self.loan = Loan([_entries(states[number][key], run) for number, run in ranges for key in self._keys])
        self.memory = DeviceMemory()
        # Kept, so that tables of addresses stay valid.
        self._again = {n: torch.empty_like(states[n]["step"]) for n, run in ranges if run is not None and run.start}

    def operands(self, active: Operands, twins: Sequence[Tensor]) -> Operands:
        """Return these entries of the members' tensors, with the state on the device."""
        given = iter(twins)
        members, params, gradients = [], [], []
        states: list[Mapping[str, Tensor]] = []
        for number, run in self._ranges:
            member, state = active.members[number], active.states[number]
            # The step is counted with the first entries; here it is counted again, for nobody.
            step = state["step"]
            if number in self._again:
                step = torch.sub(step, 1, out=self._again[number])
            members.append(member if run is None else replace(member, piece=(run,)))
            params.append(_entries(active.params[number], run))
            gradients.append(_entries(active.gradients[number], run))
            states.append({"step": step, **{key: next(given) for key in self._keys}})
        return Operands(tuple(members), params, gradients, states, 0)


def _entries(tensor: Tensor, run: slice | None) -> Tensor:
    return tensor if run is None else in_memory_order(tensor)[run]


class _Vectors:
    """What a bucket of AdamW parameters borrows, piece by piece."""

    def __init__(self, bucket: Bucket, group: Group) -> None:
        limit = offloaded_entries(group, bucket.dtype)
        assert limit is not None
        self._limit = max(limit // _MULTIPLE, 1) * _MULTIPLE
        self._key: object = None
        self.pieces: list[_Piece] = []

    @property
    def directions(self) -> list[Loan]:
        """Return everything, in order."""
        return [piece.loan for piece in self.pieces]

    @property
    def weights(self) -> list[Loan]:
        """Return nothing: there are no matrices to wait for."""
        return []

    def size(self) -> Offloaded:
        """Return how much that is of the members prepared for."""
        loans = self.directions
        most = max((loan.size for loan in loans), default=0)
        return Offloaded(sum(loan.num_bytes for loan in loans), most, 0, len(loans))

    def prepare(self, members: tuple[Member, ...], params: Sequence[Tensor] | None, states: States) -> None:
        """Get ready for a step of some members, given their state on the host, and their tensors if they have gaps."""
        key = members, [value.data_ptr() for state in states for name, value in state.items() if name in CUT_KEYS]
        if key != self._key:
            dense = [True] * len(members) if params is None else list(map(is_dense, params))
            numels = [state["exp_avg"].numel() for state in states]
            self.pieces = [_Piece(ranges, states) for ranges in self._divided(numels, dense)]
            self._key = key

    def _divided(self, numels: Sequence[int], dense: Sequence[bool]) -> Iterator[list[_Range]]:
        """Yield what is stepped together. Only members that exceed the limit are cut."""
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
