"""All products of an orthogonalisation in one launch on Hopper GPUs: the kernel of `hopper.py`, fed by a queue.

With a launch per product, a few small matrices leave the GPU idle during launches, while the last tiles of a product
are computed, and while results are written and read again. Here the tiles of all products (see
`optim/polar/program.py`) form one queue, and tile q goes to program q modulo the size of the grid.

- Every row of tiles of every matrix has a counter of finished tiles. A tile waits for the rows that it reads only.
- There is no deadlock: a tile depends on earlier tiles of the queue only, and all programs run at the same time (a
  cooperative launch), so that the first unfinished tile can always be computed.
- A program has four kinds of warps: two groups that multiply (here), as in `hopper.py`, one warp that fetches and one
  that watches the counters a few tiles ahead (both in `hopper_queue.py`).

The arithmetic is that of `hopper.py`, and so are the bits: the number of matrices may decide which of the two runs.

Import this module only where Triton is installed, and call it on devices of compute capability 9.0.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quintic.kernels.launch import launch
from quintic.kernels.products.hopper_queue import (
    APPLY,
    COLUMNS,
    GATES,
    GRAM,
    SCALARS,
    SQUARE,
    fetch,
    first_of,
    place_of,
    tiles_of,
    watch,
)
from quintic.kernels.products.hopper_sync import await_stores, count_up
from quintic.kernels.products.hopper_tiles import (
    BLOCK_K,
    STAGES,
    TILE,
    blocks_of,
    group_barrier,
    multiprocessors,
    reinterpret,
    tma_load,
    tma_store,
)

__all__ = ["APPLY", "GRAM", "SQUARE", "Step", "run_program", "steps_table"]


@gluon.jit
def _finish(counters, first_row, second_row):
    """Count a finished tile in the row or the two rows that it belongs to, once it is in memory."""
    await_stores()
    group_barrier()
    count_up(counters + first_row)
    if first_row != second_row:
        count_up(counters + second_row)


@gluon.jit
def _accumulate(
    WHICH: gl.constexpr,
    # The ring of stages and its barriers, as in hopper.py.
    smem_left,
    smem_right,
    full,
    empty,
    # Barrier of the other group's turn.
    next_turn,
    # First stage of the tile, counted from the start of the ring, and number of stages.
    position,
    steps,
    LEFT_TRANSPOSED: gl.constexpr,
    RIGHT_TRANSPOSED: gl.constexpr,
    HALVES: gl.constexpr,
    layout: gl.constexpr,
):
    """Return a tile's float32 sum of products, (HEIGHT, TILE), and pass the turn on to the other group."""
    HEIGHT: gl.constexpr = TILE // HALVES
    value = gl.zeros((HEIGHT, TILE), gl.float32, layout)
    for step in range(steps):
        stage = (position + step) % STAGES
        mbarrier.wait(full.index(stage), ((position + step) // STAGES) & 1)
        left = smem_left.index(stage * HALVES + WHICH * (HALVES - 1))
        # Stages are allocated in the shape of untransposed blocks: see them as they were loaded, then transpose.
        if LEFT_TRANSPOSED:
            left = reinterpret(left, left.dtype, [1, BLOCK_K, HEIGHT], left.layout)
            left = left.reshape([BLOCK_K, HEIGHT]).permute([1, 0])
        else:
            left = left.reshape([HEIGHT, BLOCK_K])
        right = smem_right.index(stage)
        if RIGHT_TRANSPOSED:
            right = reinterpret(right, right.dtype, [1, TILE, BLOCK_K], right.layout)
            right = right.reshape([TILE, BLOCK_K]).permute([1, 0])
        else:
            right = right.reshape([BLOCK_K, TILE])
        # One multiplication stays in flight; when the one before it is done, its stage may be filled again.
        value = warpgroup_mma(left, right, value, is_async=True)
        value = warpgroup_mma_wait(1, deps=(value,))
        mbarrier.arrive(empty.index((position + step + STAGES - 1) % STAGES), pred=step > 0)
    if HALVES == 1:
        # The other group begins while the last product is running.
        mbarrier.arrive(next_turn)
    value = warpgroup_mma_wait(0, deps=(value,))
    mbarrier.arrive(empty.index((position + steps - 1) % STAGES))
    return value


@gluon.jit
def _multiply(
    # Index of the group, 0 or 1.
    WHICH: gl.constexpr,
    # Descriptors of results: whole matrices, the last product's result, small matrices, and these in transposed blocks.
    apply_out,
    last_out,
    square_out,
    square_out_transposed,
    # The ring, and one block of shared memory per group for c and results, seen in both orientations.
    smem_left,
    smem_right,
    staging,
    staging_transposed,
    # Barriers, as in hopper.py and hopper_queue.py.
    full,
    empty,
    loaded,
    turns,
    gates,
    passed,
    # (products, COLUMNS) int32 and (products, SCALARS) float32, see `steps_table`.
    table,
    scalars,
    products,
    # (batch, short) int32: finished tiles of each row; with HALVES 2 each group counts its half.
    counters,
    # Sizes in tiles along the sides, and in blocks of BLOCK_K entries.
    batch,
    short,
    long,
    short_steps,
    long_steps,
    WIDE: gl.constexpr,
    HALVES: gl.constexpr,
):
    """Compute this group's tiles: every other tile of the program (HALVES 1), or half of every tile (HALVES 2)."""
    HEIGHT: gl.constexpr = TILE // HALVES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    next_turn = turns.index(1 - WHICH)
    mine = staging.index(WHICH)
    mine_transposed = staging_transposed.index(WHICH)
    result_here = mine.reshape([HEIGHT, TILE])
    result_there = mine_transposed.reshape([TILE, HEIGHT]).permute([1, 0])
    # Stages of the ring and tiles of this program so far, those of the other group included.
    position = 0
    number = 0
    # Group 0 begins: waiting for phase 1 of a fresh barrier returns at once.
    turn = 1 - WHICH
    loaded_phase = 0
    finished = 0
    # A tile is counted after the multiplications of the next one, or at the end of the product, so that its stores have
    # time to complete. Until then `pending` is 1, and these are its rows.
    pending = 0
    first_row = 0
    second_row = 0
    for product in range(products):
        entry = table + product * COLUMNS
        kind = gl.load(entry)
        c = gl.load(entry + 3)
        out = gl.load(entry + 4) * batch
        alpha = gl.load(scalars + product * SCALARS)
        beta = gl.load(scalars + product * SCALARS + 1)
        diagonal = gl.load(scalars + product * SCALARS + 2)
        total = tiles_of(batch, kind, short, long)
        steps = gl.where(kind == GRAM, long_steps, short_steps)
        for t in range(first_of(finished), total, gl.num_programs(0)):
            if HALVES == 2 or number % 2 == WHICH:
                matrix, i, j = place_of(t, kind, short, long, WIDE)
                row = i * TILE + WHICH * (HALVES - 1) * HEIGHT
                # The gate says that c is complete, too.
                mbarrier.wait(gates.index(number % GATES), (number // GATES) & 1)
                mbarrier.arrive(passed.index(number % GATES))
                if c >= 0:
                    tma.store_wait(0)
                    mbarrier.expect(loaded.index(WHICH), square_out.block_type.nbytes)
                    tma_load(square_out, [c * batch + matrix, row, j * TILE], loaded.index(WHICH), mine)
                if HALVES == 1:
                    # The turn also keeps the phases of `full` unambiguous, as in hopper.py.
                    mbarrier.wait(turns.index(WHICH), turn)
                    turn ^= 1
                # fmt: off
                if kind == GRAM:
                    value = _accumulate(WHICH, smem_left, smem_right, full, empty, next_turn, position, steps,
                                        not WIDE, WIDE, HALVES, layout)
                else:
                    value = _accumulate(WHICH, smem_left, smem_right, full, empty, next_turn, position, steps,
                                        False, False, HALVES, layout)
                # fmt: on
                if pending != 0:
                    _finish(counters, first_row, second_row)
                # Epilogue in float32, rounded once.
                value = value * alpha
                if c >= 0:
                    mbarrier.wait(loaded.index(WHICH), loaded_phase)
                    loaded_phase ^= 1
                    value += beta * result_here.load(layout).to(gl.float32)
                # In an APPLY `diagonal` is zero.
                if i == j:
                    down = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
                    across = j * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))
                    value += gl.where(down[:, None] == across[None, :], diagonal, 0.0)
                result = value.to(square_out.dtype)
                # The last result may have another 16-bit dtype.
                if product == products - 1:
                    last = reinterpret(mine, last_out.dtype, last_out.block_type.shape, last_out.layout)
                    last.reshape([HEIGHT, TILE]).store(value.to(last_out.dtype))
                else:
                    result_here.store(result)
                fence_async_shared()
                if product == products - 1:
                    last = reinterpret(mine, last_out.dtype, last_out.block_type.shape, last_out.layout)
                    tma_store(last_out, [matrix, row, j * TILE], last)
                elif kind == APPLY:
                    tma_store(apply_out, [out + matrix, row, j * TILE], mine)
                else:
                    tma_store(square_out, [out + matrix, row, j * TILE], mine)
                    if i != j:
                        # Mirror the tile through the same memory, once the first copy has read it.
                        tma.store_wait(0)
                        result_there.store(result)
                        fence_async_shared()
                        tma_store(square_out_transposed, [out + matrix, j * TILE, row], mine_transposed)
                rows = matrix * short
                first_row = rows + i
                second_row = rows + j
                # A tile of x counts in its row along the short side; a small one in its row and in its mirror's.
                if kind == APPLY:
                    if WIDE:
                        second_row = rows + i
                    else:
                        first_row = rows + j
                pending = 1
            position += steps
            number += 1
        if pending != 0:
            _finish(counters, first_row, second_row)
            pending = 0
        finished += total


# Triton would compile variants for sizes that are 1 or multiples of 16; one for all sizes is enough.
@gluon.jit(do_not_specialize=["products", "batch", "short", "long", "short_steps", "long_steps"])
def _program_kernel(
    # Descriptors of operands by kind of product, then of results; see `run_program`.
    gram_left,
    gram_right,
    square_left,
    square_right,
    apply_left,
    apply_right,
    apply_out,
    last_out,
    square_out,
    square_out_transposed,
    # As in `_multiply`.
    table,
    scalars,
    products,
    counters,
    batch,
    short,
    long,
    short_steps,
    long_steps,
    WIDE: gl.constexpr,
    HALVES: gl.constexpr,
):
    dtype: gl.constexpr = square_left.dtype
    smem_left = gl.allocate_shared_memory(dtype, [STAGES * HALVES] + square_left.block_type.shape, square_left.layout)
    smem_right = gl.allocate_shared_memory(dtype, [STAGES] + square_right.block_type.shape, square_right.layout)
    staging = gl.allocate_shared_memory(dtype, [2] + square_out.block_type.shape, square_out.layout)
    staging_transposed = reinterpret(
        staging, dtype, [2] + square_out_transposed.block_type.shape, square_out_transposed.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    gates = gl.allocate_shared_memory(gl.int64, [GATES, 1], mbarrier.MBarrierLayout())
    passed = gl.allocate_shared_memory(gl.int64, [GATES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=HALVES)
    for group in gl.static_range(2):
        mbarrier.init(loaded.index(group), count=1)
        mbarrier.init(turns.index(group), count=1)
    for gate in gl.static_range(GATES):
        mbarrier.init(gates.index(gate), count=1)
        # The fetching warp passes a gate, and one multiplying group or both.
        mbarrier.init(passed.index(gate), count=1 + HALVES)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_multiply, (0, apply_out, last_out, square_out, square_out_transposed, smem_left, smem_right, staging,
                         staging_transposed, full, empty, loaded, turns, gates, passed, table, scalars, products,
                         counters, batch, short, long, short_steps, long_steps, WIDE, HALVES)),
            (_multiply, (1, apply_out, last_out, square_out, square_out_transposed, smem_left, smem_right, staging,
                         staging_transposed, full, empty, loaded, turns, gates, passed, table, scalars, products,
                         counters, batch, short, long, short_steps, long_steps, WIDE, HALVES)),
            (fetch, (gram_left, gram_right, square_left, square_right, apply_left, apply_right, smem_left, smem_right,
                      full, empty, gates, passed, table, products, batch, short, long, short_steps, long_steps,
                      WIDE, HALVES)),
            (watch, (gates, passed, table, products, counters, batch, short, long, WIDE, HALVES)),
        ],
        # Warps of all functions but the first, and registers per thread: see hopper.py.
        [4, 1, 1],
        [232, 40, 40],
    )
    # fmt: on


class Step(NamedTuple):
    """One product, out = alpha a b + beta c + diagonal I, with the places of its matrices in memory."""

    kind: int
    """GRAM, SQUARE or APPLY."""
    a: int
    b: int
    c: int | None
    out: int
    alpha: float
    beta: float
    diagonal: float


def steps_table(steps: Sequence[Step], m: int, n: int) -> tuple[Tensor, Tensor]:
    """Return the kernel's tables of a program: (products, 6) int32 and (products, 3) float32, on the CPU.

    Args:
        steps: the products in order.
        m: number of rows of the matrices.
        n: number of columns of the matrices.
    """
    short, long = sorted((triton.cdiv(m, TILE.value), triton.cdiv(n, TILE.value)))
    finished = 0
    rows = []
    for step in steps:
        # A tall x is multiplied from the right: x q instead of q x.
        left, right = (step.b, step.a) if step.kind == APPLY.value and m > n else (step.a, step.b)
        rows.append((step.kind, left, right, -1 if step.c is None else step.c, step.out, finished))
        # The tiles that a product adds to each row along the short side.
        finished += long if step.kind == APPLY.value else short
    scalars = [(step.alpha, step.beta, step.diagonal) for step in steps]
    return torch.tensor(rows, dtype=torch.int32, device="cpu"), torch.tensor(scalars, device="cpu")


def run_program(x: Tensor, squares: Tensor, result: Tensor, table: Tensor, scalars: Tensor) -> None:
    """Run all products of a program on a batch of matrices.

    Args:
        x: (2, b, m, n) contiguous bfloat16 or float16: the normalised matrices in x[0], and memory for results in x[1].
            Both are overwritten.
        squares: (places, b, s, s) contiguous, same dtype, s = min(m, n): memory for small matrices; overwritten.
        result: (b, m, n) contiguous bfloat16 or float16: memory for the last result; it may be the x[i] to which the
            table directs that result.
        table: table of products from `steps_table`, on the device.
        scalars: table of scalars from `steps_table`, on the device.
    """
    _, batch, m, n = x.shape
    wide = m <= n
    side, length = sorted((m, n))
    short, long = triton.cdiv(side, TILE.value), triton.cdiv(length, TILE.value)
    grid = min(multiprocessors(x.device), batch * max(short * long, short * (short + 1) // 2))
    # With few tiles the time until each is finished counts, so both groups work on the same tile.
    halves = 2 if batch * short * (short + 1) // 2 <= grid else 1
    height = TILE.value // halves
    # All places and matrices as one batch: place p of matrix i is entry p * b + i.
    rows, small = x.view(-1, m, n), squares.view(-1, side, side)
    counters = torch.zeros((batch, short), dtype=torch.int32, device=x.device)
    square_left, square_right = blocks_of(small, height, BLOCK_K.value), blocks_of(small, BLOCK_K.value, TILE.value)
    # Blocks of the left operands are (height, BLOCK_K), of the right ones (BLOCK_K, TILE), or transposed as stored: the
    # product on the short side is x x^T for a wide x, and x^T x for a tall one.
    if wide:
        gram_left, gram_right = blocks_of(rows, height, BLOCK_K.value), blocks_of(rows, TILE.value, BLOCK_K.value)
        apply_left, apply_right = square_left, blocks_of(rows, BLOCK_K.value, TILE.value)
    else:
        gram_left, gram_right = blocks_of(rows, BLOCK_K.value, height), blocks_of(rows, BLOCK_K.value, TILE.value)
        apply_left, apply_right = blocks_of(rows, height, BLOCK_K.value), square_right
    launch(
        _program_kernel,
        (grid,),
        gram_left,
        gram_right,
        square_left,
        square_right,
        apply_left,
        apply_right,
        blocks_of(rows, height, TILE.value),
        blocks_of(result, height, TILE.value),
        blocks_of(small, height, TILE.value),
        blocks_of(small, TILE.value, height),
        table,
        scalars,
        table.shape[0],
        counters,
        batch,
        short,
        long,
        triton.cdiv(side, BLOCK_K.value),
        triton.cdiv(length, BLOCK_K.value),
        WIDE=wide,
        HALVES=halves,
        num_warps=4,
        enable_fp_fusion=False,
        launch_cooperative_grid=True,
    )
