"""Checks of parameter groups: every mistake is found when a group is added, or at the first step after a change.

`Muon` checks a new group, and checks it again when one of its `CHECKED_OPTIONS` has changed. Messages name the group.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from quintic.kernels.dispatch import choose_kernels, is_dense
from quintic.optim.comms.sharing import SHARDED_MODES
from quintic.optim.groups.flattened import check_group_is_whole
from quintic.optim.groups.names import made_up
from quintic.optim.groups.options import OPTIONS, SCHEDULED_OPTIONS, STEP_OPTIONS
from quintic.optim.layout.layouts import Layout, is_dtensor, layout_of, local_tensor
from quintic.optim.layout.views import View
from quintic.optim.layout.wrappers import check_wrapper
from quintic.optim.numeric.bf16_state import MAX_BF16_BETA
from quintic.optim.numeric.int8_state import GROUP
from quintic.optim.numeric.numbers import is_number
from quintic.optim.polar.forms import check_orthogonalizer
from quintic.optim.qk_clip.clip import QKClip
from quintic.optim.rules.rates import first_name
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.table import ALGORITHMS, check_rule, orthogonalizes, rule_of
from quintic.optim.rules.update import adjust_lr_factor
from quintic.optim.state.placement import cuts_groups

__all__ = [
    "CHECKED_OPTIONS",
    "add_names",
    "check_group",
    "check_is_group",
    "check_is_listed_once",
    "check_members",
    "check_offloaded",
    "check_options",
    "check_params",
    "check_scheduled",
]

CHECKED_OPTIONS = tuple(name for name in STEP_OPTIONS if name not in SCHEDULED_OPTIONS)
"""Options that are checked with their whole group when one of them changes, as schedules do not change them."""

# Narrower floating-point numbers have no arithmetic, so updates cannot be added to them.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_params(params: object) -> None:
    """Reject a constructor's argument that holds no parameters; a TypeError says how to give them."""
    if _is_module(params):
        raise TypeError(
            f"params is {_kind(params)}: give quintic.param_groups(model), which decides what each of its parameters is"
        )
    if isinstance(params, Mapping):
        is_group = "params" in params
        how = "[group], a list of parameter groups" if is_group else "params.items(), which are names and parameters"
        raise TypeError(f"params is a dictionary: give {how}")
    if not isinstance(params, Iterable) or isinstance(params, str):
        raise TypeError(
            f"params is {_kind(params)}: give parameters, (name, parameter) pairs or parameter groups, as from "
            f"quintic.param_groups(model)"
        )


def check_is_group(number: int, group: object) -> None:
    """Reject anything but a parameter group with parameters; a TypeError or ValueError says how to give one."""
    what = f"parameter group {number}"
    if not isinstance(group, Mapping):
        how = "give a dictionary, {'params': [...]}"
        if isinstance(group, Tensor):
            how = "give {'params': [parameter]}"
        elif _is_module(group):
            how = "add each group of quintic.param_groups(module)"
        elif isinstance(group, Iterable) and not isinstance(group, str):
            members = list(group)
            if members and all(isinstance(member, Mapping) for member in members):
                how = "add its groups one by one: for group in groups: optimizer.add_param_group(group)"
            elif members and all(isinstance(member, Tensor | tuple) for member in members):
                how = "give {'params': parameters}"
        raise TypeError(f"{what} is {_kind(group)}: {how}")
    if "params" not in group:
        keys = ", ".join(map(repr, group)) or "no keys"
        raise ValueError(f"{what} has no 'params', it has {keys}; give {{'params': [...]}}")
    params = group["params"]
    if _is_module(params) or isinstance(params, Mapping):
        how = "dictionary.items()" if isinstance(params, Mapping) else "module.named_parameters()"
        raise TypeError(f"{what}: 'params' is {_kind(params)}: give {how}, which are names and parameters")
    if not isinstance(params, Iterable) or isinstance(params, str):
        raise TypeError(f"{what}: 'params' is {_kind(params)}: give a list of parameters")


def check_members(number: int, params: Sequence[object]) -> None:
    """Reject members of a group that are neither tensors nor (name, tensor) pairs; a TypeError says which."""
    for place, member in enumerate(params):
        if isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], str):
            member = member[1]
        if not isinstance(member, Tensor):
            raise TypeError(
                f"parameter group {number}: params[{place}] is {_kind(member)}; an optimizer can only optimize "
                f"Tensors: give parameters or (name, parameter) pairs in one list, several groups as dictionaries"
            )


