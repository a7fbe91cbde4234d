"""Loads saved state, and the hyperparameters that go with it.

PyTorch's own `Optimizer.load_state_dict` casts state to the dtype of the parameter, which would turn float32 momentum
of bf16 weights into bf16; here values are copied into the existing state, and a value that does not fit is an error.

Phases of `load_state`; only the last one changes anything:
    match      saved parameters with the optimizer's (`matching.py`)
    compare    saved tensors with the state of each parameter: names, shapes, dtypes; `masters.py` where masters differ
    options    restored for each group, and checked as if a user had set them
    copy       tensors, options, and the user's own entries

A group that was saved with the same parameters gets its saved options. If parameters were grouped differently, groups
here and saved groups that have parameters in common, directly or through other groups, are taken as a set: an option is
restored if all saved groups of the set agree on it, and all groups here do, too; otherwise groups keep their values. So
the learning rate that a scheduler had reached comes back, and a weight decay that a new rule gives to some parameters
stays.

With `strict=False` a parameter may have another view or algorithm than it was saved with (`changes.py`). A saved group
hands no options to parameters of another algorithm, and no `lr_multipliers` to parameters of another view.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import replace
from operator import le
from typing import Any

import torch
from torch import Tensor

from quintic.optim.checkpoint.changes import Change, change_error, changed_option, state_after, warn_of_changes
from quintic.optim.checkpoint.masters import (
    in_saved_form,
    lacks_master,
    named_masters,
    replace_master,
    warn_of_lost_masters,
    without_own,
)
from quintic.optim.checkpoint.matching import Match, adopted_names, matched
from quintic.optim.groups.group import Group
from quintic.optim.groups.names import is_made_up, resolve_name
from quintic.optim.groups.options import OPTIONS, is_old_option
from quintic.optim.groups.ties import ties_of
from quintic.optim.layout.layouts import local_tensor
from quintic.optim.numeric.bf16_state import StateDtype
from quintic.optim.rules.rule import PARAM_SHAPED_STATE, STATE_KEYS
from quintic.optim.state.placement import check_conversion, has_packed_state, init_state
from quintic.optim.state.shards import ShardedState, shard_of_saved, sharded_parameters
from quintic.optim.state.state import MASTER_KEYS, copy_, piece_of, saved_tensor, separate_sources

__all__ = ["check_is_state_dict", "load_state"]

_Groups = Sequence[Mapping[str, Any]]

# Keys that older versions saved with every group and that have no effect on the bits.
_NO_OPTIONS = ("not_of_groups", "transport")

# Loading keeps the parameters of a group, and the options that belong to a run and not to a trajectory.
_NOT_RESTORED = frozenset(
    ("params", "param_names", *_NO_OPTIONS, *(name for name, option in OPTIONS.items() if option.saved != "restored"))
)

# The learning rate, and the values that schedulers compute it from: all of them are restored or none.
_RATE_KEYS = ("lr", "adamw_lr_ratio", "initial_lr", "max_lr", "min_lr", "swa_lr")

# Dtype of a mantissa -> integer dtypes that hold every one.
_MANTISSA_DTYPES = {
    torch.uint16: (torch.uint16, torch.int32, torch.int64),
    torch.uint8: (torch.uint8, torch.int32, torch.int64),
}

# An option that only the groups of another optimizer have -> that optimizer.
_FOREIGN = {"amsgrad": "torch.optim.AdamW", "ns_steps": "torch.optim.Muon"}

# Stands for an option that a group does not have.
_MISSING = object()


def load_state(
    groups: Sequence[dict[str, Any]],
    state: MutableMapping[Any, Any],
    typed: Sequence[Group],
    state_dict: Mapping[str, Any],
    check: Callable[[int, Mapping[str, Any]], None],
    *,
    strict: bool = True,
) -> tuple[set[Tensor], dict[str, str]]:
    """Copy saved values into state and hyperparameters; nothing changes unless everything fits.

    Returns the parameters without saved state, whose own state is dropped, and for parameters without a name of their
    own {made-up name: saved name}.

    Saved tensors are whole, and each rank takes its piece of them, or are `DTensor`s whose local piece is the one that
    the rank needs. Nothing is communicated. The user's own entries of a state come back as they were saved, tensors on
    the parameter's device; saved entries for keys other than parameters replace the optimizer's.

    Args:
        groups: the optimizer's parameter groups, changed.
        state: the optimizer's state, changed.
        typed: the same groups, typed.
        state_dict: the saved state.
        check: called with the number and new options of each group; raises an error if they do not fit.
        strict: whether it is an error if only one side has a parameter, or the sides have different views or algorithms
            for it; see the head of this module.

    Raises:
        ValueError: something does not fit; the message names the parameter or the option.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"a state dict has 'state' and 'param_groups', this one has {sorted(map(str, state_dict))}")
    saved_groups, saved_states = state_dict["param_groups"], state_dict["state"]
    _check_is_ours(saved_groups)
    if not saved_groups or any("params" not in group for group in saved_groups):
        raise ValueError("the saved optimizer state has no parameter groups, or one of them has no 'params'")
    # Match parameters.
    matches = matched(groups, saved_groups, strict=strict)
    sharded, frozen = sharded_parameters(typed), state_dict.get("frozen") or ()
    copies: list[tuple[Tensor, Tensor]] = []  # (target, source)
    made: dict[Tensor, dict[str, Tensor]] = {}  # new state of parameters that have none here
    masters: dict[Tensor, Mapping[str, Tensor]] = {}  # state with the master in its saved form, if that is another
    lost: dict[str, list[str]] = {}  # {option master: parameters that were saved with it, and are loaded without}
    changes: dict[str, tuple[Change, list[str], list[str]]] = {}  # {name: (change, state loaded, state begun anew)}
    named = named_masters(saved_groups)
    matched_params = {match.param for match in matches}
    without = {param for group in groups for param in group["params"] if param not in matched_params}
    # Compare the saved state of each parameter with its own, and collect the copies.
    for name, param, number, saved_number, saved_key, _ in matches:
        change = changed_option(groups[number], saved_groups[saved_number])
        if change is not None and strict:
            raise change_error(name, number, change)
        if change is not None:
            changes[name] = change, [], []
        saved = saved_states.get(saved_key)
        if not isinstance(saved, Mapping | None):
            raise TypeError(f"{name}: the saved state is a {type(saved).__name__}, and must be a mapping")
        if saved is None or saved.keys().isdisjoint(STATE_KEYS):
            # No state is right for a parameter that is or was frozen. PyTorch's distributed checkpoints, whose keys are
            # names, check themselves that no state is missing.
            is_lost = param.requires_grad and saved_key not in frozen and not isinstance(saved_key, str)
            if strict and is_lost:
                raise ValueError(
                    f"{name}: the saved optimizer holds no state for this parameter; if it was frozen when the state "
                    f"was saved, or is to begin anew, load with optimizer.load_state_dict(state_dict, strict=False)"
                )
            without.add(param)
            continue
        saved = without_own(name, saved, named)
        if lacks_master(param, typed[number], saved, saved_groups[saved_number]):
            lost.setdefault(saved_groups[saved_number]["master"], []).append(name)
        own = state.get(param, {})
        shards = sharded[param].local if param in sharded else None
        # Outside inference mode, since later steps could not change its tensors.
        with torch.inference_mode(False), torch.no_grad():
            # The parameter is frozen here and has no state: make some, to keep saved values for when it is unfrozen.
            if own.keys().isdisjoint(STATE_KEYS):
                own = made[param] = init_state(param, typed[number], shards)
            converted = in_saved_form(name, param, typed[number], own, saved, shards, strict=strict)
        _check_is_not_cast(name, param, typed[number], own, saved, saved_groups[saved_number].get("state_dtype"))
        if converted is not None:
            own, saved = converted
            masters[param] = own
        if change is not None:
            own, anew, saved = state_after(typed[number].rule, own, saved)
            changes[name] = change, sorted(own), sorted(anew)
            copies += [(local_tensor(value), torch.zeros((), dtype=value.dtype)) for value in anew.values()]
        copies += _matched_state(name, param, own, saved, saved_key, sharded.get(param))
    # Restore options, on copies of the groups, and check them; renamed parameters may be named in `tied_to`.
    names = adopted_names(groups, matches)
    changed_options = {name: option for name, ((option, *_), *_) in changes.items()}
    restored = _restored_options(groups, saved_groups, matches, changed_options)
    renamed = names | {match.saved_name: names.get(match.name, match.name) for match in matches if match.saved_name}
    try:
        complete = [{**group, **options} for group, options in zip(groups, restored, strict=True)]
        for number, group in enumerate(complete):
            group["param_names"] = [names.get(name, name) for name in group["param_names"]]
            if group.get("tied_to") is not None:
                head, transposed = group["tied_to"]
                group["tied_to"] = (renamed.get(head, head), transposed)
            check(number, group)
        ties_of([Group.of(number, group) for number, group in enumerate(complete)])
    except (TypeError, ValueError) as error:
        raise ValueError(f"the saved options do not fit: {error}") from None
    # The user's own entries: under keys of their own, and beside the optimizer's in a parameter's state. `same` makes
    # `deepcopy` keep parameters that values refer to.
    keys = {key for group in saved_groups for key in group["params"]}
    same = {id(param): param for group in groups for param in group["params"]}
    own_entries = {key: deepcopy(value, same) for key, value in saved_states.items() if key not in keys}
    own_values = {match.param: _users_values(match.param, saved_states.get(match.key) or {}) for match in matches}
    # Everything fits: from here on the optimizer changes, unless one of these warnings is an error.
    warn_of_changes(changes, stacklevel=3)
    warn_of_lost_masters(lost, stacklevel=3)
    for target, source in separate_sources(copies):
        copy_(target, source)
    for param in without:
        for key in STATE_KEYS & state.get(param, {}).keys():
            del state[param][key]
    for key in [key for key in state if not isinstance(key, Tensor)]:
        del state[key]
    for param, values in (*made.items(), *own_values.items()):
        if values:
            state.setdefault(param, {}).update(values)
    for param, loaded in masters.items():
        replace_master(state[param], loaded)
    state.update(own_entries)
    for group, other in zip(groups, complete, strict=True):
        group.update(other)
    return without, names


