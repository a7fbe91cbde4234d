"""Which ranks share the parameters of a group, read from its `comms` or from its `DTensor`s, and what they divide."""

from collections.abc import Sequence

from quintic.optim.comms.collectives import group_ranks, has_process_group, this_rank
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import Layout, layout_of, replicated_layout

__all__ = ["AVERAGING", "DIVIDING", "bound_ranks", "dividing_ranks", "layouts_of", "ranks_of", "travelling"]

DIVIDING = ("sharded", "sharded_sparse")
"""Values of `comms` with which state is divided among ranks."""

AVERAGING = ("replicated", *DIVIDING)
"""Values of `comms` with which the optimizer averages gradients over ranks."""


def layouts_of(group: Group) -> list[Layout | None]:
    """Return for each parameter of a group where its pieces are; None where no other rank has a part in it.

    Raises:
        ValueError: a `DTensor` in a group whose `comms` is for plain tensors, or one with a layout that is unknown.
    """
    layouts: list[Layout | None] = []
    for name, param in zip(group.param_names, group.params, strict=True):
        layout = layout_of(name, param)
        if layout is not None and group.comms != "none":
            raise ValueError(
                f"{name}: a DTensor carries its own layout; leave comms='none' (parameter group {group.number} has "
                f"comms={group.comms!r})"
            )
        if group.comms != "none" and has_process_group():
            layout = replicated_layout(param.shape, group_ranks(group.process_group))
        layouts.append(None if layout is None or len(layout.ranks) == 1 else layout)
    return layouts


def bound_ranks(group: Group) -> tuple[int, ...]:
    """Return the ranks that a user's `process_group` makes decide together though `comms` shares nothing among them.

    They are in ascending order; none if the group says nothing of that.
    """
    if group.comms != "none" or group.process_group is None or not group.params:
        return ()
    ranks = tuple(sorted(group_ranks(group.process_group)))
    return ranks if len(ranks) > 1 and this_rank() in ranks else ()


def ranks_of(layouts: Sequence[Layout | None]) -> tuple[int, ...]:
    """Return the ranks that share the plain parameters of a group with `comms`; none if there is one rank."""
    return next((tuple(sorted(layout.ranks)) for layout in layouts if layout is not None), ())


def dividing_ranks(group: Group, layouts: Sequence[Layout | None]) -> tuple[int, ...]:
    """Return the ranks among which a group's state is divided (`DIVIDING`); none where each rank has it whole."""
    return ranks_of(layouts) if group.comms in DIVIDING else ()


def travelling(group: Group, layouts: Sequence[Layout | None]) -> list[Layout | None]:
    """Return the layout of each parameter whose matrices come together on one of several ranks, None for the others.

    The others are stepped where they are: AdamW's, those that every rank of a mesh holds whole, and those of which
    `comms` brings gradients together instead. Idle ones are not stepped.
    """
    moves = group.rule.orthogonalizes and group.comms in ("none", "averaged")
    divides = group.comms == "averaged"
    return [
        layout
        if moves and layout is not None and (divides or not layout.is_replicated) and index not in group.idle
        else None
        for index, layout in enumerate(layouts)
    ]
