"""The kernels for Hopper on such a GPU: against float64, and against themselves, bit by bit."""

import contextlib
import math
import random
import subprocess
import sys

import pytest
import torch
from newer import check_gluon

check_gluon()

import quintic  # noqa: E402
from quintic.kernels.products.choose_products import choose_products  # noqa: E402
from quintic.kernels.products.hopper import TILE, hopper_multiply  # noqa: E402
from quintic.optim.polar.forms import resolve  # noqa: E402
from quintic.optim.polar.orthogonalize import apply_form, ieee_matmul  # noqa: E402
from quintic.optim.polar.products import multiply  # noqa: E402
from quintic.optim.polar.program import products_of, run_products, run_queue  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

NORM = 128.0
METHODS = ["polar_express", "gram"]
SHAPES = [
    *[(3, 256, 256), (2, 264, 328), (2, 328, 264), (5, 768, 768), (4, 1000, 520), (30, 264, 520), (25, 520, 264)],
    *[(3, 3072, 768), (1, 768, 3072), (1, 2048, 2048)],
]
RANDOM_SHAPES = [
    (rng.randint(1, 9), 8 * rng.randint(32, 150), 8 * rng.randint(32, 150)) for rng in map(random.Random, range(4))
]
CASES = [
    *[(shape, torch.float16) for shape in SHAPES + RANDOM_SHAPES],
    *[(shape, torch.bfloat16) for shape in [(2, 264, 328), (30, 264, 520)]],
]


