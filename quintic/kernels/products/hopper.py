"""Products of an orthogonalisation on Hopper, in Gluon, Triton's explicit dialect: alpha a b + beta c + diagonal I.

In each program of the grid, which takes one tile of the result after another, one warp fetches operands (the tensor
memory accelerator fills a ring of stages in shared memory) and two groups of four warps multiply:

- **Alternating.** Each group has a tile of its own, and they take turns: while one writes its result, the other has the
  tensor cores. This hides what a tile costs besides its multiplications, a third of a product of 768 rows.
- **Paired.** Where there are fewer tiles than multiprocessors, both groups compute half of the same tile.

Of a symmetric result the tiles on and below the diagonal are computed, and stored a second time, transposed. Every
entry is one sum over k in ascending order, whatever the tiles, the batch and the grid: a matrix has the same bits alone
and in any batch. The plain twin is `torch.bmm`; `products.py` of the optimizer chooses between them.

Import this module only where Triton is installed, and call it on devices of compute capability 9.0.
"""

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

from quintic.kernels.dispatch import fits_copy_engine
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

__all__ = ["can_multiply_on_hopper", "hopper_multiply"]

_DTYPES = (torch.bfloat16, torch.float16)


@gluon.jit
def _place(t, per_matrix, rows, columns, SYMMETRIC: gl.constexpr):
    """Matrix, row and column of the t-th tile."""
    if SYMMETRIC:
        i, j = triangle(t % per_matrix)
    else:
        i, j = rectangle(t % per_matrix, rows, columns)
    return t // per_matrix, i, j


@gluon.jit
def _fetch(
    a,
    b,
    smem_a,
    smem_b,
    full,
    empty,
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
    """The warp that fetches operands: the tiles' k-th blocks, one after the other."""
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        matrix, i, j = _place(t, per_matrix, rows, columns, SYMMETRIC)
        for step in range(steps):
            k = step * BLOCK_K
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
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
            stage += 1
            wrap = stage == STAGES
            stage = gl.where(wrap, 0, stage)
            phase = gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _matmul(
    WHICH: gl.constexpr,
    c,
    out,
    out_transposed,
    smem_a,
    smem_b,
    staging,
    staging_transposed,
    full,
    empty,
    loaded,
    turns,
    total,
    per_matrix,
    rows,
    columns,
    steps,
    adds,
    alpha,
    beta,
    diagonal,
    SYMMETRIC: gl.constexpr,
    A_TRANSPOSED: gl.constexpr,
    B_TRANSPOSED: gl.constexpr,
    HALVES: gl.constexpr,
):
    """One of the two groups of warps that multiply: every other tile (HALVES 1), or half of every tile (HALVES 2)."""
    HEIGHT: gl.constexpr = TILE // HALVES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    mine = staging.index(WHICH)
    mine_transposed = staging_transposed.index(WHICH)
    result_here = mine.reshape([HEIGHT, TILE])
    result_there = mine_transposed.reshape([TILE, HEIGHT]).permute([1, 0])
    if HALVES == 1:
        first = gl.program_id(0) + WHICH * gl.num_programs(0)
        stride = 2 * gl.num_programs(0)
        position = WHICH * steps
    else:
        first = gl.program_id(0)
        stride = gl.num_programs(0)
        position = 0
    turn = 1 - WHICH
    loaded_phase = 0
    for t in range(first, total, stride):
        matrix, i, j = _place(t, per_matrix, rows, columns, SYMMETRIC)
        row = i * TILE
        if HALVES == 2:
            row += WHICH * HEIGHT
        tma.store_wait(0)
        if adds != 0:
            mbarrier.expect(loaded.index(WHICH), c.block_type.nbytes)
            tma_load(c, [matrix, row, j * TILE], loaded.index(WHICH), mine)
        if HALVES == 1:
            # The other group has waited for all of its stages: none of mine is two rounds of the ring away.
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
            if A_TRANSPOSED:
                left = left.reshape([BLOCK_K, HEIGHT]).permute([1, 0])
            else:
                left = left.reshape([HEIGHT, BLOCK_K])
            if B_TRANSPOSED:
                right = smem_b.index(stage).reshape([TILE, BLOCK_K]).permute([1, 0])
            else:
                right = smem_b.index(stage).reshape([BLOCK_K, TILE])
            value = warpgroup_mma(left, right, value, is_async=True)
            value = warpgroup_mma_wait(1, deps=(value,))
            mbarrier.arrive(empty.index(previous), pred=step > 0)
            previous = stage
        if HALVES == 1:
            mbarrier.arrive(turns.index(1 - WHICH))
            position += 2 * steps
        else:
            position += steps
        value = warpgroup_mma_wait(0, deps=(value,))
        mbarrier.arrive(empty.index(previous))
        value = value * alpha
        if adds != 0:
            mbarrier.wait(loaded.index(WHICH), loaded_phase)
            loaded_phase ^= 1
            value += beta * result_here.load(layout).to(gl.float32)
        if SYMMETRIC:
            if i == j:
                down = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
                across = j * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))
                value += gl.where(down[:, None] == across[None, :], diagonal, 0.0)
        result = value.to(out.dtype)
        result_here.store(result)
        fence_async_shared()
        tma_store(out, [matrix, row, j * TILE], mine)
        if SYMMETRIC:
            if i != j:
                tma.store_wait(0)
                result_there.store(result)
                fence_async_shared()
                tma_store(out_transposed, [matrix, j * TILE, row], mine_transposed)
    tma.store_wait(0)


