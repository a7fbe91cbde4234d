"""Matches saved parameters with those of an optimizer: by name, or by position if one side has no names.

Groups may differ: a parameter keeps its state in any of them. Prefixes of wrappers do not count in names, so that
a compiled or data-parallel model and the bare one have the same state. Names that were made up for parameters without
one say where a parameter was, and count as names only for an optimizer that was built alike.

1. Parameters whose names are equal on both sides belong together.
2. The others belong together by position, group by group, as PyTorch matches them, if one side has no names for them.
3. A parameter with a name that the other side does not know is an error.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from quintic.optim.groups.names import is_made_up, resolve_name

__all__ = ["Match", "adopted_names", "matched"]

_Groups = Sequence[Mapping[str, Any]]

_TO_DO = "; to load what both have, and let the rest begin anew: optimizer.load_state_dict(state_dict, strict=False)"


class Match(NamedTuple):
    """A parameter, and where it is among those that were saved."""

    name: str
    param: Tensor
    group: int
    """Number of its group."""
    saved_group: int
    key: Any
    """Into the saved state."""
    saved_name: str | None
    """The name that it was saved with, which may be made up; None if it is unknown."""


class _Own(NamedTuple):
    name: str
    param: Tensor
    group: int

    @property
    def is_named(self) -> bool:
        return not is_made_up(self.name)


class _Saved(NamedTuple):
    name: str | None
    """None if it is unknown which name the key stands for."""
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

    Unless `strict`, parameters that only one side has are left out, instead of a ValueError that names them.
    """
    own = [
        _Own(name, param, number)
        for number, group in enumerate(groups)
        for name, param in zip(group["param_names"], group["params"], strict=True)
    ]
    saved = _saved_rows(saved_groups, {one.name for one in own})
    by_name = {row.name: row for row in saved if row.name is not None}
    pairs = {one.name: by_name[one.name] for one in own if one.name in by_name}
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
    """Return {made-up name: saved name} of parameters that have no name of their own, as PyTorch takes saved names."""
    taken = {name for group in groups for name in group["param_names"]}
    names: dict[str, str] = {}
    for match in matches:
        name = match.saved_name
        if is_made_up(match.name) and name is not None and not is_made_up(name) and name not in taken:
            names[match.name] = name
            taken.add(name)
    return names


def _saved_rows(saved_groups: _Groups, own: set[str]) -> list[_Saved]:
    rows: list[_Saved] = []
    for number, group in enumerate(saved_groups):
        rows += [_Saved(name, key, number) for name, key in zip(_saved_names(group, own), group["params"], strict=True)]
    # Older versions let several parameters have one name.
    counts = Counter(row.name for row in rows if row.name is not None)
    if any(count > 1 for count in counts.values()):
        return [row._replace(name=None) for row in rows]
    return rows


def _saved_names(saved_group: Mapping[str, Any], own: set[str]) -> Sequence[str | None]:
    """Return the names of a saved group's parameters, in the order of its keys; None for those that are not known."""
    keys: Sequence[Any] = saved_group["params"]
    if any(isinstance(key, str) for key in keys):
        # From torch.distributed.checkpoint, which may have put the keys into this optimizer's order, but not the names.
        # A tied parameter may have another name there than in the optimizer.
        meant = [resolve_name(str(key), own) for key in keys]
        return [name if name in own else None for name in meant]
    names: Sequence[str] | None = saved_group.get("param_names")
    if names is None or len(names) != len(keys):
        return [None] * len(keys)
    return [resolve_name(name, own) for name in names]


def _by_position(
    own: Sequence[_Own], saved: Sequence[_Saved], groups: _Groups, saved_groups: _Groups, example: str
) -> dict[str, _Saved]:
    """Return {name: saved parameter} for the parameters that names did not match, group by group.

    Raises a ValueError if the groups do not fit. `example` is one of the saved names, for its message.
    """
    if _are_named(own, saved):
        if own:
            raise _only_here(own, example)
        if saved:
            raise _only_saved(saved)
        return {}
    own_groups = [[one for one in own if one.group == number] for number in dict.fromkeys(one.group for one in own)]
    of_saved = [[row for row in saved if row.group == number] for number in dict.fromkeys(row.group for row in saved)]
    if list(map(len, own_groups)) != list(map(len, of_saved)):
        raise _grouped_otherwise(groups, saved_groups)
    pairs: dict[str, _Saved] = {}
    for mine, theirs in zip(own_groups, of_saved, strict=True):
        for one, row in zip(mine, theirs, strict=True):
            if one.is_named and row.is_named:
                raise _only_here([one], example)
            pairs[one.name] = row
        if all(one.is_named for one in mine):
            _check_order(mine[0].group, groups[mine[0].group], theirs[0].group, saved_groups)
    return pairs


def _are_named(own: Sequence[_Own], saved: Sequence[_Saved]) -> bool:
    return all(one.is_named for one in own) and all(row.is_named for row in saved)


def _check_order(number: int, group: Mapping[str, Any], saved_number: int, saved_groups: _Groups) -> None:
    """Check that saved names, though it is unknown which keys they are for, are those of the group, in its order."""
    saved_group = saved_groups[saved_number]
    every_name = [name for each in saved_groups for name in each.get("param_names") or ()]
    names, given = list(group["param_names"]), saved_group.get("param_names")
    if given is None or any(map(is_made_up, given)) or len(set(every_name)) < len(every_name):
        return
    saved_names = [resolve_name(name, names) for name in given]
    if saved_names == names:
        return
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
    if not names:
        return ""
    return f", {one} {names[0]}" if len(names) == 1 else f", {several} {len(names)} others such as {names[0]}"


def _grouped_otherwise(groups: _Groups, saved_groups: _Groups) -> ValueError:
    way_out = "without names in both their parameters cannot be told apart; name them, as quintic.param_groups does"
    if len(groups) != len(saved_groups):
        return ValueError(
            f"the saved optimizer has {len(saved_groups)} parameter groups, this one has {len(groups)}, and {way_out}; "
            f"or make the same groups as before, load, and add new ones afterwards: optimizer.add_param_group(...)"
        )
    sides = zip(groups, saved_groups, strict=True)
    sizes = [(len(group["params"]), len(saved["params"])) for group, saved in sides]
    number = next((number for number, (here, there) in enumerate(sizes) if here != there), None)
    if number is None:
        return ValueError(f"the saved optimizer has other parameters in its groups, and {way_out}")
    here, there = sizes[number]
    return ValueError(f"parameter group {number} was saved with {there} parameters, not {here}, and {way_out}")
