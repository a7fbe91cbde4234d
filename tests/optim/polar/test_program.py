import contextlib
import itertools
import math
import random
import types
import weakref
from itertools import pairwise

import numpy as np
import oracle
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from newer import check_gluon

from quintic.kernels.products.choose_products import choose_products
from quintic.optim.polar import program as module
from quintic.optim.polar.coefficients import polar_express_coefficients
from quintic.optim.polar.products import multiply
from quintic.optim.polar.program import products_of, run_products, run_queue

STANDARD = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
GRAM = ((0, 2), (2, 5))


@st.composite
def segments(draw, max_steps=10):
    steps = draw(st.integers(1, max_steps))
    restarts = sorted(draw(st.sets(st.integers(1, steps - 1)))) if steps > 1 else []
    return tuple(pairwise((0, *restarts, steps)))


@st.composite
def polynomials(draw, steps):
    """Triples that map [0, 1] into [-1, 1] and touch its ends, some of them with zeros."""
    number = st.one_of(st.just(0.0), st.floats(-1, 1, width=32).filter(lambda value: abs(value) > 0.01))
    found = []
    for _ in range(steps):
        triple = draw(st.tuples(number, number, number).filter(any))
        s = np.linspace(0, 1, 100)
        largest = np.abs(triple[0] * s + triple[1] * s**3 + triple[2] * s**5).max()
        found.append(tuple(float(value / largest) for value in triple) if largest > 0.1 else (1.0, -0.5, 0.0))
    return tuple(found)


def some_program(segments, cubics=()):
    """Return a program whose numbers do not matter, with cubics at some steps."""
    triples = polar_express_coefficients(segments[-1][1])
    mixed = tuple((1.5, -0.5, 0.0) if step in cubics else triple for step, triple in enumerate(triples))
    return products_of(segments, mixed, 128.0)


CUBICS = st.sets(st.integers(0, 9))


def uses(product):
    return [matrix for matrix in (product.a, product.b, product.c) if matrix is not None]


def matrices(shape, norm, seed):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x * (norm / torch.linalg.matrix_norm(x, keepdim=True))


def assert_is_the_polynomial(out, x, coefficients):
    for one, matrix in zip(out, x, strict=True):
        expected = torch.as_tensor(oracle.polynomial_polar(matrix.numpy(), coefficients, 0.0))
        # In float64; ten steps without a fresh Gram matrix may enlarge a rounding error by some 1e9.
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-6 * max(1e-3, float(expected.norm())))


SHAPES = st.sampled_from([(2, 5, 9), (1, 9, 5), (2, 6, 6), (1, 1, 1), (1, 1, 7), (3, 2, 1), (1, 10, 13), (1, 13, 10)])
NORMS = st.sampled_from([1.0, 128.0, 0.37])


# ------------------------------------------------------------------------------------------------ what is computed


@given(data=st.data(), segments=segments(6), shape=SHAPES, norm=NORMS, seed=st.integers(0, 99))
def test_a_program_is_the_polynomials_of_the_singular_values(data, segments, shape, norm, seed):
    coefficients = data.draw(polynomials(segments[-1][1]))
    x = matrices(shape, norm, seed)
    out = run_products(products_of(segments, coefficients, norm), [x], multiply)
    assert_is_the_polynomial(out, x, coefficients)


@pytest.mark.parametrize("segments", [STANDARD, GRAM, ((0, 5),)])
def test_products_come_in_the_order_of_the_segments(segments):
    """Assumptions of the kernel's tables and of the places."""
    kinds = [product.kind for product in some_program(segments).products]
    expected = []
    for start, stop in segments:
        squares = 1 + 4 * (stop - start - 1)
        expected += ["gram", *["square"] * squares, "apply"]
    assert kinds == expected


def test_cubics_have_no_polynomial_of_their_own_after_the_first_of_a_segment():
    kinds = [product.kind for product in some_program(GRAM, range(5)).products]
    assert kinds == ["gram", *["square"] * 4, "apply", "gram", *["square"] * 7, "apply"]


def test_only_symmetric_results_are_called_so():
    seen = []

    def watching(a, b, *, symmetric, **factors):
        out = multiply(a, b, symmetric=symmetric, **factors)
        seen.append(symmetric)
        if symmetric:
            torch.testing.assert_close(out, out.mT, rtol=1e-9, atol=1e-9)
        else:
            assert not factors.get("diagonal")
        return out

    for shape in ((2, 4, 6), (2, 6, 4)):
        run_products(some_program(GRAM), [matrices(shape, 128.0, 0)], watching)
    assert seen.count(False) == 2 * len(GRAM)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_only_the_last_result_has_another_dtype(dtype):
    x = matrices((2, 6, 24), 125.0, 0).half()
    seen = []

    def watching(a, b, *, dtype, **factors):
        seen.append(dtype)
        return multiply(a, b, dtype=dtype, **factors)

    program = some_program(GRAM)
    out = run_products(program, [x], watching, dtype)
    assert seen == [None] * (len(program.products) - 1) + [dtype]
    assert out.dtype == (dtype or torch.float16)
    expected = run_products(program, [x.double()], multiply)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.02)


