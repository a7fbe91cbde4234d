"""Plans the buckets of matrices that lie on several ranks: units, owners of units, and messages.

A parameter of a Muon group needs communication if it is a sharded `DTensor`, or if its ranks divide the work on copies
of it (`comms="averaged"`). The plan is made in four steps:

    1. parameters -> units, the smallest boxes that hold whole matrices (`View.units`), with the piece of each rank
    2. units -> owners, balanced so that ranks orthogonalise about equally many floating-point operations
    3. units with equal `BucketKey`s -> buckets, as large as `max_workspace_bytes` allows
    4. buckets -> this rank's `Gathered`, with its pieces and the units that it owns

Steps 1 to 3 give the same result on every rank, because all ranks have the same groups; no sizes are ever sent. State
lies with the pieces and not with the owners, so a new plan may choose other owners.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from quintic.kernels.dispatch import choose_kernels
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Box, Layout, intersection, local_tensor, size_of
from quintic.optim.layout.pieces import Piece, positions_in
from quintic.optim.layout.views import Unit, View
from quintic.optim.plan.bucket import Gathered, Units
from quintic.optim.plan.exchange import Exchange, ExchangeBytes
from quintic.optim.plan.kinds import kinds_of
from quintic.optim.plan.offload_size import POOL_BUFFERS, offloaded_bytes, offloaded_entries
from quintic.optim.plan.schedule import PhaseBytes
from quintic.optim.plan.workspace.buckets import distinct_by_memory, piece_entries, unit_phase_bytes
from quintic.optim.plan.workspace.matrices import WorkspaceSpec
from quintic.optim.state.owners import assign_owners, balance, loads_of
from quintic.optim.state.placement import is_stepped_packed

__all__ = ["SharedBucket", "gathered_buckets", "shared_buckets"]

# The factor by which a bucket may exceed the memory of a single unit where that exceeds the workspace already.
_TOLERANCE = 1.25


class BucketKey(NamedTuple):
    """The properties that all units of a bucket share."""

    group: int
    # Ranks, shape of a unit and pieces; `position` is 0 and `counts` is empty, because units have no owners yet.
    exchange: Exchange
    # The view of one unit.
    view: View
    # Rule, dtype, device, kernels and other properties that its memory depends on.
    spec: WorkspaceSpec
    # Whether parameters are contiguous, that is lie in memory row by row.
    in_order: bool
    # Whether steps read momentum of 8 bits.
    packed: bool


# (key of its bucket, unit, holders: positions of the ranks that hold the unit whole, and so need to receive nothing).
_UnassignedUnit = tuple[BucketKey, Piece, tuple[int, ...]]


@dataclass(frozen=True)
class SharedBucket:
    """A bucket as all ranks plan it: units and exchange are seen from the rank at position 0."""

    key: BucketKey
    units: Units
    exchange: Exchange

    @property
    def exchange_bytes(self) -> ExchangeBytes | None:
        """Return the exchange and its bytes; None if nothing is sent."""
        if self.exchange.is_local:
            return None
        units, spec = self.units, self.key.spec
        # Bytes of the numbers and vectors of a unit.
        numbers = spec.message_bytes(units.shapes)
        direction, update = units.direction_dtype(spec.dtype).itemsize, units.update_dtype(spec.dtype).itemsize
        # State that stages on whole matrices need goes to the owner and comes back; weights do not come back.
        return ExchangeBytes(self.exchange, direction + spec.sent_width, update + spec.state_width, numbers)

    @cached_property
    def max_phase_bytes(self) -> PhaseBytes:
        """Return for each phase the largest temporary bytes of any rank, on the worst device of the type."""
        return PhaseBytes(*map(max, zip(*_worst_case_bytes(self.key, self.units, self.exchange), strict=True)))

    def phase_bytes(self, exchange: Exchange) -> PhaseBytes:
        """Return upper bounds of the temporary bytes on a rank, given the exchange as that rank sees it."""
        return unit_phase_bytes(self.units, exchange, self.key.spec, in_order=self.key.in_order)


def shared_buckets(
    param_groups: Sequence[Group], layouts: Sequence[Sequence[Layout | None]]
) -> tuple[list[SharedBucket], float]:
    """Return the buckets as all ranks see them, and the balance of the work (see `_owners`).

    `gathered_buckets` then gives each rank its view of a bucket.

    Args:
        param_groups: the groups, as all ranks have them.
        layouts: for each group and parameter the layout of a parameter with messages; None for one without.
    """
    # 1. Units of all parameters with messages.
    unassigned: list[_UnassignedUnit] = []
    for number, (group, of_group) in enumerate(zip(param_groups, layouts, strict=True)):
        for index, layout in enumerate(of_group):
            if layout is not None:
                unassigned += _units_of_param(number, group, index, layout)
    # The kinds of matrices of each key, from which the costs of its units follow.
    keys = dict.fromkeys(key for key, _, _ in unassigned)
    units_of = {key: _empty_units(key, param_groups[key.group]) for key in keys}
    # 2. Owners, balanced over all groups.
    owners, busiest = _owners(unassigned, units_of)
    # 3. Buckets of units with equal keys.
    together: dict[BucketKey, list[tuple[int, Piece]]] = {}
    for (key, unit, _), owner in zip(unassigned, owners, strict=True):
        together.setdefault(key, []).append((owner, unit))
    buckets: list[SharedBucket] = []
    for key, units in together.items():
        buckets += _shared_buckets(key, units_of[key], param_groups[key.group], units)
    return buckets, busiest


def _units_of_param(number: int, group: Group, index: int, layout: Layout) -> Iterator[_UnassignedUnit]:
    """Yield the units of the parameter at position `index` of a group, each with its bucket's key and its holders."""
    param = group.params[index]
    local = local_tensor(param)
    spec = WorkspaceSpec.of_group(group, local.dtype, local.device, choose_kernels(group.kernels, local))
    packed = is_stepped_packed(param, group, layout)
    for unit, matrices, exchange, holders in _units_of_layout(layout, group.view):
        key = BucketKey(number, exchange, unit.view, spec, param.is_contiguous(), packed)
        yield key, Piece(group.param_names[index], index, matrices, unit.box), holders