def check_is_state_dict(state_dict: object) -> None:
    """Raise a TypeError if `state_dict`, its state or one of its groups has the wrong type; keys may be missing."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"the state dict is a {type(state_dict).__name__}: give what optimizer.state_dict() returned")
    for key, kind in (("state", Mapping), ("param_groups", Sequence)):
        if key in state_dict and (not isinstance(state_dict[key], kind) or isinstance(state_dict[key], str)):
            what = "a mapping" if kind is Mapping else "a list of parameter groups"
            raise TypeError(f"the state dict's {key!r} is a {type(state_dict[key]).__name__}, and must be {what}")
    for number, group in enumerate(state_dict.get("param_groups", ())):
        if not isinstance(group, Mapping):
            raise TypeError(f"the state dict's parameter group {number} is a {type(group).__name__}, not a mapping")
        for key in group.keys() & {"params", "param_names"}:
            if not isinstance(group[key], Sequence if key == "params" else Sequence | None):
                what = f"the state dict's parameter group {number} has {type(group[key]).__name__} as {key!r}"
                raise TypeError(f"{what}, and must have a list")


def _check_is_ours(saved_groups: _Groups) -> None:
    """Raise a ValueError if the groups were saved by another optimizer; it says how to import them."""
    if not saved_groups or any("algorithm" in group or "view" in group for group in saved_groups):
        return
    keys = set().union(*saved_groups)
    which = next((name for key, name in _FOREIGN.items() if key in keys), "another optimizer")
    source = '"torch"' if which in _FOREIGN.values() else "..."
    raise ValueError(
        f"this is the state of {which}, not of quintic.Muon; import it with quintic.interchange.import_state("
        f"optimizer, state_dict, source={source}, names=...), where names has None for parameters that another "
        f"algorithm steps now, see docs/how-to/import-state.md"
    )


def _restored_options(
    groups: _Groups, saved_groups: _Groups, matches: Sequence[Match], changed: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return for each group the saved options that it gets, see the head of this module.

    `changed` has the option that differs, algorithm, view or rule, of parameters that were saved with another one.
    """
    matches = [match for match in matches if changed.get(match.name) != "algorithm"]
    other_views = {match.group for match in matches if changed.get(match.name) == "view"}
    saved = [_options_of(saved_group) for saved_group in saved_groups]
    restored: list[dict[str, Any]] = [{} for _ in groups]
    for own_numbers, saved_numbers in _related(groups, saved_groups, matches):
        own = [groups[number] for number in own_numbers]
        theirs = [saved[number] for number in saved_numbers if saved[number]]
        # One group on both sides: all options. Otherwise those on which all agree.
        for number in own_numbers if theirs else ():
            restored[number] = deepcopy(theirs[0] if len(own) == len(theirs) == 1 else _agreed(own, theirs))
    # One for each matrix, and the matrices are others now.
    for number in other_views:
        restored[number].pop("lr_multipliers", None)
    return restored


