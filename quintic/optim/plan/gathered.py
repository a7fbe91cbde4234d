"""Planning for matrices that lie on several ranks: what travels together, and who orthogonalises it.

A parameter of a Muon group travels if no single rank's copy is the whole story: it is a `DTensor` that is sharded, or
its group divides the work on replicated parameters among ranks (`comms="averaged"`). Its units (see `View.units`) are
assigned to the ranks that share it by their floating-point operations; units of one shape, cut alike, are one bucket.
State lies with the pieces and not with the owners, which may be others in the next step. Every rank makes the same plan
from the same groups, so that nothing about sizes is ever sent.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from quintic.kernels.dispatch import choose_kernels
from quintic.optim.comms.replicas import speed_of
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import Box, Layout, intersection, local_tensor, relative, size_of
from quintic.optim.layout.views import Unit, View
from quintic.optim.plan.bucket import Gathered, ParameterUnit, Units
from quintic.optim.plan.exchange import Cargo, Exchange
from quintic.optim.plan.members import Kind, Member, direction_dtype, form_of, update_dtype
from quintic.optim.plan.memory.gathered_memory import Key, different, piece_entries, stages_of
from quintic.optim.plan.memory.workspace import Matrices, width_of
from quintic.optim.plan.offload_size import RING_BUFFERS, offloaded_bytes, offloaded_entries
from quintic.optim.plan.schedule import Stages
from quintic.optim.state.owners import assign_owners, balance, loads_of, shape_cost

__all__ = ["SharedBucket", "gathered_buckets", "kinds_of", "shared_buckets"]


# How much more than a single unit's memory buckets may take where that alone exceeds the workspace.
_TOLERANCE = 1.25


class _Share(NamedTuple):
    """A unit on its way into a bucket."""

    unit: ParameterUnit
    key: Key
    holders: tuple[int, ...]
    cost: int


@dataclass(frozen=True)
class SharedBucket:
    """A bucket that travels, before any rank's part in it."""

    key: Key
    kinds: tuple[Kind, ...]
    """One for each matrix of a unit."""
    units: tuple[ParameterUnit, ...]
    """In the order of their owners."""
    exchange: Exchange
    """As the first rank sees it; `replace(exchange, position=...)` is another's."""

    @property
    def cargo(self) -> Cargo | None:
        """Return what travels, in bytes; None if nothing does."""
        if self.exchange.is_local:
            return None
        dtype, factors = self.key.of.dtype, 0
        if self.key.of.normalizes:
            factors = 2 * width_of(dtype) * sum(max(kind.shape) for kind in self.kinds)
        return Cargo(
            self.exchange,
            max(direction_dtype(kind.form, dtype).itemsize for kind in self.kinds),
            max(update_dtype(kind.form, dtype).itemsize for kind in self.kinds),
            factors,
        )

    @property
    def unit_flops(self) -> int:
        """Return the floating-point operations of one unit's orthogonalisation."""
        return sum(kind.form.flops(*kind.shape) for kind in self.kinds if kind.form is not None)

    @property
    def unit_seconds(self) -> float:
        """Return how long one unit's orthogonalisation takes, by `SPEEDS`."""
        seconds = 0.0
        for form, shape in ((kind.form, kind.shape) for kind in self.kinds):
            flops = shape_cost(*shape) if form is None else form.flops(*shape)
            seconds += flops / speed_of(
                self.key.of.device.type, self.key.of.dtype if form is None else form.compute_dtype
            )
        return seconds

    @cached_property
    def most(self) -> Stages:
        """Return the most temporary bytes of any rank on any device of the type, by stage."""
        of_ranks = [stages_of(self.key, self.kinds, one, anywhere=True) for one in different(self.exchange)]
        return Stages(*map(max, zip(*of_ranks, strict=True)))

    def stages(self, exchange: Exchange) -> Stages:
        """Return upper bounds of the temporary bytes on a rank, given the exchange as that rank sees it."""
        return stages_of(self.key, self.kinds, exchange)


def shared_buckets(
    param_groups: Sequence[Group], layouts: Sequence[Sequence[Layout | None]]
) -> tuple[list[SharedBucket], float]:
    """Return what travels as all ranks see it, group by group, and the balance of the work; arguments of `build_plan`.

    Also buckets are among them that take no part in some ranks' plans, because those own nothing of what is local.
    """
    shares: list[_Share] = []
    for number, (group, found) in enumerate(zip(param_groups, layouts, strict=True)):
        for index, layout in enumerate(found):
            if layout is not None:
                shares += _shares(number, group, index, layout)
    owners, worst = _owners(shares)
    together: dict[Key, list[tuple[int, ParameterUnit]]] = {}
    for share, owner in zip(shares, owners, strict=True):
        together.setdefault(share.key, []).append((owner, share.unit))
    buckets: list[SharedBucket] = []
    for key, units in together.items():
        buckets += _shared_buckets(key, param_groups[key.group], units)
    return buckets, worst


