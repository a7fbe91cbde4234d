"""`comms="sharded"`: every rank has the parameters and a gradient of its own; state and work are divided among ranks.

Gradients are averaged on the way to the rank that owns a part of a parameter: all of its matrices' units for Muon, a
range of entries for AdamW. The owner has that part's state, updates it as if it were alone, and sends the new weights
to everybody: a reduce-scatter, a step, an all-gather (ZeRO-1; the modded-nanogpt speedrun's optimizer). Parts are
runs of a parameter's memory, so that state is a flat tensor and nothing is packed twice.

Who owns what follows from the shapes and views of a group's parameters and the number of ranks alone. State does not
move: it must not get another owner when other groups are added, or when options change between steps or are loaded.
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

from quintic.kernels.dispatch import Kernels, choose_kernels
from quintic.optim.exchange import Exchange
from quintic.optim.offload_size import offloaded_entries
from quintic.optim.owners import assign_owners, shape_cost
from quintic.optim.packing import in_memory_order
from quintic.optim.plan import Bucket, Member
from quintic.optim.row_division import RowDivision, divided_rows
from quintic.optim.sharded_memory import stages_of_parts
from quintic.optim.travel import Travel, TravellingUnit, kinds_of
from quintic.optim.views import Unit, View

__all__ = [
    "CUT_KEYS",
    "Part",
    "Sharding",
    "divided_state",
    "parts_of",
    "shaped",
    "sharded_buckets",
    "state_of_part",
]

CUT_KEYS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "master", "mantissa")
"""State of a parameter's shape."""

# AdamW parameters with fewer entries per rank than this have one owner: a message is not worth less.
_LEAST_ENTRIES = 1024

# Ranges begin at multiples of this many entries, which every kernel likes.
_MULTIPLE = 64

# A parameter with at least so many entries travels from where it is, and back: nothing is packed.
_LEAST_ALONE = 2**20


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
    is_direct: bool = False
    """Whether the parts are one whole parameter, in the order of its memory: then messages need no packing."""
    rows: RowDivision | None = None
    """How its rows are divided, where only those that were touched need to travel (`comms="sharded_sparse"`)."""

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
        size = _range_size(param, num_ranks)
        ranges = [(min(owner * size, numel), min((owner + 1) * size, numel)) for owner in range(num_ranks)]
        found.append([Part(name, index, a, b, owner) for owner, (a, b) in enumerate(ranges) if a < b])
    return found


