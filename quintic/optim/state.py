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
As soon as one parameter's state is needed all have theirs, so that every checkpoint has the same keys (`upkeep.py`).
State of a parameter's shape is a `DTensor` in the parameter's layout where the parameter is one; everything else is
whole on every rank (`placement.py`).
PyTorch's own `Optimizer.load_state_dict` casts state to the dtype of the parameter, which would turn float32 momentum
of bf16 weights into bf16; `load_state` copies values into the state that exists and refuses what does not fit.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from operator import le
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quintic.optim.comms import has_process_group, merged_over_ranks, this_rank
from quintic.optim.communicators import Communicators
from quintic.optim.layouts import Layout, intersection, layout_of, local_tensor, numel_of, relative
from quintic.optim.sharing import layouts_of
from quintic.optim.update import second_moment_shape
from quintic.optim.views import View

if TYPE_CHECKING:
    from quintic.optim.sharded_state import Divided

__all__ = [
    "CODE_KEYS",
    "STATE_KEYS",
    "as_saved",
    "complete_second_moments",
    "copy_",
    "load_state",
    "master_key",
    "master_of",
    "num_second_moments",
    "piece_of",
    "second_moments",
]

CODE_KEYS = ("orthogonalizer", "lr_scale", "compute_dtype", "kernels", "qk_clip", "process_group")
"""Options that may be functions, or are no plain values: saved as text for people, and not restored."""

STATE_KEYS = frozenset(
    {"momentum_buffer", "second_momentum_buffer", "exp_avg", "exp_avg_sq", "step", "master", "mantissa"}
)
"""Names of all state; other keys of a parameter's state are the user's."""

# What completes a low-precision parameter to float32; a parameter has one of them, or none.
_MASTER_KEYS = ("master", "mantissa")

# What a group is, as opposed to how it is stepped: loading must not change these.
_IDENTITY_KEYS = ("params", "param_names", "algorithm", "view")

# Where the work is done and in how much memory: of this run, not of the one that was saved.
_PLACE_KEYS = ("comms", "transport", "offload", "max_workspace_bytes")

# What older versions left in every saved group.
_NO_OPTIONS = ("not_of_groups",)

# Integers that hold every mantissa.
_MANTISSA_DTYPES = (torch.uint16, torch.int32, torch.int64)


def master_key(state: Mapping[str, Tensor]) -> str | None:
    """Return the name of what completes a parameter to float32 in its state: `master`, `mantissa`, or None."""
    return next((key for key in _MASTER_KEYS if key in state), None)


def master_of(state: Mapping[str, Tensor]) -> Tensor | None:
    """Return what completes a parameter to float32, or None."""
    key = master_key(state)
    return None if key is None else state[key]


def num_second_moments(shape: Sequence[int], view: View) -> int:
    """Return how many second moments NorMuon keeps of a parameter."""
    return sum(b * m * n for b, (m, n) in _second_moment_shapes(shape, view))


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


def complete_second_moments(
    groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Mapping[str, Tensor]], communicators: Communicators
) -> None:
    """Give every rank NorMuon's second moments of matrices that are whole on one rank and nowhere else.

    Such matrices (experts, heads) are stepped without any exchange, so that only the rank that holds one knows its
    second moments. Those of all other matrices are known to all ranks after every step. Collective over the ranks that
    share a parameter with such matrices; without one, nothing is communicated.

    Args:
        groups: parameter groups.
        state: of their parameters.
        communicators: of the optimizer.
    """
    shared: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
    layouts: list[list[Layout | None]] = []
    for number, group in enumerate(groups):
        layouts.append([None] * len(group["params"]))
        if group["algorithm"] != "muon" or group["normalize"] is None:
            continue
        of_group = layouts_of(number, group)
        for index, (param, layout) in enumerate(zip(group["params"], of_group, strict=True)):
            if layout is None or this_rank() not in layout.ranks:
                continue
            holders = _sole_holders(layout, group["view"])
            if bool((holders >= 0).any()):
                buffer = state[param]["second_momentum_buffer"]
                shared.setdefault(tuple(sorted(layout.ranks)), []).append((buffer, holders.to(buffer.device)))
                layouts[-1][index] = layout
    if not shared:
        return
    communicators.connect(groups, layouts)
    for ranks, found in sorted(shared.items()):
        mine = [torch.where(holders == this_rank(), buffer, 0) for buffer, holders in found]
        everything = merged_over_ranks(mine, communicators[ranks])
        for (buffer, holders), whole in zip(found, everything, strict=True):
            buffer.copy_(torch.where(holders >= 0, whole, buffer))


