"""Makes a parameter's state from the specs of its rule, and checks that a state has their dtype, shape and device.

State of a parameter's shape (momentum, moments, masters) lies as the parameter does, as a `DTensor` in its layout with
its strides; or, with sharded state, it is one flat tensor, (entries,), of the shards that this rank owns. With
`offload=True` it is in host memory, which is pinned for CUDA devices so that the host need not wait for copies;
`offload.py` brings it to the device. All other state is whole on every rank, on the parameter's device.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quintic.kernels.dispatch import is_dense
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Layout, is_dtensor, layout_of, local_tensor, numel_of
from quintic.optim.layout.views import View
from quintic.optim.numeric.int8_state import GROUP, PACKED
from quintic.optim.rules.rule import MASTER, MASTER_SPECS, PARAM_SHAPED_STATE, STATE_KEYS
from quintic.optim.state.shards import StateShard, local_shard_pairs

__all__ = [
    "StateForm",
    "check_conversion",
    "cuts_groups",
    "empty_master",
    "has_packed_state",
    "init_state",
    "is_stepped_packed",
    "matches_spec",
    "planned_state",
    "shares_groups",
    "state_bytes",
    "state_forms",
    "state_on_device",
]


StateForm: TypeAlias = tuple[torch.dtype, tuple[int, ...] | None]
"""Dtype and shape of one tensor of a parameter's state; None for the parameter's shape."""


def state_forms(param: Tensor, group: Group) -> dict[str, StateForm]:
    """Return {name: dtype and shape} for the state of a parameter of a validated group.

    Raises:
        ValueError: the group's view does not fit the parameter.
    """
    # The rule's state, and a master for weights of low precision.
    specs = list(group.rule.state)
    if param.dtype.itemsize < 4 and group.master is not None:
        specs.append(MASTER_SPECS[group.master])
    # (count, m, n) for each kind of matrix.
    shapes = group.view.shapes(param.shape) if group.rule.orthogonalizes else ()
    dtypes = {spec.name: spec.dtype_for(param.dtype, group.state_dtype) for spec in specs}
    if group.state_dtype == "int8" and param.dtype != torch.float64:
        packed = group.rule.packed_state
        dtypes |= packed if has_packed_state(param, group) else dict.fromkeys(packed, torch.float32)
    return {spec.name: (dtypes[spec.name], spec.shape_for(shapes)) for spec in specs}


def has_packed_state(param: Tensor, group: Group, shape: Sequence[int] | None = None) -> bool:
    """Return whether averages of a parameter, of this whole `shape` if `param` is a piece, are of 8 bits.

    They are kept in float32 where a row or a matrix would cut groups of entries. The answer does not depend on how the
    parameter lies on ranks.
    """
    if group.state_dtype != "int8" or not group.rule.packed_state or param.dtype == torch.float64:
        return False
    shape = tuple(param.shape if shape is None else shape)
    # A `DTensor` has the strides of the whole, while an empty piece is always contiguous.
    in_order = param if is_dtensor(param) else local_tensor(param)
    if len(shape) < 2 or shape[-1] % GROUP or not in_order.is_contiguous():
        return False
    return not group.rule.orthogonalizes or _matrices_fit(group.view, shape)


def cuts_groups(layout: Layout | None) -> bool:
    """Return whether a layout cuts groups of 8-bit state between ranks."""
    if layout is None or len(layout.shape) < 2 or layout.shape[-1] % GROUP:
        return False
    return any(end % GROUP for box in layout.boxes if numel_of(box) for end in box[-1])


def shares_groups(param: Tensor, group: Group, layout: Layout | None = None) -> bool:
    """Return whether averages of a parameter are of 8 bits in groups that ranks share (`cut_state.py`).

    Args:
        param: the parameter, or a piece of it.
        group: its group.
        layout: of the whole parameter; None for that of `param`.
    """
    if not has_packed_state(param, group, None if layout is None else layout.shape):
        return False
    return cuts_groups(layout_of("", param) if layout is None else layout)


def is_stepped_packed(param: Tensor, group: Group, layout: Layout | None = None) -> bool:
    """Return whether steps read and store averages of a parameter in 8 bits; arguments as for `shares_groups`."""
    shape = None if layout is None else layout.shape
    return has_packed_state(param, group, shape) and not shares_groups(param, group, layout)


def check_conversion(what: str, param: Tensor, old: torch.dtype, new: torch.dtype) -> None:
    """Reject a change between 8-bit state and another dtype where groups lie on several ranks.

    Args:
        what: names the state, for the message.
        param: the parameter that the state belongs to.
        old: dtype of the state as it is.
        new: dtype that it should get.
    """
    if old == new or (old not in PACKED and new not in PACKED) or not cuts_groups(layout_of("", param)):
        return
    raise ValueError(
        f"{what} is {old} and cannot become {new} where columns are cut between ranks inside of {GROUP} neighbours, "
        f"which 8-bit state stores together; set state_dtype back, and change it in a layout that cuts at multiples of "
        f"{GROUP}, or on one device"
    )


@lru_cache(maxsize=1024)
def _matrices_fit(view: View, shape: tuple[int, ...]) -> bool:
    # (b, groups, rows, columns) each: the parameter's rows are columns of a matrix, or rows of a transposed one.
    for block in view.blocks(torch.empty(shape, device="meta")):
        run = -1 if block.stride(-1) == 1 else -2
        if block.stride(run) != 1 or block.shape[run] % GROUP:
            return False
    return True


def state_bytes(param: Tensor, group: Group) -> int:
    """Return the bytes of the state of a whole parameter, on any device."""
    forms = state_forms(param, group).values()
    return sum(dtype.itemsize * (param.numel() if shape is None else math.prod(shape)) for dtype, shape in forms)


def init_state(param: Tensor, group: Group, own: Sequence[StateShard] | None = None) -> dict[str, Tensor]:
    """Return new state: zeros, and masters equal to the weights. `own` are this rank's shards if state is sharded."""
    state = {}
    # One tensor after the other, where it will stay.
    for key, form in state_forms(param, group).items():
        device, pinned = _place(key, param, group)
        state[key] = value = _empty(form, param, own, device, pinned)
        weights = local_tensor(param).detach()
        # A mantissa of zero means the weight itself; a float32 master is a copy of it.
        if key != MASTER:
            local_tensor(value).zero_()
        elif own is None:
            local_tensor(value).copy_(weights)
        else:
            for run, of_weights in local_shard_pairs(value, weights, own, weights):
                run.copy_(of_weights)
    return state


