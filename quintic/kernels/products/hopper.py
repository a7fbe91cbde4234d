"""Batched products on Hopper GPUs, in Gluon, the explicit dialect of Triton.

They end with one of three epilogues, where p = a b is exact to float32: `"linear"` is alpha p + beta c + diagonal I,
`"relu2"` is relu(p)^2, and `"relu2_backward"` is 2 sqrt(c) p, the gradient before relu(.)^2 if c is its result.

The grid has one program per multiprocessor, and each program computes tile after tile of the result. Its warps have
different tasks:

- One warp fetches (`_fetch`). The copy engine (tensor memory accelerator, TMA) fills a ring of stages in shared memory
  with blocks of the operands. Barrier `full` of a stage says that it was filled, barrier `empty` that it was read.
- Two groups of four warps multiply (`_matmul`), in one of two modes:
  *Alternating* (HALVES 1). Each group computes tiles of its own, and they take turns: while one group writes its
  result, the other uses the tensor cores. This hides the epilogue of a tile, a third of the time for 768 rows.
  *Paired* (HALVES 2). If there are at most as many tiles as programs, the groups compute one half of each tile.

If the result is symmetric, only the tiles on and below the diagonal are computed; the others are stored as their
transposes. Every entry is a sum over k in ascending order for any tiles, batch and grid, so a matrix has the same bits
in every batch. The plain twin is `multiply` in optim/polar/products.py; `choose_products.py` chooses.

Import this module only where Triton is installed, and call it on devices of compute capability 9.0.
"""

from typing import Literal

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
from quintic.kernels.products.hopper_tiles import (
    BLOCK_K,
    STAGES,
    TILE,
    blocks_of,
    multiprocessors,
    rectangle,
    reinterpret,
    tma_load,
    tma_store,
    triangle,
)

__all__ = ["hopper_multiply"]

_DTYPES = (torch.bfloat16, torch.float16)


@gluon.jit
def _place(t, per_matrix, rows, columns, SYMMETRIC: gl.constexpr):
    """Return the matrix, the row and the column of the t-th tile; rows and columns are counted in tiles."""
    if SYMMETRIC:
        i, j = triangle(t % per_matrix)
    else:
        i, j = rectangle(t % per_matrix, rows, columns)
    return t // per_matrix, i, j


