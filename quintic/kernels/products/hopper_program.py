"""All products of an orthogonalisation in one launch, for Hopper: `hopper.py` run as a queue.

Product by product a few small matrices leave a GPU idle: while it is launched, while the last tiles of a product are
computed, while results are written and read again. Here the tiles of all products (see `optim/polar/program.py`) are
one queue, dealt out to the programs of the grid in turn. A tile waits for the rows that it reads, and for nothing else:
every row of tiles of every matrix has a counter of the tiles finished in it. A tile depends on earlier ones of the
queue alone, and all programs run at the same time (a cooperative launch), so that one of them can always go on.

To the two groups that multiply and the warp that fetches, as in `hopper.py`, comes a warp that watches the counters, a
few tiles ahead (both are in `hopper_queue.py`). The arithmetic is the same, and so are the bits: which of the two runs
may depend on the number of matrices.

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
from quintic.kernels.products.hopper_order import await_stores, count_up
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
    """Count a tile in the rows that it is part of, one or two, once it is in memory."""
    await_stores()
    group_barrier()
    count_up(counters + first_row)
    if first_row != second_row:
        count_up(counters + second_row)


@gluon.jit
def _accumulate(
    WHICH: gl.constexpr,
    smem_left,
    smem_right,
    full,
    empty,
    next_turn,
    position,
    steps,
    LEFT_TRANSPOSED: gl.constexpr,
    RIGHT_TRANSPOSED: gl.constexpr,
    HALVES: gl.constexpr,
    layout: gl.constexpr,
):
    """Return the sum of the products of `steps` stages of the ring, from `position` on, and pass the turn on."""
    HEIGHT: gl.constexpr = TILE // HALVES
    value = gl.zeros((HEIGHT, TILE), gl.float32, layout)
    for step in range(steps):
        stage = (position + step) % STAGES
        mbarrier.wait(full.index(stage), ((position + step) // STAGES) & 1)
        left = smem_left.index(stage * HALVES + WHICH * (HALVES - 1))
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
    WHICH: gl.constexpr,
    apply_out,
    last_out,
    square_out,
    square_out_transposed,
    smem_left,
    smem_right,
    staging,
    staging_transposed,
    full,
    empty,
    loaded,
    turns,
    gates,
    passed,
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
    """One of the two groups of warps that multiply: every other tile (HALVES 1), or half of every tile (HALVES 2)."""
    HEIGHT: gl.constexpr = TILE // HALVES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    next_turn = turns.index(1 - WHICH)
    mine = staging.index(WHICH)
    mine_transposed = staging_transposed.index(WHICH)
    result_here = mine.reshape([HEIGHT, TILE])
    result_there = mine_transposed.reshape([TILE, HEIGHT]).permute([1, 0])
    position = 0
    number = 0
    turn = 1 - WHICH
    loaded_phase = 0
    finished = 0
    # The rows that the last tile counts in, once its stores are complete: after the next tile's multiplications, or at
    # the end of a product.
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
                mbarrier.wait(gates.index(number % GATES), (number // GATES) & 1)
                mbarrier.arrive(passed.index(number % GATES))
                if c >= 0:
                    tma.store_wait(0)
                    mbarrier.expect(loaded.index(WHICH), square_out.block_type.nbytes)
                    tma_load(square_out, [c * batch + matrix, row, j * TILE], loaded.index(WHICH), mine)
                if HALVES == 1:
                    # The other group has waited for all its stages: none of mine is two rounds of the ring away.
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
                value = value * alpha
                if c >= 0:
                    mbarrier.wait(loaded.index(WHICH), loaded_phase)
                    loaded_phase ^= 1
                    value += beta * result_here.load(layout).to(gl.float32)
                if i == j:
                    down = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
                    across = j * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))
                    value += gl.where(down[:, None] == across[None, :], diagonal, 0.0)
                result = value.to(square_out.dtype)
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
                        tma.store_wait(0)
                        result_there.store(result)
                        fence_async_shared()
                        tma_store(square_out_transposed, [out + matrix, j * TILE, row], mine_transposed)
                rows = matrix * short
                first_row = rows + i
                second_row = rows + j
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


# Compiled once for all sizes, not anew for those that happen to be 1 or multiples of 16.
@gluon.jit(do_not_specialize=["products", "batch", "short", "long", "short_steps", "long_steps"])
def _program_kernel(
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
        mbarrier.init(passed.index(gate), count=1 + HALVES)  # the warp that fetches, and who multiplies
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
        [4, 1, 1],
        [232, 40, 40],
    )
    # fmt: on


class Step(NamedTuple):
    """One product of a program, with its operands' places in memory."""

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
        steps: in order.
        m: rows of the matrices.
        n: columns.
    """
    short, long = sorted((triton.cdiv(m, TILE.value), triton.cdiv(n, TILE.value)))
    finished = 0
    rows = []
    for step in steps:
        left, right = (step.b, step.a) if step.kind == APPLY.value and m > n else (step.a, step.b)
        rows.append((step.kind, left, right, -1 if step.c is None else step.c, step.out, finished))
        finished += long if step.kind == APPLY.value else short
    scalars = [(step.alpha, step.beta, step.diagonal) for step in steps]
    return torch.tensor(rows, dtype=torch.int32, device="cpu"), torch.tensor(scalars, device="cpu")


def run_program(x: Tensor, squares: Tensor, result: Tensor, table: Tensor, scalars: Tensor) -> None:
    """Run a program on a batch of matrices.

    Args:
        x: (2, b, m, n) bfloat16 or float16, contiguous: the matrices, normalised, in [0]; both are overwritten.
        squares: (places, b, s, s) of that dtype with s = min(m, n), contiguous; overwritten.
        result: (b, m, n) bfloat16 or float16, contiguous: where the last product goes; it may be the half of `x` that
            the table says.
        table: from `steps_table`, on the device.
        scalars: likewise.
    """
    _, batch, m, n = x.shape
    wide = m <= n
    side, length = sorted((m, n))
    short, long = triton.cdiv(side, TILE.value), triton.cdiv(length, TILE.value)
    grid = min(multiprocessors(x.device), batch * max(short * long, short * (short + 1) // 2))
    # With fewer tiles than multiprocessors it is better to finish each sooner than to write results in the shadow.
    halves = 2 if batch * short * (short + 1) // 2 <= grid else 1
    height = TILE.value // halves
    rows, small = x.view(-1, m, n), squares.view(-1, side, side)
    counters = torch.zeros((batch, short), dtype=torch.int32, device=x.device)
    square_left, square_right = blocks_of(small, height, BLOCK_K.value), blocks_of(small, BLOCK_K.value, TILE.value)
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
