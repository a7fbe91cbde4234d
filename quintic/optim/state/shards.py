"""Sharded state (`comms="sharded"`): the ranges of each parameter's memory that each rank owns.

    AdamW    every rank owns one range of a large parameter, of equal sizes; a small parameter has one owner
    Muon     a shard is a unit, as whole matrices need one owner; units go to the rank with the least work

Owners follow only from the shapes and views of a group's parameters and from the number of ranks. They must not change
when groups are added, or options change or are loaded, since state is never sent to a new owner.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quintic.optim.comms.collectives import this_rank
from quintic.optim.comms.sharing import layouts_of, sharding_ranks
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import numel_of, size_of
from quintic.optim.layout.packing import in_memory_order
from quintic.optim.layout.pieces import Piece, positions_in
from quintic.optim.layout.views import Unit, View
from quintic.optim.rules.rule import PARAM_SHAPED_STATE
from quintic.optim.state.owners import assign_owners, loads_of, shape_cost

__all__ = [
    "ShardedState",
    "StateShard",
    "StateSharding",
    "local_shard_pairs",
    "shard_of_saved",
    "sharded_parameters",
    "shards_of",
    "state_of_shard",
    "view_as_shard",
]

StateSharding: TypeAlias = tuple[tuple[int, ...], tuple[tuple[int, int, int], ...], tuple[int, ...]]
"""The owner of every entry of a parameter: ranks, then (position of an owner, start, stop) for each range of memory,
and the order of memory. Only to be compared, as flat state is valid only for the owners that it was made for."""

# An AdamW parameter with fewer entries per rank than this has one owner: smaller ranges are not worth a message.
_LEAST_ENTRIES = 1024

# Ranges begin at multiples of this many entries, so that kernels find them aligned.
_MULTIPLE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShard(Piece):
    """A range [start, stop) of one parameter's entries, in the order of memory, which one rank owns and updates.

    The owner steps it as a tensor of its own (`view_as_shard`), so that `box` stays ().
    """

    start: int
    stop: int
    owner: int
    """Position of the owner among the ranks."""
    offset: int = 0
    """The position of its first entry in the owner's flat state of the parameter."""
    unit: Unit | None = None
    """The unit that the shard is, for Muon; None for AdamW."""

    @property
    def numel(self) -> int:
        """Return the number of entries."""
        return self.stop - self.start


class ShardedState(NamedTuple):
    """How the ranks shard the state of one parameter."""

    shards: Sequence[StateShard]
    ranks: tuple[int, ...]

    @property
    def local(self) -> list[StateShard]:
        """Return the shards of this rank."""
        position = self.ranks.index(this_rank())
        return [shard for shard in self.shards if shard.owner == position]

    def sharding(self, param: Tensor) -> StateSharding:
        """Return the owner of every entry of the state of `param`, with consecutive shards of one owner joined."""
        runs: list[tuple[int, int, int]] = []
        for shard in self.shards:
            start = shard.start
            if runs and runs[-1][0] == shard.owner and runs[-1][2] == start:
                _, start, _ = runs.pop()
            runs.append((shard.owner, start, shard.stop))
        # The order of memory: strides of the dimensions of more than one entry.
        strides = tuple(stride for stride, size in zip(param.stride(), param.shape, strict=True) if size > 1)
        return self.ranks, tuple(runs), strides


def sharded_parameters(groups: Sequence[Group]) -> dict[Tensor, ShardedState]:
    """Return the shards of each parameter whose state is sharded among ranks; nothing is communicated."""
    sharded: dict[Tensor, ShardedState] = {}
    for group in groups:
        ranks = sharding_ranks(group, layouts_of(group))
        # Only groups with `comms="sharded"` or "sharded_sparse", on several ranks.
        if ranks:
            rows = zip(group.params, shards_of(group, ranks), strict=True)
            sharded |= {param: ShardedState(shards, ranks) for param, shards in rows}
    return sharded