# Compiled once for all sizes, not anew for those that happen to be 1 or multiples of 16.
@gluon.jit(do_not_specialize=["total", "per_matrix", "rows", "columns", "steps", "adds"])
def _product_kernel(
    a,
    b,
    c,
    out,
    out_transposed,
    total,
    per_matrix,
    rows,
    columns,
    steps,
    adds,
    alpha,
    beta,
    diagonal,
    SYMMETRIC: gl.constexpr,
    A_TRANSPOSED: gl.constexpr,
    B_TRANSPOSED: gl.constexpr,
    HALVES: gl.constexpr,
):
    smem_a = gl.allocate_shared_memory(a.dtype, [STAGES * HALVES] + a.block_type.shape, a.layout)
    smem_b = gl.allocate_shared_memory(a.dtype, [STAGES] + b.block_type.shape, b.layout)
    staging = gl.allocate_shared_memory(out.dtype, [2] + out.block_type.shape, out.layout)
    staging_transposed = reinterpret(staging, a.dtype, [2] + out_transposed.block_type.shape, out_transposed.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
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
                         turns, total, per_matrix, rows, columns, steps, adds, alpha, beta, diagonal, SYMMETRIC,
                         A_TRANSPOSED, B_TRANSPOSED, HALVES)),
            (_matmul, (1, c, out, out_transposed, smem_a, smem_b, staging, staging_transposed, full, empty, loaded,
                         turns, total, per_matrix, rows, columns, steps, adds, alpha, beta, diagonal, SYMMETRIC,
                         A_TRANSPOSED, B_TRANSPOSED, HALVES)),
            (_fetch, (a, b, smem_a, smem_b, full, empty, total, per_matrix, rows, columns, steps, SYMMETRIC,
                      A_TRANSPOSED, B_TRANSPOSED, HALVES)),
        ],
        [4, 1],
        [232, 40],
    )
    # fmt: on


def can_multiply_on_hopper(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel takes products with contiguous matrices (b, m, n) there, and pays for them."""
    _, m, n = shape
    return fits_copy_engine(m, n, dtype) and torch.cuda.get_device_capability(device) == (9, 0)


class _Operand(NamedTuple):
    """A batch of matrices as the copy engine sees it."""

    stored: Tensor
    transposed: bool


def _operand(x: Tensor) -> _Operand:
    return _Operand(x, False) if x.stride(2) == 1 else _Operand(x.mT, True)


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
) -> Tensor:
    """Return alpha a @ b + beta c + diagonal I, rounded once.

    Args:
        a: (batch, m, k) bfloat16 or float16, rows or columns contiguous and 16 bytes aligned.
        b: (batch, k, n) of the same dtype, likewise.
        symmetric: the result is known to be; half of it is computed and mirrored. `diagonal` needs it.
        alpha: factor of the product.
        c: (batch, m, n) contiguous of the same dtype, or None.
        beta: factor of `c`.
        diagonal: added to the entries on the diagonal.
        dtype: of the result, where it is not symmetric and there is no `c`; None for that of the operands.

    Returns:
        (batch, m, n) contiguous, a new tensor. A symmetric one is that to the bit except within the
        128 rows and columns of a diagonal tile.
    """
    batch, m, k = a.shape
    n = b.shape[2]
    out = torch.empty((batch, m, n), dtype=dtype if dtype in _DTYPES else a.dtype, device=a.device)
    left, right = _operand(a), _operand(b)
    rows, columns = triton.cdiv(m, TILE.value), triton.cdiv(n, TILE.value)
    per_matrix = rows * (rows + 1) // 2 if symmetric else rows * columns
    total = batch * per_matrix
    grid = min(total, multiprocessors(a.device))
    halves = 2 if total <= grid else 1
    height = TILE.value // halves
    result = blocks_of(out, height, TILE.value)
    launch(
        _product_kernel,
        (grid,),
        blocks_of(left.stored, *((BLOCK_K.value, height) if left.transposed else (height, BLOCK_K.value))),
        blocks_of(right.stored, *((TILE.value, BLOCK_K.value) if right.transposed else (BLOCK_K.value, TILE.value))),
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
        A_TRANSPOSED=left.transposed,
        B_TRANSPOSED=right.transposed,
        HALVES=halves,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out if dtype is None else out.to(dtype)