# ------------------------------------------------------------------------------------------------------- memory


@given(segments=segments(), cubics=CUBICS)
def test_last_uses_are_the_last(segments, cubics):
    products, last_uses = some_program(segments, cubics)[:2]
    assert len(last_uses) == len(products) + 1
    for matrix, last in enumerate(last_uses[:-1]):
        assert last == max(number for number, product in enumerate(products) if matrix in uses(product))
    assert last_uses[-1] == len(products)


@given(segments=segments(), cubics=CUBICS)
def test_a_product_reads_what_was_computed_before(segments, cubics):
    for number, product in enumerate(some_program(segments, cubics).products):
        assert all(matrix <= number for matrix in uses(product))


@pytest.mark.parametrize("shape", [(1, 3, 5), (1, 5, 3)])
@pytest.mark.parametrize("segments", [STANDARD, GRAM, ((0, 7),), ((0, 1),)])
def test_matrices_are_freed_after_their_last_use(segments, shape):
    program = some_program(segments)
    given_ = [matrices(shape, 128.0, 0)]
    alive = [weakref.ref(given_[0])]

    def watching(a, b, **factors):
        number = len(alive) - 1
        wanted = {matrix for matrix in range(number + 1) if program.last_uses[matrix] >= number}
        assert {matrix for matrix, tensor in enumerate(alive) if tensor() is not None} == wanted
        out = multiply(a, b, **factors)
        alive.append(weakref.ref(out))
        return out

    out = run_products(program, given_, watching)
    assert given_ == []
    assert [matrix for matrix, tensor in enumerate(alive) if tensor() is not None] == [len(program.products)]
    assert alive[-1]() is out


@pytest.mark.parametrize(("segments", "expected"), [(((0, 1),), 2), (STANDARD, 3), (((0, 2),), 4), (GRAM, 5)])
def test_places_for_small_matrices(segments, expected):
    assert some_program(segments).num_squares == expected


@example(segments=((0, 10),), cubics=set())
@given(segments=segments(), cubics=CUBICS)
def test_five_places_are_enough(segments, cubics):
    program = some_program(segments, cubics)
    small = [slot for slot, product in zip(program.slots[1:], program.products, strict=True) if product.kind != "apply"]
    assert sorted(set(small)) == list(range(program.num_squares))
    assert program.num_squares <= 5


def tiles_of(kind, short, long):
    """The tiles of a product that are computed; rows of counters are those of the short side, here the first one."""
    if kind == "apply":
        return list(itertools.product(range(short), range(long)))
    return [(i, j) for i in range(short) for j in range(i + 1)]


def rows_of(kind, i, j):
    """The rows that a tile waits for, and counts in."""
    return {i} if kind == "apply" else {i, j}


def read_by(product, i, j, short, long):
    """Pairs (matrix, tile) that a tile reads, for wide matrices; small tiles are known by row >= column."""
    if product.kind == "gram":
        return {(product.a, (row, k)) for row in (i, j) for k in range(long)}
    found = {(product.a, (max(i, k), min(i, k))) for k in range(short)}
    if product.kind == "apply":
        return found | {(product.b, (k, j)) for k in range(short)}
    found |= {(product.b, (max(k, j), min(k, j))) for k in range(short)}
    return found | ({(product.c, (i, j))} if product.c is not None else set())