def add_names(number: int, group: dict[str, Any]) -> None:
    """Name parameters that come without names, which messages, plans and checkpoints need and PyTorch does not make."""
    params = group.get("params")
    if isinstance(params, Tensor):
        group["params"] = params = [params]
    if params is None or isinstance(params, set):
        return  # PyTorch's own message is right
    group["params"] = params = list(params)
    check_members(number, params)
    if not any(isinstance(param, tuple) for param in params):
        group.setdefault("param_names", [made_up(number, index) for index in range(len(params))])


def _is_module(value: object) -> bool:
    return isinstance(value, nn.Module) and not isinstance(value, nn.ParameterList)


def _kind(value: object) -> str:
    """Return the kind of a value with an article, for messages."""
    if value is None or isinstance(value, str):
        return "None" if value is None else f"the string {value!r}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def check_is_listed_once(number: int, group: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> None:
    """Reject a tensor or a name that is listed twice, in one group or in two; the ValueError names both places.

    The group's `params` are a list of tensors, with `param_names`, or of pairs; the others are complete.
    """
    # Parameters of other groups -> name and group, for the message; names -> index of their group.
    places: dict[Tensor, str] = {}
    taken: dict[str, int] = {}
    for place, other in enumerate(others):
        rows = zip(other["params"], other["param_names"], strict=True)
        places |= {param: f"{name} of parameter group {place}" for param, name in rows}
        taken |= dict.fromkeys(other["param_names"], place)
    params = group["params"]
    given = group.get("param_names") or [None] * len(params)
    own = [row if isinstance(row, tuple) else (name, row) for row, name in zip(params, given, strict=False)]
    for name, param in own:
        if isinstance(param, Tensor) and param in places:
            raise ValueError(
                f"parameter group {number}: {name} is the same tensor as {places[param]}, and would be stepped twice; "
                f"list it once. Of modules that share tensors make the groups together: "
                f"quintic.param_groups(torch.nn.ModuleList([...]))"
            )
        if isinstance(param, Tensor):
            places[param] = f"{name} of the same group"
    for name, _ in own:
        if name in taken:
            raise ValueError(
                f"parameter group {number}: {name} is also the name of another parameter, of group {taken[name]}, and "
                f"names tell parameters apart. Of several models make the groups together: quintic.param_groups("
                f"torch.nn.ModuleDict({{...}})); or begin each name with its model's, (f'critic.{{name}}', param)"
            )
        if name is not None:
            taken[name] = number


def check_group(number: int, group: Mapping[str, Any], *, was_checked: bool = False) -> None:
    """Reject a complete group that cannot be stepped: a ValueError, or a TypeError for a dtype.

    Args:
        number: position of the group.
        group: its dictionary.
        was_checked: whether the group was right before, with this algorithm, and its parameters changed since.
    """
    if group["algorithm"] not in ALGORITHMS:
        raise ValueError(
            f"parameter group {number} ({first_name(group)}): unknown algorithm {group['algorithm']!r}; "
            f"choose 'muon' or 'adamw'"
        )
    check_options(number, group)
    if orthogonalizes(group["algorithm"]) and group["comms"] == "sharded_sparse":
        raise ValueError(
            f"parameter group {number} ({first_name(group)}): comms='sharded_sparse' is for tables, in groups with "
            f"algorithm='adamw'; use comms='sharded' for matrices"
        )
    _check_rule(number, group)
    check_group_is_whole(number, group, was_checked=was_checked)
    for name, param in zip(group["param_names"], group["params"], strict=True):
        _check_kind(name, param)
        if param.requires_grad and _shares_entries(local_tensor(param)):
            raise ValueError(
                f"{name}: entries of this parameter of shape {tuple(param.shape)} and strides {param.stride()} share "
                f"memory, as after expand(), and cannot be updated independently; clone() it"
            )
        if group["master"] in ("mantissa", "8bit") and param.dtype == torch.float16:
            raise ValueError(
                f"{name}: master={group['master']!r} completes bfloat16 weights, this one is float16; use master='fp32'"
            )
        if group["comms"] in SHARDED_MODES and not is_dense(local_tensor(param)):
            raise ValueError(
                f"{name}: comms={group['comms']!r} sends runs of memory, and this parameter of shape "
                f"{tuple(param.shape)} and strides {param.stride()} has gaps in it; make it contiguous"
            )
        layout = layout_of(name, param) if group["state_dtype"] == "int8" and is_dtensor(param) else None
        if layout is not None and group["offload"]:
            check_offloaded(name, layout)
        _check_wrapper(name, param, group)
        if orthogonalizes(group["algorithm"]):
            _check_matrix(name, param, group)
        try:
            choose_kernels(group["kernels"], local_tensor(param))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def _rule_of(group: Mapping[str, Any]) -> UpdateRule:
    return rule_of(group["algorithm"], group["normalize"], group["update_rule"])


