"""Parameters with their layouts: gathers weights, gradients and state from the ranks that hold pieces of them.

Used by QK-clip, by state that is saved or copied to another parameter, and by the reference step; the real step has
faster messages of its own (`plan/exchange.py`). Whole tensors are gathered one at a time, on every rank: all ranks that
share a parameter must call the functions that return whole tensors.

A tensor of a parameter lies in one of three ways:
    plain      whole, on this rank only or on every rank
    pieces     each rank holds one box of a `Layout` (`DTensor`)
    shards     each rank holds ranges of the parameter's memory, joined as (entries,) (`shards.py`)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from quintic.optim.comms.collectives import ProcessGroup, all_gather_uneven, group_ranks, start_broadcasts, this_rank
from quintic.optim.comms.communicators import Communicators
from quintic.optim.comms.sharing import SHARDED_MODES, layouts_of
from quintic.optim.groups.group import Group, find_parameter
from quintic.optim.groups.ties import check_shapes
from quintic.optim.layout.layouts import Layout, intersection, local_tensor, numel_of, relative, size_of
from quintic.optim.layout.packing import in_memory_order
from quintic.optim.layout.views import View
from quintic.optim.numeric.int8_state import is_packed, read_packed, store_packed_
from quintic.optim.rules.rule import PARAM_SHAPED_STATE, STATE_KEYS
from quintic.optim.rules.stages import StateSpec
from quintic.optim.state.placement import cuts_groups, state_forms, state_on_device
from quintic.optim.state.shards import ShardedState, local_shard_pairs, sharded_parameters
from quintic.optim.state.state import copy_, vectors_of

__all__ = ["Parameter", "all_parameters", "broadcast_shards", "connected_parameters", "copy_state", "whole_states"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an optimizer, and where its pieces are."""

    name: str
    param: Tensor
    group: Group
    layout: Layout | None
    """Its boxes on all ranks; None if only this rank has the parameter."""
    sharded: ShardedState | None
    """The owners of the shards of its state; None if state lies as the parameter does."""
    communicators: Communicators

    @property
    def process_group(self) -> ProcessGroup | None:
        """Return the process group of the layout's ranks, once they are connected; None without a layout."""
        return None if self.layout is None else self.communicators[self.ranks]

    @property
    def is_here(self) -> bool:
        """Return whether this rank is one of the parameter's ranks."""
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
        # Ranks of a layout with several copies, as under HSDP, are divided by the index of the copy.
        copies = dict(zip(self.layout.ranks, self.layout.copies, strict=True))
        return tuple(rank for rank in self.ranks if copies[rank] == copies[this_rank()])

    def whole(self, local: Tensor) -> Tensor:
        """Return a new whole tensor, given this rank's piece of it; all ranks of the parameter must call it."""
        layout = self.layout
        if layout is None or self.process_group is None or layout.is_replicated:
            return local.clone()
        # Flat pieces of all ranks, (entries of the box,); the pieces of this rank's copy tile the whole tensor.
        boxes = [layout.box_of(rank) for rank in self.ranks]
        shards = all_gather_uneven(local.reshape(-1), [numel_of(box) for box in boxes], self.process_group)
        whole = local.new_empty(layout.shape)
        for rank, box, shard in zip(self.ranks, boxes, shards, strict=True):
            if rank in self.own_copy and shard.numel():
                self.piece(whole, rank).copy_(shard.view(size_of(box)))
        return whole

    def whole_of(self, key: str, local: Tensor) -> Tensor:
        """Return the whole `"weight"` or state of the parameter's shape, given this rank's piece or shards of it."""
        if self.sharded is None or key not in PARAM_SHAPED_STATE:
            return self.whole(local)
        return self.whole_of_shards(local)

    def whole_of_shards(self, local: Tensor) -> Tensor:
        """Return the whole tensor, given this rank's shards of it, (entries,)."""
        assert self.sharded is not None
        assert self.process_group is not None
        # Place this rank's shards, then let every owner broadcast its own.
        whole = torch.empty_like(self.param, dtype=local.dtype)
        for shard in self.sharded.local:
            in_memory_order(whole)[shard.start : shard.stop] = local[shard.offset : shard.offset + shard.numel]
        broadcast_shards([(whole, self.sharded)], self.process_group)
        return whole

    def local_of(self, key: str, whole: Tensor) -> Tensor:
        """Return this rank's piece of a whole weight or state, or its shards, (entries,); the inverse of `whole_of`."""
        if self.sharded is None or key not in PARAM_SHAPED_STATE:
            return self.piece(whole, this_rank())
        # Shards one after the other.
        own = self.sharded.local
        flat = whole.new_empty(sum(shard.numel for shard in own))
        for run, of_whole in local_shard_pairs(flat, whole, own, self.param):
            run.copy_(of_whole)
        return flat

    def piece(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's piece of a whole tensor, as a view."""
        if self.layout is None:
            return whole
        return whole[relative(self.layout.box_of(rank), tuple((0, size) for size in self.layout.shape))]

    @property
    def is_cut(self) -> bool:
        """Return whether ranks share groups of 8 columns, so that all must read, store and compare 8-bit state."""
        return cuts_groups(self.layout)

    def of_groups(self, read: Callable[[Tensor], Tensor], state: Tensor) -> Tensor:
        """Return `read(state)` of 8-bit state for this rank, computed on whole groups; all ranks must call it."""
        if not self.is_cut:
            return read(state)
        return self.piece(read(self.whole(state)), this_rank())

    def whole_vectors(self, spec: StateSpec, buffer: Tensor) -> Tensor:
        """Return vector state of all matrices, given this rank's `buffer`, (numbers of all matrices,).

        Every rank has a buffer of this size, but its values may be right only for the matrices that the rank holds.
        """
        if self.layout is None or self.process_group is None:
            return buffer.clone()
        # Take each matrix that only some ranks hold from the first of them; all others are right here.
        everyone = all_gather_uneven(buffer, [buffer.numel()] * len(self.ranks), self.process_group)
        shape, view = self.layout.shape, self.group.view
        by_rank = {rank: vectors_of(spec, one, shape, view) for rank, one in zip(self.ranks, everyone, strict=True)}
        result = buffer.clone()
        # Views by block and matrix, (b, m or 1, n or 1).
        targets = vectors_of(spec, result, shape, view)
        for (block, matrix), holders in self.holders().items():
            targets[block][matrix].copy_(by_rank[holders[0]][block][matrix])
        return result

    def holders(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """Return (block of the view, index in it) -> ranks, for matrices whose state only these ranks have right.

        With sharded state this is a matrix's owner. Otherwise it is a matrix that lies whole on one rank of each copy,
        which may step it without messages (`replicas="repeat"`).
        """
        if self.sharded is not None:
            shards, ranks = self.sharded.shards, self.sharded.ranks
            return {matrix: (ranks[shard.owner],) for shard in shards if shard.unit for matrix in shard.unit.matrices}
        return {} if self.layout is None else _holders(self.layout, self.group.view)


@lru_cache(maxsize=1024)
def _holders(layout: Layout, view: View) -> Mapping[tuple[int, int], tuple[int, ...]]:
    """Return (block, index) -> ranks, for the matrices that lie whole on one rank of each copy."""
    of_matrices: dict[tuple[int, int], tuple[int, ...]] = {}
    if layout.is_replicated:
        return of_matrices
    for unit in view.units(layout.shape):
        rows = zip(layout.ranks, layout.boxes, strict=True)
        holders = tuple(rank for rank, box in rows if intersection(box, unit.box) is not None)
        # Every copy has at least one holder, so this is exactly one each.
        if len(holders) == layout.num_copies:
            of_matrices |= dict.fromkeys(unit.matrices, holders)
    return of_matrices


def broadcast_shards(wholes: Sequence[tuple[Tensor, ShardedState]], group: ProcessGroup) -> None:
    """Let every owner broadcast its shards of some whole tensors of one dtype, in place.

    Before, a rank's tensors are right in the shards that it owns; afterwards everywhere. All ranks of the group must
    call it. Temporary memory: as much as the tensors.
    """
    # The shards of all tensors, sorted by owner, so that each owner's shards are one message.
    shards = [(shard, in_memory_order(whole)) for whole, sharded in wholes for shard in sharded.shards]
    shards.sort(key=lambda row: row[0].owner)
    # Sent as bytes, because backends do not support every dtype.
    runs = [(shard.owner, entries[shard.start : shard.stop].view(torch.uint8)) for shard, entries in shards]
    if not runs:
        return
    rows = torch.cat([run for _, run in runs])
    ranks = group_ranks(group)
    sizes = [sum(run.numel() for owner, run in runs if owner == position) for position in range(len(ranks))]
    start_broadcasts(rows, sizes, group).wait()
    # Copy the received shards to their places.
    received = rows.split([run.numel() for _, run in runs])
    of_others = [number for number, (owner, _) in enumerate(runs) if ranks[owner] != this_rank()]
    if of_others:
        torch._foreach_copy_([runs[number][1] for number in of_others], [received[number] for number in of_others])


def all_parameters(groups: Sequence[Group], communicators: Communicators) -> list[Parameter]:
    """Return all parameters, by group, also parameters of other ranks only; nothing is communicated."""
    sharded = sharded_parameters(groups)
    return [
        Parameter(name, param, group, layout, sharded.get(param), communicators)
        for group in groups
        for name, param, layout in zip(group.param_names, group.params, layouts_of(group), strict=True)
    ]


def connected_parameters(groups: Sequence[Group], communicators: Communicators) -> list[Parameter]:
    """Connect the ranks of all parameters, and return this rank's; all ranks that share parameters must call it."""
    communicators.connect(groups, list(map(layouts_of, groups)))
    return [parameter for parameter in all_parameters(groups, communicators) if parameter.is_here]


def whole_states(
    groups: Sequence[Group], communicators: Communicators, states: Mapping[Tensor, Mapping[str, Tensor]]
) -> dict[Tensor, dict[str, Tensor]]:
    """Return whole state for the parameters whose state is sharded, and complete the vectors of others in place.

    Vectors of matrices that only some ranks hold become right on all ranks. All ranks that share such parameters
    must call it; without any, nothing is communicated. Temporary memory: one parameter's state beside the result.
    """
    # Parameters whose state no single rank has whole.
    spread = [one for one in all_parameters(groups, communicators) if _has_spread_state(one) and states.get(one.param)]
    if not spread:
        return {}
    # Connect the ranks of these parameters only; others need no messages.
    layouts = {parameter.param: parameter.layout for parameter in spread}
    communicators.connect(groups, [[layouts.get(param) for param in group.params] for group in groups])
    wholes: dict[Tensor, dict[str, Tensor]] = {}
    # Process groups in one order on all ranks, since a rank in several of them runs collectives in each.
    for one in sorted((parameter for parameter in spread if parameter.is_here), key=lambda one: one.ranks):
        state, vectors = states[one.param], one.group.rule.vector_state
        # Not sharded: only vectors of matrices on some ranks differ between ranks.
        if one.sharded is None:
            for spec in vectors:
                state[spec.name].copy_(one.whole_vectors(spec, state[spec.name]))
            continue
        wholes[one.param] = whole = dict(state)
        for key in sorted(PARAM_SHAPED_STATE & state.keys()):  # in one order on all ranks
            # Gathered on the device, returned where the state is: the host with offload.
            whole[key] = one.whole_of(key, state[key].to(one.param.device)).to(state[key].device)
        for spec in vectors:
            if spec.name in state:
                whole[spec.name] = one.whole_vectors(spec, state[spec.name])
    return wholes


def _has_spread_state(one: Parameter) -> bool:
    """Return whether ranks that share a parameter may have different state of it, from which whole state is made."""
    group, layout = one.group, one.layout
    if layout is None or group.comms in SHARDED_MODES:
        return layout is not None
    # Vectors of a matrix that lies whole on one rank of each copy are right only there.
    return bool(group.rule.vector_state) and bool(_holders(layout, group.view))


def copy_state(
    groups: Sequence[Group],
    communicators: Communicators,
    states: Mapping[Tensor, Mapping[str, Tensor]],
    source: Tensor | str,
    target: Tensor | str,
    *,
    transposed: bool,
) -> None:
    """Copy the state of one parameter to another in `states`, as `Muon.copy_state` describes."""
    # Check that the state fits, before anything is sent or changed.
    by_param = {parameter.param: parameter for parameter in all_parameters(groups, communicators)}
    # Both may be given as parameters or by name.
    places = [find_parameter(groups, param, "copy_state was given") for param in (source, target)]
    origin, destination = (by_param[group.params[index]] for group, index in places)
    _check_copied(origin, destination, transposed=transposed)
    for one in (origin, destination):
        if states.get(one.param, {}).keys().isdisjoint(STATE_KEYS):
            raise ValueError(
                f"the state of {origin.name} cannot be copied to {destination.name}: {one.name} is frozen and has "
                f"no state; call requires_grad_(True) on it before"
            )
    # Connect all ranks, as every rank calls this; only the ranks of the two parameters go on.
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
        # One state after the other: gather the whole, take this rank's piece or shards of the target.
        vectors = {spec.name: spec for spec in origin.group.rule.vector_state}
        packed = origin.group.rule.packed_state
        for key, value in kept.items():
            if key in PARAM_SHAPED_STATE:
                whole = origin.whole_of(key, local_tensor(values[key]))
                if transposed and key in packed and is_packed(whole):
                    # Groups of 8 bits lie along rows.
                    wide = read_packed(whole).mT
                    whole = torch.empty_like(wide, dtype=whole.dtype, memory_format=torch.contiguous_format)
                    store_packed_(whole, wide)
                elif transposed:
                    whole = whole.mT
                piece = destination.local_of(key, whole)
                if piece.numel():
                    copy_(local_tensor(value), piece)
            elif key in vectors:
                value.copy_(origin.whole_vectors(vectors[key], values[key]))
            else:
                value.copy_(values[key])


def _check_copied(source: Parameter, target: Parameter, *, transposed: bool) -> None:
    """Raise a ValueError that names both parameters if the state of one does not fit the other."""
    what = f"the state of {source.name} cannot be copied to {target.name}"
    group, other_group = source.group, target.group
    # Two parameters, of one shape, with state of the same names and dtypes.
    if source.param is target.param:
        raise ValueError(f"{what}: they are the same parameter")
    check_shapes(what, source.param, target.param, transposed=transposed)
    if group.rule.direction != other_group.rule.direction:
        rules = group.rule.title, other_group.rule.title
        raise ValueError(f"{what}: their groups have the update rules {rules[0]} and {rules[1]}")
    needed, other_needed = (
        {key: str(dtype) for key, (dtype, _) in state_forms(one.param, one.group).items()} for one in (source, target)
    )
    if needed != other_needed:
        raise ValueError(
            f"{what}: one has {needed}, the other {other_needed}; give both parameters the same dtype, and their "
            f"groups the same state_dtype, master and update rule"
        )
    vectors = [spec.name for spec in group.rule.vector_state]
    if vectors and (transposed or group.view != other_group.view):
        raise ValueError(
            f"{what}: {vectors[0]} of {group.rule.title} belongs to the matrices of a view; copy it to a parameter of "
            f"the same view, which is not transposed, or give both another update rule"
        )
