"""Triton kernels over positions sorted by token, and over the rows of the tokens.

    _positions_kernel   a tile of positions: outputs, or the gradient of x      grid (tiles of positions, columns)
    _tables_kernel      a tile of rows: gradients of keys and values            grid (tiles of rows, columns)
    _add_kernel         one position: gradient added to its row of a table      grid (positions, columns)

lookup.py and rows.py have the formulas and the plain twins. Names: i are positions, j rows of the tables.
"""

import torch
from torch import Tensor

from quintic.kernels.jit import jit, tl, triton
from quintic.kernels.launch import launch

__all__ = ["launch_add_to_rows", "launch_lookup", "launch_lookup_backward"]

# Positions and rows of a tile, terms of a product that are loaded at a time, largest number of columns that a program
# writes (every program computes its scores again), and warps. Not tuned; with fewer warps registers are spilt.
_POSITIONS, _ROWS, _CHUNK, _COLUMNS, _WARPS = 64, 32, 64, 256, 8

# For `_add_kernel`, which multiplies nothing: positions at a time, columns, and warps.
_FEW_POSITIONS, _MANY_COLUMNS, _FEW_WARPS = 8, 1024, 4

# ------------------------------------------------------------------------------------------------------------ kernels


@jit
def _tile(table, row, is_row, column, width, dtype: tl.constexpr):
    """Load entries (row, column) of a contiguous table of this width, rounded to `dtype`; zeros outside of it."""
    # int64: a table may have 2^31 entries or more.
    place = table + row[:, None].to(tl.int64) * width + column[None, :]
    return tl.load(place, mask=is_row[:, None] & (column < width)[None, :], other=0.0).to(dtype)


@jit
def _dots(a, i, is_i, b, j, is_j, width, dtype: tl.constexpr, CHUNK: tl.constexpr):
    """Return the dot products of rows i of a with rows j of b, (i, j) float32."""
    # "ieee": float32 inputs are not rounded to tf32.
    total = tl.zeros((i.shape[0], j.shape[0]), dtype=tl.float32)
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        left = _tile(a, i, is_i, column, width, dtype)
        right = _tile(b, j, is_j, column, width, dtype)
        total = tl.dot(left, right.T, total, input_precision="ieee")
    return total


# fmt: off
@jit
def _positions_kernel(x, keys, values, grad, out, lse, delta, order, tokens, offsets, count, width,
                      BACKWARD: tl.constexpr, POSITIONS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
                      COLUMNS: tl.constexpr):
    # fmt: on
    """Write outputs and log-sum-exps of a tile of positions or, if BACKWARD, the gradient of x to `out`.

    x, grad and out are (count, width); keys and values (rows, width); lse and delta (count,) float32; order, tokens and
    offsets as in lookup.py. All are contiguous. The softmax is computed online: `total` and `sums` are relative to the
    largest score so far.
    """
    LAST: tl.constexpr = 2147483647
    dtype: tl.constexpr = x.dtype.element_ty
    place = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = place < count
    token = tl.load(tokens + place, mask=inside, other=LAST)
    i = tl.load(order + place, mask=inside, other=0)
    total = tl.zeros((POSITIONS, COLUMNS), dtype=tl.float32)
    sums = tl.zeros((POSITIONS,), dtype=tl.float32)
    peak = tl.full((POSITIONS,), float("-inf"), dtype=tl.float32)
    if BACKWARD:
        peak = tl.load(lse + i, mask=inside, other=0.0)
        less = tl.load(delta + i, mask=inside, other=0.0)
    # Take one token after the other: the tile's tokens are sorted, and the next one is the least that is larger.
    current = tl.min(token, axis=0)
    while current < LAST:
        mine = token == current
        stop = tl.load(offsets + current + 1)
        # The rows of this token; positions of other tokens are masked.
        for start in range(tl.load(offsets + current), stop, ROWS):
            j = start + tl.arange(0, ROWS)
            is_row = j < stop
            score = _dots(x, i, mine, keys, j, is_row, width, dtype, CHUNK)
            score = tl.where(mine[:, None] & is_row[None, :], score, float("-inf"))
            if BACKWARD:
                part = tl.exp2((score - peak[:, None]) * 1.4426950408889634)
                part *= _dots(grad, i, mine, values, j, is_row, width, dtype, CHUNK) - less[:, None]
                part = tl.where(mine[:, None] & is_row[None, :], part, 0.0)
                right = _tile(keys, j, is_row, column, width, dtype)
            else:
                higher = tl.maximum(peak, tl.max(score, axis=1))
                # Positions of tokens that come later have seen only -inf, and -inf - -inf would be NaN.
                base = tl.where(higher == float("-inf"), 0.0, higher)
                part = tl.exp2((score - base[:, None]) * 1.4426950408889634)
                kept = tl.exp2((peak - base) * 1.4426950408889634)
                sums = sums * kept + tl.sum(part, axis=1)
                total *= kept[:, None]
                peak = higher
                right = _tile(values, j, is_row, column, width, dtype)
            total = tl.dot(part.to(dtype), right, total, input_precision="ieee")
        current = tl.min(tl.where(token > current, token, LAST), axis=0)
    if not BACKWARD:
        # Lanes beyond the last position have no sum.
        sums = tl.where(inside, sums, 1.0)
        total /= sums[:, None]
        # All programs of a tile have the same sums; the first one writes.
        if tl.program_id(1) == 0:
            tl.store(lse + i, peak + tl.log2(sums) * 0.6931471805599453, mask=inside)
    place = out + i[:, None] * width + column[None, :]
    tl.store(place, total.to(dtype), mask=inside[:, None] & (column < width)[None, :])


