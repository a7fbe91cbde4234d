"""Runs a bucket whose matrices lie on several ranks, in three parts with a collective under way between them.

    1. momentum and directions of this rank's pieces      -> they start for the owners
    2. the owner orthogonalises, and advances the neurons  -> updates, and factors, start for the pieces
    3. weights of this rank's pieces

`run_travelling` lets buckets overtake each other's waiting: while one is orthogonalised, the next is being gathered
and the one before scattered.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from quintic.optim.comms import Agreement, Pending, ProcessGroup
from quintic.optim.device_memory import upload
from quintic.optim.device_passes import DeviceMemory
from quintic.optim.pipeline import Observer, Passes, State, advance_neurons_, orthogonalized
from quintic.optim.plan import Bucket, Kind, Member, direction_dtype, update_dtype
from quintic.optim.state import second_moments
from quintic.optim.travel import Travel
from quintic.optim.update import lr_scale_factor

__all__ = ["TravelMemory", "run_travelling", "step_travelling"]


class TravelMemory(DeviceMemory):
    """What a bucket whose matrices travel keeps between steps, besides state."""

    def __init__(self) -> None:
        super().__init__()
        self._places: Tensor | None = None
        self._scales_key: object = None
        self._scales = torch.empty(0)
        self._owned_moments: list[list[Tensor]] | None = None

    def places(self, bucket: Bucket, agreement: Agreement) -> Tensor:
        """Return where the parameters of the units stand in an agreement, for `Agreement.stepped`."""
        if self._places is None:
            self._places = agreement.numbers((bucket.group, unit.index) for unit in _travel_of(bucket).units)
        return self._places

    def scales(self, bucket: Bucket, group: Mapping[str, Any]) -> Tensor:
        """Return the learning-rate scale times the own multiplier of each matrix of each unit, (units, kinds)."""
        travel = _travel_of(bucket)
        key = (group["lr_scale"], group["lr_multipliers"])
        if key != self._scales_key:
            dtype = torch.float64 if bucket.dtype == torch.float64 else torch.float32
            scales = torch.tensor(
                [lr_scale_factor(group["lr_scale"], *kind.shape) for kind in travel.kinds], dtype=dtype
            )
            scales = scales.expand(len(travel.units), -1).clone()
            multipliers = group["lr_multipliers"]
            if multipliers is not None:
                each = [[multipliers[matrix] for matrix in unit.first_matrices] for unit in travel.units]
                scales *= torch.tensor(each, dtype=dtype)
            self._scales, self._scales_key = upload(scales, bucket.device), key
        return self._scales

    def owned_moments(self, bucket: Bucket, group: Mapping[str, Any], state: State) -> list[list[Tensor]]:
        """Return for each kind the second moments of this rank's units, each (1, m, 1) or (1, 1, n), sharing memory."""
        if self._owned_moments is None:
            travel = _travel_of(bucket)
            found: list[list[Tensor]] = [[] for _ in travel.kinds]
            for unit in travel.owned:
                param = group["params"][unit.index]
                blocks = second_moments(state[param]["second_momentum_buffer"], param.shape, group["view"])
                for kind, (block, matrix) in enumerate(unit.unit.matrices):
                    found[kind].append(blocks[block][matrix : matrix + 1])
            self._owned_moments = found
        return self._owned_moments


def run_travelling(steps: Sequence[Iterator[None]], meanwhile: Callable[[], None]) -> None:
    """Run the steps of several buckets, one ahead and one behind the one that computes.

    Every rank of a process group must run the same steps in the same order.

    Args:
        steps: from `step_travelling`.
        meanwhile: work without collectives, done while the first bucket is gathered.
    """
    for step in steps[:1]:
        next(step)
    meanwhile()
    for number, step in enumerate(steps):
        for ahead in steps[number + 1 : number + 2]:
            next(ahead)
        next(step)
        for behind in steps[max(number - 1, 0) : number]:
            next(behind, None)
    for step in steps[-1:]:
        next(step, None)


