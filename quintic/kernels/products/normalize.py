"""Scales every matrix of a batch to one Frobenius norm in two reads and one write, in Triton.

The plain twin is `_normalized` in optim/polar/orthogonalize.py. How a matrix is cut into tiles follows from its size
alone, so that a matrix gives the same bits alone and in any batch.

Import this module only where Triton is installed (see `dispatch.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintic.kernels.launch import launch

__all__ = ["can_normalize", "normalize_matrices", "scratch_bytes"]

_BLOCK = 8192
# Tiles that one program combines at a time.
_COMBINE_BLOCK = 512
# Up to so many tiles of a matrix every program combines them by itself; more are combined once, in a launch between.
_MAX_TILES = 1024
_NUM_WARPS = 8

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _exponent(peak):
    """Biased exponent of a float32 that is not negative, as its bits say: 255 for infinity and NaN."""
    return peak.to(tl.int32, bitcast=True) >> 23


@triton.jit
def _inverse_power(exponent):
    """The power of two that brings numbers of a biased exponent near one; NaN for infinity and NaN."""
    # Beyond these the power would not be a normal number.
    bits = (254 - tl.minimum(tl.maximum(exponent, 1), 253)) << 23
    return tl.where(exponent < 255, bits.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def _tile_kernel(x, exponents, sums, numel, BLOCK: tl.constexpr):
    """Exponent of the largest entry of each tile, and the sum of squares relative to it."""
    tiles = tl.cdiv(numel, BLOCK)
    matrix = tl.program_id(0) // tiles
    element = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + matrix.to(tl.int64) * numel + element, mask=element < numel, other=0.0).to(tl.float32)
    # Not through tl.max, which loses NaN: the largest bits are those of the largest number, or of NaN.
    exponent = tl.max(_exponent(tl.abs(value)))
    relative = value * _inverse_power(exponent)
    tl.store(exponents + tl.program_id(0), exponent)
    tl.store(sums + tl.program_id(0), tl.sum(relative * relative))


@triton.jit
def _combined(exponents, sums, first, tiles, norm, BLOCK: tl.constexpr):
    """Return the power of two by which a matrix is multiplied first, and the factor that follows.

    A single factor could leave float32's range for tiny or huge matrices.
    """
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
        # The excess of the tile's power; both are powers of two within float32's range.
        ratio = power / _inverse_power(own)
        total += tl.load(sums + first + tile, mask=tile < tiles, other=0.0) * ratio * ratio
    root = tl.sqrt_rn(tl.sum(total))
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
    tl.store(out + place, (value * power * factor).to(out.dtype.element_ty), mask=inside)


def can_normalize(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether `normalize_matrices` takes these arguments: dtypes it knows, matrices without gaps in memory."""
    if x.ndim != 3 or x.dtype not in _DTYPES or dtype not in _DTYPES or x.requires_grad:
        return False
    _, m, n = x.shape
    return x.numel() > 0 and m * n < 2**31 and (x.is_contiguous() or x.mT.is_contiguous())


def scratch_bytes(m: int, n: int) -> int:
    """Return the bytes that `normalize_matrices` allocates per (m, n) matrix, besides its result."""
    tiles = -(-m * n // _BLOCK)
    return 8 * tiles + (8 if tiles > _MAX_TILES else 0)


def normalize_matrices(x: Tensor, norm: float, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return each matrix of `x` scaled to the Frobenius norm `norm`, for any scale it has; zero stays zero.

    Args:
        x: (b, m, n) float32, bfloat16 or float16, contiguous or with contiguous transposes, not empty; not modified.
        norm: of every result but zero.
        dtype: of the result; the arithmetic is float32.
        out: where the result goes, of that dtype and in the memory order of `x`; None for a new tensor.

    Returns:
        (b, m, n) in the memory order of `x`; all NaN where a matrix has a NaN or an infinity.
    """
    if not x.is_contiguous():
        return normalize_matrices(x.mT, norm, dtype, None if out is None else out.mT).mT
    count, m, n = x.shape
    numel = m * n
    tiles = triton.cdiv(numel, _BLOCK)
    exponents = torch.empty((count, tiles), dtype=torch.int32, device=x.device)
    sums = torch.empty((count, tiles), dtype=torch.float32, device=x.device)
    combined = tiles > _MAX_TILES
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