def _empty_units(key: BucketKey, group: Group) -> Units:
    """Return `Units` with the shape and kinds of matrices that belong to a key, but without any units yet."""
    shape = key.exchange.unit_shape
    return Units(shape, key.view, kinds_of(key.view, shape, group, key.spec.dtype, key.spec.device), (), slice(0))


# Models have many parameters of one shape, whose units and pieces are the same.
@lru_cache(maxsize=64)
def _units_of_layout(layout: Layout, view: View) -> tuple[tuple[Unit, tuple[int, ...], Exchange, tuple[int, ...]], ...]:
    """Return (unit, positions of its matrices, `BucketKey.exchange`, holders) for each unit that is not empty."""
    # Process groups have their ranks in ascending order, layouts in the order of the mesh.
    order = sorted(range(len(layout.ranks)), key=lambda position: layout.ranks[position])
    ranks = tuple(layout.ranks[position] for position in order)
    boxes = tuple(layout.boxes[position] for position in order)
    copies = tuple(layout.copies[position] for position in order)
    found = []
    units = view.units(layout.shape)
    for unit, matrices in zip(units, positions_in(view, layout.shape, units), strict=True):
        shape = size_of(unit.box)
        # Leave out empty units. `pieces` are in coordinates of the unit.
        if math.prod(shape):
            pieces = tuple(_box_within(unit.box, box) for box in boxes)
            holders = tuple(n for n, piece in enumerate(pieces) if piece is not None and size_of(piece) == shape)
            found.append((unit, matrices, Exchange(ranks, 0, shape, pieces, copies, ()), holders))
    return tuple(found)


def _box_within(outer: Box, box: Box) -> Box | None:
    """Return the intersection of two boxes, in coordinates of `outer`; None if it is empty."""
    common = intersection(box, outer)
    if common is None:
        return None
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(common, outer, strict=True))


def _owners(unassigned: Sequence[_UnassignedUnit], units_of: Mapping[BucketKey, Units]) -> tuple[list[int], float]:
    """Return the owner of each unit, as a position among the ranks that share it, and the balance of the work.

    The balance is the work of the busiest rank over the mean work of its set of ranks; the largest of all sets counts.
    No state lies with these owners, so the next plan may choose others.
    """
    # Parameters of one set of ranks go to owners in this set.
    together: dict[tuple[int, ...], list[int]] = {}
    for number, (key, _, _) in enumerate(unassigned):
        together.setdefault(key.exchange.ranks, []).append(number)
    # The cost of a unit is that of orthogonalising its matrices; messages are not counted.
    cost_of = {key: sum(kind.cost for kind in units.kinds) for key, units in units_of.items()}
    owners, busiest = [0] * len(unassigned), 1.0
    for ranks, members in together.items():
        costs, holders = [cost_of[unassigned[i][0]] for i in members], [unassigned[i][2] for i in members]
        assigned = assign_owners(costs, holders, len(ranks))
        for i, owner in zip(members, assigned, strict=True):
            owners[i] = owner
        busiest = max(busiest, balance(loads_of(costs, assigned, len(ranks))))
    return owners, busiest


def _shared_buckets(
    key: BucketKey, units: Units, group: Group, owned: Sequence[tuple[int, Piece]]
) -> Iterator[SharedBucket]:
    """Yield the buckets of all units with one key; `owned` has (owner, unit) for each unit."""
    per_owner: list[list[Piece]] = [[] for _ in key.exchange.ranks]
    for owner, unit in owned:
        per_owner[owner].append(unit)
    # A bucket has up to `limit` units of each of up to `owners` consecutive owners.
    owners, limit = _at_a_time(key, units, group, [len(of_owner) for of_owner in per_owner])
    for start in range(0, max(map(len, per_owner)), limit):
        for first in range(0, len(per_owner), owners):
            # For each owner its units in this bucket.
            chosen = [
                of_owner[start : start + limit] if first <= owner < first + owners else []
                for owner, of_owner in enumerate(per_owner)
            ]
            if any(chosen):
                exchange = _exchange_of(key, map(len, chosen))
                everywhere = tuple(unit for of_owner in chosen for unit in of_owner)
                yield SharedBucket(key, replace(units, all=everywhere, local_slice=exchange.local_slice), exchange)


