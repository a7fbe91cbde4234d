"""Runs a bucket with the Triton kernels of `quintic/kernels`: tables of addresses, launches, no arithmetic.

The kernels find their tensors by address. Addresses of weights and state hardly ever change, those of gradients do
when the allocator hands out other memory, so every step compares them and uploads a new table only when one differs.
"""

from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quintic.optim.groups.group import Group
from quintic.optim.layout.pieces import block_of
from quintic.optim.layout.views import View
from quintic.optim.numeric.bf16_state import moment_dtype_of
from quintic.optim.plan.bucket import Bucket
from quintic.optim.rules.device import HYPERPARAMETERS, DeviceHyperparameters, host_tensor
from quintic.optim.rules.rule import EXP_AVG, EXP_AVG_SQ, MOMENTUM, STEP
from quintic.optim.state.state import master_of
from quintic.optim.step.operands import BucketCache, Operands
from quintic.optim.step.torch_backend import masters_of

if TYPE_CHECKING:  # needs Triton
    from quintic.kernels.update.matrix_layout import MatrixLayout

__all__ = ["TritonBackend", "step_adamw_triton", "with_one_gradient_dtype"]

_LR, _WEIGHT_DECAY, _MOMENTUM, _BETA1, _BETA2, _EPS = range(len(HYPERPARAMETERS))


