"""Optimizer state: names, shapes, dtypes, and loading without casts.

| algorithm | name                     | shape                             | dtype                          |
|-----------|--------------------------|-----------------------------------|--------------------------------|
| muon      | `momentum_buffer`        | of the parameter                  | float32                        |
| muon      | `second_momentum_buffer` | (rows or columns of all matrices) | float32, `normalize="neuron"`  |
| adamw     | `exp_avg`, `exp_avg_sq`  | of the parameter                  | float32                        |
| adamw     | `step`                   | ()                                | float32                        |
| both      | `master`                 | of the parameter                  | float32, `master="fp32"`       |
| both      | `mantissa`               | of the parameter                  | uint16, `master="mantissa"`    |

Masters belong to parameters of less than float32 only, see `precision.py`; float64 parameters keep float64 state.
State exists from construction on, so that every checkpoint has the same keys.
PyTorch's own `Optimizer.load_state_dict` casts state to the dtype of the parameter, which would turn float32 momentum
of bf16 weights into bf16; `load_state` copies values into the state that exists and refuses what does not fit.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quintic.optim.update import second_moment_shape
from quintic.optim.views import View

__all__ = ["CODE_KEYS", "init_state", "load_state", "master_key", "master_of", "second_moments"]

CODE_KEYS = ("orthogonalizer", "lr_scale", "compute_dtype", "kernels", "qk_clip", "process_group")
"""Options that may be functions, or are no plain values: saved as text for people, and not restored."""

# What completes a low-precision parameter to float32; a parameter has one of them, or none.
_MASTER_KEYS = ("master", "mantissa")

# What a group is, as opposed to how it is stepped, and what is code: loading must not change these.
_IDENTITY_KEYS = ("params", "param_names", "algorithm", "view")


def init_state(param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return zero state for one parameter of a validated group, on the parameter's device."""
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    zeros = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    if group["algorithm"] == "adamw":
        step = torch.zeros((), dtype=torch.float32, device=param.device)
        state = {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    else:
        state = {"momentum_buffer": zeros}
        if group["normalize"] == "neuron":
            length = sum(b * m_ * n_ for b, (m_, n_) in _second_moment_shapes(param.shape, group["view"]))
            state["second_momentum_buffer"] = torch.zeros(length, dtype=dtype, device=param.device)
    if param.dtype.itemsize < 4 and group["master"] == "fp32":
        state["master"] = param.detach().to(torch.float32, copy=True)
    elif param.dtype.itemsize < 4 and group["master"] == "mantissa":
        state["mantissa"] = torch.zeros_like(param, dtype=torch.uint16, memory_format=torch.preserve_format)
    return state


def master_key(state: Mapping[str, Tensor]) -> str | None:
    """Return the name of what completes a parameter to float32 in its state: `master`, `mantissa`, or None."""
    return next((key for key in _MASTER_KEYS if key in state), None)


def master_of(state: Mapping[str, Tensor]) -> Tensor | None:
    """Return what completes a parameter to float32, or None."""
    key = master_key(state)
    return None if key is None else state[key]


def second_moments(buffer: Tensor, shape: Sequence[int], view: View) -> list[Tensor]:
    """Return NorMuon's second moments as one (b, m, 1) or (b, 1, n) tensor per batch of the view, sharing memory.

    Args:
        buffer: the state.
        shape: of the whole parameter.
        view: of the parameter.
    """
    shapes = _second_moment_shapes(shape, view)
    pieces = buffer.split([b * m * n for b, (m, n) in shapes])
    return [piece.view(b, m, n) for piece, (b, (m, n)) in zip(pieces, shapes, strict=True)]


def load_state(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Copy saved values into the optimizer's state and hyperparameters; nothing changes unless everything fits.

    Parameters are matched by `param_names` where both sides have them, else by position, as in PyTorch.

    Raises:
        ValueError: another number of groups, another parameter set, algorithm or view, missing or unknown state, or a
            shape that differs; the message names the parameter.
    """
    saved_groups = state_dict["param_groups"]
    groups = optimizer.param_groups
    if len(saved_groups) != len(groups):
        raise ValueError(f"the saved optimizer has {len(saved_groups)} parameter groups, this one has {len(groups)}")
    copies: list[tuple[Tensor, Tensor]] = []
    for number, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True)):
        for key in ("algorithm", "view"):
            if key in saved_group and str(saved_group[key]) != str(group[key]):
                raise ValueError(
                    f"parameter group {number} was saved with {key}={saved_group[key]!s}, this one has {group[key]!s}"
                )
        for name, param, key in _matched(number, group, saved_group):
            copies += _matched_state(name, optimizer.state[param], state_dict["state"].get(key))
    for target, source in copies:
        target.copy_(source)
    for group, saved_group in zip(groups, saved_groups, strict=True):
        for key, value in saved_group.items():
            if key not in _IDENTITY_KEYS and key not in CODE_KEYS:
                group[key] = deepcopy(value)


def _matched(number: int, group: Mapping[str, Any], saved_group: Mapping[str, Any]) -> list[tuple[str, Tensor, Any]]:
    """Return (name, parameter, key into the saved state) for each parameter of a group."""
    names, saved_names = group["param_names"], saved_group.get("param_names")
    if len(saved_group["params"]) != len(group["params"]):
        raise ValueError(
            f"parameter group {number} was saved with {len(saved_group['params'])} parameters, "
            f"this one has {len(group['params'])}"
        )
    if saved_names is None:
        return list(zip(names, group["params"], saved_group["params"], strict=True))
    keys = dict(zip(saved_names, saved_group["params"], strict=True))
    missing = [name for name in names if name not in keys]
    if missing:
        raise ValueError(f"parameter group {number}: {missing[0]} is not in the saved optimizer state")
    return [(name, param, keys[name]) for name, param in zip(names, group["params"], strict=True)]


def _matched_state(
    name: str, state: Mapping[str, Tensor], saved: Mapping[str, Any] | None
) -> list[tuple[Tensor, Tensor]]:
    if saved is None:
        raise ValueError(f"{name}: the saved optimizer holds no state for this parameter")
    if set(saved) != set(state):
        raise ValueError(f"{name}: saved state has {sorted(saved)}, this optimizer needs {sorted(state)}")
    pairs = []
    for key, target in state.items():
        source = torch.as_tensor(saved[key])
        if source.shape != target.shape:
            raise ValueError(
                f"{name}: saved {key} has shape {tuple(source.shape)}, this optimizer needs {tuple(target.shape)}"
            )
        pairs.append((target, source))
    return pairs


def _second_moment_shapes(shape: Sequence[int], view: View) -> list[tuple[int, tuple[int, int]]]:
    return [(b, second_moment_shape(m, n)) for b, m, n in view.shapes(shape)]
