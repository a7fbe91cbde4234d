"""Momentum and weights of matrices in Triton: each pass reads and writes every byte once, for many tensors at a time.

    momentum_directions_   gradient, momentum -> momentum, direction (stacked)     twin: optim/rules/update.py momentum_
    apply_updates_         weight, master, update (stacked) -> weight, master      twin: apply_

A launch finds its tensors through a table of addresses, so that forty weights of a model are one launch and not forty.
Hyperparameters are read from device memory: they may change between the replays of a captured CUDA graph, and no
change compiles anything. With a guard, nothing is written where its flag is zero: a step with non-finite gradients
leaves every byte as it was, and the host never has to know.

Import this module only where Triton is installed (see `dispatch.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintic.kernels.launch import launch
from quintic.kernels.programs import TRITON_DTYPE, pointers_at
from quintic.kernels.update.weights import (
    MASTER,
    flags_of,
    load_full_precision,
    stepped_weight,
    store_weight,
)

__all__ = ["MatrixLayout", "apply_updates_", "momentum_directions_"]

# Entries per program, of which each is computed by itself. H200, 2026-11: 4.4 TB/s and more (docs/development/LOG.md).
_BLOCK = 2048
_NUM_WARPS = 8


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """Sizes and strides of each matrix of a bucket in the memory of its parameter, in elements.

    The matrix has `groups` groups of `rows` rows of `columns` columns, with these strides. Kernels go through the
    entries in the order of memory: where rows lie closer than columns, the roles of the two are exchanged. Columns may
    be in two dimensions: `kernel` of them, `kernel_stride` apart, before the next `column_stride`.
    """

    groups: int
    rows: int
    columns: int
    group_stride: int
    row_stride: int
    column_stride: int
    kernel: int = 1
    kernel_stride: int = 0

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int]) -> "MatrixLayout":
        """Return the layout of the matrices of a block, given its (g, r, n) or (g, r, c, k) and their strides."""
        (groups, rows, columns, *kernel), (group_stride, row_stride, column_stride, *kernel_stride) = shape, strides
        within = (kernel[0], kernel_stride[0]) if kernel else (1, 0)
        return cls(groups, rows, columns * within[0], group_stride, row_stride, column_stride, *within)

    @property
    def transposed(self) -> bool:
        """Return whether memory runs along columns: the stored matrix is the transpose."""
        return self.groups == 1 and self.kernel == 1 and self.row_stride == 1 and self.column_stride != 1

    @property
    def numel(self) -> int:
        """Return the entries of one matrix."""
        return self.groups * self.rows * self.columns

    def physical(self) -> tuple[int, int, int, int, int, int, int, int]:
        """Return (rows, columns, rows of a group, group stride, row stride, column stride, kernel, kernel stride).

        In the order of memory.
        """
        kernel = self.kernel, self.kernel_stride
        if self.transposed:
            return self.columns, self.rows, self.columns, 0, self.column_stride, self.row_stride, *kernel
        rows = self.groups * self.rows
        return rows, self.columns, self.rows, self.group_stride, self.row_stride, self.column_stride, *kernel

    @property
    def contiguous(self) -> bool:
        """Return whether the entries of a matrix fill their memory in order."""
        rows, columns, rows_of_group, group_stride, row_stride, column_stride, kernel, _ = self.physical()
        grouped = rows_of_group != rows and group_stride != rows_of_group * columns
        if grouped or kernel > 1:
            return False
        return (row_stride == columns or rows == 1) and (column_stride == 1 or columns == 1)


@triton.jit
def _matrix_offsets(
    element,
    columns,
    rows_of_group,
    group_stride,
    row_stride,
    column_stride,
    kernel,
    kernel_stride,
    CONTIGUOUS: tl.constexpr,
    GROUPED: tl.constexpr,
    FILTERS: tl.constexpr,
):
    if CONTIGUOUS:
        offsets = element.to(tl.int64)
    else:
        row = element // columns
        column = element % columns
        if FILTERS:
            offsets = (column // kernel).to(tl.int64) * column_stride + (column % kernel).to(tl.int64) * kernel_stride
        else:
            offsets = column.to(tl.int64) * column_stride
        if GROUPED:
            offsets += (row // rows_of_group).to(tl.int64) * group_stride
            row = row % rows_of_group
        offsets += row.to(tl.int64) * row_stride
    return offsets


@triton.jit
def _momentum_kernel(
    addresses,
    directions,
    hyperparameters,
    apply_mask,
    mask_stride,
    addresses_stride,
    numel,
    columns,
    rows_of_group,
    group_stride,
    row_stride,
    column_stride,
    kernel,
    kernel_stride,
    MU: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_MASK: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    GROUPED: tl.constexpr,
    FILTERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles = tl.cdiv(numel, BLOCK)
    matrix = tl.program_id(0) // tiles
    element = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = element < numel
    offsets = _matrix_offsets(
        element,
        columns,
        rows_of_group,
        group_stride,
        row_stride,
        column_stride,
        kernel,
        kernel_stride,
        CONTIGUOUS,
        GROUPED,
        FILTERS,
    )
    gradients = pointers_at(tl.load(addresses + matrix), offsets, GRADIENT, ALIGNED)
    momenta = pointers_at(tl.load(addresses + addresses_stride + matrix), offsets, MOMENTUM, ALIGNED)
    rest = (1.0 - tl.load(hyperparameters + MU)).to(tl.float32)
    gradient = tl.load(gradients, mask=inside, other=0.0).to(tl.float32)
    momentum = tl.load(momenta, mask=inside, other=0.0).to(tl.float32)
    momentum += (gradient - momentum) * rest
    keep = inside
    if HAS_MASK:
        keep = element < numel * tl.load(apply_mask + matrix * mask_stride)
    tl.store(momenta, momentum.to(MOMENTUM), mask=keep)
    direction = momentum
    if NESTEROV:
        direction = momentum + (gradient - momentum) * rest
    stacked = directions + matrix.to(tl.int64) * numel + element
    tl.store(stacked, direction.to(directions.dtype.element_ty), mask=inside)


@triton.jit
def _apply_kernel(
    addresses,
    updates,
    factors,
    hyperparameters,
    apply_mask,
    mask_stride,
    addresses_stride,
    numel,
    columns,
    rows_of_group,
    group_stride,
    row_stride,
    column_stride,
    kernel,
    kernel_stride,
    update_stride,
    update_row_stride,
    update_column_stride,
    decay_stride,
    factor_stride,
    factor_row_stride,
    factor_column_stride,
    LR: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
    WEIGHT: tl.constexpr,
    MASTER: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    UPDATE_CONTIGUOUS: tl.constexpr,
    PER_MATRIX: tl.constexpr,
    SCALED: tl.constexpr,
    GROUPED: tl.constexpr,
    FILTERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles = tl.cdiv(numel, BLOCK)
    matrix = tl.program_id(0) // tiles
    element = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = element < numel
    offsets = _matrix_offsets(
        element,
        columns,
        rows_of_group,
        group_stride,
        row_stride,
        column_stride,
        kernel,
        kernel_stride,
        CONTIGUOUS,
        GROUPED,
        FILTERS,
    )
    weights = pointers_at(tl.load(addresses + matrix), offsets, WEIGHT, ALIGNED)
    master_dtype: tl.constexpr = tl.uint16 if MASTER == 2 else tl.float32
    masters = weights
    if MASTER != 0:
        masters = pointers_at(tl.load(addresses + addresses_stride + matrix), offsets, master_dtype, ALIGNED)
    row = element // columns
    column = element % columns
    if UPDATE_CONTIGUOUS:
        update_offsets = element.to(tl.int64)
    else:
        update_offsets = row.to(tl.int64) * update_row_stride + column.to(tl.int64) * update_column_stride
    update = tl.load(updates + matrix.to(tl.int64) * update_stride + update_offsets, mask=inside, other=0.0)
    update = update.to(tl.float32)
    places, known = factors + matrix * factor_stride, True
    if not PER_MATRIX:
        places, known = places + row * factor_row_stride + column * factor_column_stride, inside
    factor, decay_factor = tl.load(places, mask=known, other=0.0), 1.0
    if SCALED:
        decay_factor = tl.load(places + decay_stride, mask=known, other=0.0)
    lr, weight_decay = tl.load(hyperparameters + LR), tl.load(hyperparameters + WEIGHT_DECAY)
    keep = inside
    if HAS_MASK:
        keep = element < numel * tl.load(apply_mask + matrix * mask_stride)
    value = load_full_precision(tl.load(weights, mask=inside, other=0.0), masters, inside, MASTER)
    value = stepped_weight(value, update, factor, decay_factor, lr, weight_decay, CAUTIOUS, SQUARED)
    store_weight(weights, masters, value, keep, MASTER)


def momentum_directions_(
    addresses: Tensor,
    directions: Tensor,
    hyperparameters: Tensor,
    layout: MatrixLayout,
    *,
    gradient_dtype: torch.dtype,
    momentum_dtype: torch.dtype = torch.float32,
    mu_index: int,
    nesterov: bool,
    apply_mask: Tensor | None,
    aligned: bool,
) -> None:
    """Advance the momentum of a bucket's matrices and write their update directions.

    Args:
        addresses: (2, b) int64 on the device, a part of the columns of a table perhaps: of each matrix' gradient and
            momentum, which is changed.
        directions: (b, rows, columns) contiguous, any floating dtype, overwritten, in the order of memory of `layout`.
        hyperparameters: (k,) float64 on the device.
        layout: of every matrix, in gradient and momentum alike.
        gradient_dtype: of the gradients.
        momentum_dtype: float32 or bfloat16, to which the momentum is rounded when it is stored.
        mu_index: where the momentum coefficient stands in `hyperparameters`.
        nesterov: whether the direction looks one gradient ahead.
        apply_mask: () or (b,) int32 on the device, 1 or 0: at 0 no momentum is written. None for always.
        aligned: whether all addresses are multiples of 16.
    """
    count = addresses.shape[1]
    _, *geometry = layout.physical()
    launch(
        _momentum_kernel,
        (count * _tiles(layout),),
        addresses,
        directions,
        hyperparameters,
        *flags_of(apply_mask, hyperparameters),
        addresses.stride(0),
        layout.numel,
        *geometry,
        MU=mu_index,
        GRADIENT=TRITON_DTYPE[gradient_dtype],
        MOMENTUM=TRITON_DTYPE[momentum_dtype],
        NESTEROV=nesterov,
        HAS_MASK=apply_mask is not None,
        CONTIGUOUS=layout.contiguous,
        GROUPED=layout.groups > 1,
        FILTERS=layout.kernel > 1,
        ALIGNED=aligned and layout.contiguous,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


def apply_updates_(
    addresses: Tensor,
    updates: Tensor,
    factors: Tensor,
    hyperparameters: Tensor,
    layout: MatrixLayout,
    *,
    weight_dtype: torch.dtype,
    master_dtype: torch.dtype | None,
    lr_index: int,
    weight_decay_index: int,
    cautious: bool | str,
    squared_lr_decay: bool,
    apply_mask: Tensor | None,
    aligned: bool,
) -> None:
    """Decay a bucket's weights and step against their updates.

    Args:
        addresses: (2, b) int64 likewise: of each matrix' weight and master (any number without masters), changed.
        updates: (b, m, n) floating, any strides, in the orientation of the view; not modified.
        factors: (1 or 2, b, m or 1, n or 1) float32; what multiplies updates besides the learning rate, and decay.
        hyperparameters: (k,) float64 on the device.
        layout: of every matrix, in weight and master alike.
        weight_dtype: of the weights.
        master_dtype: float32, uint16 or None; see `quintic/optim/rules/precision.py`.
        lr_index: where the learning rate stands in `hyperparameters`.
        weight_decay_index: where the weight decay stands there.
        cautious: decay only entries where update and weight agree in sign; see optim/rules/update.py `apply_`.
        squared_lr_decay: decay by lr^2 weight_decay instead of lr weight_decay.
        apply_mask: () or (b,) int32 on the device, 1 or 0: at 0 nothing is written. None for always.
        aligned: whether all addresses are multiples of 16.
    """
    count = addresses.shape[1]
    _, columns, *geometry = layout.physical()
    update = updates.mT if layout.transposed else updates
    factor = factors.expand(-1, count, -1, -1)
    factor = factor.mT if layout.transposed else factor
    factor_strides = (0 if size == 1 else stride for size, stride in zip(factor.shape, factor.stride(), strict=True))
    launch(
        _apply_kernel,
        (count * _tiles(layout),),
        addresses,
        updates,
        factors,
        hyperparameters,
        *flags_of(apply_mask, hyperparameters),
        addresses.stride(0),
        layout.numel,
        columns,
        *geometry,
        *update.stride(),
        *factor_strides,
        LR=lr_index,
        WEIGHT_DECAY=weight_decay_index,
        WEIGHT=TRITON_DTYPE[weight_dtype],
        MASTER=MASTER[master_dtype],
        CAUTIOUS=cautious,
        SQUARED=squared_lr_decay,
        HAS_MASK=apply_mask is not None,
        CONTIGUOUS=layout.contiguous,
        UPDATE_CONTIGUOUS=update.stride()[1:] == (columns, 1),
        PER_MATRIX=factors.shape[2:] == (1, 1),
        SCALED=len(factors) == 2,
        GROUPED=layout.groups > 1,
        FILTERS=layout.kernel > 1,
        ALIGNED=aligned and layout.contiguous,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


def _tiles(layout: MatrixLayout) -> int:
    if layout.numel >= 2**31:
        raise ValueError(f"a matrix of {layout.rows * layout.groups} x {layout.columns} has 2^31 entries or more")
    return -(-layout.numel // _BLOCK)
