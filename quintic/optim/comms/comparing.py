"""Descriptions of the treatment of shared parameters, and the differences between ranks."""

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

from quintic.kernels.dispatch import cpu_multiplies_bfloat16
from quintic.optim.comms.collectives import ProcessGroup, all_gather_values, this_rank
from quintic.optim.groups.group import Group
from quintic.optim.groups.options import options_affecting
from quintic.optim.layout.layouts import Layout

__all__ = ["Place", "described", "difference"]

Place: TypeAlias = tuple[int, int]
"""Position of a parameter's group, and its own in it."""

_COMPARED_OPTIONS = options_affecting("ranks")


def described(
    groups: Sequence[Group], layouts: Sequence[Sequence[Layout | None]]
) -> dict[tuple[int, ...], list[tuple[Place, str]]]:
    """Return {sharing ranks: [((group, index), description) of each parameter that they share]}."""
    by_ranks: dict[tuple[int, ...], list[tuple[Place, str]]] = {}
    # Which dtype is the fast one decides of what size updates travel, and processors differ.
    processor = "" if cpu_multiplies_bfloat16() else " without bfloat16 products"
    for number, (group, of_group) in enumerate(zip(groups, layouts, strict=True)):
        options = ", ".join(f"{key}={_text(getattr(group, key))}" for key in _COMPARED_OPTIONS)
        for index, layout in enumerate(of_group):
            if layout is not None and this_rank() in layout.ranks:
                name, param = group.param_names[index], group.params[index]
                order = "" if param.is_contiguous() else ", not contiguous"
                kind = f"{param.device.type}{processor if param.device.type == 'cpu' else ''}"
                frozen = ", frozen (requires_grad=False)" if index in group.idle else ""
                text = (
                    f"{name} of shape {layout.shape}, {param.dtype}{order}{frozen}, on ranks {layout.ranks} ({kind}) "
                    f"with {options}"
                )
                by_ranks.setdefault(tuple(sorted(layout.ranks)), []).append(((number, index), text))
    return dict(sorted(by_ranks.items()))


def _text(option: object) -> str:
    """Return an option as all ranks write it: a function's address is its own on each."""
    return getattr(option, "__qualname__", type(option).__qualname__) if callable(option) else str(option)


def difference(descriptions: Sequence[str], ranks: tuple[int, ...], group: ProcessGroup) -> str | None:
    """Return a message with the first parameter in whose description ranks differ, and the ranks; None if none do.

    All ranks of the group must call it. Descriptions, one per parameter, are equal on all ranks if their plans are.
    """
    digest = hashlib.sha256("\n".join(descriptions).encode()).hexdigest()
    if len(set(all_gather_values(digest, group))) == 1:
        return None
    everything = all_gather_values(list(descriptions), group)
    first = everything[0]
    for rank, theirs in zip(ranks, everything, strict=True):
        for number in range(max(len(first), len(theirs))):
            mine = first[number] if number < len(first) else "nothing"
            other = theirs[number] if number < len(theirs) else "nothing"
            if mine != other:
                return (
                    f"ranks {ranks[0]} and {rank} were given different parameters or options, and would wait for each "
                    f"other forever: rank {ranks[0]} has {mine}, rank {rank} has {other}; build the model, its groups "
                    f"and the optimizer in the same order on all ranks"
                )
    return None
