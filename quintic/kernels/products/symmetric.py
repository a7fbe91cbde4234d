"""Products whose result is known to be symmetric, in Triton: half of the tiles are computed, the others mirrored.

Every product of Newton-Schulz on the short side is symmetric: X X^T, and products of polynomials of one symmetric
matrix, which commute. The kernel computes alpha a b + beta c + diagonal I and rounds once. The plain twin is `multiply`
in optim/polar/products.py. A matrix has the same bits in every batch.

Import this module only where Triton is installed (see `dispatch.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintic.kernels.dispatch import MAX_SUM
from quintic.kernels.launch import launch

__all__ = ["can_multiply", "symmetric_multiply"]

_DTYPES = (torch.bfloat16, torch.float16)

# For shorter sides a product takes less time than its launch, and cuBLAS has smaller tiles.
_MIN_SIDE = 256

# Side of a tile of the result, and the least side for small matrices. Bits depend on it: entries above the diagonal are
# mirrored outside of diagonal tiles, and computed within them.
_BLOCK = 128
_SMALLEST_BLOCK = 16

# Terms of a sum that are loaded at a time. H200, 2026-11: with these warps and stages, batches of matrices of side 768
# to 2048 take at most 5 % longer than with the fastest of six settings (docs/development/LOG.md).
_BLOCK_K = 32
_NUM_WARPS = 8
_NUM_STAGES = 5


@triton.jit
def _symmetric_kernel(
    # (b, side, inner) and (b, inner, side) with the six strides below.
    a,
    b,
    # (b, side, side) contiguous; read with ADD.
    c,
    # (b, side, side) contiguous; written.
    out,
    side,
    inner,
    a_batch,
    a_row,
    a_column,
    b_batch,
    b_row,
    b_column,
    alpha,
    beta,
    diagonal,
    # Tiles along a side.
    tiles,
    ADD: tl.constexpr,
    # Whether side and inner are multiples of the blocks, so that loads need no masks.
    EVEN_SIDE: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pairs = tiles * (tiles + 1) // 2
    batch = (tl.program_id(0) // pairs).to(tl.int64)
    pair = tl.program_id(0) % pairs
    # Each program computes one tile (row, column) with column <= row, counted row by row: pair number row (row + 1) / 2
    # + column. The root inverts that in floating point and may be off by one, which the next two lines mend.
    row_tile = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) / 2.0).to(tl.int32)
    row_tile = tl.where(row_tile * (row_tile + 1) // 2 > pair, row_tile - 1, row_tile)
    row_tile = tl.where((row_tile + 1) * (row_tile + 2) // 2 <= pair, row_tile + 1, row_tile)
    column_tile = pair - row_tile * (row_tile + 1) // 2
    rows = row_tile * BLOCK + tl.arange(0, BLOCK)
    columns = column_tile * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_K)
    # int64 offsets: a batch may have 2^31 entries or more. Tiles are (BLOCK, BLOCK_K) and (BLOCK_K, BLOCK).
    a_tile = a + batch * a_batch + rows[:, None].to(tl.int64) * a_row + k[None, :].to(tl.int64) * a_column
    b_tile = b + batch * b_batch + k[:, None].to(tl.int64) * b_row + columns[None, :].to(tl.int64) * b_column
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, inner, BLOCK_K):
        if EVEN_SIDE and EVEN_INNER:
            left = tl.load(a_tile)
            right = tl.load(b_tile)
        else:
            left = tl.load(a_tile, mask=(rows[:, None] < side) & (k[None, :] + start < inner), other=0.0)
            right = tl.load(b_tile, mask=(k[:, None] + start < inner) & (columns[None, :] < side), other=0.0)
        total = tl.dot(left, right, total)
        a_tile += BLOCK_K * a_column
        b_tile += BLOCK_K * b_row
    total = total * alpha
    place = batch * side * side
    here = rows[:, None].to(tl.int64) * side + columns[None, :]
    inside = (rows[:, None] < side) & (columns[None, :] < side)
    if ADD:
        total += beta * tl.load(c + place + here, mask=inside, other=0.0).to(tl.float32)
    if row_tile == column_tile:
        total += tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
    result = total.to(out.dtype.element_ty)
    tl.store(out + place + here, result, mask=inside)
    if row_tile != column_tile:
        # Store the transpose above the diagonal.
        mirrored = columns[:, None].to(tl.int64) * side + rows[None, :]
        mirror_inside = (columns[:, None] < side) & (rows[None, :] < side)
        tl.store(out + place + mirrored, tl.trans(result), mask=mirror_inside)


def can_multiply(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Return whether to use the kernel for products of (batch, m, n) matrices on the short side.

    It is used where it is faster than cuBLAS, and where cuBLAS's bits would depend on the batch (see `MAX_SUM`).
    """
    return dtype in _DTYPES and (min(shape[-2:]) >= _MIN_SIDE or max(shape[-2:]) > MAX_SUM)


def symmetric_multiply(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    c: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """Return the symmetric matrices alpha a @ b + beta c + diagonal I, rounded once; the upper half mirrors the lower.

    Args:
        a: (batch, s, k) bfloat16 or float16, any strides.
        b: (batch, k, s) of the same dtype, any strides.
        alpha: factor of the product.
        c: (batch, s, s) contiguous, or None.
        beta: factor of `c`.
        diagonal: number added to the entries of the diagonal.

    Returns:
        A new contiguous (batch, s, s) tensor of that dtype, symmetric to the bit except within diagonal tiles.
    """
    count, side, inner = a.shape
    # A power of two, as Triton needs, and at least the 16 of tensor cores.
    block = min(_BLOCK, max(_SMALLEST_BLOCK, triton.next_power_of_2(side)))
    tiles = triton.cdiv(side, block)
    out = torch.empty((count, side, side), dtype=a.dtype, device=a.device)
    launch(
        _symmetric_kernel,
        (count * tiles * (tiles + 1) // 2,),
        a,
        b,
        a if c is None else c,
        out,
        side,
        inner,
        *a.stride(),
        *b.stride(),
        alpha,
        beta,
        diagonal,
        tiles,
        ADD=c is not None,
        EVEN_SIDE=side % block == 0,
        EVEN_INNER=inner % _BLOCK_K == 0,
        BLOCK=block,
        BLOCK_K=_BLOCK_K,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )
    return out