class TritonBackend:
    """The passes over at least one member of a bucket with the kernels, see `torch_backend.UpdateBackend`.

    Where `apply_mask`, () or (matrices,) int32 on the device, is zero, nothing changes; None steps all.
    """

    def __init__(
        self,
        bucket: Bucket,
        group: Group,
        active: Operands,
        cache: BucketCache,
        hyperparameters: DeviceHyperparameters,
        apply_mask: Tensor | None,
    ) -> None:
        self._bucket, self._group, self._apply_mask = bucket, group, apply_mask
        # One launch reads gradients of one dtype.
        self._active = active = with_one_gradient_dtype(active)
        # (hyperparameters,) float64 on the device, in the order of HYPERPARAMETERS.
        self._hyperparameters = hyperparameters.values
        if cache.runs is None:
            # Layouts follow from the plan, so that all members count, also those without a gradient today.
            cache.runs = _runs(group.view, cache.everything or active)
        self._cache = cache
        master = master_of(active.states[0])
        self._master_dtype = None if master is None else master.dtype
        self._momentum_dtype = _moment_dtype(bucket, group, active, MOMENTUM)
        # Bytes of an entry of each tensor that a matrix has, in the order of `_addresses`.
        gradient, momentum = active.gradients[0].itemsize, self._momentum_dtype.itemsize
        sizes = [gradient, momentum, bucket.dtype.itemsize, 0 if master is None else master.itemsize]
        bases = _addresses(active, MOMENTUM)

        # (4, matrices) int64 addresses: gradient, momentum, weight, master or 0.
        def addresses() -> Tensor:
            cache.check_state(active, {MOMENTUM: self._momentum_dtype}, bases[len(active.params) :])
            # (4, members) -> (4, matrices): where each matrix starts within its parameter's tensors.
            owners, offsets = cache.matrix_places(group.view, active)
            return host_tensor(bases).view(4, -1)[:, owners] + offsets * host_tensor(sizes).view(4, 1)

        self._table = cache.table.get((bases, active.members), addresses, bucket.device)

    def directions(self) -> Tensor:
        """Advance the momentum; return the directions (b, m, n)."""
        from quintic.kernels.update.matrix_update import momentum_directions_

        # A launch for each run of matrices with one layout in memory; mostly there is one.
        of_layouts = []
        for layout, part in self._layouts():
            # Directions are written in the order of memory; a view transposes them back.
            rows, columns = layout.physical()[:2]
            directions = torch.empty(
                (part.stop - part.start, rows, columns),
                dtype=self._bucket.direction_dtype,
                device=self._bucket.device,
            )
            momentum_directions_(
                self._table[:2, part],
                directions,
                self._hyperparameters,
                layout,
                gradient_dtype=self._active.gradients[0].dtype,
                momentum_dtype=self._momentum_dtype,
                mu_index=_MOMENTUM,
                nesterov=self._group.nesterov,
                apply_mask=self._mask_of(part),
                aligned=self._cache.table.aligned,
            )
            of_layouts.append(directions.mT if layout.transposed else directions)
        return of_layouts[0] if len(of_layouts) == 1 else torch.cat(of_layouts)

    def apply(self, update: Tensor, factors: Tensor, rate: Tensor | None = None) -> None:
        """Step the weights."""
        from quintic.kernels.update.matrix_update import apply_updates_

        # (b or 2b, m or 1, n or 1) -> (1 or 2, b, ...): factors of updates, then those of decay.
        factors = factors.view(len(factors) // len(update), len(update), *factors.shape[1:])
        for layout, part in self._layouts():
            apply_updates_(
                self._table[2:, part],
                update[part],
                factors[:, part],
                self._hyperparameters,
                layout,
                weight_dtype=self._bucket.dtype,
                master_dtype=self._master_dtype,
                lr_index=_LR,
                weight_decay_index=_WEIGHT_DECAY,
                cautious=self._group.cautious,
                squared_lr_decay=self._group.decay_coupling == "lr_squared",
                apply_mask=self._mask_of(part),
                aligned=self._cache.table.aligned,
            )

    def _layouts(self) -> "list[tuple[MatrixLayout, slice]]":
        """Return each layout with the range of matrices, in the batch, that have it."""
        assert self._cache.runs is not None
        if len(self._cache.runs) == 1:  # also if members without a gradient are left out
            return [(self._cache.runs[0][0], slice(0, self._table.shape[1]))]
        layouts, start = [], 0
        for layout, count in self._cache.runs:
            layouts.append((layout, slice(start, start + count)))
            start += count
        return layouts

    def _mask_of(self, part: slice) -> Tensor | None:
        return self._apply_mask if self._apply_mask is None or self._apply_mask.ndim == 0 else self._apply_mask[part]


def _runs(view: View, active: Operands) -> "list[tuple[MatrixLayout, int]]":
    from quintic.kernels.update.matrix_layout import MatrixLayout

    # Neighbours with the same shape and strides, (g, r, n) without b, are one launch.
    blocks = [block_of(param, member, view) for param, member in zip(active.params, active.members, strict=True)]
    layouts = [(MatrixLayout.of(block.shape[1:], block.stride()[1:]), block.shape[0]) for block in blocks]
    return [(layout, sum(count for _, count in run)) for layout, run in groupby(layouts, key=lambda pair: pair[0])]


def step_adamw_triton(
    bucket: Bucket,
    group: Group,
    active: Operands,
    cache: BucketCache,
    hyperparameters: DeviceHyperparameters,
    apply_mask: Tensor | None,
) -> None:
    """Step a bucket of AdamW parameters with the kernel; arguments as those of `TritonBackend`."""
    from quintic.kernels.update.adamw import adamw_tensors_

    active = with_one_gradient_dtype(active)
    master = master_of(active.states[0])
    dtypes = {key: _moment_dtype(bucket, group, active, key) for key in (EXP_AVG, EXP_AVG_SQ)}
    bases = _addresses(active, EXP_AVG)

    # (5, parameters) int64 addresses: gradient, both moments, weight, master or 0.
    def addresses() -> Tensor:
        cache.check_state(active, dtypes, bases[len(active.params) :])
        return host_tensor(bases).view(5, -1)

    table = cache.table.get(bases, addresses, bucket.device)
    # Counts of steps are tensors of one entry each: the kernel advances them in place.
    counts = tuple(state[STEP].data_ptr() for state in active.states)
    steps = cache.steps_table.get(counts, lambda: host_tensor(counts), bucket.device)
    # Which program works on which tile of which tensor, all tensors in one launch.
    numels, programs = cache.programs(active, bucket.device)
    adamw_tensors_(
        table,
        steps,
        numels,
        programs,
        hyperparameters.values,
        weight_dtype=bucket.dtype,
        gradient_dtype=active.gradients[0].dtype,
        moment_dtype=dtypes[EXP_AVG],
        master_dtype=None if master is None else master.dtype,
        indices=(_LR, _WEIGHT_DECAY, _BETA1, _BETA2, _EPS),
        cautious=group.cautious,
        squared_lr_decay=group.decay_coupling == "lr_squared",
        apply_mask=apply_mask,
        aligned=cache.table.aligned,
    )


def _moment_dtype(bucket: Bucket, group: Group, active: Operands, key: str) -> torch.dtype:
    """Return the dtype of an average of a bucket's members."""
    # The parameters of a bucket have averages of 8 bits, or none of them has.
    packed = group.rule.packed_state.get(key)
    if group.state_dtype == "int8" and packed is not None:
        return packed if active.states[0][key].dtype == packed else torch.float32
    return moment_dtype_of(bucket.dtype, group.state_dtype)


def _addresses(active: Operands, first_state: str) -> tuple[int, ...]:
    """Return the addresses of all gradients, then of all state, weights and masters, in the kernels' order."""
    # A rule whose direction is not momentum may have no such state: then weights stand in its place, and are not read.
    own = (state.get(first_state, param) for state, param in zip(active.states, active.params, strict=True))
    tensors = [*active.gradients, *own]
    if first_state == EXP_AVG:
        tensors += [state[EXP_AVG_SQ] for state in active.states]
    tensors += active.params
    masters = masters_of(active)
    tensors += masters or []
    addresses = tuple(map(Tensor.data_ptr, tensors))
    # The kernels read no master where its address is 0.
    return addresses if masters else addresses + (0,) * len(active.params)


def with_one_gradient_dtype(active: Operands) -> Operands:
    """Return operands whose gradients have one dtype that the kernels know."""
    dtypes = {gradient.dtype for gradient in active.gradients}
    # Copies in float32: the kernels compute in it, and have no loads of float64.
    if len(dtypes) == 1 and torch.float64 not in dtypes:
        return active
    return active._replace(gradients=[gradient.float() for gradient in active.gradients])