def _exchange_of(key: BucketKey, counts: Iterable[int]) -> Exchange:
    """Return the exchange of a bucket with this key, given for each rank the number of units that it owns."""
    return replace(key.exchange, counts=tuple(counts))


def gathered_buckets(shared: SharedBucket, layouts: Sequence[Layout | None], rank: int) -> Iterator[Gathered]:
    """Yield a rank's view of a bucket; nothing if another rank has the bucket whole, and owns it."""
    key, units = shared.key, shared.units
    # The same exchange at the position of this rank.
    exchange = replace(shared.exchange, position=shared.exchange.ranks.index(rank))
    if exchange.is_local and not exchange.num_owned:
        return
    yield Gathered(
        rule=key.spec.rule,
        group=key.group,
        members=tuple(_members(units.all, exchange, layouts, rank)),
        shape=units.kinds[0].shape,
        dtype=key.spec.dtype,
        device=key.spec.device,
        kernels=key.spec.kernels,
        form=units.kinds[0].form,
        numel=math.prod(units.shape) * exchange.num_units,
        flops=exchange.num_owned * units.flops,
        phase_bytes=shared.phase_bytes(exchange),
        max_phase_bytes=shared.max_phase_bytes,
        units=replace(units, local_slice=exchange.local_slice),
        exchange=exchange,
        ranks=exchange.ranks,
    )


def _members(
    units: Iterable[Piece], exchange: Exchange, layouts: Sequence[Layout | None], rank: int
) -> Iterator[Piece]:
    """Yield this rank's pieces, one of each unit; none if it holds nothing of them."""
    if exchange.piece is None:
        return
    for unit in units:
        layout = layouts[unit.index]
        assert layout is not None
        assert unit.box is not None
        # The box of the piece in coordinates of this rank's local tensor.
        box = _box_within(layout.box_of(rank), unit.box)
        assert box is not None
        yield replace(unit, box=box)


def _at_a_time(key: BucketKey, units: Units, group: Group, counts: Sequence[int]) -> tuple[int, int]:
    """Return (owners per bucket, units per owner) that fit the workspace; a single unit may exceed it.

    Args:
        key: the properties of the units.
        units: the shape and kinds of the units.
        group: the group of the units, with the option `max_workspace_bytes`.
        counts: for each rank the number of units that it owns in all.
    """
    budget, num_ranks = group.max_workspace_bytes, len(counts)
    one = _exchange_of(key, (min(count, 1) for count in counts))
    pieces = max(map(piece_entries, distinct_by_memory(one)))
    # Offload limits the number of entries whose state is loaded at a time, and so the number of units.
    entries = offloaded_entries(group, key.spec.dtype)
    limit = 2**62 if entries is None else max(1, entries // max(1, pieces))
    if budget is None:
        return num_ranks, limit
    # Bytes of offload's buffers on the device, for each unit of an owner.
    pool = POOL_BUFFERS * offloaded_bytes(group, key.spec.dtype) * pieces

    def peak_of_each(limit: int) -> int:
        return _peak(key, units, (min(count, limit) for count in counts)) + limit * pool

    # The largest number of units of each owner that fits, by bisection: the peak grows with it.
    fitting = bisect_right(range(1, max(counts) + 1), budget, key=peak_of_each)
    if fitting:
        return num_ranks, min(limit, fitting)

    # One unit of each owner is too much already: a bucket gets units of fewer owners, as far as that saves memory.
    def peak_of(owners: int) -> int:
        return _peak(key, units, (count * (owner < owners) for owner, count in enumerate(one.counts)))

    # Halve the number of owners until the bucket fits the workspace, or needs hardly more than one unit of one owner.
    bound = max(budget, peak_of(next(owner for owner, count in enumerate(one.counts) if count) + 1) * _TOLERANCE)
    owners = num_ranks
    while owners > 1 and peak_of(owners) > bound:
        owners = -(-owners // 2)
    return owners, 1


def _worst_case_bytes(key: BucketKey, units: Units, exchange: Exchange) -> list[PhaseBytes]:
    """Return the temporary bytes by phase, on the worst device of the type, one entry for each distinct need of a rank.

    All ranks know the inputs, so they compute the same numbers and plan the same buckets.
    """
    spec = key.spec._replace(worst_case=True)
    return [unit_phase_bytes(units, one, spec, in_order=key.in_order) for one in distinct_by_memory(exchange)]


def _peak(key: BucketKey, units: Units, counts: Iterable[int]) -> int:
    """Return the most temporary bytes of any rank, while the buckets before and after are as large as this one."""
    # While a bucket is computed, updates of the one before are being sent and directions of the one after, too.
    of_ranks = _worst_case_bytes(key, units, _exchange_of(key, counts))
    return max(one.scattering + one.most + one.gathering for one in of_ranks)