def empty_master(key: str, param: Tensor, group: Group, own: Sequence[StateShard] | None = None) -> Tensor:
    """Return uninitialised memory for a master of any form, by its state key, where the group keeps such state."""
    spec = next(spec for spec in MASTER_SPECS.values() if spec.name == key)
    form = spec.dtype_for(param.dtype, group.state_dtype), None
    return _empty(form, param, own, *_place(key, param, group))


def planned_state(param: Tensor, group: Group, own: Sequence[StateShard] | None = None) -> dict[str, Tensor]:
    """Return this rank's state as meta tensors, which have no memory; arguments as for `init_state`."""
    local, meta = local_tensor(param), torch.device("meta")
    return {key: _empty(form, local, own, meta, False) for key, form in state_forms(param, group).items()}


def matches_spec(state: Mapping[str, Any], param: Tensor, group: Group, own: Sequence[StateShard] | None) -> bool:
    """Return whether a parameter's state has the names, dtypes, shapes and devices of `init_state`."""
    forms = state_forms(param, group)
    if state.keys() & STATE_KEYS != forms.keys():
        return False
    for key, (dtype, shape) in forms.items():
        value = state[key]
        if not isinstance(value, Tensor) or value.dtype != dtype:
            return False
        device, pinned = _place(key, param, group)
        local = local_tensor(value)
        # Empty tensors are never pinned.
        if local.device != device or (pinned and local.numel() and not local.is_pinned()):
            return False
        # Three cases: a shape of its own; sharded, so flat; laid out as the parameter is.
        if shape is not None:
            if is_dtensor(value) or tuple(value.shape) != shape or not value.is_contiguous():
                return False
        elif own is not None:
            if is_dtensor(value) or tuple(value.shape) != (_numel(own),):
                return False
        elif not _has_layout_of(value, param):
            return False
    return True


@contextmanager
def state_on_device(param: Tensor, state: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Provide a parameter's state on its device within the `with` block, and write it back to host memory at the end.

    Only offloaded state is moved; then it waits for the device.
    """
    device = local_tensor(param).device
    here = {key: _on_device(value, device) for key, value in state.items()}
    yield here
    # Only tensors that were moved are different objects.
    for key, value in here.items():
        if value is not state[key]:
            local_tensor(state[key]).copy_(local_tensor(value))


def _place(key: str, param: Tensor, group: Group) -> tuple[torch.device, bool]:
    """Return the device of a state, and whether its memory is pinned."""
    device = local_tensor(param).device
    # Only state of the parameter's shape is offloaded.
    if key in PARAM_SHAPED_STATE and group.offload and device.type != "meta":
        return torch.device("cpu"), device.type == "cuda"
    return device, False


def _empty(
    form: StateForm, param: Tensor, own: Sequence[StateShard] | None, device: torch.device, pinned: bool
) -> Tensor:
    """Return uninitialised memory for one state; its shape is the form's, the parameter's, or (entries of `own`,)."""
    dtype, shape = form
    # With the parameter's layout and strides.
    if shape is None and own is None:
        order, like = torch.preserve_format, param if is_dtensor(param) else local_tensor(param)
        return torch.empty_like(like, dtype=dtype, device=device, pin_memory=pinned, memory_format=order)
    size = (_numel(own),) if shape is None and own is not None else shape
    assert size is not None
    return torch.empty(size, dtype=dtype, device=device, pin_memory=pinned)


def _numel(own: Sequence[StateShard]) -> int:
    return sum(shard.numel for shard in own)


def _has_layout_of(value: Tensor, param: Tensor) -> bool:
    """Return whether a state has the layout of its parameter, and its strides unless these leave gaps."""
    if value.shape != param.shape or is_dtensor(value) != is_dtensor(param):
        return False
    if is_dtensor(value) and is_dtensor(param) and value.placements != param.placements:
        return False
    if is_dtensor(value) and is_dtensor(param) and value.device_mesh != param.device_mesh:
        return False
    local, weights = local_tensor(value), local_tensor(param)
    return local.shape == weights.shape and (local.stride() == weights.stride() or not is_dense(weights))


def _on_device(value: Tensor, device: torch.device) -> Tensor:
    # A tensor or `DTensor` of the same layout, copied only if it is on another device.
    local = local_tensor(value)
    if local.device == device:
        return value
    moved = torch.empty_like(value, device=device)
    local_tensor(moved).copy_(local, non_blocking=True)
    return moved
