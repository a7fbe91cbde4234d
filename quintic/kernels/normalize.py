"""Scales every matrix of a batch to one Frobenius norm in two reads and one write, in Triton.

The plain twin is `_normalized` in optim/orthogonalize.py. How a matrix is cut into tiles follows from its size alone,
so that a matrix gives the same bits alone and in any batch.

Import this module only where Triton is installed (see `dispatch.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintic.kernels.weights import on_device_of

__all__ = ["can_normalize", "normalize_matrices"]

_BLOCK = 4096
# Tiles that one program of the second kernel combines at a time.
_COMBINE_BLOCK = 1024
_NUM_WARPS = 8

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _tile_kernel(x, peaks, sums, numel, BLOCK: tl.constexpr):
    """Largest absolute entry of each tile, and the sum of squares relative to it."""
    tiles = tl.cdiv(numel, BLOCK)
    matrix = tl.program_id(0) // tiles
    element = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + matrix.to(tl.int64) * numel + element, mask=element < numel, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(value))
    relative = value / tl.where(peak > 0, peak, 1.0)
    tl.store(peaks + tl.program_id(0), peak)
    tl.store(sums + tl.program_id(0), tl.sum(relative * relative))


@triton.jit
def _combine_kernel(peaks, sums, divisors, factors, tiles, norm, BLOCK: tl.constexpr):
    """Per matrix: its largest entry, and what multiplies entries over that for the norm to be `norm`."""
    matrix = tl.program_id(0)
    first = matrix.to(tl.int64) * tiles
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(peaks + first + tile, mask=tile < tiles, other=0.0))
    peak = tl.max(largest)
    divisor = tl.where(peak > 0, peak, 1.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        ratio = tl.load(peaks + first + tile, mask=tile < tiles, other=0.0) / divisor
        total += tl.load(sums + first + tile, mask=tile < tiles, other=0.0) * ratio * ratio
    root = tl.sqrt_rn(tl.sum(total))
    tl.store(divisors + matrix, divisor)
    tl.store(factors + matrix, norm / tl.where(root == 0, 1.0, root))


@triton.jit
def _scale_kernel(x, out, divisors, factors, numel, BLOCK: tl.constexpr):
    tiles = tl.cdiv(numel, BLOCK)
    matrix = tl.program_id(0) // tiles
    element = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = element < numel
    place = matrix.to(tl.int64) * numel + element
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    # Two factors: one alone could leave float32's range for tiny or huge matrices.
    value = value / tl.load(divisors + matrix) * tl.load(factors + matrix)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


def can_normalize(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether `normalize_matrices` takes these arguments: dtypes it knows, matrices without gaps in memory."""
    if x.ndim != 3 or x.dtype not in _DTYPES or dtype not in _DTYPES or x.requires_grad:
        return False
    _, m, n = x.shape
    return x.numel() > 0 and m * n < 2**31 and (x.is_contiguous() or x.mT.is_contiguous())


def normalize_matrices(x: Tensor, norm: float, dtype: torch.dtype) -> Tensor:
    """Return each matrix of `x` scaled to the Frobenius norm `norm`, for any scale it has; zero stays zero.

    Args:
        x: (b, m, n) float32, bfloat16 or float16, contiguous or with contiguous transposes, not empty; not modified.
        norm: of every result but zero.
        dtype: of the result; the arithmetic is float32.

    Returns:
        (b, m, n), a new tensor in the memory order of `x`; all NaN where a matrix has a NaN or an infinity.
    """
    if not x.is_contiguous():
        return normalize_matrices(x.mT, norm, dtype).mT
    count, m, n = x.shape
    numel = m * n
    tiles = triton.cdiv(numel, _BLOCK)
    peaks, sums = torch.empty((2, count, tiles), dtype=torch.float32, device=x.device)
    divisors, factors = torch.empty((2, count), dtype=torch.float32, device=x.device)
    out = torch.empty_like(x, dtype=dtype)
    with on_device_of(x):
        _tile_kernel[(count * tiles,)](x, peaks, sums, numel, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
        _combine_kernel[(count,)](peaks, sums, divisors, factors, tiles, norm, BLOCK=_COMBINE_BLOCK, num_warps=4)
        _scale_kernel[(count * tiles,)](x, out, divisors, factors, numel, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return out
