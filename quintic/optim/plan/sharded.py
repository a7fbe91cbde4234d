"""Plans the buckets of `comms="sharded"`: every rank has weights and a gradient, each piece of the state has an owner.

    gradients   -> the owner of each piece, which averages them
    step        by the owner, which has the piece's state
    weights     -> all ranks

That is a reduce-scatter, a step and an all-gather (ZeRO-1; the modded-nanogpt speedrun's optimizer). A piece is a unit
of matrices for Muon, a range of entries for AdamW; either is a range of the parameter's memory, so that its state is a
flat tensor and nothing is packed twice. `state/shards.py` assigns owners.

Invariant: buckets and the order of their pieces follow from the groups alone, and are the same on all ranks.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from quintic.kernels.dispatch import choose_kernels
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import size_of
from quintic.optim.layout.views import View
from quintic.optim.plan.bucket import Sharded, Units
from quintic.optim.plan.kinds import kinds_of
from quintic.optim.plan.offload_size import offloaded_entries
from quintic.optim.plan.row_sharding import RowSharding, sharded_rows
from quintic.optim.plan.schedule import NO_BYTES
from quintic.optim.plan.workspace.buckets import shard_phase_bytes
from quintic.optim.state.placement import has_packed_state
from quintic.optim.state.shards import StateShard, shards_of

__all__ = ["sharded_buckets"]

# From this number of entries on a parameter is sent from its own memory, and received there: packing would copy it.
_LEAST_DIRECT = 2**20


def sharded_buckets(number: int, group: Group, ranks: tuple[int, ...], rank: int) -> Iterator[Sharded]:
    """Yield one rank's buckets of the group with this index, whose state is sharded over the global ranks `ranks`."""
    # Collect pieces by the properties that a bucket's pieces share: kind of unit, dtype, device, kernels, and the
    # parameter if that is sent from its own memory.
    together: dict[tuple[Any, ...], list[StateShard]] = {}
    shardings: dict[int, RowSharding] = {}
    for index, (shards, param) in enumerate(zip(shards_of(group, ranks), group.params, strict=True)):
        if index in group.idle:
            continue  # its pieces keep their owners, should it be stepped later
        kernels, packed = choose_kernels(group.kernels, param), has_packed_state(param, group)
        # A table whose touched rows are sent is a bucket of its own.
        is_table = group.comms == "sharded_sparse" and not group.rule.orthogonalizes
        rows = sharded_rows(param, shards, len(ranks)) if is_table else None
        if rows is not None:
            shardings[index] = rows
        fits = param.numel() <= _offload_limit(group, param.dtype, len(ranks))
        direct = rows is not None or (fits and _is_sent_directly(shards, param, len(ranks)))
        for shard in shards:
            kind = None if shard.unit is None else (size_of(shard.unit.box), shard.unit.view)
            key = (kind, param.dtype, param.device, kernels, shard.index if direct else None, packed)
            together.setdefault(key, []).append(shard)
    # Make buckets of them, several where one would not fit the workspace.
    for (kind, dtype, device, kernels, direct, _), alike in together.items():
        chunks = [alike] if direct is not None else _chunks(alike, group, len(ranks), dtype)
        for shards in chunks:
            own = [shard for shard in shards if ranks[shard.owner] == rank]
            units = None if kind is None else _units(shards, group, ranks.index(rank), *kind)
            bucket = Sharded(
                rule=group.rule,
                group=number,
                members=tuple(own),
                shape=None if units is None else units.kinds[0].shape,
                dtype=dtype,
                device=device,
                kernels=kernels,
                form=None if units is None else units.kinds[0].form,
                units=units,
                flops=0 if units is None else len(own) * units.flops,
                numel=sum(shard.numel for shard in shards),
                phase_bytes=NO_BYTES,
                max_phase_bytes=NO_BYTES,
                ranks=ranks,
                position=ranks.index(rank),
                shards=tuple(shards),
                is_direct=direct is not None,
                rows=None if direct is None else shardings.get(direct),
            )
            # Memory follows from the bucket itself.
            of_all, of_this = shard_phase_bytes(bucket, group, worst_case=True), shard_phase_bytes(bucket, group)
            yield replace(bucket, phase_bytes=of_this, max_phase_bytes=of_all)


def _offload_limit(group: Group, dtype: torch.dtype, num_ranks: int) -> int:
    """Return the most entries that a bucket may have so that no owner loads too much offloaded state at once."""
    entries = offloaded_entries(group, dtype)
    # AdamW's state is brought in pieces of bounded size, however large the bucket is.
    return 2**62 if entries is None or not group.rule.orthogonalizes else entries * num_ranks


def _is_sent_directly(shards: Sequence[StateShard], param: Tensor, num_ranks: int) -> bool:
    """Return whether a parameter is large enough, and so divided, that it can be sent from its own memory, unpacked.

    Then it is a bucket of its own: all ranks own pieces of it, of one kind, in memory in the order of the ranks.
    """
    if param.numel() < _LEAST_DIRECT or {shard.owner for shard in shards} != set(range(num_ranks)):
        return False
    if len({shard.unit and (shard.unit.view, size_of(shard.unit.box)) for shard in shards}) > 1:
        return False
    # Without gaps, and in the order of the owners.
    ends = [0, *(shard.stop for shard in shards)]
    in_order = all(shard.start == end for shard, end in zip(shards, ends, strict=False)) and ends[-1] == param.numel()
    return in_order and all(a.owner <= b.owner for a, b in pairwise(shards))


def _chunks(
    shards: Sequence[StateShard], group: Group, num_ranks: int, dtype: torch.dtype
) -> Iterator[list[StateShard]]:
    """Yield the pieces of each bucket, some of every owner's, such that a bucket's messages fit the workspace."""
    budget = group.max_workspace_bytes
    # Bytes for each entry: gradients sent and received, and weights, of this bucket and its neighbours; then the
    # owner's work, which is divided among the ranks.
    per_entry = 6 * dtype.itemsize + -(-(24 if group.rule.orthogonalizes else 8) // num_ranks)
    limit = sum(shard.numel for shard in shards) if budget is None else max(1, budget // per_entry)
    limit = min(limit, _offload_limit(group, dtype, num_ranks))
    # Take the next piece of every owner that has one, until they exceed the limit: so all owners have work.
    per_owner = [[shard for shard in shards if shard.owner == owner] for owner in range(num_ranks)]
    while any(per_owner):
        chunk: list[StateShard] = []
        used = 0
        while any(per_owner):
            row = [of_owner[0] for of_owner in per_owner if of_owner]
            numel = sum(shard.numel for shard in row)
            if chunk and used + numel > limit:
                break
            chunk += row
            used += numel
            per_owner = [of_owner[1:] for of_owner in per_owner]
        yield sorted(chunk, key=lambda shard: shard.owner)


def _units(shards: Sequence[StateShard], group: Group, position: int, shape: tuple[int, ...], view: View) -> Units:
    """Return the pieces as units of one `shape` and `view`, as the rank at `position` sees them."""
    first = group.params[shards[0].index]
    # Sorted by owner, so that this rank's units are consecutive.
    owners = [shard.owner for shard in shards]
    owned = slice(bisect_left(owners, position), bisect_right(owners, position))
    return Units(shape, view, kinds_of(view, shape, group, first.dtype, first.device), tuple(shards), owned)
