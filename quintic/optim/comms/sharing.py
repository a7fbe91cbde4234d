"""Finds the ranks that share the parameters of a group, from its option `comms` or its `DTensor`s.

| `comms`            | parameters                | gradients are averaged by | state        | orthogonalised by  |
|--------------------|---------------------------|---------------------------|--------------|--------------------|
| "none"             | plain, of this rank       | not at all                | this rank    | this rank          |
| "none"             | `DTensor`s                | FSDP2, tensor parallelism | as `DTensor` | owners, if sharded |
| "averaged"         | plain, equal on all ranks | DDP or the user           | all ranks    | owners             |
| "replicated"       | plain, equal on all ranks | the optimizer, in place   | all ranks    | all ranks          |
| "sharded(_sparse)" | plain, equal on all ranks | the optimizer             | sharded      | owners             |
"""

from collections.abc import Sequence

from quintic.optim.comms.collectives import group_ranks, has_process_group, this_rank
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Layout, layout_of, replicated_layout

__all__ = [
    "AVERAGING",
    "SHARDED_MODES",
    "gather_layouts",
    "layouts_of",
    "ranks_of",
    "sharding_ranks",
    "user_linked_ranks",
]

SHARDED_MODES = ("sharded", "sharded_sparse")
"""Values of `comms` with which state is sharded among ranks."""

AVERAGING = ("replicated", *SHARDED_MODES)
"""Values of `comms` with which the optimizer averages gradients over ranks."""


def layouts_of(group: Group) -> list[Layout | None]:
    """Return the layout of each parameter of a group; None for a parameter that no other rank has a piece or copy of.

    Raises:
        ValueError: a `DTensor` in a group whose `comms` is for plain tensors, or one with unknown placements.
    """
    layouts: list[Layout | None] = []
    for name, param in zip(group.param_names, group.params, strict=True):
        layout = layout_of(name, param)  # None for a plain tensor
        if layout is not None and group.comms != "none":
            raise ValueError(
                f"{name}: a DTensor carries its own layout; leave comms='none' (parameter group {group.number} has "
                f"comms={group.comms!r})"
            )
        # A plain tensor with `comms`: every rank of the group has all of it.
        if group.comms != "none" and has_process_group():
            layout = replicated_layout(param.shape, group_ranks(group.process_group))
        # A mesh or process group of one rank is the same as none.
        layouts.append(None if layout is None or len(layout.ranks) == 1 else layout)
    return layouts


def user_linked_ranks(group: Group) -> tuple[int, ...]:
    """Return the ranks, in ascending order, that a user links by `process_group` although `comms` is "none".

    They skip steps and clip as one, like ranks that share parameters. Empty if the group links none.
    """
    # With other values of `comms`, the process group says which ranks share the parameters.
    if group.comms != "none" or group.process_group is None or not group.params:
        return ()
    ranks = tuple(sorted(group_ranks(group.process_group)))
    return ranks if len(ranks) > 1 and this_rank() in ranks else ()


def ranks_of(layouts: Sequence[Layout | None]) -> tuple[int, ...]:
    """Return the ranks that share a group's plain parameters, in ascending order; empty if there is one rank."""
    # All of them have the same ranks.
    return next((tuple(sorted(layout.ranks)) for layout in layouts if layout is not None), ())


def sharding_ranks(group: Group, layouts: Sequence[Layout | None]) -> tuple[int, ...]:
    """Return the ranks that a group's state is sharded over, in ascending order; empty if each rank has it whole."""
    return ranks_of(layouts) if group.comms in SHARDED_MODES else ()


def gather_layouts(group: Group, layouts: Sequence[Layout | None]) -> list[Layout | None]:
    """Return the layout of each parameter whose matrices are sent to an owner; None for the others.

    The others are stepped where they are: AdamW's parameters, `DTensor`s that every rank of the mesh holds whole, and
    parameters whose gradients `comms` averages ("replicated", "sharded"). Idle (frozen) ones are not stepped.
    """
    moves = group.rule.orthogonalizes and group.comms in ("none", "averaged")
    # With "averaged" every rank holds all matrices, but ranks divide the work of orthogonalising them.
    divides = group.comms == "averaged"
    return [
        layout
        if moves and layout is not None and (divides or not layout.is_replicated) and index not in group.idle
        else None
        for index, layout in enumerate(layouts)
    ]