@example(segments=STANDARD, cubics=set())
@example(segments=GRAM, cubics=set())
@example(segments=GRAM, cubics=set(range(5)))
@example(segments=((0, 10),), cubics=set())
@example(segments=((0, 10),), cubics=set(range(10)))
@settings(max_examples=25)
@given(segments=segments(), cubics=CUBICS)
def test_no_tile_overwrites_what_may_still_be_read(segments, cubics):
    """A tile waits until all earlier products are finished in the rows it reads, and for nothing else.

    What is certain to be over when it begins follows from that alone, as a set of tiles: what those waited for, and
    what these waited for, and so on. All it reads must be in there, and everyone who used the place it writes to.
    """
    short, long = 3, 4
    program = some_program(segments, cubics)
    over_in_row = [0] * short  # as bits of an integer
    written: dict[tuple[int, tuple[int, int]], int] = {}  # by matrix and tile
    used: dict[tuple[bool, int], int] = {}  # by place: all tiles that read or wrote there
    holds = {(True, program.slots[0]): 0}  # by place: the matrix in it
    whole = [True, *(product.kind == "apply" for product in program.products)]
    fresh = itertools.count()
    for number, product in enumerate(program.products):
        over_after, use = list(over_in_row), dict(used)
        out = number + 1
        target = (whole[out], program.slots[out])
        for i, j in tiles_of(product.kind, short, long):
            rows = rows_of(product.kind, i, j)
            over = 0
            for row in rows:
                over |= over_in_row[row]
            bit = 1 << next(fresh)
            for matrix, tile in read_by(product, i, j, short, long):
                place = (whole[matrix], program.slots[matrix])
                assert holds[place] == matrix
                assert place != target
                assert matrix == 0 or written[matrix, tile] & ~over == 0
                use[place] = use.get(place, 0) | bit
            assert used.get(target, 0) & ~over == 0
            use[target] = use.get(target, 0) | bit
            written[out, (i, j)] = bit
            for row in rows:
                over_after[row] |= bit | over
        holds[target] = out
        over_in_row, used = over_after, use


# -------------------------------------------------------------------------------------- the queue of Hopper GPUs


@contextlib.contextmanager
def queue_on_the_cpu(tile, order):
    """Let `run_queue` run what follows instead of the kernel: tiles in any order that the counters allow."""
    check_gluon()
    from quintic.kernels.products import hopper_program

    gram, apply = hopper_program.GRAM.value, hopper_program.APPLY.value

    def run(pair, squares, result, table, scalars):
        squares.fill_(math.nan)
        _, batch, m, n = pair.shape
        wide = m <= n
        short, long = (math.ceil(side / tile) for side in sorted((m, n)))
        counters = [[0] * short for _ in range(batch)]
        waiting = []
        for number, row in enumerate(table.tolist()):
            for matrix in range(batch):
                for i, j in tiles_of("apply" if row[0] == apply else "square", short, long):
                    place = (i, j) if row[0] != apply or wide else (j, i)
                    waiting.append((number, matrix, place, rows_of("apply" if row[0] == apply else "square", i, j)))
        while waiting:
            ready = [one for one in waiting if all(counters[one[1]][row] >= table[one[0], 5] for row in one[3])]
            chosen = order(ready)
            waiting.remove(chosen)
            number, matrix, (i, j), rows = chosen
            kind, left, right, c, out, _ = table[number].tolist()
            alpha, beta, diagonal = scalars[number].double().tolist()
            down, across = slice(i * tile, (i + 1) * tile), slice(j * tile, (j + 1) * tile)
            if kind == gram:
                x, y = pair[left, matrix], pair[right, matrix]
                x, y = (x[down], y[across].mT) if wide else (x[:, down].mT, y[:, across])
            else:
                x = (pair if kind == apply and not wide else squares)[left, matrix, down]
                y = (pair if kind == apply and wide else squares)[right, matrix, :, across]
            value = x.double() @ y.double()
            value = alpha * value
            if c >= 0:
                value += beta * squares[c, matrix, down, across]
            if kind == apply:
                (result if number == len(table) - 1 else pair[out])[matrix, down, across] = value
            else:
                if i == j:
                    value += diagonal * torch.eye(len(value), dtype=value.dtype)
                squares[out, matrix, down, across] = value
                squares[out, matrix, across, down] = value.mT
            for row in rows:
                counters[matrix][row] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_program, "run_program", run)
        patch.setattr(hopper_program, "TILE", type(hopper_program.TILE)(tile))
        module._tables.cache_clear()
        yield
    module._tables.cache_clear()


def with_float32_factors(a, b, *, symmetric, c, **factors):
    rounded = {name: float(np.float32(value)) for name, value in factors.items()}
    return multiply(a, b, symmetric=symmetric, c=c, **rounded)


ORDERS = {
    "as queued": lambda ready: ready[0],
    "the latest product first": lambda ready: ready[-1],
    "any": random.choice,
}


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=12)
@given(data=st.data(), segments=segments(5), shape=SHAPES, norm=NORMS, seed=st.integers(0, 99))
def test_the_queue_computes_the_same_in_any_order(order, data, segments, shape, norm, seed):
    coefficients = data.draw(polynomials(segments[-1][1]))
    x = matrices(shape, norm, seed)
    program = products_of(segments, coefficients, norm)
    pair = torch.stack([x, torch.full_like(x, math.nan)])
    with queue_on_the_cpu(4, ORDERS[order]):
        out = run_queue(program, pair)
    assert out.data_ptr() in (pair[0].data_ptr(), pair[1].data_ptr())
    expected = run_products(program, [x], with_float32_factors)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6 * max(1e-3, float(expected.norm())))


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float32])
def test_the_queue_gives_other_dtypes(dtype):
    x, program = matrices((2, 6, 24), 125.0, 0).half(), some_program(STANDARD)
    pair = torch.stack([x, torch.full_like(x, math.nan)])
    with queue_on_the_cpu(4, ORDERS["as queued"]):
        out = run_queue(program, pair, dtype)
    assert out.dtype == (dtype or torch.float16)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), run_products(program, [x.double()], multiply), rtol=0, atol=0.02)


