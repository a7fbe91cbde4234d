"""Averages the rows of a table over ranks, each of which sent only some rows. Twin: `optim/plan/row_sharding.py`.

Import this module only where Triton is installed (see `dispatch.py`).
"""

import triton
import triton.language as tl
from torch import Tensor

from quintic.kernels.launch import launch

__all__ = ["mean_of_rows_"]

# Entries per program, and largest number of columns per program; powers of two.
_BLOCK = 2048
_MOST_COLUMNS = 1024


@triton.jit
def _rows_kernel(
    # (rows received from all ranks, row_size), contiguous.
    received,
    # (RANKS, num_rows) int32: index in `received` of each rank's row; -1 if the rank did not send it.
    places,
    # (num_rows, row_size), contiguous; written.
    mean,
    num_rows,
    row_size,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < row_size)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for rank in tl.static_range(RANKS):
        # int64: place * row_size may exceed 2^31.
        place = tl.load(places + rank * num_rows + row, mask=row < num_rows, other=-1).to(tl.int64)
        there = inside & (place >= 0)[:, None]
        value = tl.load(received + (place * row_size)[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)
        # The sum starts with the first value, because 0 + -0 would turn a -0 into 0.
        total = value if rank == 0 else total + value
    # A correctly rounded division, as in the twin; multiplying by the reciprocal would round twice.
    average = tl.div_rn(total, tl.full(total.shape, RANKS, tl.float32))
    target = mean + (row.to(tl.int64) * row_size)[:, None] + column[None, :]
    tl.store(target, average.to(mean.dtype.element_ty), mask=inside)


def mean_of_rows_(received: Tensor, places: Tensor, mean: Tensor) -> Tensor:
    """Write the mean over ranks, added in order of rank in float32 and rounded once, and return it.

    Rows that a rank did not send count as zeros.

    Args:
        received: (rows received, row size) contiguous float32, bfloat16 or float16.
        places: (ranks, rows) int32 contiguous: index in `received` of each rank's row; -1 for a row not sent.
        mean: (rows, row size) contiguous, same dtype; overwritten.
    """
    num_rows, row_size = mean.shape
    if num_rows and row_size:
        columns = min(triton.next_power_of_2(row_size), _MOST_COLUMNS)
        rows = _BLOCK // columns
        grid = (triton.cdiv(num_rows, rows), triton.cdiv(row_size, columns))
        launch(
            _rows_kernel,
            grid,
            received,
            places,
            mean,
            num_rows,
            row_size,
            RANKS=places.shape[0],
            ROWS=rows,
            COLUMNS=columns,
            num_warps=4,
        )
    return mean
