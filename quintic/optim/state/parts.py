"""The runs of a parameter's memory that each rank owns, where ranks divide state.

Who owns what follows from the shapes and views of a group's parameters and the number of ranks alone. State does not
move: it must not get another owner when other groups are added, or when options change between steps or are loaded.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.optim.comms.collectives import this_rank
from quintic.optim.comms.sharing import dividing_ranks, layouts_of
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import numel_of, size_of
from quintic.optim.layout.packing import in_memory_order
from quintic.optim.layout.views import Unit, View
from quintic.optim.rules.table import PARAM_SHAPED_STATE
from quintic.optim.state.owners import assign_owners, loads_of, shape_cost

__all__ = [
    "DividedState",
    "Division",
    "Part",
    "divided_parameters",
    "own_runs",
    "part_of_saved",
    "parts_of",
    "shaped",
    "state_of_part",
]

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
    """The unit that the entries are, for Muon."""

    @property
    def numel(self) -> int:
        """Return the number of entries."""
        return self.stop - self.start


class Division(NamedTuple):
    """The owner of each entry of a parameter, and its place: state that was divided otherwise means something else."""

    ranks: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]
    """(owner, start, stop): the position of an owner among the ranks, and its entries in the order of memory."""
    strides: tuple[int, ...]
    """The order of memory: strides of the parameter's dimensions that have several entries."""


class DividedState(NamedTuple):
    """How the ranks divide the state of one parameter."""

    parts: Sequence[Part]
    ranks: tuple[int, ...]

    @property
    def own(self) -> list[Part]:
        """Return the parts of this rank."""
        position = self.ranks.index(this_rank())
        return [part for part in self.parts if part.owner == position]

    def division(self, param: Tensor) -> Division:
        """Return the division of its state, whatever parts the entries of one owner come in."""
        runs: list[tuple[int, int, int]] = []
        for part in self.parts:
            start = part.start
            if runs and runs[-1][0] == part.owner and runs[-1][2] == start:
                _, start, _ = runs.pop()
            runs.append((part.owner, start, part.stop))
        strides = tuple(stride for stride, size in zip(param.stride(), param.shape, strict=True) if size > 1)
        return Division(self.ranks, tuple(runs), strides)


def divided_parameters(groups: Sequence[Group]) -> dict[Tensor, DividedState]:
    """Return the parameters whose state is divided among ranks."""
    divided: dict[Tensor, DividedState] = {}
    for group in groups:
        ranks = dividing_ranks(group, layouts_of(group))
        if ranks:
            rows = zip(group.params, parts_of(group, ranks), strict=True)
            divided |= {param: DividedState(parts, ranks) for param, parts in rows}
    return divided


def parts_of(group: Group, ranks: Sequence[int]) -> list[list[Part]]:
    """Return for each parameter of a group its parts, in the order of memory; `ranks` divide the state."""
    num_ranks = len(ranks)
    if group.rule.orthogonalizes:
        return _parts_of_matrices(group, num_ranks)
    loads = [0] * num_ranks
    of_params: list[list[Part]] = []
    for index, (name, param) in enumerate(zip(group.param_names, group.params, strict=True)):
        numel = param.numel()
        if numel < _LEAST_ENTRIES * num_ranks:
            owner = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
            loads[owner] += numel
            of_params.append([Part(name, index, 0, numel, owner)] if numel else [])
            continue
        size = _range_size(param, num_ranks)
        ranges = [(min(owner * size, numel), min((owner + 1) * size, numel)) for owner in range(num_ranks)]
        of_params.append([Part(name, index, a, b, owner) for owner, (a, b) in enumerate(ranges) if a < b])
    return of_params


