"""Quantisation to 8-bit floats with a per-tensor scale, in one or both orientations, in one pass.

What a product needs of a matrix in the other orientation is written transposed by the same pass that quantises. All
implementations give the same bits.

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

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}

# Far below what any tensor needs, far above where 1 / scale leaves float32: also zeros have a scale.
SMALLEST_SCALE = 2.0**-100

# What tensor cores ask of the sizes of a product: 16 bytes.
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
    """Return the implementation, Triton with tensor cores or the twin; inside operators only."""
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
    """Return the size with the padding that tensor cores want."""
    return -(-size // MULTIPLE) * MULTIPLE


def quantized_layouts(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    rows: bool,
    columns: bool,
    chosen: Kernels,
) -> tuple[Tensor, Tensor]:
    """Return a matrix quantised in one or both orientations, in one pass.

    Inside operators only. What is too large, infinities included, becomes the dtype's largest finite value; NaN stays
    NaN. All implementations give the same bits.

    Args:
        x: (m, n) float32, bfloat16 or float16, any strides.
        scale: () float32 on the device of `x`, > 0: one unit of the result. Value = quantised * scale.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        rows: return the matrix.
        columns: return its transpose.
        chosen: the implementation.

    Returns:
        x * (1 / scale) rounded to the nearest, ties to even, (m, n) contiguous; its transpose (n, m') contiguous, m'
        the next multiple of 16, padded with zeros. A result that is not wanted has size 0.
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
    """Return the scale that quantises a tensor to the whole range of a dtype, () float32; NaN where `x` has one."""
    least, most = x.detach().aminmax()
    return (torch.maximum(-least, most).float() / LARGEST[dtype]).clamp_min(SMALLEST_SCALE)


def quantized_twin(value: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float32 tensor quantised in plain PyTorch."""
    return (value * scale.reciprocal()).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


@jit
def _four_in_one(value, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Return (rows, columns / 4) int32, four neighbours of each row of (rows, columns) float32 as 8-bit floats."""
    shape: tl.constexpr = (value.shape[0], value.shape[1] // 4, 2, 2)
    even, odd = tl.split(tl.reshape(value, shape))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    if NATIVE:
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
    # Comparisons keep NaN.
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
    """Store a tile at (row, column) of one or both orientations; the numbers of columns and padded rows divide by 4."""
    # In words of four: Triton 3.6 mixes up the bytes when it moves 8-bit entries between threads (H200, 2026-11), and
    # a tile is moved on its way to memory. Float32 values and 32-bit words arrive where they should.
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
    x,
    scale,
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
    NATIVE: tl.constexpr,
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
    # Rows beyond the last are read as zeros, which is what the padding holds.
    value = tl.load(x + i[:, None] * x_row + j[None, :] * x_column, mask=inside, other=0.0).to(tl.float32)
    # A division per tile: one per entry would take as long as the memory.
    value *= tl.div_rn(1.0, tl.load(scale))
    if not NATIVE:  # NVIDIA's conversion keeps within the range, and NaN, by itself
        value = saturated(value, LARGEST)
    # fmt: off
    _store_quantized(value, by_rows, by_columns, row, column, num_rows, num_columns, padded_rows, ROWS, COLUMNS, NATIVE,
                     WIDE, BLOCK_ROWS, BLOCK_COLUMNS)
    # fmt: on


@jit
def tile_offsets(WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Return the indices of a tile's rows and columns: in 64 bits only where needed, they fill the registers."""
    i = tl.arange(0, BLOCK_ROWS)
    j = tl.arange(0, BLOCK_COLUMNS)
    if WIDE:
        i = i.to(tl.int64)
        j = j.to(tl.int64)
    return i, j


def needs_wide_offsets(*strides: int) -> bool:
    """Return whether a tile of at most 256 rows and columns spans more than 32 bits count."""
    return max(strides) * 256 * 2 >= 2**31


# Bound by memory: both orientations are written in lines of at least 64 bytes.
_BOTH_BLOCK = (64, 128)
_ROWS_BLOCK = (1, 4096)


def _launch_quantize(x: Tensor, scale: Tensor, by_rows: Tensor, by_columns: Tensor) -> None:
    """Fill the wanted results; the others have one dimension of size 0."""
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
