"""What a parameter group must be: every mistake is found at construction and named.

`Muon.add_param_group` calls these two; `step` raises only for what cannot be known earlier.
"""

import difflib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quintic.kernels.dispatch import choose_kernels, is_dense
from quintic.optim.forms import check_orthogonalizer
from quintic.optim.layouts import local_tensor
from quintic.optim.qk_clip import QKClip
from quintic.optim.sharing import DIVIDING
from quintic.optim.update import lr_scale_factor
from quintic.optim.views import View

__all__ = ["check_group", "check_keys"]

# Keys that are not options of ours but that PyTorch's schedulers, or users labelling a group, put into one.
_FOREIGN_GROUP_KEYS = frozenset(
    {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
)

# Options with a fixed set of values.
_CHOICES: dict[str, tuple[object, ...]] = {
    "normalize": (None, "neuron"),
    "decay_coupling": ("lr", "lr_squared"),
    "comms": ("none", "averaged", "replicated", "sharded", "sharded_sparse"),
    "transport": ("collectives", "copy_engines"),
    "master": (None, "fp32", "mantissa"),
    "offload": (False, True),
    "on_nonfinite": ("propagate", "skip", "raise"),
    "kernels": ("auto", "torch", "triton"),
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
    _check_numbers(number, group)
    if group["algorithm"] == "muon" and group["comms"] == "sharded_sparse":
        raise ValueError(
            f"parameter group {number} ({_first_name(group)}): comms='sharded_sparse' is for tables, in groups with "
            f"algorithm='adamw'; use comms='sharded' for matrices"
        )
    if len(group["param_names"]) != len(group["params"]):
        raise ValueError(
            f"parameter group {number}: {len(group['params'])} params but {len(group['param_names'])} param_names"
        )
    for name, param in zip(group["param_names"], group["params"], strict=True):
        if not param.is_floating_point():
            raise TypeError(f"{name}: dtype {param.dtype} cannot be optimized; parameters must be floating point")
        if group["master"] == "mantissa" and param.dtype == torch.float16:
            raise ValueError(
                f"{name}: master='mantissa' completes bfloat16 weights to float32, this one is float16; "
                f"use master='fp32'"
            )
        if group["comms"] in DIVIDING and not is_dense(local_tensor(param)):
            raise ValueError(
                f"{name}: comms={group['comms']!r} sends runs of memory, and this parameter of shape "
                f"{tuple(param.shape)} and strides {param.stride()} has gaps in it; make it contiguous"
            )
        if group["algorithm"] == "muon":
            _check_matrix(name, param, group)
        try:
            choose_kernels(group["kernels"], local_tensor(param))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


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
            view.blocks(local_tensor(param.detach()))  # as it lies in memory
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if multipliers is not None and len(multipliers) != count:
        raise ValueError(
            f"{name}: {len(multipliers)} lr_multipliers for {count} matrices; "
            f"give one per matrix of {view}, in its order"
        )


def _check_numbers(number: int, group: Mapping[str, Any]) -> None:
    def check(key: str, ok: bool, need: str) -> None:
        if not ok:
            raise ValueError(f"parameter group {number} ({_first_name(group)}): {key}={group[key]!r} must be {need}")

    for key in ("lr", "weight_decay", "eps"):
        check(key, float(group[key]) >= 0, "at least 0")
    for key in ("momentum", "normalize_beta"):
        check(key, 0 <= group[key] < 1, "in [0, 1)")
    check("betas", len(group["betas"]) == 2 and all(0 <= beta < 1 for beta in group["betas"]), "two numbers in [0, 1)")
    for key, choices in _CHOICES.items():
        check(key, group[key] in choices, " or ".join(map(repr, choices)))
    check("max_workspace_bytes", (group["max_workspace_bytes"] or 1) > 0, "positive or None")
    check("step_every", isinstance(group["step_every"], int) and group["step_every"] >= 1, "an integer of at least 1")
    multipliers = group["lr_multipliers"]
    if multipliers is not None:
        check("lr_multipliers", all(math.isfinite(value) for value in multipliers), "finite numbers")
    check("qk_clip", group["qk_clip"] is None or isinstance(group["qk_clip"], QKClip), "None or a quintic.QKClip")
    lr_scale_factor(group["lr_scale"], 1, 1)
    if not callable(group["orthogonalizer"]):
        check_orthogonalizer(
            group["orthogonalizer"],
            group["orthogonalizer_steps"],
            coefficients=group["coefficients"],
            compute_dtype=group["compute_dtype"],
        )


def _first_name(group: Mapping[str, Any]) -> str:
    names = group.get("param_names")
    return names[0] if names else "no parameters"