def _range_size(param: Tensor, num_ranks: int) -> int:
    """Return the number of entries for each rank, the last fewer: whole rows where the parameter has enough of them."""
    # Not the stride, which means nothing where there is one row, and may then differ between ranks.
    row = math.prod(param.shape[1:]) if param.ndim and param.is_contiguous() else 1
    # So many rows are a multiple of what kernels like.
    step = _MULTIPLE // math.gcd(row, _MULTIPLE) * row
    if step * num_ranks > param.numel():
        step = _MULTIPLE
    return -(-param.numel() // (num_ranks * step)) * step


def _parts_of_matrices(group: Group, num_ranks: int) -> list[list[Part]]:
    shares: list[tuple[int, int, int, Unit]] = []
    costs = []
    for index, param in enumerate(group.params):
        for unit in _runs(group.view, param):
            start, stop = _range_of(unit, tuple(param.shape))
            if start < stop:
                shares.append((index, start, stop, unit))
                costs.append(sum(count * shape_cost(m, n) for count, m, n in unit.view.shapes(size_of(unit.box))))
    of_params: list[list[Part]] = [[] for _ in group.params]
    for (index, start, stop, unit), owner in zip(shares, _owners(shares, costs, num_ranks), strict=True):
        offset = sum(part.numel for part in of_params[index] if part.owner == owner)
        of_params[index].append(Part(group.param_names[index], index, start, stop, owner, offset, unit))
    return of_params


def _owners(shares: Sequence[tuple[int, int, int, Unit]], costs: Sequence[int], num_ranks: int) -> list[int]:
    """Return the owner of each unit: each rank has a run of every bank, if the busiest then has no more to do.

    A bank is a parameter with at least a unit for every rank, which all cost the same. A run travels from its place.
    """
    of_params: dict[int, list[int]] = {}
    for number, (index, *_) in enumerate(shares):
        of_params.setdefault(index, []).append(number)
    banks = [
        numbers
        for numbers in of_params.values()
        if len(numbers) >= num_ranks and len({costs[number] for number in numbers}) == 1
    ]
    even = [numbers for numbers in banks if len(numbers) % num_ranks == 0]
    divisions = [_in_runs(banks, costs, num_ranks)]
    if len(even) < len(banks):
        divisions.append(_in_runs(even, costs, num_ranks))
    return min(divisions, key=lambda owners: max(loads_of(costs, owners, num_ranks)))  # the first one if equal


def _in_runs(banks: Sequence[Sequence[int]], costs: Sequence[int], num_ranks: int) -> list[int]:
    """Return the owner of each unit, each rank having a run of every bank; banks are given as numbers of units.

    All ranks have equally many units of a bank. The rest of it, and units of no bank, go to the ranks with the
    least; then the runs are as long as the ranks have units.
    """
    owners = [-1] * len(costs)
    for numbers in banks:
        for place, number in enumerate(numbers[: len(numbers) // num_ranks * num_ranks]):
            owners[number] = place % num_ranks
    rest = [number for number, owner in enumerate(owners) if owner < 0]
    # Evenly divided units are the same load for every rank.
    for number, owner in zip(rest, assign_owners([costs[n] for n in rest], [()] * len(rest), num_ranks), strict=True):
        owners[number] = owner
    for numbers in banks:
        for number, owner in zip(numbers, sorted(owners[number] for number in numbers), strict=True):
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
    return stop - start == numel_of(unit.box)


def _range_of(unit: Unit, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the places of the first entry of a box, and behind its last, in a contiguous tensor."""
    first = last = 0
    for (a, b), size in zip(unit.box, shape, strict=True):
        if a == b:
            return 0, 0
        first, last = first * size + a, last * size + b - 1
    return first, last + 1


def own_runs(flat: Tensor, whole: Tensor, own: Iterable[Part], param: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each part of a rank in its flat state, sharing memory, and the same entries of a whole tensor."""
    ordered = whole.contiguous()
    if not param.is_contiguous():
        ordered = torch.empty_like(param, dtype=whole.dtype, device=whole.device).copy_(whole)
    entries = in_memory_order(ordered)
    for part in own:
        yield flat[part.offset : part.offset + part.numel], entries[part.start : part.stop]


def part_of_saved(
    what: str, param: Tensor, divided: DividedState, target: Tensor, source: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the runs of this rank's flat state beside those of a saved whole tensor; an error if its shape differs."""
    if source.shape != param.shape:
        raise ValueError(f"{what} has shape {tuple(source.shape)}, this optimizer needs {tuple(param.shape)}")
    yield from own_runs(target, source, divided.own, param)


def shaped(run: Tensor, part: Part, param: Tensor) -> Tensor:
    """Return a run of memory as the part of a parameter that it is, sharing memory."""
    if part.unit is None:
        return run
    if part.numel == param.numel():
        return run.as_strided(param.shape, param.stride(), run.storage_offset())
    return run.view(size_of(part.unit.box))


def state_of_part(state: Mapping[str, Tensor], part: Part, param: Tensor) -> dict[str, Tensor]:
    """Return a part's own state, shaped as the part: of flat tensors, which hold all parts of this rank, its run."""
    run = slice(part.offset, part.offset + part.numel)
    return {
        key: shaped(value[run], part, param) if key in PARAM_SHAPED_STATE else value for key, value in state.items()
    }
