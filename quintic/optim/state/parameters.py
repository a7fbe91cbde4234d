"""Parameters of an optimizer, and their weights, gradients and state brought together from several ranks.

For QK-clip, for state that is saved or goes from one parameter to another, and for the reference of a step, which has
no messages of its own. Whole tensors are gathered one at a time, and every rank gets all of them: all ranks that share
a parameter must call the functions that return whole tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from quintic.optim.comms.collectives import ProcessGroup, all_gather_uneven, group_ranks, start_broadcasts, this_rank
from quintic.optim.comms.communicators import Communicators
from quintic.optim.comms.sharing import SHARDED_MODES, layouts_of
from quintic.optim.groups.options import Group, found_parameter
from quintic.optim.groups.ties import check_shapes
from quintic.optim.layout.layouts import Layout, intersection, local_tensor, numel_of, relative, size_of
from quintic.optim.layout.packing import in_memory_order
from quintic.optim.layout.views import View
from quintic.optim.rules.table import NEURON_MOMENT, PARAM_SHAPED_STATE, STATE_KEYS
from quintic.optim.state.placement import state_forms, state_on_device
from quintic.optim.state.shards import ShardedState, local_shard_pairs, sharded_parameters
from quintic.optim.state.state import second_moments

__all__ = ["Parameter", "all_parameters", "broadcast_shards", "connected_parameters", "copy_state", "whole_states"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an optimizer, and where its pieces are."""

    name: str
    param: Tensor
    group: Group
    layout: Layout | None
    """None where this rank has all there is."""
    sharded: ShardedState | None
    """The owners of the shards of the state; None where state lies as the parameter does."""
    communicators: Communicators

    @property
    def process_group(self) -> ProcessGroup | None:
        """Return the process group of the layout's ranks, once they are connected; None without a layout."""
        return None if self.layout is None else self.communicators[self.ranks]

    @property
    def is_here(self) -> bool:
        """Return whether this rank has a part in it."""
        return self.layout is None or this_rank() in self.layout.ranks

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that hold pieces or copies, in the order of the process group."""
        return (this_rank(),) if self.layout is None else tuple(sorted(self.layout.ranks))

    @property
    def own_copy(self) -> tuple[int, ...]:
        """Return the ranks that hold the pieces of the same copy as this rank, in order."""
        if self.layout is None or self.layout.is_replicated:
            return (this_rank(),)
        copies = dict(zip(self.layout.ranks, self.layout.copies, strict=True))
        return tuple(rank for rank in self.ranks if copies[rank] == copies[this_rank()])

    def whole(self, local: Tensor) -> Tensor:
        """Return the whole tensor of which this rank holds a piece, a new one."""
        layout = self.layout
        if layout is None or self.process_group is None or layout.is_replicated:
            return local.clone()
        boxes = [layout.box_of(rank) for rank in self.ranks]
        shards = all_gather_uneven(local.reshape(-1), [numel_of(box) for box in boxes], self.process_group)
        whole = local.new_empty(layout.shape)
        for rank, box, shard in zip(self.ranks, boxes, shards, strict=True):
            if rank in self.own_copy and shard.numel():
                self.piece(whole, rank).copy_(shard.view(size_of(box)))
        return whole

    def whole_of(self, key: str, local: Tensor) -> Tensor:
        """Return the whole of `"weight"` or of a state of the parameter's shape."""
        if self.sharded is None or key not in PARAM_SHAPED_STATE:
            return self.whole(local)
        return self.whole_of_shards(local)

    def whole_of_shards(self, local: Tensor) -> Tensor:
        """Return the whole tensor of which each rank has some shards."""
        assert self.sharded is not None
        assert self.process_group is not None
        whole = torch.empty_like(self.param, dtype=local.dtype)
        for shard in self.sharded.local:
            in_memory_order(whole)[shard.start : shard.stop] = local[shard.offset : shard.offset + shard.numel]
        broadcast_shards([(whole, self.sharded)], self.process_group)
        return whole

    def local_of(self, key: str, whole: Tensor) -> Tensor:
        """Return this rank's piece or shards of a whole weight or state."""
        if self.sharded is None or key not in PARAM_SHAPED_STATE:
            return self.piece(whole, this_rank())
        own = self.sharded.local
        flat = whole.new_empty(sum(shard.numel for shard in own))
        for run, of_whole in local_shard_pairs(flat, whole, own, self.param):
            run.copy_(of_whole)
        return flat

    def piece(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's piece of a whole tensor, sharing memory."""
        if self.layout is None:
            return whole
        return whole[relative(self.layout.box_of(rank), tuple((0, size) for size in self.layout.shape))]

    def whole_second_moments(self, buffer: Tensor) -> Tensor:
        """Return NorMuon's second moments of all matrices; some may be on one rank only."""
        if self.layout is None or self.process_group is None:
            return buffer.clone()
        everyone = all_gather_uneven(buffer, [buffer.numel()] * len(self.ranks), self.process_group)
        shape, view = self.layout.shape, self.group.view
        by_rank = {rank: second_moments(one, shape, view) for rank, one in zip(self.ranks, everyone, strict=True)}
        result = buffer.clone()
        targets = second_moments(result, shape, view)
        for (block, matrix), holders in self.holders().items():
            targets[block][matrix].copy_(by_rank[holders[0]][block][matrix])
        return result

    def holders(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """Return the ranks that have a matrix' state, of matrices (block of the view, number in it) that others lack.

        Those with sharded state, or whole on one rank of each copy, which may step them alone (`replicas="repeat"`).
        """
        if self.sharded is not None:
            shards, ranks = self.sharded.shards, self.sharded.ranks
            return {matrix: (ranks[shard.owner],) for shard in shards if shard.unit for matrix in shard.unit.matrices}
        return {} if self.layout is None else _holders(self.layout, self.group.view)


@lru_cache(maxsize=1024)
def _holders(layout: Layout, view: View) -> Mapping[tuple[int, int], tuple[int, ...]]:
    """Return the ranks that hold a matrix, of those matrices of which one rank of each copy alone holds anything."""
    of_matrices: dict[tuple[int, int], tuple[int, ...]] = {}
    if layout.is_replicated:
        return of_matrices
    for unit in view.units(layout.shape):
        rows = zip(layout.ranks, layout.boxes, strict=True)
        holders = tuple(rank for rank, box in rows if intersection(box, unit.box) is not None)
        if len(holders) == layout.num_copies:
            of_matrices |= dict.fromkeys(unit.matrices, holders)
    return of_matrices


def broadcast_shards(wholes: Sequence[tuple[Tensor, ShardedState]], group: ProcessGroup) -> None:
    """Give all ranks of a group the shards of some tensors, of one dtype, that their owners alone have right.

    All of these ranks must call it. Temporary memory: that of the tensors.
    """
    shards = [(shard, in_memory_order(whole)) for whole, sharded in wholes for shard in sharded.shards]
    shards.sort(key=lambda row: row[0].owner)
    # As bytes: backends do not know every dtype.
    runs = [(shard.owner, entries[shard.start : shard.stop].view(torch.uint8)) for shard, entries in shards]
    if not runs:
        return
    rows = torch.cat([run for _, run in runs])
    ranks = group_ranks(group)
    sizes = [sum(run.numel() for owner, run in runs if owner == position) for position in range(len(ranks))]
    start_broadcasts(rows, sizes, group).wait()
    received = rows.split([run.numel() for _, run in runs])
    of_others = [number for number, (owner, _) in enumerate(runs) if ranks[owner] != this_rank()]
    if of_others:
        torch._foreach_copy_([runs[number][1] for number in of_others], [received[number] for number in of_others])


def all_parameters(groups: Sequence[Group], communicators: Communicators) -> list[Parameter]:
    """Return all parameters, by group, also those that this rank has no part in; nothing is communicated."""
    sharded = sharded_parameters(groups)
    return [
        Parameter(name, param, group, layout, sharded.get(param), communicators)
        for group in groups
        for name, param, layout in zip(group.param_names, group.params, layouts_of(group), strict=True)
    ]


def connected_parameters(groups: Sequence[Group], communicators: Communicators) -> list[Parameter]:
    """Return the parameters that this rank has a part in, their ranks connected; all that share some must call it."""
    communicators.connect(groups, list(map(layouts_of, groups)))
    return [parameter for parameter in all_parameters(groups, communicators) if parameter.is_here]


def whole_states(
    groups: Sequence[Group], communicators: Communicators, states: Mapping[Tensor, Mapping[str, Tensor]]
) -> dict[Tensor, dict[str, Tensor]]:
    """Return the state that ranks shard, whole, and give every rank NorMuon's second moments of all matrices.

    The latter are changed in place where no state is sharded. All ranks that share parameters with such state must
    call it; without any, nothing is communicated. Temporary memory: one parameter's state, besides the result.
    """
    apart = [one for one in all_parameters(groups, communicators) if _has_state_apart(one) and states.get(one.param)]
    if not apart:
        return {}
    layouts = {parameter.param: parameter.layout for parameter in apart}
    communicators.connect(groups, [[layouts.get(param) for param in group.params] for group in groups])
    wholes: dict[Tensor, dict[str, Tensor]] = {}
    # In one order everywhere: ranks of several process groups wait for each other.
    for one in sorted((parameter for parameter in apart if parameter.is_here), key=lambda one: one.ranks):
        state = states[one.param]
        if one.sharded is None:
            moments = state[NEURON_MOMENT]
            moments.copy_(one.whole_second_moments(moments))
            continue
        wholes[one.param] = whole = dict(state)
        for key in PARAM_SHAPED_STATE:
            if key in state:  # in the host's memory, where the state is there
                whole[key] = one.whole_of(key, state[key].to(one.param.device)).to(state[key].device)
        if NEURON_MOMENT in state:
            whole[NEURON_MOMENT] = one.whole_second_moments(state[NEURON_MOMENT])
    return wholes


def _has_state_apart(one: Parameter) -> bool:
    """Return whether a rank may have state of a shared parameter that others need for a whole one, and lack."""
    group, layout = one.group, one.layout
    if layout is None or group.comms in SHARDED_MODES:
        return layout is not None
    return group.rule.neuron_state is not None and bool(_holders(layout, group.view))


def copy_state(
    groups: Sequence[Group],
    communicators: Communicators,
    states: Mapping[Tensor, Mapping[str, Tensor]],
    source: Tensor | str,
    target: Tensor | str,
    *,
    transposed: bool,
) -> None:
    """Do as `Muon.copy_state`, given the state of all parameters, which is changed."""
    by_param = {parameter.param: parameter for parameter in all_parameters(groups, communicators)}
    places = [found_parameter(groups, param, "copy_state was given") for param in (source, target)]
    origin, destination = (by_param[group.params[index]] for group, index in places)
    _check_copied(origin, destination, transposed=transposed)
    for one in (origin, destination):
        if states.get(one.param, {}).keys().isdisjoint(STATE_KEYS):
            raise ValueError(
                f"the state of {origin.name} cannot be copied to {destination.name}: {one.name} is frozen and has "
                f"no state; call requires_grad_(True) on it before"
            )
    communicators.connect(groups, list(map(layouts_of, groups)))
    if not origin.is_here and not destination.is_here:
        return
    if origin.ranks != destination.ranks:
        raise ValueError(
            f"{origin.name} and {destination.name} are on different ranks: copy_state needs both on all ranks that "
            f"have one of them"
        )
    with (
        state_on_device(origin.param, states[origin.param]) as values,
        state_on_device(destination.param, states[destination.param]) as kept,
    ):
        for key, value in kept.items():
            if key in PARAM_SHAPED_STATE:
                whole = origin.whole_of(key, local_tensor(values[key]))
                piece = destination.local_of(key, whole.mT if transposed else whole)
                if piece.numel():
                    local_tensor(value).copy_(piece)
            elif key == NEURON_MOMENT:
                value.copy_(origin.whole_second_moments(values[key]))
            else:
                value.copy_(values[key])


def _check_copied(source: Parameter, target: Parameter, *, transposed: bool) -> None:
    """Reject two parameters of which one cannot have the state of the other; a ValueError names both."""
    what = f"the state of {source.name} cannot be copied to {target.name}"
    group, other_group = source.group, target.group
    if source.param is target.param:
        raise ValueError(f"{what}: they are the same parameter")
    check_shapes(what, source.param, target.param, transposed=transposed)
    if group.rule.direction != other_group.rule.direction:
        raise ValueError(f"{what}: their groups have algorithm={group.algorithm!r} and {other_group.algorithm!r}")
    needed, other_needed = (
        {key: str(form.dtype) for key, form in state_forms(one.param, one.group).items()} for one in (source, target)
    )
    if needed != other_needed:
        raise ValueError(
            f"{what}: one has {needed}, the other {other_needed}; give both parameters the same dtype, and their "
            f"groups the same state_dtype, master and normalize"
        )
    if NEURON_MOMENT in needed and (transposed or group.view != other_group.view):
        raise ValueError(
            f"{what}: NorMuon's second moments belong to rows or columns of the matrices of a view; copy them to a "
            f"parameter of the same view, which is not transposed, or set normalize=None for both"
        )
