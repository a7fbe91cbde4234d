"""Loads saved state, and the hyperparameters that go with it.

PyTorch's own `Optimizer.load_state_dict` casts state to the dtype of the parameter, which would turn float32 momentum
of bf16 weights into bf16; here values are copied into the state that exists, and a value that does not fit is an error.
`matching.py` decides which saved parameter is which.

A group that was saved with the same parameters gets the hyperparameters it was saved with. Where parameters were
grouped otherwise, an option comes back if all saved groups that share parameters, directly or through others, agree
about it, and so do these groups here; else groups keep what they have. So a rule that gives some parameters another
weight decay holds, and the learning rate that a scheduler had come to does, too.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from operator import le
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintic.optim.checkpoint.matching import Match, adopted_names, matched
from quintic.optim.groups.names import is_made_up, resolve_name
from quintic.optim.groups.options import OPTIONS, Group, is_old_option
from quintic.optim.groups.ties import ties_of
from quintic.optim.layout.layouts import local_tensor
from quintic.optim.rules.table import PARAM_SHAPED_STATE, STATE_KEYS
from quintic.optim.state.parts import DividedState, divided_parameters, part_of_saved
from quintic.optim.state.placement import init_state
from quintic.optim.state.state import CODE_KEYS, copy_, piece_of, saved_tensor

__all__ = ["Loaded", "check_is_state_dict", "load_state"]

_Groups = Sequence[Mapping[str, Any]]

# What a group is, as opposed to how it is stepped: loading must not change these.
_IDENTITY_KEYS = ("params", "param_names", "algorithm", "view")

# Where the work is done and in how much memory: of this run, not of the one that was saved.
_PLACE_KEYS = ("comms", "replicas", "offload", "max_workspace_bytes", "state_dtype")

# What older versions saved with every group. How messages travelled made no difference to the bits.
_NO_OPTIONS = ("not_of_groups", "transport")

_NOT_RESTORED = frozenset((*_IDENTITY_KEYS, *CODE_KEYS, *_PLACE_KEYS, *_NO_OPTIONS))

# The learning rate, and what schedulers compute it from: these come back together or not at all.
_RATE_KEYS = ("lr", "adamw_lr_ratio", "initial_lr", "max_lr", "min_lr", "swa_lr")

# Integers that hold every mantissa.
_MANTISSA_DTYPES = (torch.uint16, torch.int32, torch.int64)

# Options by which the groups of other optimizers are known.
_FOREIGN = {"amsgrad": "torch.optim.AdamW", "ns_steps": "torch.optim.Muon"}

# Stands for an option that a group does not have.
_MISSING = object()


class Loaded(NamedTuple):
    """Which parameters got no state, and which got a name, from a state dict."""

    without: set[Tensor]
    """Parameters without saved state: their own was dropped."""
    names: dict[str, str]
    """Made-up name -> saved name, of parameters that had none of their own."""


def load_state(
    groups: Sequence[dict[str, Any]],
    state: MutableMapping[Any, Any],
    typed: Sequence[Group],
    state_dict: Mapping[str, Any],
    check: Callable[[int, Mapping[str, Any]], None],
    *,
    strict: bool = True,
) -> Loaded:
    """Copy saved values into state and hyperparameters; nothing changes unless everything fits.

    State may be saved as whole tensors, of which each rank takes its piece, or as `DTensor`s of which each rank holds
    what it needs. Nothing is communicated. Keys of the user's own come back as they were saved, tensors on the device
    of the parameter; those that belong to no parameter replace the optimizer's own. `typed` are the same groups.
    `check` raises an error if a group, given with its number, has options that do not fit. A ValueError names the
    parameter that does not fit. Unless `strict`, parameters that only one side has are left out.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"a state dict has 'state' and 'param_groups', this one has {sorted(map(str, state_dict))}")
    saved_groups, saved_states = state_dict["param_groups"], state_dict["state"]
    _check_is_ours(saved_groups)
    if not saved_groups or any("params" not in group for group in saved_groups):
        raise ValueError("the saved optimizer state has no parameter groups, or one of them has no 'params'")
    matches = matched(groups, saved_groups, strict=strict)
    divided, frozen = divided_parameters(typed), state_dict.get("frozen") or ()
    copies: list[tuple[Tensor, Tensor]] = []
    made: dict[Tensor, dict[str, Tensor]] = {}
    matched_params = {match.param for match in matches}
    without = {param for group in groups for param in group["params"] if param not in matched_params}
    for name, param, number, saved_number, saved_key, _ in matches:
        group, saved_group = groups[number], saved_groups[saved_number]
        for key in ("algorithm", "view"):
            if key in saved_group and str(saved_group[key]) != str(group[key]):
                raise ValueError(
                    f"{name} was saved with {key}={saved_group[key]!s}, parameter group {number} has {group[key]!s}"
                )
        saved = saved_states.get(saved_key)
        if saved is None or saved.keys().isdisjoint(STATE_KEYS):
            # PyTorch's distributed checkpoints, whose keys are names, check by themselves whether all state is there.
            is_lost = param.requires_grad and saved_key not in frozen and not isinstance(saved_key, str)
            if strict and is_lost:
                raise ValueError(
                    f"{name}: the saved optimizer holds no state for this parameter; if it was frozen when the state "
                    f"was saved, or is to begin anew, load with optimizer.load_state_dict(state_dict, strict=False)"
                )
            without.add(param)
            continue
        own = state.get(param, {})
        if own.keys().isdisjoint(STATE_KEYS):  # it is frozen here
            parts = divided[param].own if param in divided else None
            # Tensors made in inference mode could not be stepped outside of it.
            with torch.inference_mode(False), torch.no_grad():
                own = made[param] = init_state(param, typed[number], parts)
        copies += _matched_state(name, param, own, saved, saved_key, divided.get(param))
    names = adopted_names(groups, matches)
    restored = _restored_options(groups, saved_groups, matches)
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
    keys = {key for group in saved_groups for key in group["params"]}
    # Such values may have parameters as keys, which a copy of the values must not copy.
    same = {id(param): param for group in groups for param in group["params"]}
    of_none = {key: deepcopy(value, same) for key, value in saved_states.items() if key not in keys}
    of_users = {match.param: _users_values(match.param, saved_states.get(match.key) or {}) for match in matches}
    for target, source in copies:
        copy_(target, source)
    for param in without:
        for key in STATE_KEYS & state.get(param, {}).keys():
            del state[param][key]
    for key in [key for key in state if not isinstance(key, Tensor)]:
        del state[key]
    for param, values in (*made.items(), *of_users.items()):
        if values:
            state.setdefault(param, {}).update(values)
    state.update(of_none)
    for group, other in zip(groups, complete, strict=True):
        group.update(other)
    return Loaded(without, names)


