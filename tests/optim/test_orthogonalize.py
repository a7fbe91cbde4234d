import itertools
import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import quintic
from quintic.optim.orthogonalize import (
    newton_schulz,
    newton_schulz_coefficients,
    orthogonalization_flops,
    polar_express,
    polar_express_coefficients,
    svd,
)

SHAPES = [(1, 1), (1, 7), (7, 1), (5, 5), (3, 17), (17, 3), (64, 48), (2, 3, 8, 4), (4, 1, 6)]
METHODS = ["polar_express", "newton_schulz", "svd"]


def relative_error(out, reference):
    reference = torch.as_tensor(reference)
    return float((out.double() - reference).norm() / reference.norm())


def test_coefficients_equal_the_published_five():
    np.testing.assert_allclose(polar_express_coefficients(5), oracle.PUBLISHED_POLAR_EXPRESS, rtol=1e-11)


@example(steps=4, lower=0.5, safety=0.01171875, cushion=0.0)  # an interval of 1e-4: singular in double precision
@example(steps=8, lower=0.004521353881140751, safety=0.0, cushion=0.48474271104682093)
@given(
    steps=st.integers(1, 9),
    lower=st.floats(1e-6, 0.9),
    safety=st.floats(0, 0.1),
    cushion=st.floats(0, 0.5),
)
def test_generated_polynomials_bring_every_singular_value_nearer_to_one(steps, lower, safety, cushion):
    """The composition maps [lower, 1] into an interval around 1 that shrinks with every step."""
    widths = []
    s = np.linspace(lower, 1.0, 2001)
    for a, b, c in polar_express_coefficients(steps, lower_bound=lower, safety=safety, cushion=cushion):
        s = a * s + b * s**3 + c * s**5
        widths.append(np.abs(s - 1).max())
    assert widths[-1] < 1.0
    if cushion == 0 and safety == 0:
        assert all(after <= before + 1e-9 for before, after in itertools.pairwise(widths))


def test_the_first_polynomial_equioscillates():
    a, b, c = polar_express_coefficients(1, lower_bound=0.1, safety=0.0, cushion=0.0)[0]
    s = np.linspace(0.1, 1.0, 200_001)
    error = 1 - (a * s + b * s**3 + c * s**5)
    extremes = [error[0], error[np.argmin(error[:100_000])], error.max(), error[-1]]
    assert np.abs(extremes) == pytest.approx(np.abs(error).max(), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"lower_bound": 0.0}, "lower_bound=0.0"),
        ({"lower_bound": 1.0}, "lower_bound=1.0"),
        ({"safety": -0.1}, "safety=-0.1"),
        ({"cushion": 1.0}, "cushion=1.0"),
    ],
)
def test_coefficients_reject_what_has_no_meaning(arguments, message):
    with pytest.raises(ValueError, match=message):
        polar_express_coefficients(**arguments)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["polar_express", "newton_schulz"])
def test_iterations_equal_the_polynomials_of_the_singular_values(shape, method):
    x = torch.randn(shape, dtype=torch.float64)
    coefficients, margin = {
        "polar_express": (oracle.PUBLISHED_POLAR_EXPRESS, 0.02),
        "newton_schulz": (newton_schulz_coefficients(5), 0.0),
    }[method]
    expected = np.stack(
        [oracle.polynomial_polar(matrix, coefficients, margin) for matrix in x.reshape(-1, *shape[-2:]).numpy()]
    ).reshape(shape)
    exact = quintic.orthogonalize(x, method, compute_dtype=torch.float64)
    assert relative_error(exact, expected) < 1e-9
    single = quintic.orthogonalize(x.float(), method, compute_dtype=torch.float32)
    assert relative_error(single, expected) < 1e-4
    half = quintic.orthogonalize(x.bfloat16(), method)
    assert half.dtype == torch.bfloat16
    # Eight bits of mantissa through five steps; small square matrices, which can be nearly singular, lose most.
    assert relative_error(half, expected) < 0.1


@pytest.mark.parametrize("shape", SHAPES)
def test_svd_gives_orthonormal_rows_or_columns(shape):
    out = svd(torch.randn(shape, dtype=torch.float64))
    gram = out @ out.mT if shape[-2] <= shape[-1] else out.mT @ out
    torch.testing.assert_close(gram, torch.eye(min(shape[-2:]), dtype=torch.float64).expand_as(gram))