def _shares(number: int, group: Group, index: int, layout: Layout) -> Iterator[_Share]:
    name, param = group.param_names[index], group.params[index]
    local, view = local_tensor(param), group.view
    kernels = choose_kernels(group.kernels, local)
    ranks, copies, cuts = _cuts(layout, view)
    for unit, first_matrices, pieces, holders in cuts:
        shape = size_of(unit.box)
        key = Key(
            number,
            ranks,
            shape,
            unit.view,
            pieces,
            copies,
            Matrices.of_group(group, local.dtype, local.device, kernels),
            param.is_contiguous(),
        )
        cost = sum(_cost(group, m, n, local.dtype, local.device) for _, m, n in unit.view.shapes(shape))
        yield _Share(ParameterUnit(name, index, unit, first_matrices), key, holders, cost)


class _Cut(NamedTuple):
    """A unit, and which piece of it each rank holds."""

    unit: Unit
    first_matrices: tuple[int, ...]
    pieces: tuple[Box | None, ...]
    holders: tuple[int, ...]
    """Positions of the ranks that hold it whole."""


# Parameters of one shape, of which models have many, are cut alike.
@lru_cache(maxsize=64)
def _cuts(layout: Layout, view: View) -> tuple[tuple[int, ...], tuple[int, ...], tuple[_Cut, ...]]:
    """Return the ranks in order, their copies, and the units that are not empty."""
    order = sorted(range(len(layout.ranks)), key=lambda position: layout.ranks[position])
    ranks = tuple(layout.ranks[position] for position in order)
    boxes = tuple(layout.boxes[position] for position in order)
    copies = tuple(layout.copies[position] for position in order)
    counts = [b for b, _, _ in view.shapes(layout.shape)]
    firsts = [sum(counts[:block]) for block in range(len(counts))]
    cuts = []
    for unit in view.units(layout.shape):
        shape = size_of(unit.box)
        if math.prod(shape) == 0:
            continue
        pieces = tuple(_piece(box, unit.box) for box in boxes)
        holders = tuple(
            position for position, piece in enumerate(pieces) if piece is not None and size_of(piece) == shape
        )
        cuts.append(_Cut(unit, tuple(firsts[block] + matrix for block, matrix in unit.matrices), pieces, holders))
    return ranks, copies, tuple(cuts)


def _piece(box: Box, unit: Box) -> Box | None:
    found = intersection(box, unit)
    if found is None:
        return None
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(found, unit, strict=True))


def _cost(group: Group, m: int, n: int, dtype: torch.dtype, device: torch.device) -> int:
    """Floating-point operations of one matrix; nothing but work depends on these owners, so that they may change."""
    form = form_of(group, m, n, dtype, device)
    return shape_cost(m, n) if form is None else form.flops(m, n)


def _owners(shares: Sequence[_Share]) -> tuple[list[int], float]:
    """Return the owner of each unit, as a position among the ranks that share it, and how evenly work is divided.

    The balance is the busiest rank's work over the mean, of the group of ranks where that is worst.
    """
    together: dict[tuple[int, ...], list[int]] = {}
    for number, share in enumerate(shares):
        together.setdefault(share.key.ranks, []).append(number)
    owners, worst = [0] * len(shares), 1.0
    for ranks, members in together.items():
        costs, holders = [shares[i].cost for i in members], [shares[i].holders for i in members]
        found = assign_owners(costs, holders, len(ranks))
        for i, owner in zip(members, found, strict=True):
            owners[i] = owner
        worst = max(worst, balance(loads_of(costs, found, len(ranks))))
    return owners, worst


def _shared_buckets(key: Key, group: Group, units: Sequence[tuple[int, ParameterUnit]]) -> Iterator[SharedBucket]:
    kinds = kinds_of(key.view, key.shape, group, key.of.dtype, key.of.device)
    per_owner: list[list[ParameterUnit]] = [[] for _ in key.ranks]
    for owner, unit in units:
        per_owner[owner].append(unit)

    def exchange_of(counts: Iterable[int]) -> Exchange:
        return Exchange(key.ranks, 0, key.shape, key.pieces, key.copies, tuple(counts))

    owners, limit = _at_a_time(key, group, kinds, [len(units) for units in per_owner], exchange_of)
    for start in range(0, max(map(len, per_owner)), limit):
        for first in range(0, len(per_owner), owners):
            parts = [
                part[start : start + limit] if first <= owner < first + owners else []
                for owner, part in enumerate(per_owner)
            ]
            if any(parts):
                yield SharedBucket(
                    key, kinds, tuple(unit for part in parts for unit in part), exchange_of(map(len, parts))
                )


