"""Quantisation of a matrix to 8-bit floats with one scale, written in one or both orientations in a single pass.

Products need a matrix sometimes by rows and sometimes by columns (see fp8.py), so the kernel can write the quantised
matrix and its transpose. The twin gives the same bits.

Read next: fp8.py, products of such matrices.
"""

import functools
from typing import cast

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels, KernelsOption, decide, obstacle_to_triton, triton_is_interpreted
from quintic.kernels.jit import jit, tl, triton
from quintic.kernels.launch import launch

__all__ = ["obstacle_to_fp8"]

# Largest finite value of each dtype.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}

# Lower bound of scales, so that a tensor of zeros has one, too: small enough for any tensor, and large enough that
# 1 / scale stays within float32.
SMALLEST_SCALE = 2.0**-100

# 8-bit tensor cores need rows of a multiple of 16 bytes.
MULTIPLE = 16


def check_float(name: str, x: Tensor) -> None:
    """Raise TypeError for a dtype that has no kernel."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{name} is {x.dtype}; need float32, bfloat16 or float16")


def check_scalar(name: str, scalar: Tensor, x: Tensor) -> None:
    """Raise ValueError unless `scalar` is a () float32 tensor on the device of `x`."""
    if scalar.shape != () or scalar.dtype != torch.float32 or scalar.device != x.device:
        raise ValueError(
            f"{name} is {scalar.dtype} of shape {tuple(scalar.shape)} on {str(scalar.device)!r}; "
            f"need a () float32 tensor on {str(x.device)!r}"
        )


def choose_fp8_kernels(option: str, x: Tensor) -> Kernels:
    """Return the implementation: Triton with 8-bit tensor cores, or the twin."""
    return decide(cast(KernelsOption, option), x.device, lambda: obstacle_to_fp8(x.device))[0]


def obstacle_to_fp8(device: torch.device) -> str | None:
    """Return why tensor cores cannot multiply in 8 bits on a device, or None."""
    obstacle = obstacle_to_triton(device, "x")
    if obstacle is None and device.type == "cuda" and not _has_fp8(device):
        return f"{device} has no 8-bit floats, which began with compute capability 8.9"
    return obstacle


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def next_multiple(size: int) -> int:
    """Return a size rounded up to a multiple of 16."""
    return -(-size // MULTIPLE) * MULTIPLE


def quantized_layouts(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    rows: bool,
    columns: bool,
    chosen: Kernels,
) -> tuple[Tensor, Tensor]:
    """Return a matrix in 8-bit floats, and its transpose, written in one pass; either may be left out.

    Call it inside operators only: it is not differentiable. Values beyond the range, infinities included, become the
    dtype's largest finite value; NaN stays NaN. All implementations give the same bits.

    Args:
        x: (m, n) float32, bfloat16 or float16, any strides.
        scale: () float32 on the device of `x`, > 0: one unit of the result. Value = quantised * scale.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        rows: whether to return the matrix.
        columns: whether to return its transpose.
        chosen: the implementation.

    Returns:
        x * (1 / scale), rounded to nearest, ties to even: (m, n) contiguous; and its transpose (n, m') contiguous, with
        m' the next multiple of 16, padded with zeros. A result that is left out has size 0.
    """
    by_rows, by_columns = empty_quantized(x, dtype, rows, columns)
    if chosen == "triton" and x.shape[1] % 4 == 0:  # kernels store four 8-bit floats at a time
        _launch_quantize(x, scale, by_rows, by_columns)
        return by_rows, by_columns
    quantised = quantized_twin(x.float(), scale, dtype)
    if rows:
        by_rows.copy_(quantised)
    if columns:
        by_columns.zero_()
        by_columns[:, : x.shape[0]] = quantised.mT
    return by_rows, by_columns


def empty_quantized(x: Tensor, dtype: torch.dtype, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    m, n = x.shape
    return (
        x.new_empty((m, n) if rows else (0,), dtype=dtype),
        x.new_empty((n, next_multiple(m)) if columns else (0,), dtype=dtype),
    )


def unit_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale, () float32, that maps the largest magnitude of `x` to that of the dtype; NaN if x has a NaN."""
    least, most = x.detach().aminmax()
    return (torch.maximum(-least, most).float() / LARGEST[dtype]).clamp_min(SMALLEST_SCALE)


def quantized_twin(value: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float32 tensor quantised in plain PyTorch."""
    return (value * scale.reciprocal()).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


@jit
def _four_in_one(value, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Convert (rows, columns) float32 to 8-bit floats, packed as (rows, columns / 4) int32: four neighbours a word."""
    # Split (rows, columns / 4, 2, 2) twice, by the lower and by the upper bit of an entry's index within its word.
    shape: tl.constexpr = (value.shape[0], value.shape[1] // 4, 2, 2)
    even, odd = tl.split(tl.reshape(value, shape))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    if NATIVE:
        # PTX converts two values at a time, the first operand to the upper byte, and saturates.
        kind: tl.constexpr = "e5m2x2" if dtype == tl.float8e5 else "e4m3x2"
        convert: tl.constexpr = "cvt.rn.satfinite." + kind + ".f32"
        words = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; "
            + convert
            + " low, $2, $1; "
            + convert
            + " high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            [first, second, third, fourth],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        words = byte_of(first, dtype) | (byte_of(second, dtype) << 8)
        words |= (byte_of(third, dtype) << 16) | (byte_of(fourth, dtype) << 24)
    return words


@jit
def byte_of(value, dtype: tl.constexpr):
    return value.to(dtype).to(tl.uint8, bitcast=True).to(tl.int32)


@jit
def saturated(value, LARGEST: tl.constexpr):
    # Comparisons with NaN are false, so that it stays.
    value = tl.where(value > LARGEST, LARGEST, value)
    return tl.where(value < -LARGEST, -LARGEST, value)


@jit
def _store_quantized(
    value,
    by_rows,
    by_columns,
    row,
    column,
    num_rows,
    num_columns,
    padded_rows,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NATIVE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Store a float32 tile (BLOCK_ROWS, BLOCK_COLUMNS) at (row, column) in 8 bits, in one or both orientations.

    by_rows is (num_rows, num_columns) and by_columns (num_columns, padded_rows), contiguous; num_columns and
    padded_rows are multiples of 4.
    """
    # Stored in words of four: Triton 3.6 mixes up 8-bit entries when it moves them between threads (H200, 2026-11), as
    # it does on their way to memory. It moves float32 values and 32-bit words correctly.
    dtype: tl.constexpr = by_rows.dtype.element_ty
    columns_left = tl.minimum(num_columns - column, BLOCK_COLUMNS).to(tl.int32)
    if ROWS:
        i, j = tile_offsets(WIDE, BLOCK_ROWS, BLOCK_COLUMNS // 4)
        rows_left = tl.minimum(num_rows - row, BLOCK_ROWS).to(tl.int32)
        stride = num_columns // 4
        here = by_rows.to(tl.pointer_type(tl.int32)) + row * stride + column // 4
        inside = (i[:, None] < rows_left) & (j[None, :] < columns_left // 4)
        tl.store(here + i[:, None] * stride + j[None, :], _four_in_one(value, dtype, NATIVE), mask=inside)
    if COLUMNS:
        j, i = tile_offsets(WIDE, BLOCK_COLUMNS, BLOCK_ROWS // 4)
        written_left = tl.minimum(padded_rows - row, BLOCK_ROWS).to(tl.int32)
        stride = padded_rows // 4
        here = by_columns.to(tl.pointer_type(tl.int32)) + column * stride + row // 4
        inside = (j[:, None] < columns_left) & (i[None, :] < written_left // 4)
        tl.store(here + j[:, None] * stride + i[None, :], _four_in_one(tl.trans(value), dtype, NATIVE), mask=inside)


@jit
def _quantize_kernel(
    # (num_rows, num_columns) with strides x_row and x_column.
    x,
    # () float32.
    scale,
    # Results as in `_store_quantized`, written if ROWS and COLUMNS.
    by_rows,
    by_columns,
    num_rows,
    num_columns,
    padded_rows,
    x_row,
    x_column,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    # Whether to convert with NVIDIA's instruction; False in the interpreter.
    NATIVE: tl.constexpr,
    # Whether offsets within a tile need 64 bits.
    WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    column_tiles = tl.cdiv(num_columns, BLOCK_COLUMNS)
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_ROWS
    column = (tl.program_id(0) % column_tiles).to(tl.int64) * BLOCK_COLUMNS
    i, j = tile_offsets(WIDE, BLOCK_ROWS, BLOCK_COLUMNS)
    rows_left = tl.minimum(num_rows - row, BLOCK_ROWS).to(tl.int32)
    columns_left = tl.minimum(num_columns - column, BLOCK_COLUMNS).to(tl.int32)
    inside = (i[:, None] < rows_left) & (j[None, :] < columns_left)
    x += row * x_row + column * x_column
    # Rows beyond the last are read as zeros, the values of the padding.
    value = tl.load(x + i[:, None] * x_row + j[None, :] * x_column, mask=inside, other=0.0).to(tl.float32)
    # One division per program; a division per entry would take as long as reading memory.
    value *= tl.div_rn(1.0, tl.load(scale))
    # NVIDIA's instruction saturates, and keeps NaN, by itself.
    if not NATIVE:
        value = saturated(value, LARGEST)
    # fmt: off
    _store_quantized(value, by_rows, by_columns, row, column, num_rows, num_columns, padded_rows, ROWS, COLUMNS, NATIVE,
                     WIDE, BLOCK_ROWS, BLOCK_COLUMNS)
    # fmt: on


@jit
def tile_offsets(WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Return the indices of a tile's rows and columns, int64 only if WIDE: 64-bit offsets take twice the registers."""
    i = tl.arange(0, BLOCK_ROWS)
    j = tl.arange(0, BLOCK_COLUMNS)
    if WIDE:
        i = i.to(tl.int64)
        j = j.to(tl.int64)
    return i, j


def needs_wide_offsets(*strides: int) -> bool:
    """Return whether offsets within a tile of at most 256 rows and columns may exceed 32 bits."""
    return max(strides) * 256 * 2 >= 2**31


# Tiles (rows, columns). The kernel is bound by memory: in both orientations it writes lines of at least 64 bytes. A
# single row without its transpose is one long line.
_BOTH_BLOCK = (64, 128)
_ROWS_BLOCK = (1, 4096)


def _launch_quantize(x: Tensor, scale: Tensor, by_rows: Tensor, by_columns: Tensor) -> None:
    """Fill the results; one that is left out has a single dimension, of size 0."""
    rows, columns = by_rows.ndim == 2, by_columns.ndim == 2
    m, n = x.shape
    if m and n:
        block_rows, block_columns = _BOTH_BLOCK if m > 1 or columns else _ROWS_BLOCK
        padded_rows = next_multiple(m) if columns else m
        launch(
            _quantize_kernel,
            (triton.cdiv(padded_rows, block_rows) * triton.cdiv(n, block_columns),),
            x,
            scale,
            by_rows if rows else by_columns,
            by_columns,
            m,
            n,
            padded_rows,
            x.stride(0),
            x.stride(1),
            LARGEST=LARGEST[by_rows.dtype],
            ROWS=rows,
            COLUMNS=columns,
            NATIVE=not triton_is_interpreted(),
            WIDE=needs_wide_offsets(n if m > 1 else 1, padded_rows, *(x.stride() if m > 1 else x.stride()[1:])),
            BLOCK_ROWS=block_rows,
            BLOCK_COLUMNS=block_columns,
            num_warps=8,
        )
