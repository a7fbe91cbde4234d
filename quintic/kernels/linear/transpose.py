"""Transposed copies and sums of matrices, of any size and of mixed dtypes; every byte is read and written once.

    transpose_copy_   out <- x^T          transpose_add_   out <- out + x^T

They serve two tensors that hold one matrix in two orders: a tied embedding (vocab, d) and head (d, vocab), or an 8-bit
operand that a product needs in its other orientation. A tile is read along the rows of `x`, transposed in shared
memory, and written along the rows of `out`. The plain twins are `_copy_in_torch` and `_add_in_torch`.
"""

import torch
from torch import Tensor

from quintic.kernels.dispatch import KernelsOption, decide, obstacle_to_triton
from quintic.kernels.jit import jit, tl
from quintic.kernels.launch import launch

__all__ = ["obstacle_to_transpose", "transpose_add_", "transpose_copy_"]

# Bytes of a row of a tile, in `x` and in `out`: a line of the L2 cache.
_ROW_BYTES = 128
_NUM_WARPS = 4

# Dtypes that the kernel adds, and dtypes that it converts.
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SUMMED = (torch.float32, torch.bfloat16, torch.float16)
_CONVERTED = (*_SUMMED, *_FLOAT8)
# First compute capability that converts to float8.
_FLOAT8_CAPABILITY = (8, 9)

