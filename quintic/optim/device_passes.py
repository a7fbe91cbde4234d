"""Runs a bucket with the Triton kernels of `quintic/kernels`: tables of addresses, launches, no arithmetic.

The kernels find their tensors by address. Addresses of weights and state hardly ever change, those of gradients do
when the allocator hands out other memory, so every step compares them and uploads a new table only when one differs.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quintic.optim.device_memory import HYPERPARAMETERS, DeviceHyperparameters, is_capturing, upload
from quintic.optim.pipeline import BucketMemory, Observer, Operands, orthogonalized, update_factors
from quintic.optim.plan import Bucket, direction_dtype
from quintic.optim.state import master_of
from quintic.optim.views import View

if TYPE_CHECKING:  # needs Triton
    from quintic.kernels.adamw import AdamWPrograms
    from quintic.kernels.matrix_update import MatrixLayout

__all__ = ["DeviceMemory", "step_adamw_on_device", "step_matrices_on_device"]

_LR, _WEIGHT_DECAY, _MOMENTUM, _BETA1, _BETA2, _EPS = range(len(HYPERPARAMETERS))
_ALIGNMENT = 16


class AddressTable:
    """An int64 table of addresses on the device, uploaded when it changes."""

    def __init__(self) -> None:
        self._key: object = None
        self._table = torch.empty(0)
        self._spare: Tensor | None = None
        self._captured: list[Tensor] = []
        self.aligned = False

    def get(self, key: object, build: Callable[[], Tensor], device: torch.device) -> Tensor:
        """Return the table for `key` on the device; `build` makes it on the host when the key is not the last one."""
        if key == self._key:
            return self._table
        addresses = build()
        self.aligned = not bool((addresses % _ALIGNMENT).any())
        if is_capturing(device):
            # Pinned memory cannot be allocated during a capture, and the graph reads it again at every replay.
            if self._spare is None or self._spare.shape != addresses.shape:
                raise RuntimeError("make one step with the same gradients present before the capture of a CUDA graph")
            self._captured.append(self._spare.copy_(addresses))
            self._table = torch.empty_like(addresses, device=device)
            self._table.copy_(self._spare, non_blocking=True)
            self._spare = None
        else:
            self._table = upload(addresses, device)
            if device.type == "cuda" and (self._spare is None or self._spare.shape != addresses.shape):
                self._spare = torch.empty_like(addresses).pin_memory()
        self._key = key
        return self._table


class DeviceMemory(BucketMemory):
    """What one bucket keeps on its device for the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.table = AddressTable()
        self.layout: MatrixLayout | None = None
        self._programs_key: object = None
        self._programs: tuple[Tensor, AdamWPrograms] | None = None

    def programs(self, active: Operands, device: torch.device) -> "tuple[Tensor, AdamWPrograms]":
        """Return on the device the entries of each tensor, and how programs are divided among them."""
        from quintic.kernels.adamw import adamw_programs

        if self._programs is None or active.members != self._programs_key:
            numels = [param.numel() for param in active.params]
            divided = adamw_programs(numels)
            on_device = replace(
                divided,
                tensor_of_program=upload(divided.tensor_of_program, device),
                tile_of_program=upload(divided.tile_of_program, device),
            )
            self._programs = upload(torch.tensor(numels), device), on_device
            self._programs_key = active.members
        return self._programs


def step_matrices_on_device(
    bucket: Bucket,
    group: Mapping[str, Any],
    active: Operands,
    memory: DeviceMemory,
    hyperparameters: DeviceHyperparameters,
    go: Tensor | None,
    observer: Observer | None,
) -> None:
    """Step a bucket of matrices with the kernels.

    Args:
        bucket: of the plan.
        group: its parameter group.
        active: the members that have a gradient.
        memory: the bucket's own.
        hyperparameters: up to date.
        go: () int32 on the device; where it is zero nothing changes. None for always.
        observer: is shown directions, updates and factors, or None.
    """
    from quintic.kernels.matrix_update import MatrixLayout, apply_updates_, momentum_directions_

    assert bucket.shape is not None
    if memory.layout is None:
        block = group["view"].blocks(active.params[0])[active.members[0].block]
        memory.layout = MatrixLayout(*block.shape[1:], *block.stride()[1:])
    layout = memory.layout
    active = _with_one_gradient_dtype(active)
    gradient_dtype, master = active.gradients[0].dtype, master_of(active.states[0])
    master_dtype = None if master is None else master.dtype
    item_sizes = [gradient_dtype.itemsize, 4, bucket.dtype.itemsize, 0 if master is None else master.dtype.itemsize]
    bases = _addresses(active, "momentum_buffer")

    def addresses() -> Tensor:
        _check_state(active, {"momentum_buffer": torch.float32})
        owners, offsets = _matrix_places(group["view"], active)
        return torch.tensor(bases).view(4, -1)[:, owners] + offsets * torch.tensor(item_sizes).view(4, 1)

    table = memory.table.get((bases, active.members), addresses, bucket.device)
    rows, columns = layout.physical()[:2]
    directions = torch.empty(
        (table.shape[1], rows, columns), dtype=direction_dtype(bucket.form, bucket.dtype), device=bucket.device
    )
    momentum_directions_(
        table[:2],
        directions,
        hyperparameters.values,
        layout,
        gradient_dtype=gradient_dtype,
        mu_index=_MOMENTUM,
        nesterov=group["nesterov"],
        go=go,
        aligned=memory.table.aligned,
    )
    if layout.transposed:
        directions = directions.mT
    update = orthogonalized(directions, bucket, group)
    factors = update_factors(update, bucket, group, active, memory, go=go)
    if observer is not None:
        observer(active.members, directions, update, factors)
    apply_updates_(
        table[2:],
        update,
        factors,
        hyperparameters.values,
        layout,
        weight_dtype=bucket.dtype,
        master_dtype=master_dtype,
        lr_index=_LR,
        weight_decay_index=_WEIGHT_DECAY,
        cautious=group["cautious"],
        squared_lr_decay=group["decay_coupling"] == "lr_squared",
        go=go,
        aligned=memory.table.aligned,
    )