@contextlib.contextmanager
def poisoned():
    """Let new memory be full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1, device="cuda").isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def normalised(shape, dtype, seed=0):
    x = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    return (x * (NORM / 1.02 / torch.linalg.matrix_norm(x, keepdim=True))).to(dtype)


def program_of(method, x):
    form = resolve(method, *x.shape[1:], compute_dtype=x.dtype, device_type="cuda")
    return products_of(tuple(form.segments), form.coefficients, NORM)


def one_by_one(program, x, dtype=None):
    with poisoned():
        return run_products(program, [x.clone()], hopper_multiply, dtype)


def queued(program, x, dtype=None):
    pair = torch.stack([x, torch.full_like(x, math.nan)])
    with poisoned():
        return run_queue(program, pair, dtype)


def plain(program, x, dtype=None):
    with ieee_matmul("cuda", x.dtype):
        return run_products(program, [x.clone()], multiply, dtype)


def worst(out, exact):
    """The largest relative error of a matrix."""
    assert out.isfinite().all()
    return float((torch.linalg.matrix_norm(out.double() - exact) / torch.linalg.matrix_norm(exact)).max())


def assert_as_exact(out, reference, exact):
    assert out.shape == exact.shape
    assert worst(out, exact) <= 2 * worst(reference, exact) + 1e-6


# ---------------------------------------------------------------------------------------------- whole programs


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_programs_are_as_exact_as_pytorch_and_the_same_in_one_launch(shape, dtype, method):
    x = normalised(shape, dtype)
    before = x.clone()
    program = program_of(method, x)
    exact = run_products(program, [x.double()], multiply)
    out = one_by_one(program, x)
    assert_as_exact(out, plain(program, x), exact)
    for again in (queued(program, x), queued(program, x), one_by_one(program, x)):
        assert again.is_contiguous()
        assert torch.equal(again, out)
    assert torch.equal(x, before)


@pytest.mark.parametrize("compute", [one_by_one, queued])
@pytest.mark.parametrize("shape", [(3, 264, 520), (3, 520, 264), (2, 768, 768)])
@pytest.mark.parametrize("method", METHODS)
def test_a_matrix_has_the_same_bits_in_any_batch(compute, shape, method):
    x = normalised(shape, torch.float16)
    program = program_of(method, x)
    together = compute(program, x)
    for matrix, expected in zip(x, together, strict=True):
        assert torch.equal(compute(program, matrix.unsqueeze(0))[0], expected)
    for times in (7, 40):
        repeated = compute(program, x.repeat(times, 1, 1))
        assert torch.equal(repeated, together.repeat(times, 1, 1))


@pytest.mark.parametrize("compute", [one_by_one, queued])
@pytest.mark.parametrize("shape", [(4, 264, 328), (40, 328, 264)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_matrix_spoils_no_other(compute, shape, bad):
    x = normalised(shape, torch.float16)
    program = program_of("gram", x)
    good = compute(program, x)
    others = [index for index in range(shape[0]) if index != 1]
    # As `_normalized` gives them, and a single entry that went wrong since.
    for place in ((slice(None), slice(None)), (200, 100)):
        broken = x.clone()
        broken[1][place] = bad
        out = compute(program, broken)
        assert out[1].isnan().any()
        assert torch.equal(out[others], good[others])


@pytest.mark.parametrize("compute", [one_by_one, queued])
def test_zero_gives_zero(compute):
    x = normalised((3, 264, 328), torch.float16)
    program = program_of("gram", x)
    good = compute(program, x)
    x[1] = 0
    out = compute(program, x)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(out[[0, 2]], good[[0, 2]])


@pytest.mark.parametrize("shape", [(3, 264, 520), (40, 520, 264)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_result_may_have_another_dtype(shape, dtype):
    x = normalised(shape, torch.float16)
    program = program_of("gram", x)
    out, again = one_by_one(program, x, dtype), queued(program, x, dtype)
    assert out.dtype == again.dtype == dtype
    assert torch.equal(out, again)
    exact = run_products(program, [x.double()], multiply)
    assert_as_exact(out, plain(program, x, dtype), exact)


def test_the_queue_runs_beside_other_work():
    """All of its programs must be there before one can wait for another."""
    x = normalised((4, 768, 768), torch.float16)
    program = program_of("polar_express", x)
    expected = queued(program, x)
    busy = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                for _ in range(3):
                    torch.mm(busy, busy)
                pair = torch.stack([x, torch.full_like(x, math.nan)])
                results.append(run_queue(program, pair))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


# --------------------------------------------------------------------------------------------- single products


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [2, 60])
@pytest.mark.parametrize(("a_transposed", "b_transposed"), [(False, False), (True, False), (False, True)])
def test_products_are_as_exact_as_pytorchs(dtype, batch, a_transposed, b_transposed):
    if dtype == torch.bfloat16 and (a_transposed or b_transposed):
        pytest.skip("the same code in another dtype")
    m, k, n = 264, 328, 392
    a = torch.randn(batch, k, m).mT if a_transposed else torch.randn(batch, m, k)
    b = torch.randn(batch, n, k).mT if b_transposed else torch.randn(batch, k, n)
    a, b, c = a.to("cuda", dtype), b.to("cuda", dtype), torch.randn(batch, m, n).to("cuda", dtype)
    assert (a.stride(1) == 1, b.stride(1) == 1) == (a_transposed, b_transposed)
    for factors in ({}, {"alpha": -0.3}, {"alpha": 0.7, "beta": 1.9, "c": c}, {"alpha": 0.0, "beta": 2.0, "c": c}):
        exact_c = {"c": c.double()} if "c" in factors else {}
        exact = multiply(a.double(), b.double(), symmetric=False, **(factors | exact_c))
        with ieee_matmul("cuda", dtype):
            reference = multiply(a, b, symmetric=False, **factors)
        with poisoned():
            out = hopper_multiply(a, b, symmetric=False, **factors)
        assert_as_exact(out, reference, exact)


def off_diagonal(side):
    """The entries outside the tiles of the diagonal."""
    tile = torch.arange(side, device="cuda") // TILE.value
    return tile[:, None] != tile[None, :]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [2, 60])
@pytest.mark.parametrize("tall", [False, True])
def test_symmetric_products_are_as_exact_as_pytorchs(dtype, batch, tall):
    if dtype == torch.bfloat16 and tall:
        pytest.skip("the same code in another dtype")
    side, inner = 392, 264
    x = torch.randn(batch, side, inner) / inner**0.5
    x = (x.mT.contiguous().mT if tall else x).to("cuda", dtype)
    with poisoned():
        gram = hopper_multiply(x, x.mT, symmetric=True)
    exact = x.double() @ x.double().mT
    with ieee_matmul("cuda", dtype):
        assert_as_exact(gram, x @ x.mT, exact)
    assert torch.equal(gram, gram.mT)  # every entry is the same sum as its mirror image
    for factors in (
        {"alpha": 0.4},
        {"alpha": -0.5, "diagonal": 1.7},
        {"alpha": 0.3, "beta": -2.5, "c": gram},
        {"alpha": 0.3, "beta": -2.5, "c": gram, "diagonal": 3.4},
        {"alpha": 0.0, "beta": -2.5, "c": gram, "diagonal": 3.4},
    ):
        exact_c = {"c": gram.double()} if "c" in factors else {}
        exact = multiply(gram.double(), gram.double(), symmetric=True, **(factors | exact_c))
        with ieee_matmul("cuda", dtype):
            reference = multiply(gram, gram, symmetric=True, **factors)
        with poisoned():
            out = hopper_multiply(gram, gram, symmetric=True, **factors)
        assert_as_exact(out, reference, exact)
        mask = off_diagonal(side)
        assert torch.equal(out[:, mask], out.mT[:, mask])


# ------------------------------------------------------------------------------------------------- from outside


@pytest.mark.parametrize("shape", [(4, 264, 520), (4, 520, 264), (3, 768, 768), (2, 2, 256, 1024), (512, 256)])
@pytest.mark.parametrize("method", [*METHODS, "auto", "newton_schulz"])
def test_orthogonalize_is_as_exact_as_without_kernels(shape, method):
    x = torch.randn(shape, device="cuda")
    form = resolve(method, *shape[-2:], device_type="cuda")
    assert choose_products(x.reshape(-1, *shape[-2:]).shape, form.compute_dtype, x.device) == "queue"
    exact = quintic.orthogonalize(x.double(), method, coefficients=form.coefficients, compute_dtype=torch.float64)
    reference = apply_form(x, form, "torch")
    for given in (
        x,
        x.mT.contiguous().mT,
        torch.stack([x, x], dim=-1)[..., 0],
        x.movedim(-2, 0).contiguous().movedim(0, -2),
    ):
        before = given.clone()
        out = quintic.orthogonalize(given, method)
        assert out.dtype == torch.float32
        assert_as_exact(out, reference, exact)
        assert torch.equal(given, before)


@pytest.mark.parametrize("method", METHODS)
def test_strides_do_not_change_a_bit(method):
    x = torch.randn(4, 264, 520, device="cuda")
    expected = quintic.orthogonalize(x, method)
    spread = torch.full((8, 264, 1560), math.nan, device="cuda")
    spread[::2, :, ::3] = x
    assert torch.equal(quintic.orthogonalize(spread[::2, :, ::3], method), expected)
    batch_last = x.movedim(0, -1).contiguous().movedim(-1, 0)
    assert torch.equal(quintic.orthogonalize(batch_last, method), expected)
    assert torch.equal(quintic.orthogonalize(batch_last[:1], method), expected[:1])


@pytest.mark.parametrize(
    "shape", [(3, 300, 500), (2, 500, 300), (2, 257, 391), (2, 264, 391), (2, 768, 772), (1, 248, 512)]
)
@pytest.mark.parametrize("method", METHODS)
def test_sides_that_are_no_multiples_of_eight_have_other_kernels(shape, method):
    x = torch.randn(shape, device="cuda")
    form = resolve(method, *shape[1:], device_type="cuda", compute_dtype=torch.float16)
    assert choose_products(x.shape, torch.float16, x.device) not in ("queue", "hopper")
    exact = quintic.orthogonalize(x.double(), method, coefficients=form.coefficients, compute_dtype=torch.float64)
    out = quintic.orthogonalize(x, method, compute_dtype=torch.float16)
    assert_as_exact(out, apply_form(x, form, "torch"), exact)


@pytest.mark.parametrize("method", METHODS)
def test_a_captured_graph_replays_the_same_bits(method):
    x = torch.randn(3, 264, 520, device="cuda")
    other = torch.randn(3, 264, 520, device="cuda")
    expected = [quintic.orthogonalize(one, method) for one in (x, other)]
    given = x.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quintic.orthogonalize(given, method)
    for one, result in zip((x, other), expected, strict=True):
        given.copy_(one)
        graph.replay()
        assert torch.equal(out, result)


CAPTURE_AFTER_ONE_CALL = """
import torch
import quintic

x = torch.randn(3, 264, 520, device="cuda")
expected = quintic.orthogonalize(x, "gram")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = quintic.orthogonalize(x, "gram")
graph.replay()
assert torch.equal(out, expected)
"""


def test_one_call_is_enough_before_a_capture():
    """The captured kernels are others than those that ran before, and are loaded within the capture."""
    done = subprocess.run([sys.executable, "-c", CAPTURE_AFTER_ONE_CALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
