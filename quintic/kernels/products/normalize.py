"""Scales every matrix of a batch to one Frobenius norm in two reads and one write, in Triton.

    _tile_kernel      x -> exponent and sum of squares of each tile
    _combine_kernel   these -> two factors per matrix (only for matrices of many tiles)
    _scale_kernel     x -> out, scaled

Sums of squares could leave the range of float32. So each tile is first multiplied by a power of two, which is exact,
that brings its largest entry near one.

The plain twin is `_normalized` in optim/polar/orthogonalize.py. The tiles of a matrix depend on its size only: it has
the same bits in every batch.

Import this module only where Triton is installed (see `dispatch.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintic.kernels.launch import launch

__all__ = ["can_normalize", "normalize_matrices"]

# Entries of a tile.
_BLOCK = 8192
# Tiles that one program combines at a time.
_COMBINE_BLOCK = 512
# Matrices of at most this many tiles: every program of `_scale_kernel` combines them for itself, which saves a launch.
# Of more: `_combine_kernel` combines them once.
_MAX_TILES = 1024
_NUM_WARPS = 8

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _exponent(peak):
    """Return the biased exponent of a non-negative float32, 255 for infinity and NaN."""
    return peak.to(tl.int32, bitcast=True) >> 23


@triton.jit
def _inverse_power(exponent):
    """Return the power of two that scales numbers of a biased exponent to near one; NaN for exponent 255."""
    # 254 - e is the biased exponent of the inverse; clamped, so that the power is a normal number.
    bits = (254 - tl.minimum(tl.maximum(exponent, 1), 253)) << 23
    return tl.where(exponent < 255, bits.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def _tile_kernel(x, exponents, sums, numel, BLOCK: tl.constexpr):
    """Write the exponent of the largest entry of each tile, and the sum of squares of entries scaled by it.

    x is (b, numel), exponents (b, tiles) int32 and sums (b, tiles) float32; all contiguous.
    """
    # int64 for the start of the matrix only: one matrix has fewer than 2^31 entries (`can_normalize`).
    tiles = tl.cdiv(numel, BLOCK)
    matrix = tl.program_id(0) // tiles
    element = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + matrix.to(tl.int64) * numel + element, mask=element < numel, other=0.0).to(tl.float32)
    # The maximum of exponents and not of values: tl.max drops a NaN, whose exponent is the largest.
    exponent = tl.max(_exponent(tl.abs(value)))
    relative = value * _inverse_power(exponent)
    tl.store(exponents + tl.program_id(0), exponent)
    tl.store(sums + tl.program_id(0), tl.sum(relative * relative))


@triton.jit
def _combined(exponents, sums, first, tiles, norm, BLOCK: tl.constexpr):
    """Return the power of two and the factor that together scale a matrix to the norm.

    They are applied one after the other: their product could leave the range of float32 for tiny or huge matrices. The
    tiles of the matrix are entries first to first + tiles of `exponents` and `sums`.
    """
    # The largest exponent of all tiles.
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(exponents + first + tile, mask=tile < tiles, other=0))
    exponent = tl.max(largest)
    power = _inverse_power(exponent)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        own = tl.load(exponents + first + tile, mask=tile < tiles, other=0)
        # Converts the tile's sum to the matrix' power; a quotient of powers of two is exact.
        ratio = power / _inverse_power(own)
        total += tl.load(sums + first + tile, mask=tile < tiles, other=0.0) * ratio * ratio
    root = tl.sqrt_rn(tl.sum(total))
    # A zero matrix stays zero.
    return power, norm / tl.where(root == 0, 1.0, root)


@triton.jit
def _combine_kernel(exponents, sums, factors, tiles, norm, BLOCK: tl.constexpr):
    matrix = tl.program_id(0)
    power, factor = _combined(exponents, sums, matrix.to(tl.int64) * tiles, tiles, norm, BLOCK)
    tl.store(factors + 2 * matrix, power)
    tl.store(factors + 2 * matrix + 1, factor)


@triton.jit
def _scale_kernel(
    x, out, exponents, sums, factors, numel, norm, COMBINED: tl.constexpr, BLOCK: tl.constexpr, COMBINE: tl.constexpr
):
    # x and out are (b, numel), contiguous; factors (b, 2) float32 is read if COMBINED, else exponents and sums are.
    tiles = tl.cdiv(numel, BLOCK)
    matrix = tl.program_id(0) // tiles
    element = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = element < numel
    place = matrix.to(tl.int64) * numel + element
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if COMBINED:
        power = tl.load(factors + 2 * matrix)
        factor = tl.load(factors + 2 * matrix + 1)
    else:
        power, factor = _combined(exponents, sums, matrix.to(tl.int64) * tiles, tiles, norm, COMBINE)
    # From left to right: the power first.
    tl.store(out + place, (value * power * factor).to(out.dtype.element_ty), mask=inside)


def can_normalize(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether `normalize_matrices` takes x and a result of this dtype."""
    if x.ndim != 3 or x.dtype not in _DTYPES or dtype not in _DTYPES or x.requires_grad:
        return False
    _, m, n = x.shape
    return x.numel() > 0 and m * n < 2**31 and (x.is_contiguous() or x.mT.is_contiguous())


def normalize_matrices(x: Tensor, norm: float, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return the matrices of `x` scaled to the Frobenius norm `norm`, without overflow at any scale; zero stays zero.

    Args:
        x: (b, m, n) float32, bfloat16 or float16, contiguous or with contiguous transposes, not empty; not modified.
        norm: norm of every matrix that is not zero.
        dtype: dtype of the result; the arithmetic is float32.
        out: tensor for the result, of that dtype and the strides of `x`; None for a new tensor.

    Returns:
        (b, m, n) with the strides of `x`; a matrix with a NaN or an infinity becomes all NaN.
    """
    # The norm of the transpose is the same: go through entries in the order of memory.
    if not x.is_contiguous():
        return normalize_matrices(x.mT, norm, dtype, None if out is None else out.mT).mT
    count, m, n = x.shape
    numel = m * n
    tiles = triton.cdiv(numel, _BLOCK)
    exponents = torch.empty((count, tiles), dtype=torch.int32, device=x.device)
    sums = torch.empty((count, tiles), dtype=torch.float32, device=x.device)
    combined = tiles > _MAX_TILES
    # Without `_combine_kernel` the argument is not read.
    factors = torch.empty((count, 2), dtype=torch.float32, device=x.device) if combined else sums
    out = torch.empty_like(x, dtype=dtype) if out is None else out
    grid = (count * tiles,)
    launch(_tile_kernel, grid, x, exponents, sums, numel, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    if combined:
        launch(_combine_kernel, (count,), exponents, sums, factors, tiles, norm, BLOCK=_COMBINE_BLOCK, num_warps=4)
    launch(
        _scale_kernel,
        grid,
        x,
        out,
        exponents,
        sums,
        factors,
        numel,
        norm,
        COMBINED=combined,
        BLOCK=_BLOCK,
        COMBINE=_COMBINE_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return out