@gluon.jit
def _fetch(
    # Descriptors of the operands as they are stored: (batch, m, k), or (batch, k, m) if A_TRANSPOSED.
    a,
    # (batch, k, n), or (batch, n, k) if B_TRANSPOSED.
    b,
    # STAGES * HALVES blocks of a, and STAGES blocks of b.
    smem_a,
    smem_b,
    # Barriers of the stages.
    full,
    empty,
    # Tiles in all, per matrix, and along each dimension of the result; blocks along k.
    total,
    per_matrix,
    rows,
    columns,
    steps,
    SYMMETRIC: gl.constexpr,
    A_TRANSPOSED: gl.constexpr,
    B_TRANSPOSED: gl.constexpr,
    HALVES: gl.constexpr,
):
    """Fill the ring with the blocks of all tiles of this program, in the order in which they are multiplied."""
    # A barrier alternates between two phases. Waiting for phase 1 of a fresh barrier returns at once: the ring is empty
    # at first.
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        matrix, i, j = _place(t, per_matrix, rows, columns, SYMMETRIC)
        for step in range(steps):
            k = step * BLOCK_K
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            # The stage is full once this number of bytes has arrived.
            mbarrier.expect(ready, HALVES * a.block_type.nbytes + b.block_type.nbytes)
            for half in gl.static_range(HALVES):
                row = i * TILE + half * (TILE // HALVES)
                if A_TRANSPOSED:
                    tma_load(a, [matrix, k, row], ready, smem_a.index(stage * HALVES + half))
                else:
                    tma_load(a, [matrix, row, k], ready, smem_a.index(stage * HALVES + half))
            if B_TRANSPOSED:
                tma_load(b, [matrix, j * TILE, k], ready, smem_b.index(stage))
            else:
                tma_load(b, [matrix, k, j * TILE], ready, smem_b.index(stage))
            # The next stage; the phase flips with every round of the ring.
            stage += 1
            wrap = stage == STAGES
            stage = gl.where(wrap, 0, stage)
            phase = gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _matmul(
    # Index of the group, 0 or 1.
    WHICH: gl.constexpr,
    # Descriptors (batch, m, n) of c (read if `reads_c`) and of the result.
    c,
    out,
    # The result again, in blocks of the transposed shape; used if SYMMETRIC.
    out_transposed,
    # The ring, as in `_fetch`.
    smem_a,
    smem_b,
    # Shared memory, one block per group, for c and for the result on its way out; the same memory seen transposed.
    staging,
    staging_transposed,
    # Barriers: of the stages, of each group's block of c, and of each group's turn.
    full,
    empty,
    loaded,
    turns,
    total,
    per_matrix,
    rows,
    columns,
    steps,
    reads_c,
    alpha,
    beta,
    diagonal,
    SYMMETRIC: gl.constexpr,
    A_TRANSPOSED: gl.constexpr,
    B_TRANSPOSED: gl.constexpr,
    HALVES: gl.constexpr,
    EPILOGUE: gl.constexpr,
):
    """Compute this group's tiles: every other tile of the program (HALVES 1), or half of every tile (HALVES 2)."""
    HEIGHT: gl.constexpr = TILE // HALVES
    # How four warps hold a (HEIGHT, TILE) float32 accumulator: the layout of Hopper's warp group multiplication.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    mine = staging.index(WHICH)
    mine_transposed = staging_transposed.index(WHICH)
    # Blocks have a leading dimension of 1 for the batch.
    result_here = mine.reshape([HEIGHT, TILE])
    result_there = mine_transposed.reshape([TILE, HEIGHT]).permute([1, 0])
    # `position` counts stages of the ring from the start. Alternating groups skip the stages of the other one's tiles.
    if HALVES == 1:
        first = gl.program_id(0) + WHICH * gl.num_programs(0)
        stride = 2 * gl.num_programs(0)
        position = WHICH * steps
    else:
        first = gl.program_id(0)
        stride = gl.num_programs(0)
        position = 0
    # Group 0 begins: its first wait returns at once, as in `_fetch`.
    turn = 1 - WHICH
    loaded_phase = 0
    for t in range(first, total, stride):
        matrix, i, j = _place(t, per_matrix, rows, columns, SYMMETRIC)
        row = i * TILE
        if HALVES == 2:
            row += WHICH * HEIGHT
        # The last result must have left the staging memory before c or a new result is written there. c arrives during
        # the multiplications.
        tma.store_wait(0)
        if reads_c != 0:
            mbarrier.expect(loaded.index(WHICH), c.block_type.nbytes)
            tma_load(c, [matrix, row, j * TILE], loaded.index(WHICH), mine)
        if HALVES == 1:
            # The turn also keeps the phases of `full` unambiguous. The other group has waited for all stages of its
            # tile, so none of this tile's stages is two rounds of the ring ahead.
            mbarrier.wait(turns.index(WHICH), turn)
            turn ^= 1
        value = gl.zeros((HEIGHT, TILE), gl.float32, layout)
        previous = 0
        for step in range(steps):
            stage = (position + step) % STAGES
            mbarrier.wait(full.index(stage), ((position + step) // STAGES) & 1)
            if HALVES == 1:
                left = smem_a.index(stage)
            else:
                left = smem_a.index(stage * 2 + WHICH)
            # The tensor cores read both orders from shared memory: transposing is a change of view.
            if A_TRANSPOSED:
                left = left.reshape([BLOCK_K, HEIGHT]).permute([1, 0])
            else:
                left = left.reshape([HEIGHT, BLOCK_K])
            if B_TRANSPOSED:
                right = smem_b.index(stage).reshape([TILE, BLOCK_K]).permute([1, 0])
            else:
                right = smem_b.index(stage).reshape([BLOCK_K, TILE])
            # One multiplication stays in flight. When the one before it is done, its stage may be filled again.
            value = warpgroup_mma(left, right, value, is_async=True)
            value = warpgroup_mma_wait(1, deps=(value,))
            mbarrier.arrive(empty.index(previous), pred=step > 0)
            previous = stage
        if HALVES == 1:
            # The other group may begin while the last multiplication is running.
            mbarrier.arrive(turns.index(1 - WHICH))
            position += 2 * steps
        else:
            position += steps
        value = warpgroup_mma_wait(0, deps=(value,))
        mbarrier.arrive(empty.index(previous))
        # Epilogue in float32, rounded once.
        if EPILOGUE == "relu2":
            # The comparison keeps a NaN.
            value = gl.where(value < 0.0, 0.0, value)
            value = value * value
        else:
            value = value * alpha
            if reads_c != 0:
                mbarrier.wait(loaded.index(WHICH), loaded_phase)
                loaded_phase ^= 1
                from_c = result_here.load(layout).to(gl.float32)
                if EPILOGUE == "linear":
                    value += beta * from_c
                else:
                    # An inactive entry has gradient zero, even if its product is infinite.
                    value = gl.where(from_c == 0.0, 0.0, 2.0 * gl.sqrt(from_c) * value)
        if SYMMETRIC:
            if i == j:
                down = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
                across = j * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))
                value += gl.where(down[:, None] == across[None, :], diagonal, 0.0)
        result = value.to(out.dtype)
        # The fence makes writes to shared memory visible to the copy engine, which masks entries outside of the matrix.
        result_here.store(result)
        fence_async_shared()
        tma_store(out, [matrix, row, j * TILE], mine)
        if SYMMETRIC:
            if i != j:
                # The same memory is used for the transposed tile, once the first copy has read it.
                tma.store_wait(0)
                result_there.store(result)
                fence_async_shared()
                tma_store(out_transposed, [matrix, j * TILE, row], mine_transposed)
    # Shared memory must live until the last copy has read it.
    tma.store_wait(0)


# Triton would compile variants for sizes that are 1 or multiples of 16; one for all sizes is enough.
@gluon.jit(do_not_specialize=["total", "per_matrix", "rows", "columns", "steps", "reads_c"])
def _product_kernel(
    # Descriptors as in `_fetch` and `_matmul`.
    a,
    b,
    c,
    out,
    out_transposed,
    # Numbers of tiles and blocks, as in `_fetch`.
    total,
    per_matrix,
    rows,
    columns,
    steps,
    # 1 if the epilogue has a c, else 0.
    reads_c,
    alpha,
    beta,
    diagonal,
    SYMMETRIC: gl.constexpr,
    A_TRANSPOSED: gl.constexpr,
    B_TRANSPOSED: gl.constexpr,
    HALVES: gl.constexpr,
    EPILOGUE: gl.constexpr,
):
    # The ring, the staging memory, and the barriers.
    smem_a = gl.allocate_shared_memory(a.dtype, [STAGES * HALVES] + a.block_type.shape, a.layout)
    smem_b = gl.allocate_shared_memory(a.dtype, [STAGES] + b.block_type.shape, b.layout)
    staging = gl.allocate_shared_memory(out.dtype, [2] + out.block_type.shape, out.layout)
    staging_transposed = reinterpret(staging, a.dtype, [2] + out_transposed.block_type.shape, out_transposed.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # `count` is the number of arrivals that complete a phase; in paired mode both groups read every stage.
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=HALVES)
    for group in gl.static_range(2):
        mbarrier.init(loaded.index(group), count=1)
        mbarrier.init(turns.index(group), count=1)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_matmul, (0, c, out, out_transposed, smem_a, smem_b, staging, staging_transposed, full, empty, loaded,
                         turns, total, per_matrix, rows, columns, steps, reads_c, alpha, beta, diagonal, SYMMETRIC,
                         A_TRANSPOSED, B_TRANSPOSED, HALVES, EPILOGUE)),
            (_matmul, (1, c, out, out_transposed, smem_a, smem_b, staging, staging_transposed, full, empty, loaded,
                         turns, total, per_matrix, rows, columns, steps, reads_c, alpha, beta, diagonal, SYMMETRIC,
                         A_TRANSPOSED, B_TRANSPOSED, HALVES, EPILOGUE)),
            (_fetch, (a, b, smem_a, smem_b, full, empty, total, per_matrix, rows, columns, steps, SYMMETRIC,
                      A_TRANSPOSED, B_TRANSPOSED, HALVES)),
        ],
        # Warps of the second and third function (the first has the launch's 4), and registers per thread of both:
        # accumulators need many, the fetching warp few.
        [4, 1],
        [232, 40],
    )
    # fmt: on


