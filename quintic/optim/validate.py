"""What a parameter group must be: every mistake is found at construction and named.

`Muon.add_param_group` calls these two; `step` raises only for what cannot be known earlier.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, ones

from quintic.optim.orthogonalize import orthogonalize
from quintic.optim.update import lr_scale_factor
from quintic.optim.views import View

__all__ = ["check_group", "check_keys"]

# Keys that are not options of ours but that PyTorch's schedulers, or users labelling a group, put into one.
_FOREIGN_GROUP_KEYS = frozenset(
    {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
)

# Options of the published interface that this version accepts only at their neutral value, and what to do instead.
_NEUTRAL_ONLY: dict[str, object] = {
    "comms": "none",
    "process_group": None,
    "master": None,
    "qk_clip": None,
    "offload": False,
    "on_nonfinite": "propagate",
}


def check_keys(number: int, group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Reject options that do not exist.

    Raises:
        ValueError: names the option and the nearest one that exists.
    """
    known = options.keys() | _FOREIGN_GROUP_KEYS
    for key in group.keys() - known:
        nearest = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"parameter group {number}: unknown option {key!r}{hint}")


def check_group(number: int, group: Mapping[str, Any]) -> None:
    """Reject a complete group whose options or parameters cannot be stepped.

    Args:
        number: its position, for messages.
        group: with every option set and `params` and `param_names` as lists.

    Raises:
        ValueError: an option is unknown or out of range, or a parameter does not fit its algorithm or view.
        TypeError: a parameter is not floating point.
    """
    if group["algorithm"] not in ("muon", "adamw"):
        raise ValueError(
            f"parameter group {number} ({_first_name(group)}): unknown algorithm {group['algorithm']!r}; "
            f"choose 'muon' or 'adamw'"
        )
    for key, neutral in _NEUTRAL_ONLY.items():
        if group[key] != neutral:
            raise ValueError(
                f"parameter group {number}: {key}={group[key]!r} is not available in this version; "
                f"leave {key}={neutral!r}"
            )
    _check_numbers(number, group)
    if len(group["param_names"]) != len(group["params"]):
        raise ValueError(
            f"parameter group {number}: {len(group['params'])} params but {len(group['param_names'])} param_names"
        )
    for name, param in zip(group["param_names"], group["params"], strict=True):
        if not param.is_floating_point():
            raise TypeError(f"{name}: dtype {param.dtype} cannot be optimized; parameters must be floating point")
        if group["algorithm"] == "muon":
            _check_matrix(name, param, group["view"])


def _check_matrix(name: str, param: Tensor, view: View) -> None:
    if not isinstance(view, View):
        raise ValueError(f"{name}: view={view!r} is not a view; use quintic.Matrix(), Heads(n), Split(sizes), ...")
    if param.ndim < 2:
        raise ValueError(
            f"{name}: a {param.ndim}-D parameter (shape {tuple(param.shape)}) cannot be orthogonalised; put it into a "
            f"group with algorithm='adamw', or let quintic.param_groups(model) do so"
        )
    try:
        view.batches(param)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check_numbers(number: int, group: Mapping[str, Any]) -> None:
    def check(key: str, ok: bool, need: str) -> None:
        if not ok:
            raise ValueError(f"parameter group {number} ({_first_name(group)}): {key}={group[key]!r} must be {need}")

    for key in ("lr", "weight_decay", "eps"):
        check(key, float(group[key]) >= 0, "at least 0")
    for key in ("momentum", "normalize_beta"):
        check(key, 0 <= group[key] < 1, "in [0, 1)")
    check("betas", len(group["betas"]) == 2 and all(0 <= beta < 1 for beta in group["betas"]), "two numbers in [0, 1)")
    check("normalize", group["normalize"] in (None, "neuron"), "None or 'neuron'")
    check("orthogonalizer_steps", group["orthogonalizer_steps"] >= 1, "at least 1")
    check("max_workspace_bytes", (group["max_workspace_bytes"] or 1) > 0, "positive or None")
    lr_scale_factor(group["lr_scale"], 1, 1)
    if not callable(group["orthogonalizer"]):
        orthogonalize(ones(1, 1), group["orthogonalizer"])


def _first_name(group: Mapping[str, Any]) -> str:
    names = group.get("param_names")
    return names[0] if names else "no parameters"