def step_adamw_on_device(
    bucket: Bucket,
    group: Mapping[str, Any],
    active: Operands,
    memory: DeviceMemory,
    hyperparameters: DeviceHyperparameters,
    go: Tensor | None,
) -> None:
    """Step a bucket of AdamW parameters with the kernel; arguments as in `step_matrices_on_device`."""
    from quintic.kernels.adamw import adamw_tensors_

    active = _with_one_gradient_dtype(active)
    master = master_of(active.states[0])
    bases = _addresses(active, "exp_avg")

    def addresses() -> Tensor:
        _check_state(active, {"exp_avg": torch.float32, "exp_avg_sq": torch.float32})
        return torch.tensor(bases).view(5, -1)

    table = memory.table.get(bases, addresses, bucket.device)
    steps = [state["step"] for state in active.states]
    if go is None:
        torch._foreach_add_(steps, 1)
    else:
        # One tensor in place of the list would be read by the host.
        torch._foreach_add_(steps, [go.float()] * len(steps))
    betas = hyperparameters.values[_BETA1 : _BETA2 + 1]
    # Double precision: 1 - beta^step loses digits.
    corrections = (1 - betas.unsqueeze(1) ** torch.stack(steps).double()).float()
    numels, programs = memory.programs(active, bucket.device)
    adamw_tensors_(
        table,
        numels,
        programs,
        corrections,
        hyperparameters.values,
        weight_dtype=bucket.dtype,
        gradient_dtype=active.gradients[0].dtype,
        master_dtype=None if master is None else master.dtype,
        indices=(_LR, _WEIGHT_DECAY, _BETA1, _BETA2, _EPS),
        cautious=group["cautious"],
        squared_lr_decay=group["decay_coupling"] == "lr_squared",
        go=go,
        aligned=memory.table.aligned,
    )


def _addresses(active: Operands, first_state: str) -> tuple[int, ...]:
    """Return the addresses of all gradients, then of all state, weights and masters, in the kernels' order."""
    tensors = [*active.gradients, *(state[first_state] for state in active.states)]
    if first_state == "exp_avg":
        tensors += [state["exp_avg_sq"] for state in active.states]
    tensors += active.params
    masters = active.masters()
    tensors += masters or []
    addresses = tuple(map(Tensor.data_ptr, tensors))
    return addresses if masters else addresses + (0,) * len(active.params)


def _check_state(active: Operands, dtypes: Mapping[str, torch.dtype]) -> None:
    """Reject state that the kernels would misread: they see addresses alone.

    Raises:
        ValueError: state is on another device, or has another dtype or memory order than the optimizer gave it.
    """
    wanted = {**dtypes, "master": torch.float32, "mantissa": torch.uint16}
    for member, param, state in zip(active.members, active.params, active.states, strict=True):
        for key in wanted.keys() & state.keys():
            found = state[key]
            if (found.device, found.dtype, found.stride()) != (param.device, wanted[key], param.stride()):
                raise ValueError(
                    f"{member.name}: its {key} is {found.dtype} on {found.device} with strides {found.stride()}, and "
                    f"must be {wanted[key]} on {param.device} with strides {param.stride()}; make the optimizer after "
                    f"moving the model, or move its state along"
                )


def _matrix_places(view: View, active: Operands) -> tuple[Tensor, Tensor]:
    """Return for each matrix which operand it belongs to, and where it starts in the parameter, in entries."""
    owners: list[Tensor] = []
    offsets: list[Tensor] = []
    for number, (member, param) in enumerate(zip(active.members, active.params, strict=True)):
        block = view.blocks(param)[member.block]
        matrices = torch.arange(member.start, member.start + member.num_matrices)
        start = int(block.storage_offset()) - int(param.storage_offset())
        offsets.append(matrices * int(block.stride(0)) + start)
        owners.append(torch.full_like(matrices, number))
    return torch.cat(owners), torch.cat(offsets)


def _with_one_gradient_dtype(active: Operands) -> Operands:
    dtypes = {gradient.dtype for gradient in active.gradients}
    if len(dtypes) == 1 and torch.float64 not in dtypes:
        return active
    return active._replace(gradients=[gradient.float() for gradient in active.gradients])
