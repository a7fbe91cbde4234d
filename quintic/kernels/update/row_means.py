"""The mean over ranks of a table's rows of which each rank sent only some. The twin is in `optim/plan/row_sharding.py`.

Import this module only where Triton is installed (see `dispatch.py`).
"""

import triton
import triton.language as tl
from torch import Tensor

from quintic.kernels.launch import launch

__all__ = ["mean_of_rows_"]

# Entries per program, and entries of one row at a time; powers of two.
_BLOCK = 2048
_MOST_COLUMNS = 1024


@triton.jit
def _rows_kernel(
    received,
    places,
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
        # 64 bits wide, which rows times entries need not be.
        place = tl.load(places + rank * num_rows + row, mask=row < num_rows, other=-1).to(tl.int64)
        there = inside & (place >= 0)[:, None]
        value = tl.load(received + (place * row_size)[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)
        # From the first value on, not from zero: zero plus minus zero is zero.
        total = value if rank == 0 else total + value
    # Rounded once, as a division rounds; times the reciprocal would round twice.
    average = tl.div_rn(total, tl.full(total.shape, RANKS, tl.float32))
    target = mean + (row.to(tl.int64) * row_size)[:, None] + column[None, :]
    tl.store(target, average.to(mean.dtype.element_ty), mask=inside)


def mean_of_rows_(received: Tensor, places: Tensor, mean: Tensor) -> Tensor:
    """Write the mean over ranks, summed in order in float32 and rounded once; return it. Missing rows count as zeros.

    Args:
        received: (rows received, row size) contiguous, float32, bfloat16 or float16.
        places: (ranks, rows) int32 contiguous: which of the rows received is each rank's; -1 for none.
        mean: (rows, row size) contiguous, of the same dtype; changed.
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
