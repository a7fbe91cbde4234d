"""Sums of squares of the rows or columns of matrices, in one launch that reads them once, in Triton.

A matrix has the same bits in every batch, stored by rows or by columns, because the order of every sum depends on
(m, n) only. The entries of a row are divided into segments. Within a segment, entry j belongs to lane j mod 64; a lane
adds its entries one after the other, then the upper half of the lanes is added to the lower half until one lane is
left. `tl.sum` over a whole tile would be shorter, but adds in the order in which the compiler has laid out the
registers, which depends on alignment and strides. The plain twin is in `norms` of optim/numeric/sums.py.

Import this module only where Triton is installed (see `dispatch.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintic.kernels.launch import launch

__all__ = ["square_sums", "sum_of_lanes"]

# The following numbers decide the order of sums, and with it the last bits of the results.
#
# Logarithm of the number of lanes of a segment.
_LOG_LANES = 6
# Entries of a row in one segment. Shorter segments give more programs per matrix, longer ones fewer sums to add up.
# Powers of two and multiples of the number of lanes.
_MIN_SEGMENT = 128
_MAX_SEGMENT = 1024
# Programs of one matrix that fill a large GPU; segments grow until there are no more than these.
_PROGRAMS = 512
# Rows per program; `_segment` counts programs with it.
_BLOCK = 64

# No bit depends on the number of warps.
_NUM_WARPS = 4


@triton.jit
def sum_of_lanes(x, LOG: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sums over the first dimension of (2^LOG, WIDTH), in a fixed order, as (WIDTH,).

    Each step adds the upper half of the rows to the lower half. `tl.sum` over two numbers has only one order.
    """
    for step in tl.static_range(LOG):
        x = tl.sum(tl.reshape(x, (2, 1 << (LOG - 1 - step), WIDTH)), axis=0)
    return tl.reshape(x, (WIDTH,))


@triton.jit
def _sum_kernel(
    # (b, rows, entries) with the three strides below.
    matrices,
    # (b, segments, rows) float32, contiguous; written.
    sums,
    rows,
    entries,
    # Entries per segment.
    segment,
    matrix_stride,
    row_stride,
    entry_stride,
    # Whether the entries of a row lie side by side in memory.
    ENTRIES_FIRST: tl.constexpr,
    LOG_LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LANES: tl.constexpr = 1 << LOG_LANES
    segments = tl.cdiv(entries, segment)
    blocks = tl.cdiv(rows, BLOCK)
    matrix = (tl.program_id(0) // (segments * blocks)).to(tl.int64)
    place = tl.program_id(0) % (segments * blocks)
    # Consecutive programs run at the same time: number them so that they read adjacent memory.
    if ENTRIES_FIRST:
        block, number = place // segments, place % segments
    else:
        block, number = place % blocks, place // blocks
    row = block * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)
    known = row < rows
    starts = matrices + matrix * matrix_stride + row.to(tl.int64) * row_stride
    # Lane l of column c adds the squares of entries l, l + 64, ... of row c; masked entries add zeros.
    total = tl.zeros((LANES, BLOCK), tl.float32)
    for first in range(number * segment, tl.minimum((number + 1) * segment, entries), LANES):
        entry = first + lane
        pointers = starts[None, :] + (entry.to(tl.int64) * entry_stride)[:, None]
        value = tl.load(pointers, mask=known[None, :] & (entry < entries)[:, None], other=0.0).to(tl.float32)
        # An explicit fma: whether the compiler fuses a product and a sum would be its own choice.
        total = tl.fma(value, value, total)
    target = sums + (matrix * segments + number) * rows + row
    tl.store(target, sum_of_lanes(total, LOG_LANES, BLOCK), mask=known)


def square_sums(matrices: Tensor, dim: int) -> Tensor:
    """Return sums of squares along a dimension of matrices, for each segment of it: (b, segments, m or n) float32.

    Args:
        matrices: (b, m, n) of 16, 32 or 64 bits floating point, any strides (fastest if rows or columns are
            contiguous); not modified.
        dim: -1 to add up the entries of rows, for m sums, or -2 those of columns, for n.
    """
    by_row = matrices if dim == -1 else matrices.mT  # (b, rows, entries)
    count, rows, entries = by_row.shape
    segment = _segment(rows, entries)
    segments = triton.cdiv(entries, segment)
    sums = torch.empty((count, segments, rows), dtype=torch.float32, device=matrices.device)
    if sums.numel():
        launch(
            _sum_kernel,
            (count * segments * triton.cdiv(rows, _BLOCK),),
            by_row,
            sums,
            rows,
            entries,
            segment,
            *by_row.stride(),
            ENTRIES_FIRST=by_row.stride(2) == 1,
            LOG_LANES=_LOG_LANES,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    return sums


def _segment(rows: int, entries: int) -> int:
    """Return the number of entries of a segment; independent of the batch, as the order of sums must be."""
    segment = _MIN_SEGMENT
    while segment < _MAX_SEGMENT and triton.cdiv(rows, _BLOCK) * triton.cdiv(entries, segment) > _PROGRAMS:
        segment *= 2
    return segment