def _related(groups: _Groups, saved_groups: _Groups, matches: Sequence[Match]) -> Iterator[tuple[set[int], set[int]]]:
    """Yield (numbers of groups, numbers of saved groups) that are connected by common parameters.

    These are the connected components of the graph whose edges are pairs of a group and a saved group.
    """
    pairs = {(match.group, match.saved_group) for match in matches}
    # torch.distributed.checkpoint rebuilds the saved groups to be like these, but keeps their saved lists of names,
    # which tell the groups that the parameters were saved in.
    numbers = {match.name: match.group for match in matches}
    for saved_number, saved_group in enumerate(saved_groups):
        given = [name for name in saved_group.get("param_names") or () if not is_made_up(name)]
        names = [resolve_name(name, numbers) for name in given]
        pairs |= {(numbers[name], saved_number) for name in names if name in numbers}
    # Empty groups can only be matched by their numbers.
    sides = zip(groups, saved_groups, strict=False)
    pairs |= {(n, n) for n, (one, other) in enumerate(sides) if not one["params"] and not other["params"]}
    # Take a pair, and add the pairs that touch it until there are no more.
    while pairs:
        own, saved = ({number} for number in pairs.pop())
        while linked := {pair for pair in pairs if pair[0] in own or pair[1] in saved}:
            pairs -= linked
            own |= {pair[0] for pair in linked}
            saved |= {pair[1] for pair in linked}
        yield own, saved


