import itertools
import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from polar_factors import polar_factor

import quintic
from quintic.optim.polar import orthogonalize
from quintic.optim.polar.coefficients import newton_schulz_coefficients, polar_express_coefficients
from quintic.optim.polar.forms import resolve
from quintic.optim.polar.orthogonalize import apply_form
from quintic.optim.polar.products import padded_side

SHAPES = [(1, 1), (1, 7), (7, 1), (5, 5), (3, 17), (17, 3), (64, 48), (2, 3, 8, 4), (4, 1, 6)]
METHODS = ["polar_express", "newton_schulz", "gram", "auto", "svd"]
POLYNOMIAL_METHODS = METHODS[:-1]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
COMBINATIONS = [
    (method, dtype)
    for method, dtype in itertools.product(METHODS, DTYPES)
    if method != "svd" or dtype in (torch.float32, torch.float64)
]


def relative_error(out, reference):
    reference = torch.as_tensor(reference)
    return float((out.double() - reference).norm() / reference.norm())


def expected_polynomial(x, method, steps=5):
    """The polynomials of the singular values, matrix by matrix, in float64 NumPy."""
    if method == "newton_schulz":
        coefficients, margin = ((3.4445, -4.7750, 2.0315),) * steps, 0.0
    else:
        coefficients, margin = polar_express_coefficients(steps), 0.02
    if x.numel() == 0:
        return np.zeros(x.shape)
    matrices = x.double().reshape(-1, *x.shape[-2:]).numpy()
    return np.stack([oracle.polynomial_polar(matrix, coefficients, margin) for matrix in matrices]).reshape(x.shape)