def check_is_state_dict(state_dict: object) -> None:
    """Raise a TypeError if a value, or a part of it, is nothing that a state dict could be; keys are not looked at."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"the state dict is a {type(state_dict).__name__}: give what optimizer.state_dict() returned")
    for key, kind in (("state", Mapping), ("param_groups", Sequence)):
        if key in state_dict and (not isinstance(state_dict[key], kind) or isinstance(state_dict[key], str)):
            what = "a mapping" if kind is Mapping else "a list of parameter groups"
            raise TypeError(f"the state dict's {key!r} is a {type(state_dict[key]).__name__}, and must be {what}")
    for number, group in enumerate(state_dict.get("param_groups", ())):
        if not isinstance(group, Mapping):
            raise TypeError(f"the state dict's parameter group {number} is a {type(group).__name__}, not a mapping")


def _check_is_ours(saved_groups: _Groups) -> None:
    if not saved_groups or any("algorithm" in group or "view" in group for group in saved_groups):
        return
    keys = set().union(*saved_groups)
    which = next((name for key, name in _FOREIGN.items() if key in keys), "another optimizer")
    source = '"torch"' if which in _FOREIGN.values() else "..."
    raise ValueError(
        f"this is the state of {which}, not of quintic.Muon; take it over with quintic.interchange.import_state("
        f"optimizer, state_dict, source={source}, names=...), where names has None for parameters that another "
        f"algorithm steps now, see docs/how-to/import-state.md"
    )


def _restored_options(groups: _Groups, saved_groups: _Groups, matches: Sequence[Match]) -> list[dict[str, Any]]:
    saved = [_options_of(saved_group) for saved_group in saved_groups]
    restored: list[dict[str, Any]] = [{} for _ in groups]
    for own_numbers, saved_numbers in _related(groups, saved_groups, matches):
        own = [groups[number] for number in own_numbers]
        theirs = [saved[number] for number in saved_numbers if saved[number]]
        for number in own_numbers if theirs else ():
            restored[number] = deepcopy(theirs[0] if len(own) == len(theirs) == 1 else _agreed(own, theirs))
    return restored


def _related(groups: _Groups, saved_groups: _Groups, matches: Sequence[Match]) -> Iterator[tuple[set[int], set[int]]]:
    """Yield sets of groups and of saved groups that have parameters in common, and with no others."""
    pairs = {(match.group, match.saved_group) for match in matches}
    # torch.distributed.checkpoint has made the saved groups anew, like these, each with the names it was saved with.
    numbers = {match.name: match.group for match in matches}
    for saved_number, saved_group in enumerate(saved_groups):
        given = [name for name in saved_group.get("param_names") or () if not is_made_up(name)]
        names = [resolve_name(name, numbers) for name in given]
        pairs |= {(numbers[name], saved_number) for name in names if name in numbers}
    # Groups without parameters have nothing but their place.
    sides = zip(groups, saved_groups, strict=False)
    pairs |= {(n, n) for n, (one, other) in enumerate(sides) if not one["params"] and not other["params"]}
    while pairs:
        own, saved = ({number} for number in pairs.pop())
        while linked := {pair for pair in pairs if pair[0] in own or pair[1] in saved}:
            pairs -= linked
            own |= {pair[0] for pair in linked}
            saved |= {pair[1] for pair in linked}
        yield own, saved


def _options_of(saved_group: Mapping[str, Any]) -> dict[str, Any]:
    options = {
        key: _with_tuples(value) if key in OPTIONS else value
        for key, value in saved_group.items()
        if key not in _NOT_RESTORED and not is_old_option(key, value)
    }
    # Before there were ratios, a group's rate was its own.
    return {"adamw_lr_ratio": None, **options} if "lr" in options else options


def _agreed(own: _Groups, saved: _Groups) -> dict[str, Any]:
    """Return the saved options about which all groups agree, the saved ones and these."""
    units = [_RATE_KEYS, *((key,) for key in saved[0] if key not in _RATE_KEYS)]
    agreed: dict[str, Any] = {}
    for keys in units:
        if all(_is_same([group.get(key, _MISSING) for group in side]) for side in (own, saved) for key in keys):
            agreed |= {key: saved[0][key] for key in keys if key in saved[0]}
    return agreed


def _is_same(values: Sequence[Any]) -> bool:
    try:
        return all(value is values[0] or bool(value == values[0]) for value in values)
    except (RuntimeError, ValueError):  # arrays and tensors of several entries, in keys of the user's own
        return False


def _matched_state(
    name: str,
    param: Tensor,
    state: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    saved_key: Any,
    divided: DividedState | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tensors of this rank's state of a parameter, and the saved ones that go there."""
    needed = {key: state[key] for key in state if key in STATE_KEYS}  # others are the user's
    if saved.keys() & STATE_KEYS != needed.keys():
        raise ValueError(
            f"{name}: saved state has {sorted(saved)}, this optimizer needs {sorted(needed)}; make it with the master "
            f"and normalize of the saved one, for weights of the dtype they had, and change them after loading"
        )
    for key, target in needed.items():
        what = f"{name}: saved {key}"
        source = saved_tensor(saved[key], what)
        if divided is not None and key in PARAM_SHAPED_STATE:
            yield from part_of_saved(what, param, divided, target, source)
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
        if target.dtype == torch.uint16 and source.dtype not in _MANTISSA_DTYPES:
            raise ValueError(f"{what} is {source.dtype}, and must be torch.uint16: other types do not keep its bits")
        piece = piece_of(what, target, source)
        if piece is not None:
            yield local_tensor(target), piece


def _users_values(param: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the user's own entries of a parameter's state, tensors on its device."""
    device = local_tensor(param).device
    return {key: _copy_of(value, device) for key, value in saved.items() if key not in STATE_KEYS}


def _copy_of(value: Any, device: torch.device) -> Any:
    return value.to(device, copy=True) if isinstance(value, Tensor) else deepcopy(value)


def _with_tuples(value: Any) -> Any:
    """Return a hyperparameter with tuples for lists, which checkpoints make of tuples."""
    return tuple(map(_with_tuples, value)) if isinstance(value, list | tuple) else value