def _options_of(saved_group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a saved group that may be restored, in this version's form."""
    options = {
        key: _with_tuples(value) if key in OPTIONS else value
        for key, value in saved_group.items()
        if key not in _NOT_RESTORED and not is_old_option(key, value)
    }
    # Versions without `adamw_lr_ratio` saved each group's own learning rate, which a ratio of None means.
    return {"adamw_lr_ratio": None, **options} if "lr" in options else options


def _agreed(own: _Groups, saved: _Groups) -> dict[str, Any]:
    """Return the saved options that are equal in all saved groups, and whose values here are equal in all groups."""
    # Options that are restored together; all keys of the learning rate are one unit.
    units = [_RATE_KEYS, *((key,) for key in saved[0] if key not in _RATE_KEYS)]
    agreed: dict[str, Any] = {}
    for keys in units:
        if all(_is_same([group.get(key, _MISSING) for group in side]) for side in (own, saved) for key in keys):
            agreed |= {key: saved[0][key] for key in keys if key in saved[0]}
    return agreed


def _is_same(values: Sequence[Any]) -> bool:
    try:
        return all(value is values[0] or bool(value == values[0]) for value in values)
    except (RuntimeError, ValueError):  # arrays and tensors have no single truth value; users may keep them in groups
        return False


def _check_is_not_cast(
    name: str,
    param: Tensor,
    group: Group,
    own: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    state_dtype: StateDtype,
) -> None:
    """Reject averages of 8 bits that were cast as if their bytes were numbers, or numbers cast to bytes.

    `torch.distributed.checkpoint.load` does so where it reads into the state of an optimizer with another dtype, so a
    cast average has the dtype of this optimizer's. In any other dtype it is as it was saved, for another view or order
    in memory.
    """
    packed = state_dtype == "int8" and has_packed_state(param, replace(group, state_dtype=state_dtype))
    for key in group.rule.packed_state.keys() & saved.keys() & own.keys():
        dtype = saved_tensor(saved[key], f"{name}: saved {key}").dtype
        if dtype == own[key].dtype and dtype.is_floating_point == packed:
            raise ValueError(
                f"{name}: saved {key} is {dtype}, and the checkpoint is of state_dtype={state_dtype!r}: "
                f"torch.distributed.checkpoint.load has cast it to the dtype of this optimizer's state; set "
                f"state_dtype={state_dtype!r} before loading, and change it after"
            )


def _matched_state(
    name: str,
    param: Tensor,
    state: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    saved_key: Any,
    sharded: ShardedState | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tensor of this rank's state, saved tensor to copy into it) of a parameter; a ValueError if one misfits."""
    needed = {key: state[key] for key in state if key in STATE_KEYS}  # other keys are the user's
    if saved.keys() & STATE_KEYS != needed.keys():
        raise ValueError(
            f"{name}: saved state has {sorted(saved)}, this optimizer needs {sorted(needed)}; make it with the update "
            f"rule of the saved one, for weights of the dtype they had, and change them after loading"
        )
    for key, target in needed.items():
        what = f"{name}: saved {key}"
        source = saved_tensor(saved[key], what)
        # Sharded state: this rank owns ranges of the parameter's memory.
        if sharded is not None and key in PARAM_SHAPED_STATE:
            yield from shard_of_saved(what, param, sharded, target, source)
            continue
        if source.shape != target.shape:
            message = f"{what} has shape {tuple(source.shape)}, this optimizer needs {tuple(target.shape)}"
            if source.ndim == target.ndim and all(map(le, source.shape, target.shape)):
                message += (
                    "; if it is the piece of one rank, save whole tensors or DTensors instead, as "
                    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict does"
                )
            raise ValueError(
                f"{message}; if the parameter has another shape now, let it begin anew: "
                f"del state_dict['state'][{saved_key!r}], then optimizer.load_state_dict(state_dict, strict=False)"
            )
        if key in MASTER_KEYS and source.dtype not in _MANTISSA_DTYPES.get(target.dtype, (source.dtype,)):
            raise ValueError(f"{what} is {source.dtype}, and must be {target.dtype}: other types do not keep its bits")
        if key not in MASTER_KEYS:
            check_conversion(what, param, source.dtype, target.dtype)
        # This rank's piece of a whole tensor or DTensor; None if it holds nothing.
        piece = piece_of(what, target, source)
        if piece is not None:
            yield local_tensor(target), piece


def _users_values(param: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the user's own entries in a saved state, tensors on the parameter's device."""
    device = local_tensor(param).device
    return {key: _copy_of(value, device) for key, value in saved.items() if key not in STATE_KEYS}


def _copy_of(value: Any, device: torch.device) -> Any:
    return value.to(device, copy=True) if isinstance(value, Tensor) else deepcopy(value)


def _with_tuples(value: Any) -> Any:
    """Return a hyperparameter with lists turned back into tuples: some checkpoints save tuples as lists."""
    return tuple(map(_with_tuples, value)) if isinstance(value, list | tuple) else value
