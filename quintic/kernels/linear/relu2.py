"""The Triton kernel of a product that ends in relu(.)^2 or in its backward.

The public function is in mlp.py. Forward `product_relu2` squares what is positive, backward it multiplies by 2 sqrt(s),
s being the activation. Its operands may be 8-bit floats; then it writes the result as such as well.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.kernels.dispatch import triton_is_interpreted
from quintic.kernels.jit import jit, tl
from quintic.kernels.launch import launch
from quintic.kernels.linear.fp8_quantize import LARGEST, byte_of, needs_wide_offsets, saturated, tile_offsets

__all__ = ["QuantizedProduct", "product_relu2", "relu2_backward_twin"]


# ------------------------------------------------------------------------------------------------------------ kernels


@jit
def _through_relu2(grad, activation):
    """Return 2 sqrt(activation) grad in float32: the gradient before relu(.)^2."""
    activation = activation.to(tl.float32)
    # Zero where relu was, whatever the gradient: also an infinite one.
    return tl.where(activation == 0.0, 0.0, 2.0 * tl.sqrt(activation) * grad)


@jit
def _relu2(value):
    # A comparison keeps NaN, which a maximum would drop.
    value = tl.where(value < 0.0, 0.0, value)
    return value * value


@jit
def _two_in_one(value, FP8: tl.constexpr, LARGEST: tl.constexpr, NATIVE: tl.constexpr):
    """Return (rows, columns / 2) int16: two neighbours of each row of (rows, columns) float32 as 8-bit floats."""
    # In words of two, which one thread has: Triton 3.6 mixes up 8-bit entries that move (see fp8_quantize.py).
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
    """Finish a tile and store it through descriptors, in two halves: a staging buffer of half the size."""
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
    a,
    b,
    activation,
    words,
    out,
    m,
    n,
    k,
    a_row,
    a_column,
    b_row,
    b_column,
    a_scale,
    b_scale,
    words_scale,
    BACKWARD: tl.constexpr,
    FP8: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A product of a (m, k) with b, stored (n, k) or, TRANSPOSED, (k, n); then relu(.)^2 or its backward.

    With FP8, the kind of 8-bit floats, (m, n / 2) `words` of two are written, in units of `words_scale`.
    """
    unit, words_unit = 1.0, 1.0  # without FP8 nothing is multiplied by them
    if FP8 is not None:
        unit = tl.load(a_scale) * tl.load(b_scale)
        words_unit = tl.div_rn(1.0, tl.load(words_scale))
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    # One program per multiprocessor takes several tiles: loads of the next one begin under the epilogue of the last.
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=DESCRIPTORS):
        # Tiles go down GROUP rows before they go right: what runs at a time shares more of both operands in L2.
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
            # Strides of b are those of its (k, n) or (n, k) storage.
            b_k = b_row if TRANSPOSED else b_column
            b_n = b_column if TRANSPOSED else b_row
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

# In the interpreter: few programs, so that each takes several tiles.
_INTERPRETED_PROGRAMS = 2


class _Tiling(NamedTuple):
    """Tiles of a product, and how they are computed."""

    block_m: int
    block_n: int
    inner_bytes: int
    """Bytes of a row that are loaded together."""
    group: int = 8
    """Tiles that programs go down before they go right."""
    num_warps: int = 8
    num_stages: int = 3


# With descriptors, in the shared memory of a Hopper GPU; small where there are fewer large tiles than multiprocessors.
_LARGE = _Tiling(block_m=128, block_n=256, inner_bytes=128)
_SMALL = _Tiling(block_m=128, block_n=128, inner_bytes=128)
# Without descriptors, in the shared memory that every GPU has.
_POINTERS = _Tiling(block_m=128, block_n=128, inner_bytes=64)


@functools.cache
def _device_limits(device: torch.device) -> tuple[int, bool]:
    """Return the number of multiprocessors, and whether shared memory and descriptors are as Hopper's."""
    if device.type == "cpu":
        return _INTERPRETED_PROGRAMS, True
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, torch.version.hip is None and properties.major in (9, 10)


# What PTX calls the 8-bit floats.
_KINDS = {None: None, torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class QuantizedProduct(NamedTuple):
    """The scales of 8-bit operands of `product_relu2`, and where it writes the result in 8 bits."""

    a_scale: Tensor
    """() float32: one unit of `a`."""
    b_scale: Tensor
    """() float32: one unit of `b`."""
    scale: Tensor
    """() float32: one unit of `values`."""
    values: Tensor
    """(m, n) e4m3 or e5m2, contiguous, n even: the result rounded once from float32; what is too large saturates."""


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
        transposed: how `b` is stored.
        activation: (m, n) contiguous, dtype of the result, or None.
        dtype: of the result; None for that of the operands.
        quantized: None for 16-bit operands; sums of 8-bit products have about 14 bits on Hopper.
    """
    if b.stride(1) != 1 and b.stride(0) == 1 and quantized is None:  # a view of what is stored the other way round
        b, transposed = b.mT, not transposed
    (m, k), n = a.shape, b.shape[1] if transposed else b.shape[0]
    out = a.new_empty((m, n), dtype=dtype)
    if 0 in (m, n, k):
        return out.zero_()
    programs, is_hopper = _device_limits(a.device)
    scales: tuple[Tensor | None, ...] = (None,) * 3
    kind, words = None, out  # any matrix where there are no words
    if quantized is not None:
        scales, kind, words = quantized[:3], quantized.values.dtype, quantized.values.view(torch.int16)
    operands = [a, b, out if activation is None else activation, words, out]
    descriptors = is_hopper and all(_fits_descriptor(tensor) for tensor in operands)
    # Chosen from shape and device only.
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
    """Return whether the hardware can address tiles of this matrix: rows begin at multiples of 16 bytes."""
    row_bytes = x.stride(0) * x.element_size()
    return x.stride(1) == 1 and row_bytes % 16 == 0 and row_bytes > 0 and x.data_ptr() % 16 == 0


def relu2_backward_twin(grad: Tensor, activation: Tensor) -> Tensor:
    """Return 2 sqrt(activation) grad in plain PyTorch, in float32 or wider."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    product = 2 * activation.to(wide).sqrt() * grad.to(wide)
    return torch.where(activation == 0, 0.0, product)
