"""Plans the buckets of `comms="sharded"`: every rank has weights and a gradient, each piece of the state has an owner.

    gradients   -> the owner of each piece, which averages them
    step        by the owner, which has the piece's state
    weights     -> all ranks

That is a reduce-scatter, a step and an all-gather (ZeRO-1; the modded-nanogpt speedrun's optimizer). A piece is a unit
of matrices for Muon, a range of entries for AdamW; either is a range of the parameter's memory, so that its state is a
flat tensor and nothing is packed twice. `state/parts.py` assigns owners.

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
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import size_of
from quintic.optim.layout.views import View
from quintic.optim.plan.bucket import Divided, DividedMatrices, DividedTable, ParameterUnit, Units
from quintic.optim.plan.members import Member, kinds_of
from quintic.optim.plan.memory.buckets import stages_of_parts
from quintic.optim.plan.offload_size import offloaded_entries
from quintic.optim.plan.row_division import RowDivision, divided_rows
from quintic.optim.plan.schedule import NO_STAGES
from quintic.optim.state.parts import Part, parts_of

__all__ = ["divided_buckets"]

# From this number of entries on a parameter is sent from its own memory, and received there: packing would copy it.
_LEAST_ALONE = 2**20


def divided_buckets(number: int, group: Group, ranks: tuple[int, ...], rank: int) -> Iterator[Divided]:
    """Yield one rank's buckets of the group in place `number`, whose state some global ranks divide."""
    together: dict[tuple[Any, ...], list[Part]] = {}
    divisions: dict[int, RowDivision] = {}
    for index, (parts, param) in enumerate(zip(parts_of(group, ranks), group.params, strict=True)):
        if index in group.idle:
            continue  # its pieces keep their owners, should it be stepped later
        kernels = choose_kernels(group.kernels, param)
        is_table = group.comms == "sharded_sparse" and not group.rule.orthogonalizes
        rows = divided_rows(param, parts, len(ranks)) if is_table else None
        if rows is not None:
            divisions[index] = rows
        fits = param.numel() <= _offload_limit(group, param.dtype, len(ranks))
        alone = rows is not None or (fits and _travels_alone(parts, param, len(ranks)))
        for part in parts:
            kind = None if part.unit is None else (size_of(part.unit.box), part.unit.view)
            key = (kind, param.dtype, param.device, kernels, part.index if alone else None)
            together.setdefault(key, []).append(part)
    for (kind, dtype, device, kernels, alone), alike in together.items():
        chunks = [alike] if alone is not None else _chunks(alike, group, len(ranks), dtype)
        for parts in chunks:
            own = [part for part in parts if ranks[part.owner] == rank]
            of_kind: type[Divided] = Divided
            more: dict[str, Any] = {}
            if kind is not None:
                units = _units(parts, group, ranks.index(rank), *kind)
                of_kind, first = DividedMatrices, units.kinds[0]
                more = {"shape": first.shape, "form": first.form, "flops": len(own) * units.flops, "units": units}
            elif alone in divisions:
                of_kind, more = DividedTable, {"rows": divisions[alone]}
            bucket = of_kind(
                rule=group.rule,
                group=number,
                members=tuple(Member(name=p.name, index=p.index, num_matrices=1, piece=()) for p in own),
                dtype=dtype,
                device=device,
                kernels=kernels,
                numel=sum(part.numel for part in parts),
                stages=NO_STAGES,
                shared_stages=NO_STAGES,
                ranks=ranks,
                position=ranks.index(rank),
                parts=tuple(parts),
                is_direct=alone is not None,
                **more,
            )
            of_all, of_this = stages_of_parts(bucket, group, anywhere=True), stages_of_parts(bucket, group)
            yield replace(bucket, stages=of_this, shared_stages=of_all)


def _offload_limit(group: Group, dtype: torch.dtype, num_ranks: int) -> int:
    """Return the number of entries that a bucket may have, so that owners bring little state from the host at once."""
    entries = offloaded_entries(group, dtype)
    # AdamW's state is brought in pieces of bounded size, however large the bucket is.
    return 2**62 if entries is None or not group.rule.orthogonalizes else entries * num_ranks


def _travels_alone(parts: Sequence[Part], param: Tensor, num_ranks: int) -> bool:
    """Return whether a large parameter can be a bucket sent from its own memory.

    All ranks then own pieces of it, of one kind, which follow each other in memory in the order of the ranks.
    """
    if param.numel() < _LEAST_ALONE or {part.owner for part in parts} != set(range(num_ranks)):
        return False
    if len({part.unit and (part.unit.view, size_of(part.unit.box)) for part in parts}) > 1:
        return False
    ends = [0, *(part.stop for part in parts)]
    in_order = all(part.start == end for part, end in zip(parts, ends, strict=False)) and ends[-1] == param.numel()
    return in_order and all(a.owner <= b.owner for a, b in pairwise(parts))


def _chunks(parts: Sequence[Part], group: Group, num_ranks: int, dtype: torch.dtype) -> Iterator[list[Part]]:
    """Yield pieces that are one bucket, some of each owner's, such that their messages fit the workspace."""
    budget = group.max_workspace_bytes
    # Bytes for each entry: gradients sent and received, and weights, of this bucket and its neighbours; then the
    # owner's work, which is divided among the ranks.
    per_entry = 6 * dtype.itemsize + -(-(24 if group.rule.orthogonalizes else 8) // num_ranks)
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


def _units(parts: Sequence[Part], group: Group, position: int, shape: tuple[int, ...], view: View) -> Units:
    """Return the units that are the pieces, as the rank in this position sees them."""
    first = group.params[parts[0].index]
    everywhere = tuple(
        ParameterUnit.of(group, part.index, part.unit, group.params[part.index].shape)
        for part in parts
        if part.unit is not None
    )
    owners = [part.owner for part in parts]
    owned = slice(bisect_left(owners, position), bisect_right(owners, position))
    return Units(shape, view, kinds_of(view, shape, group, first.dtype, first.device), everywhere, owned)