def step_travelling(
    bucket: Bucket,
    group: Mapping[str, Any],
    memory: TravelMemory,
    passes: Passes | None,
    state: State,
    process_group: ProcessGroup,
    go: Tensor | None,
    observer: Observer | None,
) -> Iterator[None]:
    """Step a bucket whose matrices travel; yields twice, while a collective is under way.

    Args:
        bucket: of the plan.
        group: its parameter group.
        memory: the bucket's own.
        passes: over this rank's pieces; None if it has none.
        state: of all parameters.
        process_group: of the bucket's ranks.
        go: (units,) int32 on the device: where it is zero the unit stays as it was. None for all.
        observer: is shown what this rank orthogonalises, or None.
    """
    travel = _travel_of(bucket)
    exchange = travel.exchange
    pieces = _empty_pieces(bucket) if passes is None else passes.directions()
    pending = exchange.gather(pieces.contiguous(), process_group)
    del pieces
    yield
    units = exchange.assemble(pending.wait())
    owned_go = None if go is None else go[exchange.first_owned : exchange.first_owned + exchange.num_owned]
    scales = memory.scales(bucket, group)
    normalizes = group["normalize"] is not None
    moments = memory.owned_moments(bucket, group, state) if normalizes else []
    updates, factors = [], []
    owned_scales = scales[exchange.first_owned : exchange.first_owned + exchange.num_owned]
    for number, (kind, block) in enumerate(zip(travel.kinds, _blocks(units, travel), strict=True)):
        directions = block.flatten(1, 2)
        if bucket.kernels == "torch":
            directions = directions.contiguous()
        found = owned_scales[:, number].view(-1, 1, 1)
        if exchange.num_owned:
            update = orthogonalized(directions, kind.form, bucket, group)
            if normalizes:
                table = memory.neuron_table(bucket, moments[number], (unit.name for unit in travel.owned), number)
                found = advance_neurons_(update, moments[number], found, group, owned_go, table)
            if observer is not None:
                observer(_owned_members(bucket, number), directions, update, found)
        else:
            update = directions.to(update_dtype(kind.form, bucket.dtype))
            if normalizes:
                found = scales.new_empty((0, *_factor_shape(kind)))
        updates.append(update)
        factors.append(found)
    del units
    pending = exchange.scatter(_units(updates, travel), process_group)
    pending_factors: Pending | None = None
    if normalizes:
        vectors = torch.cat([found.flatten(1) for found in factors], dim=1)
        pending_factors = exchange.all_gather(vectors, process_group)
    del updates, factors
    yield
    received = exchange.pieces_of(pending.wait())
    if pending_factors is None:
        of_units = [scales[:, number].view(-1, 1, 1) for number in range(len(travel.kinds))]
    else:
        of_units = _unpacked(exchange.in_order(pending_factors.wait()), travel.kinds)
    if passes is not None:
        passes.apply(_as_rows(received), _of_pieces(of_units, travel))


def _travel_of(bucket: Bucket) -> Travel:
    assert bucket.travel is not None
    return bucket.travel


def _empty_pieces(bucket: Bucket) -> Tensor:
    shape = (_travel_of(bucket).exchange.num_units, 0)
    return torch.empty(shape, dtype=direction_dtype(bucket.form, bucket.dtype), device=bucket.device)


def _blocks(units: Tensor, travel: Travel) -> list[Tensor]:
    """Return for each kind the matrices of (count, *unit_shape) contiguous units, (count, g, r, n), sharing memory."""
    unit = torch.empty(travel.exchange.unit_shape, device="meta")
    return [
        units.as_strided(
            (units.shape[0], *block.shape[1:]),
            (unit.numel(), *block.stride()[1:]),
            units.storage_offset() + block.storage_offset(),
        )
        for block in travel.view.blocks(unit)
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


def _of_pieces(factors: Sequence[Tensor], travel: Travel) -> Tensor:
    """Return the factors of this rank's pieces, (units, rows or 1, columns or 1), from those of whole units."""
    exchange = travel.exchange
    piece = exchange.piece
    assert piece is not None
    if len(factors) == 1 and factors[0].shape[1:] == (1, 1):
        return factors[0]
    count = exchange.num_units
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
    return _as_rows(units[(slice(None), *(slice(start, stop) for start, stop in piece))])


def _as_rows(pieces: Tensor) -> Tensor:
    """Return (count, *piece_shape) as (count, rows, columns)."""
    return pieces if pieces.ndim == 3 else pieces.flatten(1, -2)


def _owned_members(bucket: Bucket, kind: int) -> list[Member]:
    return [
        Member(name=unit.name, index=unit.index, num_matrices=1, first_matrix=unit.first_matrices[kind])
        for unit in _travel_of(bucket).owned
    ]