# fmt: off
@jit
def _tables_kernel(x, keys, values, grad, lse, delta, grad_keys, grad_values, order, tokens, starts, owners, num_rows,
                   width, TIED: tl.constexpr, POSITIONS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
                   COLUMNS: tl.constexpr):
    # fmt: on
    """Write the gradients of a tile of rows; zeros for rows whose tokens do not occur.

    The rows of the tile belong to consecutive tokens, so the positions of these tokens are one range of `order`. Every
    row is written by one program, which adds positions in order.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    first = tl.program_id(0) * ROWS
    j = first + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = j < num_rows
    owner = tl.load(owners + j, mask=is_row, other=-1)
    stop = tl.load(starts + tl.max(owner, axis=0) + 1)
    for_keys = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for_values = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(tl.load(starts + tl.load(owners + first)), stop, POSITIONS):
        place = start + tl.arange(0, POSITIONS)
        inside = place < stop
        i = tl.load(order + place, mask=inside, other=0)
        # (ROWS, POSITIONS): whether row and position have the same token. -1 and -2 are equal to nothing.
        together = owner[:, None] == tl.load(tokens + place, mask=inside, other=-2)[None, :]
        score = _dots(keys, j, is_row, x, i, inside, width, dtype, CHUNK)
        # p = exp(score - lse), recomputed; then ds = p (V g - delta).
        weight = tl.exp2((score - tl.load(lse + i, mask=inside, other=0.0)[None, :]) * 1.4426950408889634)
        weight = tl.where(together, weight, 0.0)
        part = _dots(values, j, is_row, grad, i, inside, width, dtype, CHUNK)
        part = weight * (part - tl.load(delta + i, mask=inside, other=0.0)[None, :])
        part = part.to(dtype)
        for_keys = tl.dot(part, _tile(x, i, inside, column, width, dtype), for_keys, input_precision="ieee")
        right = _tile(grad, i, inside, column, width, dtype)
        if TIED:
            for_keys = tl.dot(weight.to(dtype), right, for_keys, input_precision="ieee")
        else:
            for_values = tl.dot(weight.to(dtype), right, for_values, input_precision="ieee")
    place = j[:, None].to(tl.int64) * width + column[None, :]
    is_entry = is_row[:, None] & (column < width)[None, :]
    tl.store(grad_keys + place, for_keys.to(grad_keys.dtype.element_ty), mask=is_entry)
    if not TIED:
        tl.store(grad_values + place, for_values.to(grad_keys.dtype.element_ty), mask=is_entry)


# fmt: off
@jit
def _add_kernel(table, rows, order, grad, count, width, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr):
    # fmt: on
    """Add the gradients of all positions of one row to the row: done by the program of the first of them.

    rows (count,) int32 are the sorted rows and order (count,) their positions; table (R, width) and grad (count, width)
    are contiguous. Other programs of the same row do nothing.
    """
    first = tl.program_id(0)
    row = tl.load(rows + first)
    before = tl.load(rows + first - 1, mask=first > 0, other=-1)
    if before != row:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        place = table + row.to(tl.int64) * width + column
        total = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        # Tiles of POSITIONS, until one contains a position of another row.
        left = tl.full((), 1, dtype=tl.int32)
        while left > 0:
            here = first + tl.arange(0, POSITIONS)
            mine = tl.load(rows + here, mask=here < count, other=-1) == row
            i = tl.load(order + here, mask=mine, other=0)
            tile = tl.load(grad + i[:, None] * width + column[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
            total += tl.sum(tile.to(tl.float32), axis=0)
            first += POSITIONS
            left = tl.min(mine.to(tl.int32), axis=0)
        tl.store(place, total.to(table.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------------ launches


def _launch(kernel, count: int, size: int, width: int, *arguments, **constants) -> None:
    columns = max(16, min(_COLUMNS, triton.next_power_of_2(width)))
    grid = (triton.cdiv(count, size), triton.cdiv(width, columns))
    sizes = {"POSITIONS": _POSITIONS, "ROWS": _ROWS, "CHUNK": min(_CHUNK, columns), "COLUMNS": columns}
    if 0 not in grid:
        launch(kernel, grid, *arguments, count, width, **constants, **sizes, num_warps=_WARPS)


def launch_lookup(x: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, plan) -> tuple[Tensor, Tensor]:
    """Return the outputs (N, d) and the log-sum-exp of each softmax (N,) float32."""
    (count, width), (order, tokens, _, _) = x.shape, plan
    out, lse = torch.empty_like(x), x.new_empty(count, dtype=torch.float32)
    # `grad` and `delta` are not read forward.
    arguments = (x, keys, values, x, out, lse, lse, order, tokens, offsets)
    _launch(_positions_kernel, count, _POSITIONS, width, *arguments, BACKWARD=False)
    return out, lse


def launch_lookup_backward(
    grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, lse: Tensor, delta: Tensor, offsets: Tensor, plan
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, keys and values; the last two are one tensor for tied tables."""
    (count, width), (order, tokens, starts, owners) = x.shape, plan
    tied = values is keys
    grad_x, grad_keys = torch.empty_like(x), torch.empty_like(keys)
    grad_values = grad_keys if tied else torch.empty_like(keys)
    at_positions = (x, keys, values, grad, grad_x, lse, delta, order, tokens, offsets)
    _launch(_positions_kernel, count, _POSITIONS, width, *at_positions, BACKWARD=True)
    in_tables = (x, keys, values, grad, lse, delta, grad_keys, grad_values, order, tokens, starts, owners)
    _launch(_tables_kernel, keys.shape[0], _ROWS, width, *in_tables, TIED=tied)
    return grad_x, grad_keys, grad_values


def launch_add_to_rows(table: Tensor, rows: Tensor, grad: Tensor) -> None:
    """Add each position's (C,) gradient to its row of a contiguous table."""
    in_order, order = rows.int().sort(stable=True)
    count, width = grad.shape
    columns = min(_MANY_COLUMNS, triton.next_power_of_2(width))
    sizes = {"POSITIONS": _FEW_POSITIONS, "COLUMNS": columns}
    grid = (count, triton.cdiv(width, columns))
    launch(_add_kernel, grid, table, in_order, order, grad, count, width, **sizes, num_warps=_FEW_WARPS)
