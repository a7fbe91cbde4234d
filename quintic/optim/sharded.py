"""`comms="sharded"`: every rank has the parameters and a gradient of its own; state and work are divided among ranks.

Gradients are averaged on the way to the rank that owns a part of a parameter: all of its matrices' units for Muon, a
range of entries for AdamW. The owner has that part's state, updates it as if it were alone, and sends the new weights
to everybody: a reduce-scatter, a step, an all-gather (ZeRO-1; the modded-nanogpt speedrun's optimizer). Parts are
runs of a parameter's memory, so that state is a flat tensor and nothing is packed twice.

Who owns what follows from a group alone: it must not change when other groups are added, because state does not move.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from quintic.kernels.dispatch import choose_kernels
from quintic.optim.owners import assign_owners
from quintic.optim.plan import Bucket, Member, Stages, form_of, workspace_bytes
from quintic.optim.views import Unit, View

__all__ = [
    "CUT_KEYS",
    "Part",
    "Sharding",
    "divided_state",
    "in_memory_order",
    "parts_of",
    "shaped",
    "sharded_buckets",
]

CUT_KEYS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "master", "mantissa")
"""State of a parameter's shape."""

# AdamW parameters with fewer entries per rank than this have one owner: a message is not worth less.
_LEAST_ENTRIES = 1024

# Ranges begin at multiples of this many entries, which every kernel likes.
_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Part:
    """A run of one parameter's entries, in the order of memory, which one rank updates."""

    name: str
    index: int
    """Position of the parameter in its group."""
    start: int
    stop: int
    owner: int
    """Position of the owner among the ranks."""
    offset: int = 0
    """Where its entries stand in the owner's state of the parameter."""
    unit: Unit | None = None
    """What the entries are, for Muon."""

    @property
    def numel(self) -> int:
        """Return the number of entries."""
        return self.stop - self.start


@dataclass(frozen=True)
class Sharding:
    """How the parts of one bucket are divided among ranks."""

    ranks: tuple[int, ...]
    position: int
    """Of this rank."""
    parts: tuple[Part, ...]
    """In the order of their owners."""

    @cached_property
    def of_owners(self) -> list[slice]:
        """Return for each rank which of the parts it owns."""
        stops = list(accumulate(Counter(part.owner for part in self.parts)[owner] for owner in range(len(self.ranks))))
        return [slice(start, stop) for start, stop in pairwise([0, *stops])]

    @cached_property
    def entries(self) -> list[int]:
        """Return how many entries each rank owns."""
        return [sum(part.numel for part in self.parts[of_owner]) for of_owner in self.of_owners]

    @cached_property
    def owned(self) -> tuple[Part, ...]:
        """Return the parts of this rank."""
        return self.parts[self.of_owners[self.position]]


