"""Orthogonalisation on CPUs: the same polynomials in every order of memory, batch and division into blocks."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import quintic
from quintic.optim.plan import planning
from quintic.optim.polar import cpu_orthogonalize, forms
from quintic.optim.polar.forms import Form, resolve
from quintic.optim.polar.orthogonalize import apply_form

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.08}


def exactly(x, form):
    """The form's polynomials of the singular values, in float64."""
    norm = 1.0 if form.method == "newton_schulz" else 1 / 1.02
    u, s, vh = torch.linalg.svd(x.double() * norm / torch.linalg.matrix_norm(x.double(), keepdim=True), False)
    for a, b, c in form.coefficients:
        s = a * s + b * s**3 + c * s**5
    return (u * s.unsqueeze(-2)) @ vh


def form_of(method, shape, dtype, **options):
    return resolve(method, *shape[-2:], compute_dtype=dtype, device_type="cpu", **options)


def directions(*shape, dtype=torch.float32, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(torch.bfloat16 if dtype == torch.bfloat16 else dtype)


@pytest.fixture
def blocks(monkeypatch):
    """Matrices of 24 rows count as large, and their symmetric products have blocks of 8 rows."""
    monkeypatch.setattr(cpu_orthogonalize, "_SINGLE_SIDE", 24)
    monkeypatch.setattr(cpu_orthogonalize, "_BLOCK_ROWS", 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", ["polar_express", "newton_schulz", "gram"])
@pytest.mark.parametrize(
    "shape", [(3, 32, 100), (3, 100, 32), (2, 47, 49), (1, 64, 64), (2, 24, 24), (2, 25, 31), (2, 39, 80)], ids=str
)
def test_blocks_are_the_polynomials_of_the_singular_values(blocks, method, shape, dtype):
    x, form = directions(*shape, dtype=dtype), form_of(method, shape, dtype)
    found = apply_form(x, form)
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, x.shape, True)
    expected = exactly(x, form)
    assert (found.double() - expected).norm() < TOLERANCES[dtype] * expected.norm()


@given(
    method=st.sampled_from(["polar_express", "newton_schulz", "gram"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    batch=st.integers(1, 4),
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    steps=st.integers(1, 8),
    large=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_and_number_of_steps(method, dtype, batch, m, n, steps, large):
    with pytest.MonkeyPatch.context() as patch:
        if large:
            patch.setattr(cpu_orthogonalize, "_SINGLE_SIDE", 1)
            patch.setattr(cpu_orthogonalize, "_BLOCK_ROWS", 4)
        x, form = directions(batch, m, n, dtype=dtype), form_of(method, (m, n), dtype, steps=steps)
        expected = exactly(x, form)
        # Square matrices have singular values near zero, whose rounding errors the polynomials lift.
        tolerance = {torch.float64: 1e-10, torch.float32: 0.02}[dtype]
        assert (apply_form(x, form).double() - expected).norm() < tolerance * (1 + expected.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 48, 64), (5, 64, 48), (4, 32, 128), (3, 33, 70), (2, 65, 130)], ids=str)
def test_bits_depend_neither_on_the_batch_nor_on_the_order_in_memory(shape, dtype):
    x, form = directions(*shape, dtype=dtype), form_of("auto", shape, dtype)
    together = apply_form(x, form)
    alone = torch.cat([apply_form(one.clone(), form) for one in x.split(1)])
    assert torch.equal(together, alone)
    assert torch.equal(apply_form(x.mT.contiguous().mT, form), together)
    gaps = torch.zeros(shape[0], shape[1], 2 * shape[2], dtype=x.dtype)[:, :, ::2].copy_(x)
    assert torch.equal(apply_form(gaps, form), together)


def test_matrices_are_computed_alone_where_a_batch_has_other_bits(monkeypatch):
    """As with libraries that divide a batch among threads in another way than a matrix."""
    right, shape = torch.baddbmm, (4, 32, 48)
    form = form_of("polar_express", shape, torch.float32)
    x = directions(*shape)
    expected = torch.cat([apply_form(one, form) for one in x.split(1)])
    sizes = []

    def multiply(c, a, b, *, out, **factors):
        right(c, a, b, out=out, **factors)
        sizes.append(a.shape[0])
        if a.shape[0] == 4:
            out[2, 0, 0] += 1e-6

    monkeypatch.setattr(torch, "baddbmm", multiply)
    cpu_orthogonalize._batch_keeps_bits.cache_clear()
    try:
        assert torch.equal(apply_form(x, form), expected)
        assert set(sizes) == {1, 4}
        sizes.clear()
        assert torch.equal(apply_form(x, form), expected)  # the comparison is not made again
        assert set(sizes) == {1}
        assert apply_form(x[:3], form).shape[0] == 3  # another number of matrices is another question
        assert set(sizes) == {1, 3}
    finally:
        cpu_orthogonalize._batch_keeps_bits.cache_clear()


@pytest.mark.parametrize("shape", [(5, 11, 13), (7, 17, 9), (4, 33, 31)], ids=str)
@pytest.mark.parametrize("method", ["gram", "polar_express"])
def test_bits_do_not_depend_on_where_results_lie(shape, method, monkeypatch):
    monkeypatch.setattr(cpu_orthogonalize, "_batch_keeps_bits", lambda *_: False)
    x, form = directions(*shape), form_of(method, shape, torch.float32)
    alone = torch.cat([apply_form(matrix[None].clone(), form) for matrix in x])
    assert torch.equal(apply_form(x, form), alone)


def test_a_batch_is_multiplied_together(monkeypatch):
    sizes = []
    monkeypatch.setattr(cpu_orthogonalize, "_batch_keeps_bits", lambda *given: True)

    def counted(right):
        return lambda *tensors, **options: (sizes.append(tensors[-1].shape[0]), right(*tensors, **options))

    for name in ("bmm", "baddbmm"):
        monkeypatch.setattr(torch, name, counted(getattr(torch, name)))
    apply_form(directions(6, 32, 64), form_of("polar_express", (32, 64), torch.float32))
    assert sizes == [6] * 15


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exponent", [-70, 70, -100, 120])
def test_a_scale_beyond_that_of_squares_changes_no_bit(exponent, dtype):
    form = form_of("polar_express", (32, 48), dtype)
    x = directions(3, 32, 48, dtype=dtype)
    expected = apply_form(x, form)
    x[1] *= 2.0**exponent
    assert torch.equal(apply_form(x, form), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_one_matrix_has_is_its_own(dtype):
    form = form_of("polar_express", (32, 48), dtype)
    x = directions(4, 32, 48, dtype=dtype)
    expected = apply_form(x, form)
    x[0] = 0
    x[1, 3, 5] = float("nan")
    x[2, 0, 0] = float("inf")
    found = apply_form(x, form)
    assert not found[0].any()
    assert found[1:3].isnan().all()
    assert torch.equal(found[3], expected[3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("side", [32, 520])
def test_cubic_polynomials(side, dtype):
    """Their products with a factor of zero are left out: PyTorch 2.13 would forget the addend's."""
    cubic = [(1.5, -0.5, 0.0)] * 3
    x = directions(1, side, side, dtype=dtype)
    form = form_of("polar_express", x.shape, dtype, coefficients=cubic)
    expected = exactly(x, form)
    assert (apply_form(x, form).double() - expected).norm() < TOLERANCES[dtype] * expected.norm()


@pytest.fixture
def kept(monkeypatch):
    """The memory that the threads of a test keep: none at first."""
    kept = threading.local()
    monkeypatch.setattr(cpu_orthogonalize, "_KEPT", kept)
    return kept


def test_memory_is_used_again_and_no_result_is_in_it(kept):
    calls = [(shape, method, dtype) for shape in [(2, 40, 60), (1, 16, 12)] for method in ("gram", "polar_express")
             for dtype in (torch.float32, torch.float64)]  # fmt: skip
    forms = [form_of(method, shape, dtype) for shape, method, dtype in calls]
    inputs = [directions(*shape, seed=number) for number, (shape, _, _) in enumerate(calls)]
    results = [apply_form(x, form) for x, form in zip(inputs, forms, strict=True)]
    addresses = {kept.buffer.data_ptr()}
    for x, form, result in zip(inputs, forms, results, strict=True):
        kept.buffer.fill_(255)  # NaN in any dtype
        assert torch.equal(apply_form(x, form), result)
        addresses.add(kept.buffer.data_ptr())
    assert len(addresses) == 1
    assert all(result.isfinite().all() for result in results)


def test_threads_keep_their_own_memory(kept):
    form = form_of("polar_express", (64, 64), torch.float32)
    inputs = [directions(1, 64, 64, seed=seed) for seed in range(4)]
    expected = [apply_form(x, form) for x in inputs]
    wrong = []

    def run(x, result):
        wrong.extend(1 for _ in range(50) if not torch.equal(apply_form(x, form), result))

    threads = [threading.Thread(target=run, args=row) for row in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_of_large_matrices_is_given_back(kept, monkeypatch):
    monkeypatch.setattr(cpu_orthogonalize, "_MAX_KEPT", 50_000)
    small, large = directions(1, 24, 24), directions(1, 64, 64)
    for x, is_kept in [(large, False), (small, True), (large, False), (small, True)]:
        apply_form(x, form_of("polar_express", x.shape, torch.float32))
        assert (kept.buffer is not None) == is_kept


def test_memory_of_inference_mode_serves_outside_of_it(kept, blocks):
    x, form = directions(1, 48, 100), form_of("polar_express", (48, 100), torch.float32)
    with torch.inference_mode():
        inside = apply_form(x, form)
    assert torch.equal(apply_form(x, form), inside)


def test_operands_are_left_alone():
    x = directions(2, 32, 48)
    kept = x.clone()
    apply_form(x, form_of("gram", (32, 48), torch.float32))
    assert torch.equal(x, kept)


# -- what is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has_bfloat16", "shape", "expected"),
    [
        (True, (96, 96), "polar_express bf16"),
        (True, (95, 400), "polar_express fp32"),
        (False, (96, 96), "polar_express fp32"),
        (False, (256, 1024), "gram fp32"),
        (True, (256, 1024), "polar_express bf16"),
    ],
)
def test_the_fast_dtype_follows_from_shape_and_processor(has_bfloat16, shape, expected, monkeypatch):
    monkeypatch.setattr(forms, "cpu_multiplies_bfloat16", lambda: has_bfloat16)
    assert str(resolve("auto", *shape, device_type="cpu")) == expected
    assert str(resolve("auto", *shape, compute_dtype=torch.bfloat16, device_type="cpu")) == "polar_express bf16"
    assert resolve("auto", *shape, device_type="cuda").compute_dtype == torch.float16


def test_buckets_fit_the_caches_and_change_no_bit(monkeypatch):
    def weights(entries):
        monkeypatch.setattr(planning, "_CPU_ENTRIES", entries)
        params = [nn.Parameter(directions(24, 32, seed=i)) for i in range(5)]
        optimizer = quintic.Muon(params, lr=0.1)
        for i, param in enumerate(params):
            param.grad = directions(24, 32, seed=10 + i)
        optimizer.step()
        return [param.detach() for param in params], [len(bucket.members) for bucket in optimizer.plan().buckets]

    together, (one,) = weights(2**22)
    apart, several = weights(2 * 24 * 32 + 5)
    single, each = weights(7)
    assert (one, several, each) == (5, [2, 2, 1], [1] * 5)
    assert all(map(torch.equal, together, apart))
    assert all(map(torch.equal, together, single))


def test_forms_that_are_computed_elsewhere():
    assert not cpu_orthogonalize.iterates_on_cpu(form_of("gram", (64, 64), torch.float16), 64, 64)
    assert not cpu_orthogonalize.iterates_on_cpu(Form("svd", torch.float32, (), ()), 64, 64)
    small = form_of("polar_express", (16, 16), torch.bfloat16)
    assert [cpu_orthogonalize.iterates_on_cpu(small, side, side) for side in (16, 17)] == [False, True]
