"""Compares between ranks how their shared parameters are treated, so that different plans are an error, not a deadlock.

Each rank describes its shared parameters as text, one line each (`described`); ranks exchange a digest, and the texts
only if the digests differ (`difference`).
"""

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
"""(index of a parameter's group, position of the parameter in the group)."""

# Options that must be equal on all ranks, as they decide which collectives run and how large they are.
_COMPARED_OPTIONS = options_affecting("ranks")


def described(
    groups: Sequence[Group], layouts: Sequence[Sequence[Layout | None]]
) -> dict[tuple[int, ...], list[tuple[Place, str]]]:
    """Return, for each set of ranks that share parameters, ((group, index), description) of every such parameter.

    The ranks are in ascending order. Equal plans have equal descriptions on all of the ranks.
    """
    by_ranks: dict[tuple[int, ...], list[tuple[Place, str]]] = {}
    # Updates are sent in the dtype of the products, which "auto" chooses by the CPU's instructions.
    processor = "" if cpu_multiplies_bfloat16() else " without bfloat16 products"
    for number, (group, of_group) in enumerate(zip(groups, layouts, strict=True)):
        # `layouts` has one entry per parameter; None means that no other rank has the parameter.
        options = ", ".join(f"{key}={_option_text(getattr(group, key))}" for key in _COMPARED_OPTIONS)
        for index, layout in enumerate(of_group):
            if layout is not None and this_rank() in layout.ranks:
                name, param = group.param_names[index], group.params[index]
                # Everything that the sizes or the order of messages depend on.
                order = "" if param.is_contiguous() else ", not contiguous"
                kind = f"{param.device.type}{processor if param.device.type == 'cpu' else ''}"
                frozen = ", frozen (requires_grad=False)" if index in group.idle else ""
                text = (
                    f"{name} of shape {layout.shape}, {param.dtype}{order}{frozen}, on ranks {layout.ranks} ({kind}) "
                    f"with {options}"
                )
                by_ranks.setdefault(tuple(sorted(layout.ranks)), []).append(((number, index), text))
    return dict(sorted(by_ranks.items()))


def _option_text(option: object) -> str:
    """Return an option as text that is equal on all ranks; the text of a function would have its address in it."""
    return getattr(option, "__qualname__", type(option).__qualname__) if callable(option) else str(option)


def difference(descriptions: Sequence[str], ranks: tuple[int, ...], group: ProcessGroup) -> str | None:
    """Return an error message about the first parameter that ranks describe differently; None if all are equal.

    `ranks` are the global ranks of `group`; every one must call it. `descriptions` has one text per parameter.
    """
    # The usual case: one digest from each rank, and they are equal.
    digest = hashlib.sha256("\n".join(descriptions).encode()).hexdigest()
    if len(set(all_gather_values(digest, group))) == 1:
        return None
    # The texts themselves, compared with the first rank's.
    everything = all_gather_values(list(descriptions), group)
    first = everything[0]
    for rank, theirs in zip(ranks, everything, strict=True):
        # A rank with fewer parameters differs where its list ends.
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