def with_singular_values(values, n, seed=0):
    rng = torch.Generator().manual_seed(seed)
    m = len(values)
    u = torch.linalg.qr(torch.randn(m, m, generator=rng, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(n, m, generator=rng, dtype=torch.float64))[0]
    return (u * values) @ v.T


# ----------------------------------------------------------------------------- the same polynomial in every form


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", POLYNOMIAL_METHODS)
def test_iterations_equal_the_polynomials_of_the_singular_values(shape, method):
    x = torch.randn(shape, dtype=torch.float64)
    expected = expected_polynomial(x, method)
    exact = quintic.orthogonalize(x, method, compute_dtype=torch.float64)
    assert relative_error(exact, expected) < 1e-9
    single = quintic.orthogonalize(x.float(), method, compute_dtype=torch.float32)
    assert relative_error(single, expected) < 2e-4
    half = quintic.orthogonalize(x.bfloat16(), method)
    assert half.dtype == torch.bfloat16
    # Eight bits of mantissa through five steps; small square matrices, which can be nearly singular, lose most.
    assert relative_error(half, expected) < 0.1


@st.composite
def matrices(draw):
    """Batches of every kind of shape and memory order."""
    batch = draw(st.lists(st.integers(0, 3), max_size=3))
    m, n = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    x = torch.randn(
        *batch, m, n, dtype=torch.float64, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    layout = draw(st.sampled_from(["contiguous", "transposed", "strided", "batch last"]))
    if layout == "transposed":
        x = x.mT.contiguous().mT
    elif layout == "strided":
        spread = torch.full((*batch, 2 * m, 3 * n), torch.nan, dtype=torch.float64)
        spread[..., ::2, ::3] = x
        x = spread[..., ::2, ::3]
    elif layout == "batch last":
        x = x.movedim((-2, -1), (0, 1)).contiguous().movedim((0, 1), (-2, -1))
    return x


@example(x=torch.ones(1, 1, dtype=torch.float64), method="gram", steps=8)
@given(x=matrices(), method=st.sampled_from(POLYNOMIAL_METHODS), steps=st.integers(1, 8))
def test_every_shape_and_memory_order_gives_the_polynomial(x, method, steps):
    before = x.clone()
    out = quintic.orthogonalize(x, method, steps, compute_dtype=torch.float64)
    assert out.shape == x.shape
    torch.testing.assert_close(out, torch.as_tensor(expected_polynomial(x, method, steps)), rtol=1e-6, atol=1e-7)
    assert torch.equal(x, before)


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("shape", [(40, 40), (3, 32, 128), (128, 32)])
def test_gram_form_equals_the_standard_form(shape, steps):
    x = torch.randn(shape, dtype=torch.float64)
    gram = quintic.orthogonalize(x, "gram", steps, compute_dtype=torch.float64)
    standard = quintic.orthogonalize(x, "polar_express", steps, compute_dtype=torch.float64)
    torch.testing.assert_close(gram, standard, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", POLYNOMIAL_METHODS)
def test_custom_triples_are_applied_in_order(method):
    x = torch.eye(2, dtype=torch.float64) * 3
    triples = [(2.0, 0.0, 0.0), (0.0, 1.0, 0.0)]
    out = quintic.orthogonalize(x, method, coefficients=triples, compute_dtype=torch.float64)
    norm = math.sqrt(2) * (1.0 if method == "newton_schulz" else 1.02)
    torch.testing.assert_close(out, torch.eye(2, dtype=torch.float64) * (2 / norm) ** 3)


@pytest.mark.parametrize("method", POLYNOMIAL_METHODS)
def test_one_triple_is_taken_at_every_step(method):
    x, triple = torch.randn(4, 6), (1.5, -0.5, 0.0)
    assert torch.equal(
        quintic.orthogonalize(x, method, 3, coefficients=triple),
        quintic.orthogonalize(x, method, coefficients=[list(triple)] * 3),
    )


@pytest.mark.parametrize("method", POLYNOMIAL_METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_coefficients_may_be_zero(method, dtype):
    """PyTorch's bfloat16 products on CPUs forget the addend's factor where the product's factor is zero."""
    x, cubic = torch.randn(2, 48, 64), ((1.5, -0.5, 0.0),) * 12
    out = polar_factor(x, method, coefficients=cubic, compute_dtype=dtype)
    margin = 0.0 if method == "newton_schulz" else 0.02
    expected = np.stack([oracle.polynomial_polar(matrix.numpy(), cubic, margin) for matrix in x])
    assert relative_error(out, expected) < 0.05


def test_defaults_are_the_published_coefficients():
    x = torch.randn(6, 9)
    assert torch.equal(
        quintic.orthogonalize(x), quintic.orthogonalize(x, coefficients=polar_express_coefficients(5), steps=99)
    )
    assert torch.equal(
        quintic.orthogonalize(x, "newton_schulz"),
        quintic.orthogonalize(x, "newton_schulz", coefficients=newton_schulz_coefficients(5)),
    )


# ------------------------------------------------------------------------------------------ nearness to the factor


@pytest.mark.parametrize("shape", SHAPES)
def test_svd_gives_orthonormal_rows_or_columns(shape):
    out = quintic.orthogonalize(torch.randn(shape, dtype=torch.float64), "svd")
    gram = out @ out.mT if shape[-2] <= shape[-1] else out.mT @ out
    torch.testing.assert_close(gram, torch.eye(min(shape[-2:]), dtype=torch.float64).expand_as(gram))


def test_svd_keeps_the_null_space_empty():
    x = torch.outer(torch.arange(1.0, 5.0), torch.ones(3))
    torch.testing.assert_close(quintic.orthogonalize(x, "svd"), x / x.norm())


@pytest.mark.parametrize(("method", "dtype"), COMBINATIONS)
@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (16, 16)])
def test_rows_and_columns_of_zeros_stay_zeros(method, dtype, shape):
    """Stages that divide by norms of rows or columns would enlarge the rounding errors there."""
    x = torch.randn(3, *shape)
    x[0, 1], x[1, :, 2], x[2, [0, 3]], x[2, :, 4] = 0, 0, 0, 0
    out = polar_factor(x, method, compute_dtype=dtype)
    assert torch.equal(out == 0, x == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(20, 64), (64, 20)])
@pytest.mark.parametrize("num_large", [1, 16])
def test_svd_cuts_off_at_the_rounding_error_of_the_largest_singular_value(shape, dtype, num_large):
    """Singular values up to max(m, n) eps times the largest become zero, those above it one."""
    cutoff = 64 * torch.finfo(dtype).eps
    values = torch.tensor([1.0] * num_large + [2 * cutoff, 1.5 * cutoff, 0.7 * cutoff, 0.5 * cutoff], dtype=dtype)
    x = torch.zeros(shape, dtype=dtype)
    x.diagonal()[: len(values)] = values
    expected = torch.zeros(shape, dtype=dtype)
    expected.diagonal()[: num_large + 2] = 1
    torch.testing.assert_close(polar_factor(x, "svd", compute_dtype=dtype), expected)


@pytest.mark.parametrize(("method", "low", "high"), [("polar_express", 0.85, 1.15), ("newton_schulz", 0.65, 1.25)])
def test_singular_values_end_in_the_documented_band(method, low, high):
    x = torch.randn(8, 96, 160)
    values = torch.linalg.svdvals(quintic.orthogonalize(x, method, compute_dtype=torch.float32))
    assert low < float(values.min()) <= float(values.max()) < high


@pytest.mark.parametrize(
    ("method", "dtype", "steps", "most"),
    [
        ("polar_express", torch.bfloat16, 5, 1.15),
        ("polar_express", torch.float16, 5, 1.15),
        ("polar_express", torch.float32, 6, 1.005),
        ("polar_express", torch.float32, 4, 1.10),
        ("polar_express", torch.float32, 3, 1.105),
        ("polar_express", torch.float32, 2, 1.525),
        ("gram", torch.float16, 5, 1.20),
        ("auto", None, 5, 1.15),
        ("newton_schulz", torch.bfloat16, 5, 1.21),
        ("newton_schulz", torch.float32, 8, 1.205),
    ],
)
def test_no_singular_value_ends_above_the_documented_one(method, dtype, steps, most):
    """Awkward shapes and spectra: docs/explanation/orthogonalization.md has the numbers."""
    largest = 0.0
    for m, n in ((1, 1), (3, 5), (7, 7), (16, 64), (33, 65), (64, 64), (128, 512)):
        spectra = [torch.ones(m), torch.arange(1, m + 1) ** -0.5, torch.logspace(0, -4, m), torch.rand(m) ** 4]
        for values in (*spectra, (torch.arange(m) < max(1, m // 8)).double()):
            x = with_singular_values(values, n).float()
            result = quintic.orthogonalize(x, method, steps, compute_dtype=dtype)
            largest = max(largest, float(torch.linalg.matrix_norm(result.double(), 2)))
    assert most - 0.07 < largest <= most


def test_more_steps_come_nearer_to_the_polar_factor():
    x = torch.randn(32, 48, dtype=torch.float64)
    exact = quintic.orthogonalize(x, "svd")
    errors = [relative_error(polar_factor(x, "gram", steps, compute_dtype=torch.float64), exact) for steps in (2, 5, 8)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-3


# ---------------------------------------------------------------------------------------------------- rounding


@pytest.mark.parametrize("method", ["polar_express", "newton_schulz", "gram"])
@pytest.mark.parametrize("shape", [(128, 256), (128, 512), (320, 96)])
def test_float16_is_within_three_thousandths(method, shape):
    x = torch.randn(shape)
    out = quintic.orthogonalize(x, method, compute_dtype=torch.float16)
    assert relative_error(out, expected_polynomial(x, method)) < 3e-3


@pytest.mark.parametrize("steps", [5, 6, 7, 8])
@pytest.mark.parametrize("coefficients", ["polar_express", "newton_schulz"])
@pytest.mark.parametrize("spectrum", ["cond 1e2", "cond 1e4", "cond 1e6", "rank n/8", "one dominant", "row scales"])
def test_float16_gram_is_better_than_the_bfloat16_standard_form(spectrum, coefficients, steps):
    m, n = 64, 160
    if spectrum.startswith("cond"):
        x = with_singular_values(torch.logspace(0, -float(spectrum[-1]), m, dtype=torch.float64), n)
    elif spectrum == "rank n/8":
        x = torch.randn(m, m // 8, dtype=torch.float64) @ torch.randn(m // 8, n, dtype=torch.float64)
    elif spectrum == "one dominant":
        x = torch.randn(m, n, dtype=torch.float64) / 12 + 100 * torch.ones(m, n, dtype=torch.float64) / math.sqrt(m * n)
    else:
        x = torch.randn(m, n, dtype=torch.float64) * torch.exp(3 * torch.randn(m, 1, dtype=torch.float64))
    triples = {"polar_express": polar_express_coefficients, "newton_schulz": newton_schulz_coefficients}[coefficients](
        steps
    )
    expected = oracle.polynomial_polar(x.numpy(), triples, 0.02)
    gram = relative_error(polar_factor(x, "gram", coefficients=triples), expected)
    standard = relative_error(polar_factor(x, "polar_express", coefficients=triples), expected)
    assert gram < 0.6 * standard


def test_gram_does_not_diverge_where_a_first_restart_after_three_steps_would():
    """Thousands of small matrices with singular values at random places: the spectra that rounding hurts most."""
    rng = torch.Generator().manual_seed(0)
    values = 10 ** (-5 * torch.rand(4000, 1, 4, generator=rng, dtype=torch.float64))
    u = torch.linalg.qr(torch.randn(4000, 4, 4, generator=rng, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(4000, 8, 4, generator=rng, dtype=torch.float64))[0]
    out = polar_factor((u * values) @ v.mT, "gram")
    assert float(torch.linalg.matrix_norm(out.double(), 2).max()) < 1.5


def test_float16_keeps_small_rows_of_large_matrices():
    """With norm one, the small rows would have entries near 2e-7: three digits of float16's subnormal numbers.

    Measured on the small rows alone: beside the large row their errors would not show.
    """
    x = torch.randn(16, 2048)
    x[1:] *= 1e-5
    expected = expected_polynomial(x, "gram")[1:]
    assert relative_error(polar_factor(x, "gram", compute_dtype=torch.float16)[1:], expected) < 3e-3


@pytest.mark.parametrize("method", POLYNOMIAL_METHODS)
def test_float16_holds_the_gram_matrix_of_a_single_row(method):
    """The largest entry that a Gram matrix can have, with all of the norm in one row, is not infinite."""
    x = torch.zeros(16, 64)
    x[3] = 1
    out = polar_factor(x, method, compute_dtype=torch.float16)
    assert relative_error(out, expected_polynomial(x, method)) < 0.05


# ------------------------------------------------------------------------------------- scale, zeros, NaN, aliasing


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-8, 1.0, 1e8, 1e20, 1e30])
def test_result_does_not_depend_on_the_scale(method, scale):
    x = torch.randn(3, 12, 20)
    expected = quintic.orthogonalize(x, method, compute_dtype=torch.float32)
    scaled = quintic.orthogonalize(x * scale, method, compute_dtype=torch.float32)
    torch.testing.assert_close(scaled, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("method", "dtype"), COMBINATIONS)
@pytest.mark.parametrize("exponent", [-66, 66])
def test_a_power_of_two_does_not_change_a_bit(method, dtype, exponent):
    x = torch.randn(12, 20)
    scaled = polar_factor(x * 2.0**exponent, method, compute_dtype=dtype)  # 1e-20 and 1e20
    assert torch.equal(scaled, polar_factor(x, method, compute_dtype=dtype))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_zero_matrix_gives_zero_beside_others(method, dtype):
    x = torch.randn(3, 6, 9, dtype=torch.float64).to(dtype)
    x[1] = 0
    out = quintic.orthogonalize(x, method)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert float(out[0].float().norm()) > 1
    assert torch.isfinite(out.float()).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("method", "dtype"), COMBINATIONS)
def test_one_bad_entry_spoils_its_matrix_and_no_other(method, dtype, bad):
    x = torch.randn(4, 6, 9)
    good = polar_factor(x, method, compute_dtype=dtype)
    x[2, 3, 5] = bad
    out = polar_factor(x, method, compute_dtype=dtype)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3]], good[[0, 1, 3]])


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize(("method", "dtype"), COMBINATIONS)
@pytest.mark.parametrize("order", ["wide", "tall", "transposed"])
def test_input_is_not_modified_and_not_aliased(method, dtype, x_dtype, order):
    x = torch.randn(2, 4, 6).to(x_dtype)
    x = {"wide": x, "tall": x.mT.contiguous(), "transposed": x.mT}[order]
    before = x.clone()
    for function in (quintic.orthogonalize, polar_factor):
        out = function(x, method, compute_dtype=dtype)
        assert out.dtype == (x_dtype if function is quintic.orthogonalize else dtype)
        assert torch.equal(x, before)
        out.zero_()
        assert torch.equal(x, before)


@pytest.mark.parametrize("method", METHODS)
def test_strides_do_not_matter(method):
    x = torch.randn(5, 2, 8, 6).permute(1, 0, 3, 2)
    torch.testing.assert_close(
        quintic.orthogonalize(x, method, compute_dtype=torch.float32),
        quintic.orthogonalize(x.contiguous(), method, compute_dtype=torch.float32),
    )


@pytest.mark.parametrize("shape", [(4, 8), (12, 12), (24, 40), (128, 64), (96, 256)])
@pytest.mark.parametrize(("method", "dtype"), [pair for pair in COMBINATIONS if pair[0] != "svd"])
def test_batching_does_not_change_a_bit(method, dtype, shape):
    """Layout invariance rests on this: a matrix gives the same result in any batch."""
    x = torch.randn(7, *shape)
    together = polar_factor(x, method, compute_dtype=dtype)
    alone = torch.stack([polar_factor(matrix, method, compute_dtype=dtype) for matrix in x])
    parts = torch.cat([polar_factor(part, method, compute_dtype=dtype) for part in x.split([2, 5])])
    assert torch.equal(together, alone)
    assert torch.equal(together, parts)


@pytest.mark.parametrize("shape", [(3, 5), (5, 7), (6, 40), (3, 300), (15, 17), (16, 31), (1, 9), (33, 65)])
@pytest.mark.parametrize("method", ["polar_express", "gram"])
def test_batching_does_not_change_a_bit_of_odd_matrices_in_bfloat16(method, shape):
    """Float32 and float64 products may differ there: MKL looks at the alignment of each matrix in memory."""
    x = torch.randn(64, *shape)
    together = polar_factor(x, method, compute_dtype=torch.bfloat16)
    alone = torch.stack([polar_factor(matrix, method, compute_dtype=torch.bfloat16) for matrix in x])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("shape", [(5, 5), (5, 13), (10, 3), (13, 32), (16, 16), (2, 0), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_place_in_a_batch_does_not_change_a_bit_of_svd(shape, dtype):
    """LAPACK looks at the alignment of each matrix in memory."""
    alone = torch.randn(shape, dtype=dtype)
    expected = polar_factor(alone, "svd", compute_dtype=dtype)
    for first, count, place in [(0, 1, 0), (0, 3, 1), (1, 5, 2), (3, 4, 3)]:
        memory = torch.randn(first + count * alone.numel(), dtype=dtype)
        batch = memory[first:].view(count, *shape)
        batch[place] = alone
        assert torch.equal(polar_factor(batch, "svd", compute_dtype=dtype)[place], expected)


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (2, 0, 3, 3), (0, 0)])
@pytest.mark.parametrize("method", METHODS)
def test_empty_inputs_stay_empty(shape, method):
    out = quintic.orthogonalize(torch.empty(shape, dtype=torch.bfloat16), method)
    assert out.shape == shape
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("method", POLYNOMIAL_METHODS)
def test_transposing_commutes(method):
    x = torch.randn(10, 30, dtype=torch.float64)
    torch.testing.assert_close(
        polar_factor(x.mT, method, compute_dtype=torch.float64),
        polar_factor(x, method, compute_dtype=torch.float64).mT,
    )


@pytest.mark.parametrize("method", POLYNOMIAL_METHODS)
def test_gradients_flow(method):
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: quintic.orthogonalize(x, method, 3, compute_dtype=torch.float64), x)