def shards_of(group: Group, ranks: Sequence[int]) -> list[list[StateShard]]:
    """Return the shards of each parameter of a group whose state is sharded over `ranks`, in the order of memory."""
    num_ranks = len(ranks)
    if group.rule.orthogonalizes:
        return _shards_of_matrices(group, num_ranks)
    # AdamW: small parameters go to the rank with the fewest entries so far, large ones are divided evenly.
    loads = [0] * num_ranks
    of_params: list[list[StateShard]] = []
    for index, (name, param) in enumerate(zip(group.param_names, group.params, strict=True)):
        numel = param.numel()
        if numel < _LEAST_ENTRIES * num_ranks:
            owner = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
            loads[owner] += numel
            of_params.append([StateShard(name, index, start=0, stop=numel, owner=owner)] if numel else [])
            continue
        size = _range_size(param, num_ranks)
        ranges = [(min(owner * size, numel), min((owner + 1) * size, numel)) for owner in range(num_ranks)]
        of_params.append(
            [
                StateShard(name, index, start=start, stop=stop, owner=owner)
                for owner, (start, stop) in enumerate(ranges)
                if start < stop
            ]
        )
    return of_params


def _range_size(param: Tensor, num_ranks: int) -> int:
    """Return the number of entries of each rank's range; whole rows if there are enough. The last ranks have fewer."""
    # From the shape, because the stride of a dimension of one row is arbitrary and may differ between ranks.
    row = math.prod(param.shape[1:]) if param.ndim and param.is_contiguous() else 1
    # The smallest number of whole rows that is a multiple of `_MULTIPLE` entries.
    step = _MULTIPLE // math.gcd(row, _MULTIPLE) * row
    if step * num_ranks > param.numel():
        step = _MULTIPLE
    return -(-param.numel() // (num_ranks * step)) * step


def _shards_of_matrices(group: Group, num_ranks: int) -> list[list[StateShard]]:
    """Return the shards of each parameter of a Muon group: its units, with owners balanced over the group."""
    # Shards without an owner yet.
    shards: list[StateShard] = []
    costs = []
    for index, (name, param) in enumerate(zip(group.param_names, group.params, strict=True)):
        units = _contiguous_units(group.view, param)
        for unit, matrices in zip(units, positions_in(group.view, param.shape, units), strict=True):
            start, stop = _range_of(unit, tuple(param.shape))
            # Empty units, of parameters without entries, have no owner.
            if start < stop:
                shards.append(StateShard(name, index, matrices, start=start, stop=stop, owner=-1, unit=unit))
                costs.append(sum(count * shape_cost(m, n) for count, m, n in unit.view.shapes(size_of(unit.box))))
    of_params: list[list[StateShard]] = [[] for _ in group.params]
    # An owner's shards of a parameter follow each other in its flat state.
    owners = _unit_owners([shard.index for shard in shards], costs, num_ranks)
    for shard, owner in zip(shards, owners, strict=True):
        offset = sum(other.numel for other in of_params[shard.index] if other.owner == owner)
        of_params[shard.index].append(replace(shard, owner=owner, offset=offset))
    return of_params


def _unit_owners(indices: Sequence[int], costs: Sequence[int], num_ranks: int) -> list[int]:
    """Return the owner of each unit, given its parameter's position in the group, and its cost.

    A bank is a parameter with at least one unit for every rank, all of equal cost. Each rank should own consecutive
    units of it, which can be sent from the parameter's memory without packing.
    """
    # The units of each parameter, by index, and the banks among the parameters.
    of_params: dict[int, list[int]] = {}
    for number, index in enumerate(indices):
        of_params.setdefault(index, []).append(number)
    banks = [
        numbers
        for numbers in of_params.values()
        if len(numbers) >= num_ranks and len({costs[number] for number in numbers}) == 1
    ]
    # Consecutive units of all banks, or only of banks that divide evenly among the ranks if that balances better.
    even = [numbers for numbers in banks if len(numbers) % num_ranks == 0]
    shardings = [_consecutive_owners(banks, costs, num_ranks)]
    if len(even) < len(banks):
        shardings.append(_consecutive_owners(even, costs, num_ranks))
    return min(shardings, key=lambda owners: max(loads_of(costs, owners, num_ranks)))  # the first one if equal


def _consecutive_owners(banks: Sequence[Sequence[int]], costs: Sequence[int], num_ranks: int) -> list[int]:
    """Return the owner of each unit, such that every rank owns consecutive units of each bank.

    `banks` are lists of indices of units. All ranks get equally many units of a bank; what remains of it, and units of
    other parameters, go to the ranks with the least work.
    """
    owners = [-1] * len(costs)
    # Equally many units of every bank for each rank, in any order for now.
    for numbers in banks:
        for place, number in enumerate(numbers[: len(numbers) // num_ranks * num_ranks]):
            owners[number] = place % num_ranks
    # The remaining units, by size; so far all ranks have the same load.
    rest = [number for number, owner in enumerate(owners) if owner < 0]
    for number, owner in zip(rest, assign_owners([costs[n] for n in rest], [()] * len(rest), num_ranks), strict=True):
        owners[number] = owner
    # Each rank keeps its number of units of a bank; sorting makes them consecutive.
    for numbers in banks:
        for number, owner in zip(numbers, sorted(owners[number] for number in numbers), strict=True):
            owners[number] = owner
    return owners


def _contiguous_units(view: View, param: Tensor) -> tuple[Unit, ...]:
    """Return the units of a tensor, or one unit of all its matrices if some units are not ranges of its memory."""
    shape = tuple(param.shape)
    units = view.units(shape)
    if param.is_contiguous() and all(_is_range_of_memory(unit, shape) for unit in units):
        return units
    # One unit, the whole tensor, with all its matrices.
    matrices = tuple((block, matrix) for block, (b, _, _) in enumerate(view.shapes(shape)) for matrix in range(b))
    return (Unit(tuple((0, size) for size in shape), view, matrices),)


def _is_range_of_memory(unit: Unit, shape: tuple[int, ...]) -> bool:
    start, stop = _range_of(unit, shape)
    return stop - start == numel_of(unit.box)


def _range_of(unit: Unit, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the range of memory from a unit's first entry to behind its last, in a contiguous tensor of `shape`."""
    # Row-major positions of the box's first and last corner.
    first = last = 0
    for (a, b), size in zip(unit.box, shape, strict=True):
        # An empty unit.
        if a == b:
            return 0, 0
        first, last = first * size + a, last * size + b - 1
    return first, last + 1


def local_shard_pairs(
    flat: Tensor, whole: Tensor, own: Iterable[StateShard], param: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (view of a shard in the flat state, the same entries of a whole tensor) for each shard of a rank.

    Args:
        flat: this rank's state, (entries of all its shards,).
        whole: a tensor of the parameter's shape.
        own: this rank's shards.
        param: the parameter, whose memory order shards refer to.
    """
    # In the memory order of the parameter, which may be channels_last or transposed.
    ordered = whole.contiguous()
    if not param.is_contiguous():
        ordered = torch.empty_like(param, dtype=whole.dtype, device=whole.device).copy_(whole)
    entries = in_memory_order(ordered)
    for shard in own:
        yield flat[shard.offset : shard.offset + shard.numel], entries[shard.start : shard.stop]


def shard_of_saved(
    what: str, param: Tensor, sharded: ShardedState, target: Tensor, source: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (view of a shard in this rank's flat state, the same entries of a saved whole tensor).

    Raises:
        ValueError: the saved tensor has another shape than the parameter; the message begins with `what`.
    """
    if source.shape != param.shape:
        raise ValueError(f"{what} has shape {tuple(source.shape)}, this optimizer needs {tuple(param.shape)}")
    yield from local_shard_pairs(target, source, sharded.local, param)


def view_as_shard(run: Tensor, shard: StateShard, param: Tensor) -> Tensor:
    """Return a shard's entries, (numel,), in the shape of its unit or of the whole parameter, as a view."""
    # AdamW's shards stay flat.
    if shard.unit is None:
        return run
    # A parameter of one shard may have any memory order; the units of others are contiguous.
    if shard.numel == param.numel():
        return run.as_strided(param.shape, param.stride(), run.storage_offset())
    return run.view(size_of(shard.unit.box))


def state_of_shard(state: Mapping[str, Tensor], shard: StateShard, param: Tensor) -> dict[str, Tensor]:
    """Return the state of one shard: its range of this rank's flat tensors, in its shape; other state unchanged."""
    run = slice(shard.offset, shard.offset + shard.numel)
    return {
        key: view_as_shard(value[run], shard, param) if key in PARAM_SHAPED_STATE else value
        for key, value in state.items()
    }
