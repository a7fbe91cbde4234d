"""The queue of tiles of `hopper_program.py`, and two of its warps: `watch` and `fetch`.

For every tile of its program, in order, `watch` waits until the rows that the tile reads are finished and then opens a
gate. `fetch` passes the gate and loads the tile's operands; the groups that multiply pass it, too, since they load c.
GATES gates are used in turn, so that `watch` is at most that many tiles ahead.

Sizes are counted in tiles: `short` and `long` are those of the short and the long side of a matrix. Import this module
only where Triton is installed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quintic.kernels.products.hopper_sync import await_count, let_copies_see
from quintic.kernels.products.hopper_tiles import BLOCK_K, STAGES, TILE, rectangle, reinterpret, tma_load, triangle

__all__ = [
    "APPLY",
    "COLUMNS",
    "GATES",
    "GRAM",
    "SCALARS",
    "SQUARE",
    "fetch",
    "first_of",
    "place_of",
    "tiles_of",
    "watch",
]

# Kinds of products: x x^T (or x^T x if x is tall); small times small, both with symmetric results; small times x.
GRAM = gl.constexpr(0)
SQUARE = gl.constexpr(1)
APPLY = gl.constexpr(2)

# Columns of the table of products: kind; places in memory of left, right, c (or -1) and out; and the number of tiles
# that every row has finished before this product.
COLUMNS = gl.constexpr(6)
# Columns of the table of scalars: alpha, beta, diagonal.
SCALARS = gl.constexpr(3)
# Number of tiles that may be ready before their operands are fetched.
GATES = gl.constexpr(4)


@gluon.jit
def place_of(t, kind, short, long, WIDE: gl.constexpr):
    """Return the matrix, the row and the column of the t-th tile of a product."""
    if kind == APPLY:
        per_matrix = short * long
        if WIDE:
            i, j = rectangle(t % per_matrix, short, long)
        else:
            i, j = rectangle(t % per_matrix, long, short)
    else:
        per_matrix = short * (short + 1) // 2
        i, j = triangle(t % per_matrix)
    return t // per_matrix, i, j


@gluon.jit
def tiles_of(batch, kind, short, long):
    """Return the number of tiles of a product, of all matrices together."""
    return batch * gl.where(kind == APPLY, short * long, short * (short + 1) // 2)


@gluon.jit
def first_of(finished):
    """Return the first tile of this program in a product that begins `finished` tiles into the queue.

    Tile q of the queue belongs to program q modulo the number of programs.
    """
    programs = gl.num_programs(0)
    return (gl.program_id(0) + programs - finished % programs) % programs


@gluon.jit
def watch(gates, passed, table, products, counters, batch, short, long, WIDE: gl.constexpr, HALVES: gl.constexpr):
    """Open a gate for each tile of this program once the rows that it reads are finished."""
    # `table` is (products, COLUMNS) int32, `counters` (batch, short) int32: finished tiles of each row, in halves.
    number = 0
    finished = 0
    for product in range(products):
        row = table + product * COLUMNS
        kind = gl.load(row)
        target = gl.load(row + 5) * HALVES
        total = tiles_of(batch, kind, short, long)
        for t in range(first_of(finished), total, gl.num_programs(0)):
            matrix, i, j = place_of(t, kind, short, long, WIDE)
            rows = counters + matrix * short
            # A tile of a small product reads rows i and j, one of an APPLY row i of the small operand, or column j,
            # which is row j by symmetry.
            if kind == APPLY:
                await_count(rows + (i if WIDE else j), target)
            else:
                await_count(rows + i, target)
                await_count(rows + j, target)
            let_copies_see()
            # The gate is free once all warps that waited at it GATES tiles ago have passed.
            mbarrier.wait(passed.index(number % GATES), ((number // GATES) & 1) ^ 1)
            mbarrier.arrive(gates.index(number % GATES))
            number += 1
        finished += total


@gluon.jit
def _fetch_tile(
    # Descriptors of the operands, and the index of the matrix in each.
    left,
    right,
    left_matrix,
    right_matrix,
    # First row and column of the tile, in entries.
    row,
    column,
    smem_left,
    smem_right,
    full,
    empty,
    # Next stage of the ring and its phase, as in hopper.py; returned for the next tile.
    stage,
    phase,
    steps,
    LEFT_TRANSPOSED: gl.constexpr,
    RIGHT_TRANSPOSED: gl.constexpr,
    HALVES: gl.constexpr,
):
    """Fill `steps` stages of the ring with the operands of one tile."""
    for step in range(steps):
        k = step * BLOCK_K
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(ready, HALVES * left.block_type.nbytes + right.block_type.nbytes)
        for half in gl.static_range(HALVES):
            # Blocks of the products differ in shape but not in size: each is seen in the shape of its descriptor.
            place = reinterpret(smem_left.index(stage * HALVES + half), left.dtype, left.block_type.shape, left.layout)
            if LEFT_TRANSPOSED:
                tma_load(left, [left_matrix, k, row + half * (TILE // HALVES)], ready, place)
            else:
                tma_load(left, [left_matrix, row + half * (TILE // HALVES), k], ready, place)
        place = reinterpret(smem_right.index(stage), right.dtype, right.block_type.shape, right.layout)
        if RIGHT_TRANSPOSED:
            tma_load(right, [right_matrix, column, k], ready, place)
        else:
            tma_load(right, [right_matrix, k, column], ready, place)
        stage += 1
        wrap = stage == STAGES
        stage = gl.where(wrap, 0, stage)
        phase = gl.where(wrap, phase ^ 1, phase)
    return stage, phase


@gluon.jit
def fetch(
    # Descriptors of the operands of each kind of product, see `run_program`.
    gram_left,
    gram_right,
    square_left,
    square_right,
    apply_left,
    apply_right,
    # The ring of stages and its barriers, as in hopper.py.
    smem_left,
    smem_right,
    full,
    empty,
    # Barriers of the gates: opened, and passed by all.
    gates,
    passed,
    # (products, COLUMNS) int32.
    table,
    products,
    batch,
    short,
    long,
    # Blocks of BLOCK_K entries along the short and the long side.
    short_steps,
    long_steps,
    WIDE: gl.constexpr,
    HALVES: gl.constexpr,
):
    """Fetch the operands of all tiles of this program, product by product."""
    stage = 0
    phase = 1
    number = 0
    finished = 0
    for product in range(products):
        row = table + product * COLUMNS
        kind = gl.load(row)
        # A place in memory holds the whole batch.
        left = gl.load(row + 1) * batch
        right = gl.load(row + 2) * batch
        total = tiles_of(batch, kind, short, long)
        for t in range(first_of(finished), total, gl.num_programs(0)):
            matrix, i, j = place_of(t, kind, short, long, WIDE)
            mbarrier.wait(gates.index(number % GATES), (number // GATES) & 1)
            mbarrier.arrive(passed.index(number % GATES))
            number += 1
            # fmt: off
            if kind == GRAM:
                stage, phase = _fetch_tile(
                    gram_left, gram_right, left + matrix, right + matrix, i * TILE, j * TILE, smem_left, smem_right,
                    full, empty, stage, phase, long_steps, not WIDE, WIDE, HALVES)
            elif kind == SQUARE:
                stage, phase = _fetch_tile(
                    square_left, square_right, left + matrix, right + matrix, i * TILE, j * TILE, smem_left, smem_right,
                    full, empty, stage, phase, short_steps, False, False, HALVES)
            else:
                stage, phase = _fetch_tile(
                    apply_left, apply_right, left + matrix, right + matrix, i * TILE, j * TILE, smem_left, smem_right,
                    full, empty, stage, phase, short_steps, False, False, HALVES)
            # fmt: on
        finished += total