def _check_rule(number: int, group: Mapping[str, Any]) -> None:
    """Reject options that the group's update rule does not read, or cannot have."""
    if not orthogonalizes(group["algorithm"]):
        return
    rule = _rule_of(group)
    if rule.scale is not None and group["adjust_lr"] not in ("spectral", rule.scale):
        raise ValueError(
            f"parameter group {number} ({first_name(group)}): adjust_lr={group['adjust_lr']!r} with the update rule "
            f"{rule.title}, which scales updates itself; leave adjust_lr out"
        )
    if rule.constrain is None:
        return
    if rule.constrain.state and group["qk_clip"] is not None:
        raise ValueError(
            f"parameter group {number} ({first_name(group)}): qk_clip with the update rule {rule.title}, which keeps "
            f"norms of weights in its state, and so would undo the clip at the next step; leave qk_clip out"
        )
    for key, plain in (("cautious", False), ("scale_decay", False), ("decay_coupling", "lr")):
        if group[key] != plain:
            raise ValueError(
                f"parameter group {number} ({first_name(group)}): {key}={group[key]!r} with the update rule "
                f"{rule.title}, which decides itself how weights decay; leave {key} out"
            )


def _check_kind(name: str, param: Tensor) -> None:
    if is_lazy(param):
        raise ValueError(f"{name} has no shape yet: run one batch through the model before making the optimizer")
    local = local_tensor(param)
    if param.dtype not in _DTYPES:
        raise TypeError(
            f"{name}: dtype {param.dtype} cannot be optimized; parameters must be float64, float32, bfloat16 or "
            f"float16. Keep a trained weight in one of these and convert it in the forward pass, leave out a frozen one"
        )
    if local.layout is not torch.strided or local.is_nested:
        kind = "a nested tensor" if local.is_nested else f"stored as {local.layout}"
        raise TypeError(f"{name} is {kind}, which cannot be optimized; parameters must be ordinary dense tensors")


