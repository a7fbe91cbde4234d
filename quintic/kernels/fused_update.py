"""The optimizer's element-wise passes in Triton: each reads and writes every byte once, for many tensors in one launch.

    momentum_directions_   gradient, momentum -> momentum, direction (stacked)     twin: optim/update.py momentum_
    apply_updates_         weight, master, update (stacked) -> weight, master      twin: apply_
    adamw_tensors_         gradient, moments, weight, master -> the same           twin: adamw_

A launch finds its tensors through a table of addresses, so that forty weights of a model are one launch and not forty.
Hyperparameters are read from device memory: they may change between the replays of a captured CUDA graph, and no
change compiles anything. With a guard, nothing is written where its flag is zero: a step with non-finite gradients
leaves every byte as it was, and the host never has to know.

Import this module only where Triton is installed (see `dispatch.py`).
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "AdamWPrograms",
    "MatrixLayout",
    "adamw_programs",
    "adamw_tensors_",
    "apply_updates_",
    "momentum_directions_",
    "on_device_of",
]

# Elements per program. H200, 2026-11: AdamW reached 3.2 TB/s with 1024, 2.3 with 2048 (docs/LOG.md).
_MATRIX_BLOCK = 2048
_ADAMW_BLOCK = 1024
_NUM_WARPS = 8

# Tensors with more programs than this are launched alone: a look into the tables costs more than a launch.
_ALONE_PROGRAMS = 2048

_TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# What a table's row of masters holds.
_MASTER = {None: 0, torch.float32: 1, torch.uint16: 2}


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """How each matrix of a bucket lies in the memory of its parameter, in elements.

    The matrix has `groups` groups of `rows` rows of `columns` columns, with these strides. Kernels go through the
    entries in the order of memory: where rows lie closer than columns, the roles of the two are exchanged.
    """

    groups: int
    rows: int
    columns: int
    group_stride: int
    row_stride: int
    column_stride: int

    @property
    def transposed(self) -> bool:
        """Return whether memory runs along columns: the stored matrix is the transpose."""
        return self.groups == 1 and self.row_stride == 1 and self.column_stride != 1

    @property
    def numel(self) -> int:
        """Return the entries of one matrix."""
        return self.groups * self.rows * self.columns

    def physical(self) -> tuple[int, int, int, int, int, int]:
        """Return (rows, columns, rows of a group, group stride, row stride, column stride) in the order of memory."""
        if self.transposed:
            return self.columns, self.rows, self.columns, 0, self.column_stride, self.row_stride
        rows = self.groups * self.rows
        return rows, self.columns, self.rows, self.group_stride, self.row_stride, self.column_stride

    @property
    def contiguous(self) -> bool:
        """Return whether the entries of a matrix fill their memory in order."""
        rows, columns, rows_of_group, group_stride, row_stride, column_stride = self.physical()
        grouped = rows_of_group != rows and group_stride != rows_of_group * columns
        return not grouped and (row_stride == columns or rows == 1) and (column_stride == 1 or columns == 1)


@dataclass(frozen=True, slots=True)
class AdamWPrograms:
    """How the programs of `adamw_tensors_` are divided among its tensors."""

    alone: tuple[tuple[int, int], ...]
    """(number, programs) of each large tensor: one launch each."""
    tensor_of_program: Tensor
    """(p,) int32: which of the small tensors each program works on."""
    tile_of_program: Tensor
    """(p,) int32: which of its tiles."""


def adamw_programs(numels: Sequence[int]) -> AdamWPrograms:
    """Return the division for tensors of so many entries, on the CPU."""
    tiles = [-(-numel // _ADAMW_BLOCK) for numel in numels]
    alone = tuple((number, count) for number, count in enumerate(tiles) if count > _ALONE_PROGRAMS)
    small = torch.tensor([0 if count > _ALONE_PROGRAMS else count for count in tiles], dtype=torch.int64)
    tensors = torch.repeat_interleave(torch.arange(len(tiles)), small)
    first_program = (small.cumsum(0) - small)[tensors]
    return AdamWPrograms(alone, tensors.int(), (torch.arange(len(tensors)) - first_program).int())


@triton.jit
def _matrix_offsets(
    element,
    columns,
    rows_of_group,
    group_stride,
    row_stride,
    column_stride,
    CONTIGUOUS: tl.constexpr,
    GROUPED: tl.constexpr,
):
    if CONTIGUOUS:
        offsets = element.to(tl.int64)
    else:
        row = element // columns
        offsets = (element % columns).to(tl.int64) * column_stride
        if GROUPED:
            offsets += (row // rows_of_group).to(tl.int64) * group_stride
            row = row % rows_of_group
        offsets += row.to(tl.int64) * row_stride
    return offsets


@triton.jit
def _pointers(base, offsets, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointers = base.to(tl.pointer_type(dtype)) + offsets
    if ALIGNED:
        # Addresses from a table carry no alignment: without the hint every entry would be a load of its own.
        pointers = tl.max_contiguous(tl.multiple_of(pointers, 16), 16)
    return pointers


@triton.jit
def _momentum_kernel(
    addresses,
    directions,
    hyperparameters,
    go,
    num_matrices,
    numel,
    columns,
    rows_of_group,
    group_stride,
    row_stride,
    column_stride,
    MU: tl.constexpr,
    GRADIENT: tl.constexpr,
    NESTEROV: tl.constexpr,
    GUARDED: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    GROUPED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles = tl.cdiv(numel, BLOCK)
    matrix = tl.program_id(0) // tiles
    element = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = element < numel
    offsets = _matrix_offsets(
        element, columns, rows_of_group, group_stride, row_stride, column_stride, CONTIGUOUS, GROUPED
    )
    gradients = _pointers(tl.load(addresses + matrix), offsets, GRADIENT, ALIGNED)
    momenta = _pointers(tl.load(addresses + num_matrices + matrix), offsets, tl.float32, ALIGNED)
    rest = (1.0 - tl.load(hyperparameters + MU)).to(tl.float32)
    gradient = tl.load(gradients, mask=inside, other=0.0).to(tl.float32)
    momentum = tl.load(momenta, mask=inside, other=0.0)
    momentum += (gradient - momentum) * rest
    keep = inside
    if GUARDED:
        keep = element < numel * tl.load(go)
    tl.store(momenta, momentum, mask=keep)
    direction = momentum
    if NESTEROV:
        direction = momentum + (gradient - momentum) * rest
    stacked = directions + matrix.to(tl.int64) * numel + element
    tl.store(stacked, direction.to(directions.dtype.element_ty), mask=inside)


@triton.jit
def _full_precision(weight, masters, mask, MASTER: tl.constexpr):
    """Return the float32 value behind a weight; see optim/precision.py."""
    if MASTER == 2:
        low = tl.load(masters, mask=mask, other=0).to(tl.uint32)
        high = weight.to(tl.uint16, bitcast=True).to(tl.uint32)
        value = ((high << 16) | low).to(tl.float32, bitcast=True)
    else:
        value = weight.to(tl.float32)
    if MASTER == 1:
        master = tl.load(masters, mask=mask, other=0.0)
        # A weight that is not its master's was written by somebody else: then the weight counts.
        value = tl.where(_rounded(master, weight.dtype).to(tl.float32) == value, master, value)
    return value


@triton.jit
def _rounded(value, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        rounded = (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = value.to(dtype)
    return rounded


@triton.jit
def _store(weights, masters, value, mask, MASTER: tl.constexpr):
    dtype: tl.constexpr = weights.dtype.element_ty
    if MASTER == 0:
        tl.store(weights, value.to(dtype), mask=mask)
    else:
        tl.store(weights, _rounded(value, dtype), mask=mask)
    if MASTER == 1:
        tl.store(masters, value, mask=mask)
    if MASTER == 2:
        tl.store(masters, (value.to(tl.uint32, bitcast=True) & 0xFFFF).to(tl.uint16), mask=mask)


@triton.jit
def _stepped(value, update, factor, lr, weight_decay, CAUTIOUS: tl.constexpr, SQUARED: tl.constexpr):
    """Return the weight after decay and update; see optim/update.py apply_."""
    decay_rate = weight_decay
    if SQUARED:
        decay_rate = weight_decay * lr
    decay = value * decay_rate.to(tl.float32)
    if CAUTIOUS:
        decay = tl.where(update * value >= 0, decay, 0.0)
    return value - lr.to(tl.float32) * (update * factor + decay)


@triton.jit
def _apply_kernel(
    addresses,
    updates,
    factors,
    hyperparameters,
    go,
    num_matrices,
    numel,
    columns,
    rows_of_group,
    group_stride,
    row_stride,
    column_stride,
    update_stride,
    update_row_stride,
    update_column_stride,
    factor_stride,
    factor_row_stride,
    factor_column_stride,
    LR: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
    WEIGHT: tl.constexpr,
    MASTER: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    SQUARED: tl.constexpr,
    GUARDED: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    UPDATE_CONTIGUOUS: tl.constexpr,
    PER_MATRIX: tl.constexpr,
    GROUPED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles = tl.cdiv(numel, BLOCK)
    matrix = tl.program_id(0) // tiles
    element = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = element < numel
    offsets = _matrix_offsets(
        element, columns, rows_of_group, group_stride, row_stride, column_stride, CONTIGUOUS, GROUPED
    )
    weights = _pointers(tl.load(addresses + matrix), offsets, WEIGHT, ALIGNED)
    master_dtype: tl.constexpr = tl.uint16 if MASTER == 2 else tl.float32
    masters = weights
    if MASTER != 0:
        masters = _pointers(tl.load(addresses + num_matrices + matrix), offsets, master_dtype, ALIGNED)
    row = element // columns
    column = element % columns
    if UPDATE_CONTIGUOUS:
        update_offsets = element.to(tl.int64)
    else:
        update_offsets = row.to(tl.int64) * update_row_stride + column.to(tl.int64) * update_column_stride
    update = tl.load(updates + matrix.to(tl.int64) * update_stride + update_offsets, mask=inside, other=0.0)
    update = update.to(tl.float32)
    factor_offsets = matrix * factor_stride
    if PER_MATRIX:
        factor = tl.load(factors + factor_offsets)
    else:
        factor_offsets += row * factor_row_stride + column * factor_column_stride
        factor = tl.load(factors + factor_offsets, mask=inside, other=0.0)
    lr = tl.load(hyperparameters + LR)
    weight_decay = tl.load(hyperparameters + WEIGHT_DECAY)
    keep = inside
    if GUARDED:
        keep = element < numel * tl.load(go)
    value = _full_precision(tl.load(weights, mask=inside, other=0.0), masters, inside, MASTER)
    value = _stepped(value, update, factor, lr, weight_decay, CAUTIOUS, SQUARED)
    _store(weights, masters, value, keep, MASTER)


@triton.jit
def _adamw_kernel(
    addresses,
    numels,
    tensor_of_program,
    tile_of_program,
    corrections,
    hyperparameters,
    go,
    num_tensors,
    only_tensor,
    ALONE: tl.constexpr,
    LR: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    MASTER: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    SQUARED: tl.constexpr,
    GUARDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if ALONE:
        tensor = only_tensor
        tile = tl.program_id(0)
    else:
        tensor = tl.load(tensor_of_program + tl.program_id(0))
        tile = tl.load(tile_of_program + tl.program_id(0))
    # A tile's start may lie beyond 2^31, the place within it does not.
    start = tile.to(tl.int64) * BLOCK
    numel = tl.load(numels + tensor)
    element = start + tl.arange(0, BLOCK)
    inside = element < numel
    gradients = _pointers(tl.load(addresses + tensor), element, GRADIENT, ALIGNED)
    exp_avgs = _pointers(tl.load(addresses + num_tensors + tensor), element, tl.float32, ALIGNED)
    exp_avg_sqs = _pointers(tl.load(addresses + 2 * num_tensors + tensor), element, tl.float32, ALIGNED)
    weights = _pointers(tl.load(addresses + 3 * num_tensors + tensor), element, WEIGHT, ALIGNED)
    master_dtype: tl.constexpr = tl.uint16 if MASTER == 2 else tl.float32
    masters = weights
    if MASTER != 0:
        masters = _pointers(tl.load(addresses + 4 * num_tensors + tensor), element, master_dtype, ALIGNED)
    rest1 = (1.0 - tl.load(hyperparameters + BETA1)).to(tl.float32)
    rest2 = (1.0 - tl.load(hyperparameters + BETA2)).to(tl.float32)
    eps = tl.load(hyperparameters + EPS).to(tl.float32)
    correction1 = tl.load(corrections + tensor)
    correction2 = tl.load(corrections + num_tensors + tensor)
    gradient = tl.load(gradients, mask=inside, other=0.0).to(tl.float32)
    exp_avg = tl.load(exp_avgs, mask=inside, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sqs, mask=inside, other=0.0)
    exp_avg += (gradient - exp_avg) * rest1
    exp_avg_sq += (gradient * gradient - exp_avg_sq) * rest2
    update = (exp_avg / correction1) / (tl.sqrt_rn(exp_avg_sq / correction2) + eps)
    lr = tl.load(hyperparameters + LR)
    weight_decay = tl.load(hyperparameters + WEIGHT_DECAY)
    keep = inside
    if GUARDED:
        keep = element < numel * tl.load(go)
    value = _full_precision(tl.load(weights, mask=inside, other=0.0), masters, inside, MASTER)
    value = _stepped(value, update, 1.0, lr, weight_decay, CAUTIOUS, SQUARED)
    tl.store(exp_avgs, exp_avg, mask=keep)
    tl.store(exp_avg_sqs, exp_avg_sq, mask=keep)
    _store(weights, masters, value, keep, MASTER)


def momentum_directions_(
    addresses: Tensor,
    directions: Tensor,
    hyperparameters: Tensor,
    layout: MatrixLayout,
    *,
    gradient_dtype: torch.dtype,
    mu_index: int,
    nesterov: bool,
    go: Tensor | None,
    aligned: bool,
) -> None:
    """Advance the momentum of a bucket's matrices and write their update directions.

    Args:
        addresses: (2, b) int64 on the device: of each matrix' gradient and float32 momentum, which is changed.
        directions: (b, rows, columns) contiguous, any floating dtype, overwritten, in the order of memory of `layout`.
        hyperparameters: (k,) float64 on the device.
        layout: of every matrix, in gradient and momentum alike.
        gradient_dtype: of the gradients.
        mu_index: where the momentum coefficient stands in `hyperparameters`.
        nesterov: whether the direction looks one gradient ahead.
        go: () int32 on the device, 1 or 0: at 0 no momentum is written. None for always.
        aligned: whether all addresses are multiples of 16.
    """
    count = addresses.shape[1]
    _, *geometry = layout.physical()
    with on_device_of(directions):
        _momentum_kernel[(count * _tiles(layout),)](
            addresses,
            directions,
            hyperparameters,
            hyperparameters if go is None else go,
            count,
            layout.numel,
            *geometry,
            MU=mu_index,
            GRADIENT=_TRITON_DTYPE[gradient_dtype],
            NESTEROV=nesterov,
            GUARDED=go is not None,
            CONTIGUOUS=layout.contiguous,
            GROUPED=layout.groups > 1,
            ALIGNED=aligned and layout.contiguous,
            BLOCK=_MATRIX_BLOCK,
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
    cautious: bool,
    squared_lr_decay: bool,
    go: Tensor | None,
    aligned: bool,
) -> None:
    """Decay a bucket's weights and step against their updates.

    Args:
        addresses: (2, b) int64 on the device: of each matrix' weight and master (any number without masters), changed.
        updates: (b, m, n) floating, any strides, in the orientation of the view; not modified.
        factors: (b, m or 1, n or 1) float32; what multiplies each update besides the learning rate.
        hyperparameters: (k,) float64 on the device.
        layout: of every matrix, in weight and master alike.
        weight_dtype: of the weights.
        master_dtype: float32, uint16 or None; see `quintic/optim/precision.py`.
        lr_index: where the learning rate stands in `hyperparameters`.
        weight_decay_index: where the weight decay stands there.
        cautious: decay only entries where update and weight agree in sign.
        squared_lr_decay: decay by lr^2 weight_decay instead of lr weight_decay.
        go: () int32 on the device, 1 or 0: at 0 nothing is written. None for always.
        aligned: whether all addresses are multiples of 16.
    """
    count = addresses.shape[1]
    _, columns, *geometry = layout.physical()
    update = updates.mT if layout.transposed else updates
    factor = factors.expand(count, *factors.shape[1:])
    factor = factor.mT if layout.transposed else factor
    factor_strides = (0 if size == 1 else stride for size, stride in zip(factor.shape, factor.stride(), strict=True))
    contiguous = layout.contiguous
    with on_device_of(updates):
        _apply_kernel[(count * _tiles(layout),)](
            addresses,
            updates,
            factors,
            hyperparameters,
            hyperparameters if go is None else go,
            count,
            layout.numel,
            columns,
            *geometry,
            *update.stride(),
            *factor_strides,
            LR=lr_index,
            WEIGHT_DECAY=weight_decay_index,
            WEIGHT=_TRITON_DTYPE[weight_dtype],
            MASTER=_MASTER[master_dtype],
            CAUTIOUS=cautious,
            SQUARED=squared_lr_decay,
            GUARDED=go is not None,
            CONTIGUOUS=contiguous,
            UPDATE_CONTIGUOUS=update.stride()[1:] == (columns, 1),
            PER_MATRIX=factors.shape[1:] == (1, 1),
            GROUPED=layout.groups > 1,
            ALIGNED=aligned and contiguous,
            BLOCK=_MATRIX_BLOCK,
            num_warps=_NUM_WARPS,
        )


def adamw_tensors_(
    addresses: Tensor,
    numels: Tensor,
    programs: AdamWPrograms,
    corrections: Tensor,
    hyperparameters: Tensor,
    *,
    weight_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    master_dtype: torch.dtype | None,
    indices: tuple[int, int, int, int, int],
    cautious: bool,
    squared_lr_decay: bool,
    go: Tensor | None,
    aligned: bool,
) -> None:
    """Advance AdamW on many tensors at once.

    Args:
        addresses: (5, t) int64 on the device: of each tensor's gradient, float32 first and second moment, weight, and
            master (any number without masters); all but the gradient are changed. Entries are paired by their place in
            memory.
        numels: (t,) int64 on the device: entries of each tensor.
        programs: how the work is divided.
        corrections: (2, t) float32: 1 - beta^step for both moments.
        hyperparameters: (k,) float64 on the device.
        weight_dtype: of the weights.
        gradient_dtype: of the gradients.
        master_dtype: as in `apply_updates_`.
        indices: where learning rate, weight decay, beta1, beta2 and eps stand in `hyperparameters`.
        cautious: as in `apply_updates_`.
        squared_lr_decay: as in `apply_updates_`.
        go: as in `apply_updates_`.
        aligned: as in `apply_updates_`.
    """
    lr, weight_decay, beta1, beta2, eps = indices
    # (which tensor, its programs) of each launch; -1 for the one launch of all small tensors.
    launches = list(programs.alone)
    if programs.tensor_of_program.shape[0]:
        launches.append((-1, programs.tensor_of_program.shape[0]))
    with on_device_of(addresses):
        for tensor, count in launches:
            _adamw_kernel[(count,)](
                addresses,
                numels,
                programs.tensor_of_program,
                programs.tile_of_program,
                corrections,
                hyperparameters,
                hyperparameters if go is None else go,
                addresses.shape[1],
                tensor,
                ALONE=tensor >= 0,
                LR=lr,
                WEIGHT_DECAY=weight_decay,
                BETA1=beta1,
                BETA2=beta2,
                EPS=eps,
                WEIGHT=_TRITON_DTYPE[weight_dtype],
                GRADIENT=_TRITON_DTYPE[gradient_dtype],
                MASTER=_MASTER[master_dtype],
                CAUTIOUS=cautious,
                SQUARED=squared_lr_decay,
                GUARDED=go is not None,
                ALIGNED=aligned,
                BLOCK=_ADAMW_BLOCK,
                num_warps=_NUM_WARPS,
            )


def _tiles(layout: MatrixLayout) -> int:
    if layout.numel >= 2**31:
        raise ValueError(f"a matrix of {layout.rows * layout.groups} x {layout.columns} has 2^31 entries or more")
    return -(-layout.numel // _MATRIX_BLOCK)


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Make the tensor's device the current one: Triton launches there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