def test_svd_keeps_the_null_space_empty():
    x = torch.outer(torch.arange(1.0, 5.0), torch.ones(3))
    torch.testing.assert_close(svd(x), x / x.norm())


@pytest.mark.parametrize(("method", "low", "high"), [("polar_express", 0.85, 1.15), ("newton_schulz", 0.65, 1.25)])
def test_singular_values_end_in_the_documented_band(method, low, high):
    x = torch.randn(8, 96, 160)
    values = torch.linalg.svdvals(quintic.orthogonalize(x, method, compute_dtype=torch.float32))
    assert low < float(values.min()) <= float(values.max()) < high


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-8, 1.0, 1e8, 1e20, 1e30])
def test_result_does_not_depend_on_the_scale(method, scale):
    x = torch.randn(3, 12, 20)
    expected = quintic.orthogonalize(x, method, compute_dtype=torch.float32)
    scaled = quintic.orthogonalize(x * scale, method, compute_dtype=torch.float32)
    torch.testing.assert_close(scaled, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_zero_matrix_gives_zero_beside_others(method, dtype):
    x = torch.randn(3, 6, 9, dtype=torch.float64).to(dtype)
    x[1] = 0
    out = quintic.orthogonalize(x, method)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert float(out[0].float().norm()) > 1
    assert torch.isfinite(out.float()).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tall", [False, True])
def test_input_is_not_modified_and_not_aliased(method, dtype, tall):
    x = torch.randn(2, 4, 6).to(dtype)
    x = x.mT.contiguous() if tall else x
    before = x.clone()
    out = quintic.orthogonalize(x, method, compute_dtype=dtype)
    out.zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("method", METHODS)
def test_strides_do_not_matter(method):
    x = torch.randn(5, 2, 8, 6).permute(1, 0, 3, 2)
    torch.testing.assert_close(
        quintic.orthogonalize(x, method, compute_dtype=torch.float32),
        quintic.orthogonalize(x.contiguous(), method, compute_dtype=torch.float32),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batching_does_not_change_a_bit(dtype):
    """Layout invariance rests on this: a matrix gives the same result in any batch."""
    x = torch.randn(7, 24, 40)
    together = polar_express(x, compute_dtype=dtype)
    alone = torch.cat([polar_express(matrix.unsqueeze(0), compute_dtype=dtype) for matrix in x])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0)])
@pytest.mark.parametrize("method", METHODS)
def test_empty_inputs_stay_empty(shape, method):
    assert quintic.orthogonalize(torch.empty(shape), method).shape == shape


def test_transposing_commutes():
    x = torch.randn(10, 30, dtype=torch.float64)
    torch.testing.assert_close(
        polar_express(x.mT, compute_dtype=torch.float64), polar_express(x, compute_dtype=torch.float64).mT
    )


def test_more_steps_come_nearer_to_the_polar_factor():
    x = torch.randn(32, 48, dtype=torch.float64)
    exact = svd(x)
    errors = [relative_error(polar_express(x, steps, compute_dtype=torch.float64), exact) for steps in (3, 5, 8)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-3


def test_custom_triples_are_applied_in_order():
    x = torch.eye(2, dtype=torch.float64) * 3
    out = newton_schulz(x, [(2.0, 0.0, 0.0), (0.0, 1.0, 0.0)], compute_dtype=torch.float64)
    torch.testing.assert_close(out, torch.eye(2, dtype=torch.float64) * (2 / math.sqrt(2)) ** 3)


@pytest.mark.parametrize(
    ("x", "method", "steps", "error", "message"),
    [
        (torch.ones(3), "svd", 5, ValueError, r"shape \(3,\)"),
        (torch.ones(3, 3, dtype=torch.int64), "svd", 5, TypeError, "int64"),
        (torch.ones(3, 3), "qr", 5, ValueError, "method='qr'.*'polar_express'"),
        (torch.ones(3, 3), "polar_express", 0, ValueError, "steps=0"),
        (torch.ones(3, 3), "newton_schulz", -1, ValueError, "steps=-1"),
    ],
)
def test_bad_arguments_are_named(x, method, steps, error, message):
    with pytest.raises(error, match=message):
        quintic.orthogonalize(x, method, steps)


def test_flops_are_those_of_the_standard_form():
    assert orthogonalization_flops(768, 3072) == orthogonalization_flops(3072, 768)
    assert orthogonalization_flops(2, 3, steps=1) == 4 * 2 * 2 * 3 + 2 * 2**3