def _operand(x: Tensor) -> tuple[Tensor, bool]:
    """Return the batch as it is stored, in contiguous rows, and whether `x` is its transpose."""
    return (x, False) if x.stride(2) == 1 else (x.mT, True)


def hopper_multiply(
    a: Tensor,
    b: Tensor,
    *,
    symmetric: bool,
    alpha: float = 1.0,
    c: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
    dtype: torch.dtype | None = None,
    epilogue: Literal["linear", "relu2", "relu2_backward"] = "linear",
) -> Tensor:
    """Return alpha a @ b + beta c + diagonal I, or what else the epilogue makes of a @ b, rounded once.

    Args:
        a: (batch, m, k) bfloat16 or float16; rows or columns contiguous and aligned to 16 bytes.
        b: (batch, k, n) of the same dtype; rows or columns contiguous and aligned to 16 bytes.
        symmetric: True promises a symmetric result: half of it is computed, and mirrored. Required for `diagonal`.
        alpha: factor of the product.
        c: (batch, m, n) contiguous of the same dtype, or None; `"relu2_backward"` needs it.
        beta: factor of `c`.
        diagonal: number added to the entries of the diagonal.
        dtype: dtype of the result, for products that are not symmetric and have no `c`; None for the operands' dtype.
        epilogue: see this module's docstring; with another than `"linear"` the factors keep their defaults.

    Returns:
        A new contiguous (batch, m, n) tensor. A symmetric result is symmetric to the bit except within the 128 rows and
        columns of a diagonal tile.
    """
    batch, m, k = a.shape
    n = b.shape[2]
    # Other dtypes than the kernel's are converted afterwards.
    out = torch.empty((batch, m, n), dtype=dtype if dtype in _DTYPES else a.dtype, device=a.device)
    (left, a_transposed), (right, b_transposed) = _operand(a), _operand(b)
    rows, columns = triton.cdiv(m, TILE.value), triton.cdiv(n, TILE.value)
    per_matrix = rows * (rows + 1) // 2 if symmetric else rows * columns
    total = batch * per_matrix
    grid = min(total, multiprocessors(a.device))
    # See the modes in this module's docstring.
    halves = 2 if total <= grid else 1
    height = TILE.value // halves
    result = blocks_of(out, height, TILE.value)
    launch(
        _product_kernel,
        (grid,),
        blocks_of(left, *((BLOCK_K.value, height) if a_transposed else (height, BLOCK_K.value))),
        blocks_of(right, *((TILE.value, BLOCK_K.value) if b_transposed else (BLOCK_K.value, TILE.value))),
        result if c is None else blocks_of(c, height, TILE.value),
        result,
        blocks_of(out, TILE.value, height) if symmetric else result,
        total,
        per_matrix,
        rows,
        columns,
        triton.cdiv(k, BLOCK_K.value),
        int(c is not None),
        alpha,
        beta,
        diagonal,
        SYMMETRIC=symmetric,
        A_TRANSPOSED=a_transposed,
        B_TRANSPOSED=b_transposed,
        HALVES=halves,
        EPILOGUE=epilogue,
        num_warps=4,
        # The epilogue keeps its own roundings of products and sums, the same ones in `hopper_program.py`.
        enable_fp_fusion=False,
    )
    return out if dtype is None else out.to(dtype)
