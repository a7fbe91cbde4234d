"""Runs a bucket whose matrices lie on several ranks, in three parts with a collective under way between them.

    1. momentum and directions of this rank's pieces      -> they start for the owners
    2. the owner orthogonalises, and advances the neurons  -> updates, and factors, start for the pieces
    3. weights of this rank's pieces

`run_overlapping` of `schedule.py` lets buckets overtake each other's waiting: while one is orthogonalised, the next is
being gathered and the one before scattered.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from math import prod

import torch
from torch import Tensor

from quintic.optim.comms.channels import Channel
from quintic.optim.groups.options import Group
from quintic.optim.layout.packing import Packing, Run
from quintic.optim.plan.bucket import Bucket, Travel
from quintic.optim.plan.members import Kind, Member, direction_dtype, update_dtype
from quintic.optim.state.state import second_moments
from quintic.optim.step.bucket_step import BucketStep
from quintic.optim.step.device_passes import DeviceMemory
from quintic.optim.step.operands import State
from quintic.optim.step.updates import Moments, Observer, make_updates

__all__ = [
    "Neurons",
    "TravelMemory",
    "TravelStep",
    "as_rows",
    "factors_of_pieces",
    "orthogonalized_units",
    "scales_of_units",
]


class TravelMemory(DeviceMemory):
    """What a bucket whose matrices travel keeps between steps, besides state."""

    def __init__(self) -> None:
        super().__init__()
        self._moments_of_units: list[list[Tensor]] | None = None
        self._moments_packing: Packing | None = None

    def renew(self) -> None:
        """Forget where weights and state are."""
        super().renew()
        self._moments_of_units = None

    def moments_of_units(self, bucket: Bucket, group: Group, state: State) -> list[list[Tensor]]:
        """Return for each kind the second moments of all units, each (1, m, 1) or (1, 1, n), sharing memory."""
        if self._moments_of_units is None:
            travel = _travel_of(bucket)
            found: list[list[Tensor]] = [[] for _ in travel.kinds]
            for unit in travel.units:
                param = group.params[unit.index]
                blocks = second_moments(state[param]["second_momentum_buffer"], param.shape, group.view)
                for kind, (block, matrix) in enumerate(unit.unit.matrices):
                    found[kind].append(blocks[block][matrix : matrix + 1])
            self._moments_of_units = found
        return self._moments_of_units

    def moments_packing(self, bucket: Bucket) -> Packing:
        """Return the copy plan that unpacks gathered second moments, kind by kind."""
        if self._moments_packing is None:
            travel = _travel_of(bucket)
            numels = [prod(_factor_shape(kind)) for kind in travel.kinds]
            half = sum(numels)
            runs: list[Run] = []
            for number, numel in enumerate(numels):
                for unit in range(len(travel.units)):
                    place = (2 * unit + 1) * half + sum(numels[:number])
                    runs.append(Run(len(runs), 0, numel, place))
            self._moments_packing = Packing(runs, bucket.kernels, bucket.device)
        return self._moments_packing


class TravelStep(BucketStep):
    """Steps a bucket whose matrices travel; its memory is a `TravelMemory`."""

    def run(self, go: Tensor | None) -> Iterator[None]:
        """Step the bucket; yields twice, while a message is under way."""
        bucket, group, memory, active = self.bucket, self.group, self.memory, self.active
        assert isinstance(memory, TravelMemory)
        travel, channel, state = _travel_of(bucket), self.channel, self._common.state
        exchange = travel.exchange
        stepped = self.stepped(go, travel.units, (unit.index for unit in travel.units))
        passes = self.passes(active, stepped) if active.params else None
        pieces = _empty_pieces(bucket) if passes is None else passes.directions()
        gathered = exchange.gather(pieces.contiguous(), channel)
        del pieces
        yield
        updates, factors = orthogonalized_units(
            bucket, group, memory, state, exchange.assemble(gathered.wait()), stepped, self.observer()
        )
        scattered = exchange.scatter(updates, channel)
        gathered.release()
        neurons = Neurons(bucket, group, memory, state, factors, channel) if group.normalize is not None else None
        del updates, factors
        yield
        received = exchange.pieces_of(scattered.wait())
        if neurons is None:
            scales = scales_of_units(bucket, group, memory)
            factors = [scales[:, number].view(-1, 1, 1) for number in range(len(travel.kinds))]
        else:
            factors = neurons.wait()
        if passes is not None:
            passes.apply(as_rows(received), factors_of_pieces(factors, travel))
        scattered.release()
        if neurons is not None:
            neurons.release()


def scales_of_units(bucket: Bucket, group: Group, memory: TravelMemory) -> Tensor:
    """Return the learning-rate scale times the own multiplier of each matrix of each unit, (units, kinds)."""
    travel = _travel_of(bucket)
    shapes = [kind.shape for kind in travel.kinds]
    return memory.scales(bucket, group, shapes, len(travel.units), (unit.first_matrices for unit in travel.units))


def orthogonalized_units(
    bucket: Bucket,
    group: Group,
    memory: TravelMemory,
    state: State,
    units: Tensor,
    go: Tensor | None,
    observer: Observer | None,
) -> tuple[Tensor, list[Tensor]]:
    """Orthogonalise the units that this rank owns, and advance their neurons.

    Args:
        bucket: of the plan.
        group: its parameter group.
        memory: the bucket's own.
        state: of all parameters.
        units: (num_owned, *unit_shape) contiguous: directions.
        go: (units of all ranks,) int32 on the device: where it is zero the unit stays as it was. None for all.
        observer: is shown what this rank orthogonalises, or None.

    Returns:
        The updates (num_owned, *unit_shape), and for each kind of matrix the factors (num_owned, m or 1, n or 1).
    """
    travel = _travel_of(bucket)
    exchange = travel.exchange
    owned = exchange.owned
    scales = scales_of_units(bucket, group, memory)[owned]
    normalizes = group.normalize is not None
    moments = [of_kind[owned] for of_kind in memory.moments_of_units(bucket, group, state)] if normalizes else []
    updates, factors = [], []
    for number, (kind, block) in enumerate(zip(travel.kinds, _blocks(units, travel), strict=True)):
        directions = block.flatten(1, 2)
        if bucket.kernels == "torch":
            directions = directions.contiguous()
        found = scales[:, number].view(-1, 1, 1)
        if exchange.num_owned:
            of_owned = go[owned] if go is not None and (normalizes or observer is not None) else None
            of_kind = None
            if normalizes:
                table = memory.neuron_table(bucket, moments[number], (unit.name for unit in travel.owned), number)
                of_kind = Moments(moments[number], table)
            update, found = make_updates(directions, kind.form, bucket, group, found, of_kind, of_owned)
            if observer is not None:
                observer(_owned_members(bucket, number), directions, update, found, of_owned)
        else:
            # Not a part of the directions, which it would keep alive.
            update = torch.empty_like(directions, dtype=update_dtype(kind.form, bucket.dtype))
            if normalizes:
                found = scales.new_empty((0, *_factor_shape(kind)))
        updates.append(update)
        factors.append(found)
    return _units(updates, travel), factors


class Neurons:
    """Factors and second moments of NorMuon on their way from the owners to everybody, started by construction.

    Args:
        bucket: of the plan.
        group: its parameter group.
        memory: the bucket's own.
        state: of all parameters.
        factors: of the units that this rank owns, for each kind.
        channel: of the bucket's ranks.
    """

    def __init__(
        self,
        bucket: Bucket,
        group: Group,
        memory: TravelMemory,
        state: State,
        factors: Sequence[Tensor],
        channel: Channel,
    ) -> None:
        self._travel = _travel_of(bucket)
        exchange = self._travel.exchange
        self._moments = memory.moments_of_units(bucket, group, state)
        self._packing = memory.moments_packing(bucket)
        vectors = [found.flatten(1) for found in factors]
        # Nobody but the owner can advance them; a checkpoint, and the next plan, may be another rank's.
        for of_kind, found in zip(self._moments, factors, strict=True):
            mine = torch.cat(of_kind[exchange.owned]).flatten(1) if exchange.num_owned else found.flatten(1)
            vectors.append(mine.to(found.dtype))
        self._pending = exchange.all_gather(torch.cat(vectors, dim=1), channel)

    def wait(self) -> list[Tensor]:
        """Return for each kind the factors (units, m or 1, n or 1) of all units; second moments are up to date."""
        exchange, kinds = self._travel.exchange, self._travel.kinds
        vectors = exchange.in_order(self._pending.wait())
        if not exchange.is_local:
            self._packing.unpack(vectors.view(-1), [moment for of_kind in self._moments for moment in of_kind])
        return _unpacked(vectors.chunk(2, dim=1)[0], kinds)

    def release(self) -> None:
        """Give back the memory of the factors."""
        self._pending.release()


def _travel_of(bucket: Bucket) -> Travel:
    assert bucket.travel is not None
    return bucket.travel


def _empty_pieces(bucket: Bucket) -> Tensor:
    shape = (_travel_of(bucket).exchange.num_units, 0)
    return torch.empty(shape, dtype=direction_dtype(bucket.form, bucket.dtype), device=bucket.device)


def _blocks(units: Tensor, travel: Travel) -> list[Tensor]:
    """Return for each kind the matrices of (count, *unit_shape) contiguous units, (count, g, r, n), sharing memory."""
    if len(travel.kinds) == 1 and travel.is_plain:
        m, n = travel.kinds[0].shape
        return [units.view(-1, 1, n, m).mT if travel.is_transposed else units.view(-1, 1, m, n)]
    unit = torch.empty(travel.exchange.unit_shape, device="meta")
    return [
        units.as_strided(
            (units.shape[0], *matrix.shape),
            (unit.numel(), *matrix.stride()),
            units.storage_offset() + matrix.storage_offset(),
        )
        for block in travel.view.blocks(unit)
        for matrix in block
    ]


def _units(updates: Sequence[Tensor], travel: Travel) -> Tensor:
    """Return (count, *unit_shape) from the updates (count, m, n) of each kind."""
    shape = travel.exchange.unit_shape
    count = updates[0].shape[0]
    if len(updates) == 1 and travel.is_plain:
        update = updates[0].mT if travel.is_transposed else updates[0]
        return update.reshape(count, *shape)
    dtype = reduce(torch.promote_types, (update.dtype for update in updates))
    units = torch.empty((count, *shape), dtype=dtype, device=updates[0].device)
    for block, update in zip(_blocks(units, travel), updates, strict=True):
        block.copy_(update.view(block.shape) if block.shape[1] == 1 else update.unflatten(1, block.shape[1:3]))
    return units


def _factor_shape(kind: Kind) -> tuple[int, int]:
    m, n = kind.shape
    return (m, 1) if m >= n else (1, n)


def _unpacked(vectors: Tensor, kinds: Sequence[Kind]) -> list[Tensor]:
    """Return the factors (units, m or 1, n or 1) of each kind from what was sent of all of them."""
    shapes = [_factor_shape(kind) for kind in kinds]
    parts = vectors.split([m * n for m, n in shapes], dim=1)
    return [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]


def factors_of_pieces(factors: Sequence[Tensor], travel: Travel) -> Tensor:
    """Return the factors of this rank's pieces, (units, rows or 1, columns or 1), from those of whole units."""
    exchange = travel.exchange
    piece = exchange.piece
    assert piece is not None
    if len(factors) == 1 and factors[0].shape[1:] == (1, 1):
        return factors[0]
    count = factors[0].shape[0]
    if len(factors) == 1 and travel.is_plain:
        m, n = travel.kinds[0].shape
        whole = factors[0].expand(count, m, n)
        whole = whole.mT if travel.is_transposed else whole
        # Of two dimensions, or with leading ones: nothing is copied.
        units = whole.reshape(count, *exchange.unit_shape)
    else:
        units = factors[0].new_empty((count, *exchange.unit_shape))
        for block, found in zip(_blocks(units, travel), factors, strict=True):
            over = found.unsqueeze(1) if found.shape[1] == 1 else found.unflatten(1, block.shape[1:3])
            block.copy_(over)
    return as_rows(units[(slice(None), *(slice(start, stop) for start, stop in piece))])


def as_rows(pieces: Tensor) -> Tensor:
    """Return (count, *piece_shape) as (count, rows, columns)."""
    return pieces if pieces.ndim == 3 else pieces.flatten(3).flatten(1, 2)


def _owned_members(bucket: Bucket, kind: int) -> list[Member]:
    return [
        Member(name=unit.name, index=unit.index, num_matrices=1, first_matrix=unit.first_matrices[kind])
        for unit in _travel_of(bucket).owned
    ]