# Bytes per entry -> integer dtype. Tensors of equal dtype are copied as integers, which preserves every bit and allows
# dtypes unknown to Triton.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@jit
def _transpose_kernel(
    # (m, n), rows x_row apart and contiguous.
    x,
    # (n, m), rows out_row apart and contiguous; written.
    out,
    m,
    n,
    x_row,
    out_row,
    # Tiles along the rows and the columns of x.
    row_tiles,
    column_tiles,
    ADD: tl.constexpr,
    # Magnitude to clamp values to; 0 for no clamping.
    LARGEST: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Number tiles along the dimension with fewer tiles first: programs that run at the same time then access long
    # stretches of both tensors.
    if ROWS_FIRST:
        row_tile, column_tile = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles
    else:
        row_tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    # int64: offsets may exceed 2^31.
    row = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = (row[:, None] < m) & (column[None, :] < n)
    written = (column[:, None] < n) & (row[None, :] < m)
    # (BLOCK_M, BLOCK_N), transposed to (BLOCK_N, BLOCK_M).
    tile = tl.trans(tl.load(x + row[:, None] * x_row + column[None, :], mask=read))
    target = out + column[:, None] * out_row + row[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    if ADD:
        tile = tile.to(tl.float32) + tl.load(target, mask=written).to(tl.float32)
    if LARGEST > 0:
        # Comparisons keep a NaN, which tl.clamp would drop.
        tile = tile.to(tl.float32)
        tile = tl.where(tile > LARGEST, LARGEST, tl.where(tile < -LARGEST, -LARGEST, tile))
    if tile.dtype != dtype:
        # Through float32, from which all conversions exist.
        tile = tile.to(tl.float32).to(dtype)
    tl.store(target, tile, mask=written)


def transpose_copy_(out: Tensor, x: Tensor, *, kernels: KernelsOption = "auto") -> None:
    """Write the transpose of a matrix into another tensor.

    Args:
        out: (n, m) floating point, any strides, overwritten.
        x: (m, n) floating point, any strides and any dtype, on the device of `out`; not modified. Values are rounded
            to nearest. Values beyond the range of a float8 `out` saturate, as in quantisation; NaN stays NaN.
        kernels: `"auto"` takes Triton on CUDA devices for float32, bfloat16, float16 and float8 (e4m3fn and e5m2), and
            for any two tensors of one dtype, if both have contiguous rows or both contiguous columns; `"triton"` raises
            an error if Triton cannot do it; `"torch"` is plain PyTorch. Both give the same bits.

    Raises:
        ValueError: shapes are not each other's transposes, tensors overlap in memory, a dtype is not floating point, a
            tensor requires grad, or `"triton"` cannot be honoured.
    """
    _refuse_gradients(out, x)
    _transpose_copy_op(out, x, kernels)


def transpose_add_(out: Tensor, x: Tensor, *, kernels: KernelsOption = "auto") -> None:
    """Add the transpose of a matrix to another tensor; the sum is computed in float32 (or float64) and rounded once.

    Args:
        out: (n, m) floating point of 16 bits or more, any strides, changed.
        x: (m, n) floating point of 16 bits or more, any strides, on the device of `out`; not modified.
        kernels: as for `transpose_copy_`, with Triton for float32, bfloat16 and float16 only.

    Raises:
        ValueError: as for `transpose_copy_`; float8.
    """
    _refuse_gradients(out, x)
    _transpose_add_op(out, x, kernels)


@torch.library.custom_op("quintic::transpose_copy_", mutates_args=("out",))
def _transpose_copy_op(out: Tensor, x: Tensor, kernels: str = "auto") -> None:
    _check_transpose(out, x, add=False)
    _refuse_shared_memory(out, x)
    if _choose_transpose(kernels, out, x, add=False) == "triton":
        _launch_transpose(out, x, add=False)
    else:
        _copy_in_torch(out, x)


@torch.library.custom_op("quintic::transpose_add_", mutates_args=("out",))
def _transpose_add_op(out: Tensor, x: Tensor, kernels: str = "auto") -> None:
    _check_transpose(out, x, add=True)
    _refuse_shared_memory(out, x)
    if _choose_transpose(kernels, out, x, add=True) == "triton":
        _launch_transpose(out, x, add=True)
    else:
        _add_in_torch(out, x)


@_transpose_copy_op.register_fake
def _(out: Tensor, x: Tensor, kernels: str = "auto") -> None:
    _check_transpose(out, x, add=False)


@_transpose_add_op.register_fake
def _(out: Tensor, x: Tensor, kernels: str = "auto") -> None:
    _check_transpose(out, x, add=True)


def _copy_in_torch(out: Tensor, x: Tensor) -> None:
    largest = _largest(out, x)
    if largest > 0:
        x = (x if x.dtype == torch.float64 else x.float()).clamp(-largest, largest)
    out.copy_(x.T)


def _add_in_torch(out: Tensor, x: Tensor) -> None:
    out.add_(x.T)


def _launch_transpose(out: Tensor, x: Tensor, *, add: bool) -> None:
    if out.numel() == 0:
        return
    # If both have contiguous columns, the transposes have contiguous rows, and out^T <- (x^T)^T is the same task.
    if not (_has_rows(out) and _has_rows(x)):
        out, x = out.T, x.T
    if out.dtype == x.dtype and not add:
        out, x = out.view(_BITS[out.itemsize]), x.view(_BITS[x.itemsize])
    m, n = x.shape
    block_m, block_n = _ROW_BYTES // out.itemsize, _ROW_BYTES // x.itemsize
    row_tiles, column_tiles = -(-m // block_m), -(-n // block_n)
    launch(
        _transpose_kernel,
        (row_tiles * column_tiles,),
        x,
        out,
        m,
        n,
        x.stride(0),
        out.stride(0),
        row_tiles,
        column_tiles,
        ADD=add,
        LARGEST=_largest(out, x),
        ROWS_FIRST=row_tiles < column_tiles,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=_NUM_WARPS,
    )


def _largest(out: Tensor, x: Tensor) -> float:
    """Return the magnitude to which values for a float8 `out` are clamped; 0 for no clamping."""
    if out.dtype not in _FLOAT8 or out.dtype == x.dtype:
        return 0.0
    return torch.finfo(out.dtype).max


def _has_rows(x: Tensor) -> bool:
    """Return whether the rows of a matrix are contiguous."""
    return x.stride(1) == 1 or x.shape[1] <= 1


def _choose_transpose(kernels: str, out: Tensor, x: Tensor, *, add: bool) -> str:
    return decide(kernels, out.device, lambda: obstacle_to_transpose(out, x, add=add))[0]  # type: ignore[arg-type]


def obstacle_to_transpose(out: Tensor, x: Tensor, *, add: bool) -> str | None:
    """Return why Triton cannot make a transposed copy or sum, or None."""
    obstacle = obstacle_to_triton(out.device, "out")
    if obstacle is not None:
        return obstacle
    known = _SUMMED if add else _CONVERTED
    for name, tensor in (("out", out), ("x", x)):
        if tensor.dtype not in known and (add or out.dtype != x.dtype):
            return f"{name} is {tensor.dtype}, which has no kernel"
    if not add and out.dtype != x.dtype and {out.dtype, x.dtype} & set(_FLOAT8) and out.is_cuda:
        found = torch.cuda.get_device_capability(out.device)
        if found < _FLOAT8_CAPABILITY:
            return f"this device of compute capability {found[0]}.{found[1]} does not convert float8, 8.9 does"
    if not (_has_rows(out) and _has_rows(x)) and not (_has_rows(out.T) and _has_rows(x.T)):
        return (
            f"out has strides {out.stride()} and x {x.stride()}: the kernel needs entries of a row side by side in both"
        )
    return None


def _check_transpose(out: Tensor, x: Tensor, *, add: bool) -> None:
    if out.ndim != 2 or x.ndim != 2 or out.shape[0] != x.shape[1] or out.shape[1] != x.shape[0]:
        raise ValueError(f"out {tuple(out.shape)} and x {tuple(x.shape)}: need (n, m) and (m, n)")
    if out.device != x.device:
        raise ValueError(f"out is on {out.device} and x on {x.device}: move one of them")
    for name, tensor in (("out", out), ("x", x)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}: need a floating-point tensor")
        if add and tensor.itemsize < 2:
            raise ValueError(f"{name} has dtype {tensor.dtype}: sums need 16 bits or more; convert it first")


def _refuse_gradients(out: Tensor, x: Tensor) -> None:
    for name, tensor in (("out", out), ("x", x)):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, and this is not differentiable: call it under torch.no_grad()")


def _refuse_shared_memory(out: Tensor, x: Tensor) -> None:
    if out.numel() == 0:
        return
    # No two entries of `out` may be in one place: in order of strides, each must exceed the extent of the smaller ones.
    reach = 1
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1:
            if stride < reach:
                raise ValueError(
                    f"out of shape {tuple(out.shape)} has strides {out.stride()}, with which entries share memory: "
                    f"give a tensor whose entries have their own"
                )
            reach = stride * size
    # The kernel reads and writes in no particular order, so x must not lie within the memory of `out`.
    first, last = _span(out)
    x_first, x_last = _span(x)
    if first < x_last and x_first < last:
        raise ValueError("out and x lie within the same memory: give x.clone()")


def _span(x: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte and the address after its last byte."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.itemsize