def gathered_buckets(shared: SharedBucket, layouts: Sequence[Layout | None], rank: int) -> Iterator[Gathered]:
    """Yield a rank's part in a bucket, or nothing where it has none."""
    key, kinds = shared.key, shared.kinds
    exchange = replace(shared.exchange, position=key.ranks.index(rank))
    if exchange.is_local and not exchange.num_owned:
        return
    yield Gathered(
        algorithm="muon",
        group=key.group,
        members=tuple(_members(shared.units, exchange, layouts, rank)),
        shape=kinds[0].shape,
        dtype=key.of.dtype,
        device=key.of.device,
        kernels=key.of.kernels,
        form=kinds[0].form,
        numel=math.prod(key.shape) * len(shared.units),
        flops=exchange.num_owned * shared.unit_flops,
        stages=shared.stages(exchange),
        shared_stages=shared.most,
        units=Units(key.shape, key.view, kinds, shared.units, exchange.owned),
        exchange=exchange,
    )


def _members(
    units: Iterable[ParameterUnit], exchange: Exchange, layouts: Sequence[Layout | None], rank: int
) -> Iterator[Member]:
    """Yield this rank's pieces, one of each unit, or none."""
    if exchange.piece is None:
        return
    for unit in units:
        layout = layouts[unit.index]
        assert layout is not None
        box = layout.box_of(rank)
        found = intersection(unit.unit.box, box)
        assert found is not None
        yield Member(
            name=unit.name,
            index=unit.index,
            num_matrices=1,
            first_matrix=unit.first_matrices[0],
            piece=relative(found, box),
        )


def kinds_of(
    view: View, shape: Sequence[int], group: Group, dtype: torch.dtype, device: torch.device
) -> tuple[Kind, ...]:
    """Return the matrices of a unit of some shape."""
    shapes = [(m, n) for b, m, n in view.shapes(shape) for _ in range(b)]
    return tuple(Kind((m, n), form_of(group, m, n, dtype, device)) for m, n in shapes)


def _at_a_time(
    key: Key,
    group: Group,
    kinds: Sequence[Kind],
    counts: Sequence[int],
    exchange_of: Callable[[Iterable[int]], Exchange],
) -> tuple[int, int]:
    """Return (owners per bucket, units per owner) that fit the workspace; a single unit may exceed it.

    Each rank owns so many units (counts) in all; `exchange_of` returns the exchange of so many of each owner.
    """
    budget, num_ranks = group.max_workspace_bytes, len(key.ranks)
    one = exchange_of(min(count, 1) for count in counts)
    pieces = max(map(piece_entries, different(one)))
    entries = offloaded_entries(group, key.of.dtype)
    limit = 2**62 if entries is None else max(1, entries // max(1, pieces))
    if budget is None:
        return num_ranks, limit
    ring = RING_BUFFERS * offloaded_bytes(group, key.of.dtype) * pieces

    def peak_of_each(limit: int) -> int:
        return _peak(key, kinds, exchange_of(min(count, limit) for count in counts)) + limit * ring

    fitting = bisect_right(range(1, max(counts) + 1), budget, key=peak_of_each)
    if fitting:
        return num_ranks, min(limit, fitting)

    # Not even one unit of each: fewer owners at a time, if that helps. What one unit needs, it needs in any case.
    def peak_of(owners: int) -> int:
        return _peak(key, kinds, exchange_of(count * (owner < owners) for owner, count in enumerate(one.counts)))

    bound = max(budget, peak_of(next(owner for owner, count in enumerate(one.counts) if count) + 1) * _TOLERANCE)
    owners = num_ranks
    while owners > 1 and peak_of(owners) > bound:
        owners = -(-owners // 2)
    return owners, 1


def _peak(key: Key, kinds: Sequence[Kind], exchange: Exchange) -> int:
    """Return the most temporary memory of any rank, with the bucket before and the one after like this one."""
    stages = [stages_of(key, kinds, one, anywhere=True) for one in different(exchange)]
    return max(stage.scattering + stage.most + stage.gathering for stage in stages)