def as_saved(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return PyTorch's state dict of an optimizer with views and callables as text.

    Tensors share memory with the state, except that mantissas become int32 where there are process groups: whoever
    gathers or distributes a state dict needs collectives, and these do not know uint16.
    """
    state: dict[Any, dict[str, Any]] = {}
    for key, tensors in state_dict["state"].items():
        state[key] = dict(tensors)
        if "mantissa" in tensors and has_process_group():
            state[key]["mantissa"] = tensors["mantissa"].to(torch.int32)
    groups = [
        {**group, **{key: _as_text(group[key]) for key in ("view", *CODE_KEYS)}} for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": state, "param_groups": groups}


def _as_text(option: object) -> str | None:
    return None if option is None else str(option)


def load_state(
    optimizer: Optimizer, state: Mapping[Tensor, Mapping[str, Tensor]], state_dict: Mapping[str, Any]
) -> None:
    """Copy saved values into the optimizer's state and hyperparameters; nothing changes unless everything fits.

    Parameters are matched by name where both sides have names, else by position, as in PyTorch. State may be saved as
    whole tensors, of which each rank takes its piece, or as `DTensor`s of which each rank holds what it needs. Nothing
    is communicated.

    Args:
        optimizer: whose hyperparameters are set.
        state: of its parameters.
        state_dict: what was saved.

    Raises:
        ValueError: another number of groups, another parameter set, algorithm or view, missing or unknown state, a
            shape that differs, or a `DTensor` in another layout; the message names the parameter.
    """
    saved_groups = state_dict["param_groups"]
    groups = optimizer.param_groups
    if len(saved_groups) != len(groups):
        raise ValueError(f"the saved optimizer has {len(saved_groups)} parameter groups, this one has {len(groups)}")
    from quintic.optim.sharded_state import divided_parameters

    divided = divided_parameters(groups)
    copies: list[tuple[Tensor, Tensor]] = []
    for number, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True)):
        for key in ("algorithm", "view"):
            if key in saved_group and str(saved_group[key]) != str(group[key]):
                raise ValueError(
                    f"parameter group {number} was saved with {key}={saved_group[key]!s}, this one has {group[key]!s}"
                )
        for name, param, key in _matched(number, group, saved_group):
            parts = divided.get(param)
            copies += _matched_state(name, param, state[param], state_dict["state"].get(key), parts)
    for target, source in copies:
        copy_(target, source)
    for group, saved_group in zip(groups, saved_groups, strict=True):
        for key, value in saved_group.items():
            if key not in (*_IDENTITY_KEYS, *CODE_KEYS, *_PLACE_KEYS, *_NO_OPTIONS):
                group[key] = _with_tuples(deepcopy(value))


@lru_cache(maxsize=1024)
def _sole_holders(layout: Layout, view: View) -> Tensor:
    """Return for each second moment the rank that alone holds any of its matrix, -1 where several do; int64, CPU."""
    shape = layout.shape
    length = num_second_moments(shape, view)
    # On the CPU, whatever the default device is.
    result = torch.full((length,), -1, dtype=torch.int64, device="cpu")
    blocks = second_moments(result, shape, view)
    for unit in view.units(shape):
        holders = [
            rank
            for rank, box in zip(layout.ranks, layout.boxes, strict=True)
            if intersection(box, unit.box) is not None
        ]
        if len(holders) == 1:
            for block, matrix in unit.matrices:
                blocks[block][matrix] = holders[0]
    return result


def _matched(number: int, group: Mapping[str, Any], saved_group: Mapping[str, Any]) -> list[tuple[str, Tensor, Any]]:
    """Return (name, parameter, key into the saved state) for each parameter of a group."""
    names, saved_names, keys = group["param_names"], saved_group.get("param_names"), saved_group["params"]
    if len(keys) != len(names):
        raise ValueError(f"parameter group {number} was saved with {len(keys)} parameters, this one has {len(names)}")
    if set(keys) == set(names):
        keys = names  # the keys of torch.distributed.checkpoint, which may have put them into this optimizer's order
    elif saved_names is not None and list(saved_names) != list(names):
        missing = [name for name in names if name not in saved_names]
        if missing:
            raise ValueError(f"parameter group {number}: {missing[0]} is not in the saved optimizer state")
        if any(isinstance(key, str) for key in keys):
            raise ValueError(
                f"parameter group {number} was saved with its parameters in another order, {saved_names[0]} first, "
                f"and under keys such as {keys[0]} that are not their names; name the parameters of this optimizer as "
                f"model.named_parameters() does, or give them in the saved order"
            )
        of_name = dict(zip(saved_names, keys, strict=True))
        keys = [of_name[name] for name in names]
    return list(zip(names, group["params"], keys, strict=True))


def _matched_state(
    name: str,
    param: Tensor,
    state: Mapping[str, Tensor],
    saved: Mapping[str, Any] | None,
    divided: "Divided | None",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what of this rank's state becomes what of the saved state of a parameter."""
    from quintic.optim.sharded import CUT_KEYS
    from quintic.optim.sharded_state import part_of_saved

    if saved is None:
        raise ValueError(f"{name}: the saved optimizer holds no state for this parameter")
    if set(saved) != set(state):
        raise ValueError(f"{name}: saved state has {sorted(saved)}, this optimizer needs {sorted(state)}")
    for key, target in state.items():
        what = f"{name}: saved {key}"
        source = torch.as_tensor(saved[key])
        if divided is not None and key in CUT_KEYS:
            yield from part_of_saved(what, param, divided, target, source)
            continue
        if source.shape != target.shape:
            message = f"{what} has shape {tuple(source.shape)}, this optimizer needs {tuple(target.shape)}"
            if source.ndim == target.ndim and all(map(le, source.shape, target.shape)):
                message += (
                    "; if it is the piece of one rank, save whole tensors or DTensors instead, as "
                    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict does"
                )
            raise ValueError(message)
        if target.dtype == torch.uint16 and source.dtype not in _MANTISSA_DTYPES:
            raise ValueError(f"{what} is {source.dtype}, and must be torch.uint16: other types do not keep its bits")
        piece = piece_of(what, target, source)
        if piece is not None:
            yield local_tensor(target), piece


def piece_of(what: str, target: Tensor, source: Tensor) -> Tensor | None:
    """Return the part of a saved tensor that this rank holds of a state of the same shape; None if it holds nothing.

    Raises:
        ValueError: the saved tensor is a `DTensor` of which some rank does not hold what it needs.
    """
    layout, saved_layout = layout_of(what, target), layout_of(what, source)
    whole = tuple((0, size) for size in target.shape)
    rank = this_rank()
    if saved_layout is not None and saved_layout != layout:
        # The same answer on all ranks, so that none of them loads what another one refuses.
        for other in (*saved_layout.ranks, rank) if layout is None else layout.ranks:
            needed = whole if layout is None else layout.box_of(other)
            held = saved_layout.box_of(other) if other in saved_layout.ranks else None
            if numel_of(needed) and (held is None or intersection(needed, held) != needed):
                raise ValueError(
                    f"{what} is a DTensor of which rank {other} does not hold the part that it needs; save with "
                    f"torch.distributed.checkpoint.save and load into the state dict of this optimizer, or save with "
                    f"full_state_dict=True"
                )
    if layout is not None and rank not in layout.ranks:
        return None
    box = whole if layout is None else layout.box_of(rank)
    if not numel_of(box):
        return None
    return local_tensor(source)[relative(box, whole if saved_layout is None else saved_layout.box_of(rank))]


def copy_(target: Tensor, source: Tensor) -> None:
    """Copy state in place, from whatever device and dtype; mantissas come as any integers."""
    if target.dtype == torch.uint16 and source.dtype != torch.uint16:
        target = target.view(torch.int16)  # the cast keeps the low 16 bits
    target.copy_(source)


def _with_tuples(value: Any) -> Any:
    """Return a hyperparameter with tuples for lists, which checkpoints make of tuples."""
    return tuple(map(_with_tuples, value)) if isinstance(value, list | tuple) else value


def _second_moment_shapes(shape: Sequence[int], view: View) -> list[tuple[int, tuple[int, int]]]:
    return [(b, second_moment_shape(m, n)) for b, m, n in view.shapes(shape)]