def _shares_entries(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def check_scheduled(number: int, group: Mapping[str, Any]) -> None:
    """Reject values that schedules may have set: no numbers, out of range, or too slow averages for bfloat16 state.

    Tensors on a device are not read.
    """
    _check_values(number, group, SCHEDULED_OPTIONS)
    if group["state_dtype"] is None:
        return
    # `below` is exclusive, and the limit itself is allowed.
    above = math.nextafter(MAX_BF16_BETA, 1)
    for key in _rule_of(group).averages:
        averages = group[key] if isinstance(group[key], tuple | list) else (group[key],)
        if not all(is_number(value, below=above) for value in averages):
            raise ValueError(
                f"parameter group {number} ({first_name(group)}): {key}={group[key]!r} with state_dtype="
                f"{group['state_dtype']!r}: above {MAX_BF16_BETA} an average moves by less than it resolves; lower "
                f"{key}, or set state_dtype=None for this group"
            )


def check_offloaded(name: str, layout: Layout) -> None:
    """Reject a layout of offloaded 8-bit state whose groups lie on several ranks."""
    # Copies to and from the host are of this rank's pieces.
    if cuts_groups(layout):
        raise ValueError(
            f"{name}: its {layout.shape[-1]} columns are cut between ranks inside of {GROUP} neighbours, which "
            f"state_dtype='int8' stores together, and offload=True keeps state out of their reach; use "
            f"state_dtype='bf16' for this group, or a number of ranks that cuts at multiples of {GROUP}"
        )


def _check_wrapper(name: str, param: Tensor, group: Mapping[str, Any]) -> None:
    # The view decides which rows of a wrapped weight belong together; `_check_matrix` reports a view that does not fit.
    view = None
    if orthogonalizes(group["algorithm"]) and isinstance(group["view"], View):
        try:
            group["view"].shapes(param.shape)
            view = group["view"]
        except ValueError:
            pass
    # Some uses need the wrapped tensor itself, so the wrapper may only be opened without them.
    reasons = (
        (is_dtensor(param), "a DTensor holds it"),
        (group["comms"] != "none", f"comms={group['comms']!r} sends its memory"),
        (group["master"] is not None, f"master={group['master']!r} completes ordinary weights"),
        (group["tied_to"] is not None, "it is tied to another"),
    )
    may_open = next((reason for holds, reason in reasons if holds), None)
    raw = local_tensor(param) if is_dtensor(param) else param
    check_wrapper(name, raw, view if raw.shape == param.shape else None, may_open=may_open)


def _check_matrix(name: str, param: Tensor, group: Mapping[str, Any]) -> None:
    view, multipliers = group["view"], group["lr_multipliers"]
    if not isinstance(view, View):
        raise ValueError(f"{name}: view={view!r} is not a view; use quintic.Matrix(), Heads(n), Split(sizes), ...")
    if param.ndim < 2:
        raise ValueError(
            f"{name}: a {param.ndim}-D parameter (shape {tuple(param.shape)}) cannot be orthogonalised; put it into a "
            f"group with algorithm='adamw', or let quintic.param_groups(model) do so"
        )
    try:
        count = sum(b for b, _, _ in view.shapes(param.shape))
        if local_tensor(param).shape == param.shape:
            # The whole parameter is here, so its order of memory can be checked, too.
            view.blocks(local_tensor(param).detach())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    # A user's function is tried for each shape (m, n) of matrices now, and not in the middle of a step.
    rule = _rule_of(group)
    what, scale = ("adjust_lr", group["adjust_lr"]) if rule.scale is None else (f"scale of {rule.title}", rule.scale)
    if callable(scale):
        for _, m, n in view.shapes(param.shape):
            factor = scale(m, n) if m and n else 1.0
            if not is_number(factor):
                raise ValueError(f"{name}: {what}({m}, {n}) returned {factor!r}; it must return a finite number")
    if multipliers is not None and len(multipliers) != count:
        raise ValueError(
            f"{name}: lr_multipliers are {len(multipliers)}, the matrices {count}; "
            f"give one per matrix of {view}, in its order"
        )


def check_options(number: int, group: Mapping[str, Any]) -> None:
    """Reject values of options that fit no parameters; a ValueError names the option.

    Each value is checked by itself first, as its row of the table says. Then come options whose classes the table
    cannot import, and options that must fit each other.
    """
    # First the rule: other checks read it.
    _check_values(number, group, ("normalize",))
    try:
        check_rule(group["update_rule"], group["normalize"])
    except (TypeError, ValueError) as error:
        raise type(error)(f"parameter group {number} ({first_name(group)}): {error}") from None
    check_scheduled(number, group)
    _check_values(number, group, CHECKED_OPTIONS)
    if group["qk_clip"] is not None and not isinstance(group["qk_clip"], QKClip):
        raise _option_error(number, group, "qk_clip")
    try:
        if not callable(group["adjust_lr"]):
            adjust_lr_factor(group["adjust_lr"], 1, 1)
        if not callable(group["orthogonalizer"]):
            check_orthogonalizer(
                group["orthogonalizer"],
                group["orthogonalizer_steps"],
                coefficients=group["coefficients"],
                compute_dtype=group["compute_dtype"],
            )
    except ValueError as error:
        # `orthogonalize` calls its arguments by other names than the options.
        message = re.sub(r"^method=", "orthogonalizer=", re.sub(r"^steps=", "orthogonalizer_steps=", str(error)))
        raise ValueError(f"parameter group {number} ({first_name(group)}): {message}") from None


def _check_values(number: int, group: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if not OPTIONS[name].values.accepts(group[name]):
            raise _option_error(number, group, name)


def _option_error(number: int, group: Mapping[str, Any], name: str) -> ValueError:
    need = OPTIONS[name].values.text
    return ValueError(f"parameter group {number} ({first_name(group)}): {name}={group[name]!r} must be {need}")
