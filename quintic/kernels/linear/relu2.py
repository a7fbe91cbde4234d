"""The Triton kernel of a product with relu(.)^2, or the backward of relu(.)^2, in its epilogue.

`product_relu2` computes relu(a b^T)^2 in the forward pass and 2 sqrt(s) (a b^T) in the backward pass, s being the
activation. Operands may be 8-bit floats with scales; then the result is written in 16 and in 8 bits. mlp.py calls it.

The kernel has two ways to memory: tensor descriptors, which let the hardware load and store whole tiles (Hopper and
Blackwell), and pointers with masks, for all other GPUs and for tensors that descriptors cannot describe. Products of
16-bit operands on Hopper have a faster kernel, which also computes one tile while it stores another
(products/hopper.py). All kernels add up terms in the same order.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.kernels.dispatch import triton_is_interpreted
from quintic.kernels.jit import jit, tl
from quintic.kernels.launch import launch
from quintic.kernels.linear.fp8_quantize import LARGEST, byte_of, needs_wide_offsets, saturated, tile_offsets
from quintic.kernels.products.choose_products import has_hopper_kernels

__all__ = ["QuantizedProduct", "product_relu2", "relu2_backward_twin"]


# ------------------------------------------------------------------------------------------------------------ kernels


@jit
def _through_relu2(grad, activation):
    """Return the gradient of the pre-activation, 2 sqrt(activation) grad, in float32."""
    activation = activation.to(tl.float32)
    # An inactive entry has gradient zero, even if `grad` is infinite and the product would be NaN.
    return tl.where(activation == 0.0, 0.0, 2.0 * tl.sqrt(activation) * grad)


@jit
def _relu2(value):
    # The comparison keeps a NaN, which tl.maximum would drop.
    value = tl.where(value < 0.0, 0.0, value)
    return value * value


@jit
def _two_in_one(value, FP8: tl.constexpr, LARGEST: tl.constexpr, NATIVE: tl.constexpr):
    """Convert (rows, columns) float32 to 8-bit floats, packed as (rows, columns / 2) int16: two neighbours a word."""
    # Packed, because Triton 3.6 mixes up 8-bit entries when it moves them between threads (see fp8_quantize.py).
    low, high = tl.split(tl.reshape(value, (value.shape[0], value.shape[1] // 2, 2)))
    if NATIVE:
        convert: tl.constexpr = "cvt.rn.satfinite." + FP8 + "x2.f32 $0, $2, $1;"
        words = tl.inline_asm_elementwise(convert, "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1)
    else:
        dtype: tl.constexpr = tl.float8e5 if FP8 == "e5m2" else tl.float8e4nv
        low = byte_of(saturated(low, LARGEST), dtype)
        high = byte_of(saturated(high, LARGEST), dtype)
        words = (low | (high << 8)).to(tl.int16)
    return words


@jit
def _store_tile(
    out,
    activation,
    words,
    total,
    unit,
    words_unit,
    row,
    column,
    BACKWARD: tl.constexpr,
    FP8: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Apply the epilogue to a tile (BLOCK_M, BLOCK_N) at (row, column), and store it through descriptors.

    The tile is stored in two halves of its columns, so that the staging buffer in shared memory is half as large.
    """
    halves = tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
    left, right = tl.split(halves)
    if BACKWARD:
        left = _through_relu2(left * unit, activation.load([row, column]))
        right = _through_relu2(right * unit, activation.load([row, column + BLOCK_N // 2]))
    else:
        left = _relu2(left * unit)
        right = _relu2(right * unit)
    out.store([row, column], left.to(out.dtype))
    if FP8 is not None:
        words.store([row, column // 2], _two_in_one(left * words_unit, FP8, LARGEST, NATIVE))
    out.store([row, column + BLOCK_N // 2], right.to(out.dtype))
    if FP8 is not None:
        words.store([row, column // 2 + BLOCK_N // 4], _two_in_one(right * words_unit, FP8, LARGEST, NATIVE))


@jit
def _linear_kernel(
    # Tensors, or their descriptors with DESCRIPTORS. a (m, k); b (n, k), or (k, n) if TRANSPOSED.
    a,
    b,
    # (m, n) contiguous, read if BACKWARD.
    activation,
    # (m, n / 2) int16, contiguous: the result in 8 bits, two entries a word; written if FP8.
    words,
    # (m, n) contiguous, written.
    out,
    m,
    n,
    k,
    # Strides of a and b; used without DESCRIPTORS.
    a_row,
    a_column,
    b_row,
    b_column,
    # () float32 each, read if FP8: one unit of a, of b and of the 8-bit result.
    a_scale,
    b_scale,
    words_scale,
    BACKWARD: tl.constexpr,
    # None, or the format of the 8-bit result in PTX: "e4m3" or "e5m2".
    FP8: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    # Whether offsets within a tile need 64 bits.
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write relu(a b^T)^2 or, if BACKWARD, 2 sqrt(activation) (a b^T), rounded once; with FP8 also in 8 bits."""
    # Without FP8, multiplying by 1 changes no bit.
    unit, words_unit = 1.0, 1.0
    if FP8 is not None:
        unit = tl.load(a_scale) * tl.load(b_scale)
        words_unit = tl.div_rn(1.0, tl.load(words_scale))
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    # With descriptors there is one program per multiprocessor, which takes several tiles (a persistent kernel): loads
    # of the next tile begin during the epilogue of the last one.
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=DESCRIPTORS):
        # GROUP rows of tiles are computed column by column, so that tiles computed at the same time have operands in
        # common in the L2 cache.
        group = tile // (GROUP * tiles_n)
        height = min(tiles_m - group * GROUP, GROUP)
        place = tile % (GROUP * tiles_n)
        row = (group * GROUP + place % height) * BLOCK_M
        column = (place // height) * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if DESCRIPTORS:
            for start in range(0, k, BLOCK_K):
                left = a.load([row, start])
                if TRANSPOSED:
                    right = b.load([start, column])
                else:
                    right = b.load([column, start]).T
                total = tl.dot(left, right, total)
            # fmt: off
            _store_tile(out, activation, words, total, unit, words_unit, row, column, BACKWARD, FP8, LARGEST, NATIVE,
                        BLOCK_M, BLOCK_N)
            # fmt: on
        else:
            i, j = tile_offsets(WIDE, BLOCK_M, BLOCK_N)
            _, inner = tile_offsets(WIDE, BLOCK_M, BLOCK_K)
            # Strides of b along k and n.
            b_k = b_row if TRANSPOSED else b_column
            b_n = b_column if TRANSPOSED else b_row
            # int64 for the start of a tile; offsets within it are int64 only if WIDE, to save registers.
            wide_row = row.to(tl.int64)
            wide_column = column.to(tl.int64)
            a_tile = a + wide_row * a_row + (i[:, None] * a_row + inner[None, :] * a_column)
            b_tile = b + wide_column * b_n + (inner[:, None] * b_k + j[None, :] * b_n)
            step = tl.full((), BLOCK_K, dtype=tl.int64)
            for start in range(0, k, BLOCK_K):
                left_mask = (i[:, None] < m - row) & (inner[None, :] < k - start)
                right_mask = (inner[:, None] < k - start) & (j[None, :] < n - column)
                total = tl.dot(
                    tl.load(a_tile, mask=left_mask, other=0.0), tl.load(b_tile, mask=right_mask, other=0.0), total
                )
                a_tile += step * a_column
                b_tile += step * b_k
            here = wide_row * n + wide_column + (i[:, None] * n + j[None, :])
            mask = (i[:, None] < m - row) & (j[None, :] < n - column)
            if BACKWARD:
                total = _through_relu2(total * unit, tl.load(activation + here, mask=mask, other=0.0))
            else:
                total = _relu2(total * unit)
            if FP8 is not None:
                _, pair = tile_offsets(WIDE, BLOCK_M, BLOCK_N // 2)
                there = wide_row * (n // 2) + wide_column // 2 + (i[:, None] * (n // 2) + pair[None, :])
                words_mask = (i[:, None] < m - row) & (pair[None, :] < (n - column) // 2)
                tl.store(words + there, _two_in_one(total * words_unit, FP8, LARGEST, NATIVE), mask=words_mask)
            tl.store(out + here, total.to(out.dtype.element_ty), mask=mask)


# ------------------------------------------------------------------------------------------------------------ launches

# Programs in the interpreter: few, so that tests cover programs with several tiles.
_INTERPRETED_PROGRAMS = 2


class _Tiling(NamedTuple):
    """Sizes of the tiles of a product, and options of the compiler."""

    block_m: int
    block_n: int
    inner_bytes: int
    """Bytes along k that are loaded at a time."""
    group: int = 8
    """Rows of tiles that are computed column by column."""
    num_warps: int = 8
    num_stages: int = 3


# With descriptors, sized for the shared memory of a Hopper GPU. Small tiles are for results with fewer large tiles than
# there are multiprocessors.
_LARGE = _Tiling(block_m=128, block_n=256, inner_bytes=128)
_SMALL = _Tiling(block_m=128, block_n=128, inner_bytes=128)
# Without descriptors, sized for the shared memory that every GPU has.
_POINTERS = _Tiling(block_m=128, block_n=128, inner_bytes=64)


@functools.cache
def _device_limits(device: torch.device) -> tuple[int, bool]:
    """Return the number of multiprocessors, and whether the device has Hopper's descriptors and shared memory."""
    if device.type == "cpu":
        return _INTERPRETED_PROGRAMS, True
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, torch.version.hip is None and properties.major in (9, 10)


# Names of the 8-bit dtypes in PTX.
_KINDS = {None: None, torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class QuantizedProduct(NamedTuple):
    """The scales of 8-bit operands of `product_relu2`, and the tensor for its 8-bit result."""

    a_scale: Tensor
    """() float32: one unit of `a`."""
    b_scale: Tensor
    """() float32: one unit of `b`."""
    scale: Tensor
    """() float32: one unit of `values`."""
    values: Tensor
    """(m, n) e4m3 or e5m2, contiguous, n even; overwritten with the result, rounded once and saturated."""


def product_relu2(
    a: Tensor,
    b: Tensor,
    *,
    transposed: bool = False,
    activation: Tensor | None = None,
    dtype: torch.dtype | None = None,
    quantized: QuantizedProduct | None = None,
) -> Tensor:
    """Return relu(a @ b.mT)^2 or, with an activation s, 2 sqrt(s) (a @ b.mT), as a new contiguous (m, n).

    Args:
        a: (m, k) bfloat16 or float16, any strides; with `quantized` e4m3 or e5m2, contiguous.
        b: (n, k), or (k, n) if `transposed`, same dtype, any strides; with `quantized` e4m3, (n, k) contiguous.
        transposed: whether `b` is stored as (k, n).
        activation: (m, n) contiguous, dtype of the result; None for the forward pass.
        dtype: dtype of the result; None for that of the operands.
        quantized: scales and 8-bit result for 8-bit operands, whose sums have about 14 bits on Hopper; None for 16-bit
            operands.
    """
    # A transposed view of `b`: use the stored matrix, whose rows are contiguous.
    if b.stride(1) != 1 and b.stride(0) == 1 and quantized is None:
        b, transposed = b.mT, not transposed
    (m, k), n = a.shape, b.shape[1] if transposed else b.shape[0]
    if quantized is None and dtype in (None, a.dtype) and _fits_hopper(a, b, activation, n):
        from quintic.kernels.products.hopper import hopper_multiply

        # (1, m, k) times (1, k, n).
        left, right = a.unsqueeze(0), (b if transposed else b.mT).unsqueeze(0)
        if activation is None:
            return hopper_multiply(left, right, symmetric=False, epilogue="relu2").squeeze(0)
        c = activation.unsqueeze(0)
        return hopper_multiply(left, right, symmetric=False, c=c, epilogue="relu2_backward").squeeze(0)
    out = a.new_empty((m, n), dtype=dtype)
    if 0 in (m, n, k):
        return out.zero_()
    programs, is_hopper = _device_limits(a.device)
    scales: tuple[Tensor | None, ...] = (None,) * 3
    # Arguments that the kernel does not read still need a tensor: `out`.
    kind, words = None, out
    if quantized is not None:
        scales, kind, words = quantized[:3], quantized.values.dtype, quantized.values.view(torch.int16)
    operands = [a, b, out if activation is None else activation, words, out]
    descriptors = is_hopper and all(_fits_descriptor(tensor) for tensor in operands)
    # The tiling depends on shapes, strides and device only, so that equal inputs give equal bits.
    if not descriptors:
        tiling = _POINTERS
    elif _num_tiles(m, n, _LARGE) < programs:
        tiling = _SMALL
    else:
        tiling = _LARGE
    block_m, block_n = tiling.block_m, tiling.block_n
    block_k = tiling.inner_bytes // a.element_size()
    tiles = _num_tiles(m, n, tiling)
    if descriptors:
        from triton.tools.tensor_descriptor import TensorDescriptor

        b_block = [block_k, block_n] if transposed else [block_n, block_k]
        # Results are stored in halves of a tile (`_store_tile`), words of two entries in a quarter of its columns.
        half = [block_m, block_n // 2]
        blocks = [[block_m, block_k], b_block, half, half if kind is None else [block_m, block_n // 4], half]
        operands = [TensorDescriptor.from_tensor(*each) for each in zip(operands, blocks, strict=True)]
    launch(
        _linear_kernel,
        (min(programs, tiles) if descriptors else tiles,),
        *operands,
        m,
        n,
        k,
        *a.stride(),
        *b.stride(),
        *scales,
        BACKWARD=activation is not None,
        FP8=_KINDS[kind],
        LARGEST=0.0 if kind is None else LARGEST[kind],
        NATIVE=not triton_is_interpreted(),
        TRANSPOSED=transposed,
        DESCRIPTORS=descriptors,
        WIDE=needs_wide_offsets(n, *a.stride(), *b.stride()),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP=tiling.group,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return out


def _num_tiles(m: int, n: int, tiling: _Tiling) -> int:
    return -(-m // tiling.block_m) * -(-n // tiling.block_n)


def _fits_descriptor(x: Tensor) -> bool:
    """Return whether a tensor descriptor can describe a matrix: contiguous rows that start at multiples of 16 bytes."""
    row_bytes = x.stride(0) * x.element_size()
    return x.stride(1) == 1 and row_bytes % 16 == 0 and row_bytes > 0 and x.data_ptr() % 16 == 0


def _fits_hopper(a: Tensor, b: Tensor, activation: Tensor | None, n: int) -> bool:
    """Return whether to use the kernel for Hopper: descriptors fit the operands and a result with n columns."""
    if not has_hopper_kernels(a.device) or not a.numel() or n % 8:  # 8 entries of 16 bits are 16 bytes
        return False
    return all(_fits_descriptor(tensor) for tensor in (a, b, activation) if tensor is not None)


def relu2_backward_twin(grad: Tensor, activation: Tensor) -> Tensor:
    """Return the gradient of the pre-activation, 2 sqrt(activation) grad, in plain PyTorch, in float32 or wider."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    product = 2 * activation.to(wide).sqrt() * grad.to(wide)
    return torch.where(activation == 0, 0.0, product)