def _range_size(param: Tensor, num_ranks: int) -> int:
    """Return how many entries each rank has of a parameter, the last less: whole rows where it has enough of them."""
    # Not the stride, which means nothing where there is one row, and may then differ between ranks.
    row = math.prod(param.shape[1:]) if param.ndim and param.is_contiguous() else 1
    # So many rows are a multiple of what kernels like.
    step = _MULTIPLE // math.gcd(row, _MULTIPLE) * row
    if step * num_ranks > param.numel():
        step = _MULTIPLE
    return -(-param.numel() // (num_ranks * step)) * step


def _parts_of_matrices(group: Mapping[str, Any], num_ranks: int) -> list[list[Part]]:
    shares: list[tuple[int, int, int, Unit]] = []
    costs = []
    for index, param in enumerate(group["params"]):
        for unit in _runs(group["view"], param):
            start, stop = _range_of(unit, tuple(param.shape))
            if start < stop:
                shares.append((index, start, stop, unit))
                costs.append(_cost(unit))
    found: list[list[Part]] = [[] for _ in group["params"]]
    for (index, start, stop, unit), owner in zip(shares, _owners(shares, costs, num_ranks), strict=True):
        offset = sum(part.numel for part in found[index] if part.owner == owner)
        found[index].append(Part(group["param_names"][index], index, start, stop, owner, offset, unit))
    return found


def _owners(shares: Sequence[tuple[int, int, int, Unit]], costs: Sequence[int], num_ranks: int) -> list[int]:
    """Return the owner of each unit; banks that divide evenly are divided in the order of their memory."""
    owners = [-1] * len(shares)
    of_params: dict[int, list[int]] = {}
    for number, (index, *_) in enumerate(shares):
        of_params.setdefault(index, []).append(number)
    for numbers in of_params.values():
        if len(numbers) % num_ranks == 0 and len({costs[number] for number in numbers}) == 1:
            for place, number in enumerate(numbers):
                owners[number] = place * num_ranks // len(numbers)
    rest = [number for number, owner in enumerate(owners) if owner < 0]
    # What is divided evenly is the same load for everybody.
    for number, owner in zip(rest, assign_owners([costs[n] for n in rest], [()] * len(rest), num_ranks), strict=True):
        owners[number] = owner
    return owners


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


def _cost(unit: Unit) -> int:
    """Cost of a unit's matrices, the same whatever the group's options are."""
    return sum(count * shape_cost(m, n) for count, m, n in unit.view.shapes([b - a for a, b in unit.box]))


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


def shaped(run: Tensor, part: Part, param: Tensor) -> Tensor:
    """Return a run of memory as the part of a parameter that it is, sharing memory."""
    if part.unit is None:
        return run
    if part.numel == param.numel():
        return run.as_strided(param.shape, param.stride(), run.storage_offset())
    return run.view([stop - start for start, stop in part.unit.box])


def state_of_part(state: Mapping[str, Tensor], part: Part, param: Tensor) -> dict[str, Tensor]:
    """Return a part's own state, shaped as the part: of the flat tensors, which hold all parts of this rank, its run.

    Args:
        state: of the parameter, as `divided_state` returns it.
        part: of this rank.
        param: the parameter.
    """
    run = slice(part.offset, part.offset + part.numel)
    return {key: shaped(value[run], part, param) if key in CUT_KEYS else value for key, value in state.items()}


def sharded_buckets(number: int, group: Mapping[str, Any], ranks: tuple[int, ...], rank: int) -> Iterator[Bucket]:
    """Yield the buckets of a group whose state is divided, the same on all ranks.

    Args:
        number: position of the group.
        group: validated.
        ranks: global ranks that divide the state.
        rank: the global rank whose plan this is.
    """
    together: dict[tuple[Any, ...], list[Part]] = {}
    divisions: dict[int, RowDivision] = {}
    for index, (parts, param) in enumerate(zip(parts_of(group, ranks), group["params"], strict=True)):
        kernels = choose_kernels(group["kernels"], param)
        is_table = group["comms"] == "sharded_sparse" and group["algorithm"] == "adamw"
        rows = divided_rows(param, parts, len(ranks)) if is_table else None
        if rows is not None:
            divisions[index] = rows
        fits = param.numel() <= _offload_limit(group, param.dtype, len(ranks))
        alone = rows is not None or (fits and _travels_alone(parts, param, len(ranks)))
        for part in parts:
            kind = None if part.unit is None else (_size(part.unit), part.unit.view)
            key = (kind, param.dtype, param.device, kernels, part.index if alone else None)
            together.setdefault(key, []).append(part)
    for (kind, dtype, device, kernels, alone), found in together.items():
        chunks = [found] if alone is not None else _chunks(found, group, len(ranks), dtype)
        for parts in chunks:
            rows = None if alone is None else divisions.get(alone)
            sharding = Sharding(ranks, ranks.index(rank), tuple(parts), alone is not None, rows)
            yield _bucket(number, group, sharding, kind, dtype, device, kernels)


def _offload_limit(group: Mapping[str, Any], dtype: torch.dtype, num_ranks: int) -> int:
    """Return how many entries a bucket may have, such that owners bring little state from the host at a time."""
    entries = offloaded_entries(group, dtype)
    # AdamW's state comes in parts, whatever the bucket has.
    return 2**62 if entries is None or group["algorithm"] == "adamw" else entries * num_ranks


def _travels_alone(parts: Sequence[Part], param: Tensor, num_ranks: int) -> bool:
    """Return whether a parameter is large, and all ranks have parts of it, in their order in memory, of one kind."""
    if param.numel() < _LEAST_ALONE or {part.owner for part in parts} != set(range(num_ranks)):
        return False
    if len({part.unit and (part.unit.view, _size(part.unit)) for part in parts}) > 1:
        return False
    ends = [0, *(part.stop for part in parts)]
    in_order = all(part.start == end for part, end in zip(parts, ends, strict=False)) and ends[-1] == param.numel()
    return in_order and all(a.owner <= b.owner for a, b in pairwise(parts))


def _size(unit: Unit) -> tuple[int, ...]:
    return tuple(b - a for a, b in unit.box)


def _chunks(
    parts: Sequence[Part], group: Mapping[str, Any], num_ranks: int, dtype: torch.dtype
) -> Iterator[list[Part]]:
    """Divide parts so that what is in flight fits the workspace: some of each owner's at a time."""
    budget = group["max_workspace_bytes"]
    # Gradients sent and received, and weights, of this bucket and its neighbours; the owner's own work.
    per_entry = 6 * dtype.itemsize + -(-(24 if group["algorithm"] == "muon" else 8) // num_ranks)
    limit = sum(part.numel for part in parts) if budget is None else max(1, budget // per_entry)
    limit = min(limit, _offload_limit(group, dtype, num_ranks))
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
    sharding: Sharding,
    kind: tuple[tuple[int, ...], View] | None,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
) -> Bucket:
    ranks, parts = sharding.ranks, sharding.parts
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
    # Touched rows travel in collectives. What all ranks agree on bounds messages, too.
    elsewhere = group["transport"] == "copy_engines" and sharding.rows is None
    stages, shared_stages = (
        stages_of_parts(
            sharding, travel, group, dtype, device, kernels, anywhere=anywhere, elsewhere=elsewhere and not anywhere
        )
        for anywhere in (False, True)
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
        numel=sum(part.numel for part in parts),
        flops=flops,
        workspace_bytes=stages.working,
        stages=stages,
        shared_stages=shared_stages,
        travel=travel,
        sharding=sharding,
    )


def _first_matrices(unit: Unit, group: Mapping[str, Any], index: int) -> tuple[int, ...]:
    counts = [b for b, _, _ in group["view"].shapes(group["params"][index].shape)]
    return tuple(sum(counts[:block]) + matrix for block, matrix in unit.matrices)