def parts_of(group: Mapping[str, Any], ranks: Sequence[int]) -> list[list[Part]]:
    """Return for each parameter of a group its parts, in the order of memory.

    Args:
        group: validated.
        ranks: global ranks that divide the state.
    """
    num_ranks = len(ranks)
    if group["algorithm"] == "muon":
        return _parts_of_matrices(group, num_ranks)
    loads = [0] * num_ranks
    found: list[list[Part]] = []
    for index, (name, param) in enumerate(zip(group["param_names"], group["params"], strict=True)):
        numel = param.numel()
        if numel < _LEAST_ENTRIES * num_ranks:
            owner = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
            loads[owner] += numel
            found.append([Part(name, index, 0, numel, owner)] if numel else [])
            continue
        size = -(-numel // (num_ranks * _MULTIPLE)) * _MULTIPLE
        ranges = [(min(owner * size, numel), min((owner + 1) * size, numel)) for owner in range(num_ranks)]
        found.append([Part(name, index, a, b, owner) for owner, (a, b) in enumerate(ranges) if a < b])
    return found


def _parts_of_matrices(group: Mapping[str, Any], num_ranks: int) -> list[list[Part]]:
    shares: list[tuple[int, int, int, Unit]] = []
    costs = []
    for index, param in enumerate(group["params"]):
        for unit in _runs(group["view"], param):
            start, stop = _range_of(unit, tuple(param.shape))
            if start < stop:
                shares.append((index, start, stop, unit))
                costs.append(_cost(group, unit, param))
    owners = assign_owners(costs, [()] * len(costs), num_ranks)
    found: list[list[Part]] = [[] for _ in group["params"]]
    for (index, start, stop, unit), owner in zip(shares, owners, strict=True):
        offset = sum(part.numel for part in found[index] if part.owner == owner)
        found[index].append(Part(group["param_names"][index], index, start, stop, owner, offset, unit))
    return found


def _runs(view: View, param: Tensor) -> tuple[Unit, ...]:
    """Return the units of a tensor, or one of them all if some are no runs of its memory."""
    shape = tuple(param.shape)
    units = view.units(shape)
    if param.is_contiguous() and all(_is_run(unit, shape) for unit in units):
        return units
    matrices = tuple((block, matrix) for block, (b, _, _) in enumerate(view.shapes(shape)) for matrix in range(b))
    return (Unit(tuple((0, size) for size in shape), view, matrices),)


def _is_run(unit: Unit, shape: tuple[int, ...]) -> bool:
    start, stop = _range_of(unit, shape)
    return stop - start == math.prod(b - a for a, b in unit.box)


def _range_of(unit: Unit, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the places of the first entry of a box, and behind its last, in a contiguous tensor."""
    first = last = 0
    for (a, b), size in zip(unit.box, shape, strict=True):
        if a == b:
            return 0, 0
        first, last = first * size + a, last * size + b - 1
    return first, last + 1


def _cost(group: Mapping[str, Any], unit: Unit, param: Tensor) -> int:
    shape = [b - a for a, b in unit.box]
    total = 0
    for count, m, n in unit.view.shapes(shape):
        form = form_of(group, m, n, param.dtype, param.device)
        total += count * (min(m, n) * m * n if form is None else form.flops(m, n))
    return total


def divided_state(state: Mapping[str, Tensor], parts: Sequence[Part], position: int) -> dict[str, Tensor]:
    """Return what one rank keeps of a parameter's state: of tensors of the parameter's shape its own parts, flat.

    Args:
        state: whole, as `init_state` returns it.
        parts: of the parameter.
        position: of the rank.
    """
    return {key: _own(value, parts, position) if key in CUT_KEYS else value for key, value in state.items()}


def _own(value: Tensor, parts: Sequence[Part], position: int) -> Tensor:
    runs = [in_memory_order(value)[part.start : part.stop] for part in parts if part.owner == position]
    return torch.cat(runs) if runs else value.new_empty(0)


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return the entries of a tensor without gaps as a vector that shares its memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def shaped(run: Tensor, part: Part, param: Tensor) -> Tensor:
    """Return a run of memory as the part of a parameter that it is, sharing memory."""
    if part.unit is None:
        return run
    if part.numel == param.numel():
        return run.as_strided(param.shape, param.stride(), run.storage_offset())
    return run.view([stop - start for start, stop in part.unit.box])


def sharded_buckets(number: int, group: Mapping[str, Any], ranks: tuple[int, ...], rank: int) -> Iterator[Bucket]:
    """Yield the buckets of a group with `comms="sharded"`, the same on all ranks.

    Args:
        number: position of the group.
        group: validated.
        ranks: global ranks that divide the state.
        rank: the global rank whose plan this is.
    """
    together: dict[tuple[Any, ...], list[Part]] = {}
    for parts, param in zip(parts_of(group, ranks), group["params"], strict=True):
        kernels = choose_kernels(group["kernels"], param)
        for part in parts:
            kind = None if part.unit is None else (tuple(b - a for a, b in part.unit.box), part.unit.view)
            together.setdefault((kind, param.dtype, param.device, kernels), []).append(part)
    for (kind, dtype, device, kernels), found in together.items():
        for parts in _chunks(found, group, len(ranks), dtype):
            yield _bucket(number, group, ranks, rank, kind, dtype, device, kernels, parts)


def _chunks(
    parts: Sequence[Part], group: Mapping[str, Any], num_ranks: int, dtype: torch.dtype
) -> Iterator[list[Part]]:
    """Divide parts so that what is in flight fits the workspace: some of each owner's at a time."""
    budget = group["max_workspace_bytes"]
    # Gradients sent and received, and weights, of this bucket and its neighbours; the owner's own work.
    per_entry = 6 * dtype.itemsize + -(-(24 if group["algorithm"] == "muon" else 8) // num_ranks)
    limit = sum(part.numel for part in parts) if budget is None else max(1, budget // per_entry)
    per_owner = [[part for part in parts if part.owner == owner] for owner in range(num_ranks)]
    while any(per_owner):
        chunk: list[Part] = []
        used = 0
        while any(per_owner):
            row = [of_owner[0] for of_owner in per_owner if of_owner]
            numel = sum(part.numel for part in row)
            if chunk and used + numel > limit:
                break
            chunk += row
            used += numel
            per_owner = [of_owner[1:] for of_owner in per_owner]
        yield sorted(chunk, key=lambda part: part.owner)


def _bucket(
    number: int,
    group: Mapping[str, Any],
    ranks: tuple[int, ...],
    rank: int,
    kind: tuple[tuple[int, ...], View] | None,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Any,
    parts: Sequence[Part],
) -> Bucket:
    from quintic.optim.exchange import Exchange
    from quintic.optim.travel import Travel, TravellingUnit, kinds_of

    sharding = Sharding(ranks, ranks.index(rank), tuple(parts))
    entries = sharding.entries
    numel = sum(part.numel for part in parts)
    members = tuple(Member(name=p.name, index=p.index, num_matrices=1, piece=()) for p in sharding.owned)
    travel, flops = None, 0
    if kind is not None:
        shape, view = kind
        whole = tuple((0, size) for size in shape)
        counts = tuple(sum(part.owner == owner for part in parts) for owner in range(len(ranks)))
        copies = tuple(range(len(ranks)))
        exchange = Exchange(ranks, sharding.position, shape, (whole,) * len(ranks), copies, counts)
        kinds = kinds_of(view, shape, group, dtype, device)
        units = tuple(
            TravellingUnit(p.name, p.index, p.unit, _first_matrices(p.unit, group, p.index))
            for p in parts
            if p.unit is not None
        )
        travel = Travel(exchange, units, view, kinds)
        flops = exchange.num_owned * sum(k.form.flops(*k.shape) for k in kinds if k.form is not None)
    mine, most = entries[sharding.position], max(entries)
    work = (
        0
        if travel is None
        else len(sharding.owned)
        * sum(workspace_bytes(*kind.shape, dtype, device, kind.form, kernels) for kind in travel.kinds)
    )
    if travel is None and kernels == "torch":
        work = 2 * 4 * mine
    gradients = (numel + len(ranks) * mine) * dtype.itemsize
    average = mine * (max(dtype.itemsize, 4) + dtype.itemsize)
    stages = Stages(
        gathering=gradients,
        computing=max(len(ranks) * mine * dtype.itemsize + average, mine * dtype.itemsize + work),
        updates=0,
        scattering=(most + len(ranks) * most) * dtype.itemsize,
    )
    return Bucket(
        algorithm=group["algorithm"],
        group=number,
        members=members,
        shape=None if travel is None else travel.kinds[0].shape,
        dtype=dtype,
        device=device,
        kernels=kernels,
        form=None if travel is None else travel.kinds[0].form,
        numel=numel,
        flops=flops,
        workspace_bytes=stages.peak(Stages(0, 0, 0, 0), Stages(0, 0, 0, 0)),
        stages=stages,
        travel=travel,
        sharding=sharding,
    )


def _first_matrices(unit: Unit, group: Mapping[str, Any], index: int) -> tuple[int, ...]:
    counts = [b for b, _, _ in group["view"].shapes(group["params"][index].shape)]
    return tuple(sum(counts[:block]) + matrix for block, matrix in unit.matrices)