def test_a_form_says_all_that_there_is_to_know():
    x = torch.randn(2, 128, 512)
    form = resolve("auto", 128, 512, compute_dtype=torch.float16, device_type="cpu")
    assert form.method == "gram"
    assert torch.equal(apply_form(x, form), polar_factor(x, "gram"))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(3), ValueError, r"shape \(3,\)"),
        (torch.ones(3, 3, dtype=torch.int64), TypeError, "int64"),
        ([[1.0]], TypeError, "x is a list: orthogonalize needs a tensor"),
    ],
)
def test_what_is_no_matrix_is_named(x, error, message):
    with pytest.raises(error, match=message):
        quintic.orthogonalize(x)


@pytest.mark.parametrize("method", ["polar_express", "newton_schulz", "gram"])
@pytest.mark.parametrize("shape", [(2, 9, 13), (3, 13, 9), (2, 8, 13), (1, 1, 1)])
def test_padding_changes_no_polar_factor(method, shape, monkeypatch):
    """GPUs multiply 16-bit matrices with sides that are multiples of 8 (see `padded_side`)."""
    x = torch.randn(shape, requires_grad=True)  # else CPUs compute in another way
    form = resolve(method, *shape[-2:], compute_dtype=torch.float32, device_type="cpu")
    plain = apply_form(x, form)
    sides = []
    original = orthogonalize._iterate
    monkeypatch.setattr(orthogonalize, "padded_side", lambda side, dtype, device: -(-side // 8) * 8)
    monkeypatch.setattr(
        orthogonalize, "_iterate", lambda x, *given: sides.append(tuple(x.shape[-2:])) or original(x, *given)
    )
    padded = apply_form(x, form)
    assert sides == [tuple(-(-side // 8) * 8 for side in shape[-2:])]
    assert padded.is_contiguous()
    expected = torch.as_tensor(expected_polynomial(x.detach(), method))
    for found in (padded, plain):
        torch.testing.assert_close(found.detach().double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("side", "dtype", "device", "expected"),
    [
        (13, torch.float16, "cuda", 16),
        (16, torch.bfloat16, "cuda", 16),
        (13, torch.float32, "cuda", 13),
        (13, torch.float16, "cpu", 13),
        (0, torch.float16, "cuda", 0),
    ],
)
def test_sides_are_padded_where_libraries_choose_by_the_address(side, dtype, device, expected):
    assert padded_side(side, dtype, torch.device(device)) == expected