@settings(max_examples=50)
@given(data=st.data(), m=st.integers(1, 700), n=st.integers(1, 700))
def test_tables_tell_how_many_tiles_are_finished_before(data, m, n):
    check_gluon()
    from quintic.kernels.products import hopper_program

    tile = hopper_program.TILE.value
    kinds = [constant.value for constant in (hopper_program.GRAM, hopper_program.SQUARE, hopper_program.APPLY)]
    index, number = st.integers(0, 4), st.floats(-9, 9, width=32)
    steps = [
        hopper_program.Step(
            *data.draw(st.tuples(st.sampled_from(kinds), index, index, st.none() | index, index, *[number] * 3))
        )
        for _ in range(data.draw(st.integers(1, 6)))
    ]
    table, scalars = hopper_program.steps_table(steps, m, n)
    assert (table.shape, table.dtype, table.device.type) == ((len(steps), 6), torch.int32, "cpu")
    assert (scalars.dtype, scalars.tolist()) == (torch.float32, [list(step[5:]) for step in steps])
    short, long = sorted((math.ceil(m / tile), math.ceil(n / tile)))
    counted = [0] * short
    for row, step in zip(table.tolist(), steps, strict=True):
        is_apply = step.kind == hopper_program.APPLY.value
        assert row[0] == step.kind
        assert tuple(row[1:3]) == ((step.b, step.a) if is_apply and m > n else (step.a, step.b))
        assert row[3] == (-1 if step.c is None else step.c)
        assert row[4] == step.out
        assert counted == [row[5]] * short
        for i, j in tiles_of("apply" if is_apply else "square", short, long):
            for counter in rows_of("apply" if is_apply else "square", i, j):
                counted[counter] += 1


# ------------------------------------------------------------------------------------------- which kernels multiply

CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """Make believe that there is a GPU: its compute capability, and whether a graph is being captured, to be set."""
    pytest.importorskip("triton")
    found = types.SimpleNamespace(capability=(9, 0), capturing=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found.capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_products_are_queued_and_large_ones_launched(gpu, dtype):
    check_gluon()
    shapes = [(1, 256, 256), (12, 768, 768), (3, 3072, 768), (100, 2048, 2048), (1, 8192, 8192)]
    expected = ["queue", "queue", "queue", "hopper", "hopper"]
    assert [choose_products(torch.Size(shape), dtype, CUDA) for shape in shapes] == expected
    gpu.capturing = True
    assert [choose_products(torch.Size(shape), dtype, CUDA) for shape in shapes] == ["hopper"] * 5


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_have_kernels_for_symmetric_products(gpu, capability):
    gpu.capability = capability
    assert choose_products(torch.Size((2, 768, 768)), torch.float16, CUDA) == "symmetric"


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((2, 260, 512), torch.float16, "symmetric"),  # rows that do not start at multiples of 16 bytes
        ((2, 512, 260), torch.float16, "symmetric"),
        ((2, 768, 769), torch.bfloat16, "symmetric"),
        ((2, 248, 2048), torch.float16, None),
        ((2, 2048, 248), torch.bfloat16, None),
        ((2, 768, 768), torch.float32, None),
        ((2, 768, 768), torch.float64, None),
    ],
)
@pytest.mark.parametrize("capturing", [False, True])
def test_what_the_kernels_do_not_take_is_left_to_others(gpu, shape, dtype, expected, capturing):
    gpu.capturing = capturing
    assert choose_products(torch.Size(shape), dtype, CUDA) == expected


@given(
    side=st.integers(30, 400), length=st.integers(30, 4000), eights=st.booleans(), batches=st.sets(st.integers(1, 300))
)
def test_the_number_of_matrices_decides_nothing_that_changes_a_bit(side, length, eights, batches):
    pytest.importorskip("triton")
    m, n = (8 * side, 8 * length) if eights else (side, length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        found = {choose_products(torch.Size((batch, m, n)), torch.float16, CUDA) for batch in batches}
    assert len(found) <= 1 or found == {"queue", "hopper"}


def test_the_interpreter_has_symmetric_products():
    pytest.importorskip("triton")
    assert choose_products(torch.Size((2, 256, 300)), torch.float16, torch.device("cpu")) == "symmetric"
    assert choose_products(torch.Size((2, 255, 300)), torch.float16, torch.device("cpu")) is None
