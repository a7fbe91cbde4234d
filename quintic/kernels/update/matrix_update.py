"""Element-wise passes of a Muon step over a bucket of matrices, in Triton; every byte is read and written once.

    momentum_directions_   gradient, momentum -> momentum, direction           before the orthogonalisation
    apply_updates_         weight, master, update, factors -> weight, master   after it

The plain twins are `momentum_` and `decay_and_step_` in optim/rules/update.py. Gradients, momenta, weights and masters
lie in the memory of their parameters; directions and updates are stacked, (b, m, n).

- A launch finds its matrices through a table of addresses, so that forty weights of a model take one launch.
- Hyperparameters are read from device memory: they may change between replays of a captured CUDA graph, and a new
  value compiles nothing.
- With a mask, flags in device memory (1 or 0) say which matrices may be written: a step with non-finite gradients
  leaves every byte as it was, without a wait on the host.

Import this module only where Triton is installed (see `dispatch.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintic.kernels.launch import launch
from quintic.kernels.programs import TRITON_DTYPE, pointers_at
from quintic.kernels.update.matrix_layout import MatrixLayout, matrix_offsets
from quintic.kernels.update.packed import load_average, store_average
from quintic.kernels.update.weights import (
    MASTER,
    flags_of,
    load_full_precision,
    stepped_weight,
    store_weight,
)

__all__ = ["apply_updates_", "momentum_directions_"]

# Entries per program; no bit depends on it, since no entry depends on another. H200, 2026-11: 4.4 TB/s and more
# (docs/development/LOG.md).
_BLOCK = 2048
_NUM_WARPS = 8


@triton.jit
def _momentum_kernel(
    # (2, b) int64, rows `addresses_stride` apart: addresses of gradients, then of momenta.
    addresses,
    # (b, rows, columns) contiguous, in the order of memory; written.
    directions,
    # (k,) float64; MU is an index into it.
    hyperparameters,
    # int32, one flag or one per matrix (stride 0 or not): with HAS_MASK, a flag of 0 leaves the momentum as it is.
    apply_mask,
    mask_stride,
    addresses_stride,
    # Layout of every matrix, in the order of memory: see `MatrixLayout.physical`.
    numel,
    columns,
    rows_of_group,
    group_stride,
    row_stride,
    column_stride,
    kernel,
    kernel_stride,
    MU: tl.constexpr,
    # Dtypes of gradients and momenta.
    GRADIENT: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_MASK: tl.constexpr,
    # Special cases of the layout: see `matrix_offsets`.
    CONTIGUOUS: tl.constexpr,
    GROUPED: tl.constexpr,
    FILTERS: tl.constexpr,
    # Whether all addresses are multiples of 16 bytes, and the matrices contiguous.
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The grid has b * tiles programs. A matrix has fewer than 2^31 entries (see `_tiles`), so `element` is int32.
    tiles = tl.cdiv(numel, BLOCK)
    matrix = tl.program_id(0) // tiles
    element = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = element < numel
    offsets = matrix_offsets(
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
    # Subtracted in float64, as in the twin, and rounded once.
    rest = (1.0 - tl.load(hyperparameters + MU)).to(tl.float32)
    gradient = tl.load(gradients, mask=inside, other=0.0).to(tl.float32)
    momentum = load_average(momenta, inside, BLOCK)
    momentum += (gradient - momentum) * rest
    keep = inside
    if HAS_MASK:
        # A flag of 0 makes the bound 0: nothing is stored.
        keep = element < numel * tl.load(apply_mask + matrix * mask_stride)
    store_average(momenta, momentum, keep, 0, BLOCK)
    # The direction is made of the momentum before it is rounded to MOMENTUM, and written whether or not the flag is 0:
    # the matrix' update is then dropped by `_apply_kernel`.
    direction = momentum
    if NESTEROV:
        direction = momentum + (gradient - momentum) * rest
    stacked = directions + matrix.to(tl.int64) * numel + element
    tl.store(stacked, direction.to(directions.dtype.element_ty), mask=inside)


@triton.jit
def _apply_kernel(
    # (2, b) int64, rows `addresses_stride` apart: addresses of weights, then of masters.
    addresses,
    # (b, rows, columns) in the order of memory, with the strides `update_...`.
    updates,
    # (1 or 2, b, rows or 1, columns or 1) float32 with the strides `factor_...`, 0 in dimensions of size 1. The second
    # entry of the first dimension, `decay_stride` away, is the factor of the decay (SCALED).
    factors,
    # (k,) float64; LR and WEIGHT_DECAY are indices into it.
    hyperparameters,
    # int32, one flag or one per matrix (stride 0 or not): with HAS_MASK, a flag of 0 leaves the weights as they are.
    apply_mask,
    mask_stride,
    addresses_stride,
    # Layout of every matrix, in the order of memory: see `MatrixLayout.physical`.
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
    # Dtype of weights, and MASTER as in weights.py.
    WEIGHT: tl.constexpr,
    MASTER: tl.constexpr,
    # See `stepped_weight`.
    CAUTIOUS: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    # Whether entry e of an update lies at offset e.
    UPDATE_CONTIGUOUS: tl.constexpr,
    # Whether each matrix has one factor.
    PER_MATRIX: tl.constexpr,
    SCALED: tl.constexpr,
    # Special cases of the layout: see `matrix_offsets`.
    GROUPED: tl.constexpr,
    FILTERS: tl.constexpr,
    # Whether all addresses are multiples of 16 bytes, and the matrices contiguous.
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles = tl.cdiv(numel, BLOCK)
    matrix = tl.program_id(0) // tiles
    element = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = element < numel
    offsets = matrix_offsets(
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
    master_dtype: tl.constexpr = tl.uint16 if MASTER == 2 else (tl.uint8 if MASTER == 3 else tl.float32)
    # Without masters their pointers are never dereferenced, but must have a type.
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
    # One factor per matrix is a single scalar load for the whole program.
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
        addresses: (2, b) int64 on the device: addresses of each matrix' gradient and momentum. Columns of a larger
            table may be passed. The momenta are changed.
        directions: (b, rows, columns) contiguous, any floating dtype; overwritten, in the order of memory of `layout`.
        hyperparameters: (k,) float64 on the device.
        layout: layout of every matrix, for gradients and momenta alike.
        gradient_dtype: dtype of the gradients.
        momentum_dtype: float32, bfloat16 or int8; momenta are rounded to it when they are stored.
        mu_index: index of the momentum coefficient in `hyperparameters`.
        nesterov: True for Nesterov's direction, momentum + (1 - mu)(gradient - momentum), else the momentum.
        apply_mask: () or (b,) int32 on the device, 1 or 0: a matrix with 0 keeps its momentum. None for 1 everywhere.
        aligned: whether all addresses are multiples of 16 bytes.
    """
    count = addresses.shape[1]
    # The kernel needs no number of rows.
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
        addresses: (2, b) int64 on the device: addresses of each matrix' weight and master (ignored without masters),
            which are changed. Columns of a larger table may be passed.
        updates: (b, m, n) floating, any strides, in the orientation of the view (not transposed to the order of
            memory); not modified.
        factors: (1 or 2, b, m or 1, n or 1) float32: factors of the updates in addition to the learning rate, and, if
            there is a second entry, of the decay.
        hyperparameters: (k,) float64 on the device.
        layout: layout of every matrix, for weights and masters alike.
        weight_dtype: dtype of the weights.
        master_dtype: float32, uint16, uint8 or None; see `quintic/optim/numeric/precision.py`.
        lr_index: index of the learning rate in `hyperparameters`.
        weight_decay_index: index of the weight decay in `hyperparameters`.
        cautious: decay only entries where update and weight agree in sign; see `decay_and_step_`.
        squared_lr_decay: decay by lr^2 weight_decay instead of lr weight_decay.
        apply_mask: () or (b,) int32 on the device, 1 or 0: a matrix with 0 keeps its weight and master. None for all 1.
        aligned: whether all addresses are multiples of 16 bytes.
    """
    count = addresses.shape[1]
    _, columns, *geometry = layout.physical()
    # In the order of memory, as the kernel counts entries. Factors of size 1 in a dimension are read with stride 0.
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
