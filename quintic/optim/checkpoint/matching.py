"""Matches saved parameters with an optimizer's: by name, or by position if one side has no names.

A parameter is matched whichever group it is in on either side. Prefixes of wrappers are ignored in names, so that a
compiled or data-parallel model loads the state of the bare one and vice versa. A parameter without a name has a made-up
one that states its group and position; it matches the equal made-up name of an optimizer that was built alike.

1. Parameters with equal names on both sides are matched.
2. If one side has no names for the rest, these are matched by position, group by group, as PyTorch does.
3. Otherwise a remaining parameter is an error, unless `strict` is False.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from quintic.optim.groups.names import is_made_up, resolve_name

__all__ = ["Match", "adopted_names", "matched"]

_Groups = Sequence[Mapping[str, Any]]

# The way out that errors about missing parameters name.
_TO_DO = (
    "; to load the parameters that both have, and start the others without state, use "
    "optimizer.load_state_dict(state_dict, strict=False)"
)


class Match(NamedTuple):
    """A parameter of the optimizer, and the saved one that it is matched with."""

    name: str
    param: Tensor
    group: int
    """Index of its group in the optimizer."""
    saved_group: int
    """Index of its group in the state dict."""
    key: Any
    """Its key in the saved state."""
    saved_name: str | None
    """The name that it was saved with, which may be made up; None if unknown."""


# One parameter on either side, before they are matched.
class _Own(NamedTuple):
    name: str
    param: Tensor
    group: int

    @property
    def is_named(self) -> bool:
        return not is_made_up(self.name)


class _Saved(NamedTuple):
    # None if the name of the parameter with this key is unknown.
    name: str | None
    key: Any
    group: int

    @property
    def is_named(self) -> bool:
        return self.name is not None and not is_made_up(self.name)

    @property
    def saved_name(self) -> str | None:
        return self.key if self.name is None and isinstance(self.key, str) else self.name

    def __str__(self) -> str:
        return self.name or str(self.key)


def matched(groups: _Groups, saved_groups: _Groups, *, strict: bool = True) -> list[Match]:
    """Return the matches of all parameters, in the order of the groups.

    A parameter that only one side has is left out if `strict` is False.

    Raises:
        ValueError: parameters cannot be matched, or only one side has one and `strict` is True; the message names it.
    """
    # List both sides. Saved names are reduced to the optimizer's, without wrappers' prefixes.
    own = [
        _Own(name, param, number)
        for number, group in enumerate(groups)
        for name, param in zip(group["param_names"], group["params"], strict=True)
    ]
    saved = _saved_rows(saved_groups, {one.name for one in own})
    # Rule 1: equal names.
    by_name = {row.name: row for row in saved if row.name is not None}
    pairs = {one.name: by_name[one.name] for one in own if one.name in by_name}
    # Rules 2 and 3 for the rest. Position is only tried where it is needed: named parameters may be left out instead.
    taken = {(row.group, row.key) for row in pairs.values()}
    own_left = [one for one in own if one.name not in pairs]
    saved_left = [row for row in saved if (row.group, row.key) not in taken]
    may_leave_out = not strict and _are_named(own_left, [row._replace(name=row.saved_name) for row in saved_left])
    if not may_leave_out:
        pairs |= _by_position(own_left, saved_left, groups, saved_groups, next(map(str, saved), "none"))
    return [
        Match(one.name, one.param, one.group, row.group, row.key, row.saved_name)
        for one in own
        if (row := pairs.get(one.name)) is not None
    ]


def adopted_names(groups: _Groups, matches: Iterable[Match]) -> dict[str, str]:
    """Return {made-up name: saved name} for parameters that the optimizer has no names for.

    PyTorch, too, takes over the names of a state dict. A name that a parameter already has is not given again.
    """
    taken = {name for group in groups for name in group["param_names"]}
    names: dict[str, str] = {}
    for match in matches:
        name = match.saved_name
        if is_made_up(match.name) and name is not None and not is_made_up(name) and name not in taken:
            names[match.name] = name
            taken.add(name)
    return names


def _saved_rows(saved_groups: _Groups, own: set[str]) -> list[_Saved]:
    """Return the saved parameters in their order, with the names that they have in the optimizer, if known."""
    rows: list[_Saved] = []
    for number, group in enumerate(saved_groups):
        rows += [_Saved(name, key, number) for name, key in zip(_saved_names(group, own), group["params"], strict=True)]
    # Older versions allowed several parameters of one name; then names do not identify parameters.
    counts = Counter(row.name for row in rows if row.name is not None)
    if any(count > 1 for count in counts.values()):
        return [row._replace(name=None) for row in rows]
    return rows


def _saved_names(saved_group: Mapping[str, Any], own: set[str]) -> Sequence[str | None]:
    """Return the names of a saved group's parameters, in the order of its keys; None for an unknown name.

    `own` are the optimizer's names, which saved ones are reduced to.
    """
    keys: Sequence[Any] = saved_group["params"]
    # Keys that are names come from torch.distributed.checkpoint. It may have reordered the keys, but not `param_names`,
    # so only the keys count. A tied parameter's key may be another of its names, unknown to the optimizer.
    if any(isinstance(key, str) for key in keys):
        meant = [resolve_name(str(key), own) for key in keys]
        return [name if name in own else None for name in meant]
    names: Sequence[str] | None = saved_group.get("param_names")
    if names is None or len(names) != len(keys):
        return [None] * len(keys)
    return [resolve_name(name, own) for name in names]


def _by_position(
    own: Sequence[_Own], saved: Sequence[_Saved], groups: _Groups, saved_groups: _Groups, example: str
) -> dict[str, _Saved]:
    """Match the parameters that are left by position, group by group; return {name: saved parameter}.

    `own` and `saved` are the parameters without a match; `example` is a saved name for messages. A ValueError if they
    have names that differ, or the groups differ in size.
    """
    # All have names, and no name is on both sides.
    if _are_named(own, saved):
        if own:
            raise _only_here(own, example)
        if saved:
            raise _only_saved(saved)
        return {}
    # The same number of groups, with the same number of parameters left in each.
    own_groups = [[one for one in own if one.group == number] for number in dict.fromkeys(one.group for one in own)]
    of_saved = [[row for row in saved if row.group == number] for number in dict.fromkeys(row.group for row in saved)]
    if list(map(len, own_groups)) != list(map(len, of_saved)):
        raise _grouped_otherwise(groups, saved_groups)
    # Pair them in order. Two names at one position are different, or they would have been matched.
    pairs: dict[str, _Saved] = {}
    for mine, theirs in zip(own_groups, of_saved, strict=True):
        for one, row in zip(mine, theirs, strict=True):
            if one.is_named and row.is_named:
                raise _only_here([one], example)
            pairs[one.name] = row
        # The saved names may be known without it being known which key each belongs to.
        if all(one.is_named for one in mine):
            _check_order(mine[0].group, groups[mine[0].group], theirs[0].group, saved_groups)
    return pairs


def _are_named(own: Sequence[_Own], saved: Sequence[_Saved]) -> bool:
    return all(one.is_named for one in own) and all(row.is_named for row in saved)


def _check_order(number: int, group: Mapping[str, Any], saved_number: int, saved_groups: _Groups) -> None:
    """Raise a ValueError if a saved group has other names, or another order, than the group at its position."""
    saved_group = saved_groups[saved_number]
    # Made-up or repeated names prove nothing.
    every_name = [name for each in saved_groups for name in each.get("param_names") or ()]
    names, given = list(group["param_names"]), saved_group.get("param_names")
    if given is None or any(map(is_made_up, given)) or len(set(every_name)) < len(every_name):
        return
    saved_names = [resolve_name(name, names) for name in given]
    if saved_names == names:
        return
    # Either a name is missing, or the order is another.
    missing = next((name for name in names if name not in saved_names), None)
    if missing is not None:
        raise ValueError(f"parameter group {number}: {missing} is not in the saved optimizer state{_TO_DO}")
    raise ValueError(
        f"parameter group {number} was saved with its parameters in another order, {saved_names[0]} first, and under "
        f"keys such as {saved_group['params'][0]} that are not their names; name the parameters of this optimizer as "
        f"model.named_parameters() does, or give them in the saved order"
    )


def _only_here(missing: Sequence[_Own], example: str) -> ValueError:
    return ValueError(
        f"{missing[0].name} is not in the saved optimizer state, whose names are like {example}"
        f"{_others([one.name for one in missing[1:]], 'nor is', 'nor are')}{_TO_DO}; if modules were only renamed, "
        f"write their new names into 'param_names' of state_dict['param_groups']"
    )


def _only_saved(unknown: Sequence[_Saved]) -> ValueError:
    return ValueError(
        f"{unknown[0]} is in the saved optimizer state, and is not a parameter of this optimizer"
        f"{_others(list(map(str, unknown[1:])), 'nor is', 'nor are')}{_TO_DO}; if it belongs to the model, give it to "
        f"the optimizer before loading: optimizer.add_param_group(...)"
    )


def _others(names: Sequence[str], one: str, several: str) -> str:
    """Return the end of a sentence about one parameter that mentions the other `names`."""
    if not names:
        return ""
    return f", {one} {names[0]}" if len(names) == 1 else f", {several} {len(names)} others such as {names[0]}"


def _grouped_otherwise(groups: _Groups, saved_groups: _Groups) -> ValueError:
    """Return the error for groups of other sizes; its message has the first difference: number, then sizes."""
    way_out = "without names in both their parameters cannot be told apart; name them, as quintic.param_groups does"
    if len(groups) != len(saved_groups):
        return ValueError(
            f"the saved optimizer has {len(saved_groups)} parameter groups, this one has {len(groups)}, and {way_out}; "
            f"or make the same groups as before, load, and add new ones afterwards: optimizer.add_param_group(...)"
        )
    # Equal numbers of groups: name the first one with another number of parameters.
    sides = zip(groups, saved_groups, strict=True)
    sizes = [(len(group["params"]), len(saved["params"])) for group, saved in sides]
    number = next((number for number, (here, there) in enumerate(sizes) if here != there), None)
    if number is None:
        return ValueError(f"the saved optimizer has other parameters in its groups, and {way_out}")
    here, there = sizes[number]
    return ValueError(f"parameter group {number} was saved with {there} parameters, not {here}, and {way_out}")
