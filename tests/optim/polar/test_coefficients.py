import itertools

import numpy as np
import oracle
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quintic.optim.polar.coefficients import gram_restarts, newton_schulz_coefficients, polar_express_coefficients

FLOAT16, BFLOAT16, FLOAT32 = 11, 8, 24
"""Significant bits."""

SPEEDRUN_TRIPLES = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Another list in use: hand-tuned for the modded-nanogpt speedrun."""


def test_coefficients_equal_the_published_five():
    np.testing.assert_allclose(polar_express_coefficients(5), oracle.PUBLISHED_POLAR_EXPRESS, rtol=1e-11)


def test_newton_schulz_is_the_published_triple_at_every_step():
    assert newton_schulz_coefficients(3) == ((3.4445, -4.7750, 2.0315),) * 3


@pytest.mark.parametrize(
    ("steps", "shape", "most"),
    [
        (4, (256, 256), 0.17),
        (4, (256, 1024), 0.08),
        (3, (256, 256), 0.3),
        (3, (256, 1024), 0.09),
        (2, (256, 256), 0.5),
        (2, (256, 1024), 0.3),
    ],
)
def test_few_steps_are_made_for_what_they_can_lift(steps, shape, most):
    """Singular values of Gaussian matrices; docs/explanation/orthogonalization.md has these distances."""
    sigmas = np.linalg.svd(np.random.default_rng(0).standard_normal(shape), compute_uv=False)

    def distance(coefficients):
        found = sigmas / np.linalg.norm(sigmas) / 1.02
        for a, b, c in coefficients:
            found = a * found + b * found**3 + c * found**5
        return np.sqrt(np.mean((found - 1) ** 2))

    found = distance(polar_express_coefficients(steps))
    assert found < most
    assert found < 0.8 * distance(polar_express_coefficients(steps, lower_bound=1e-3))


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


@pytest.mark.parametrize(
    ("coefficients", "bits", "expected"),
    [
        (polar_express_coefficients(5), FLOAT16, (2, 4)),
        (polar_express_coefficients(8), FLOAT16, (2, 4)),  # flat polynomials at the end, where all is nearly one
        (polar_express_coefficients(5), FLOAT32, (2, 4)),
        (polar_express_coefficients(5), BFLOAT16, (1, 2, 3, 4)),  # at every step: the standard form
        (newton_schulz_coefficients(8), FLOAT16, (2, 4, 6)),
        (SPEEDRUN_TRIPLES, FLOAT16, (2, 4)),
        (((1.5, -0.5, 0.0),) * 10, FLOAT16, (6,)),
        (((1.0, 0.0, 0.0),) * 3, FLOAT16, ()),  # the identity
        (((2.0, 0.0, 0.0), (0.0, 1.0, 0.0)), FLOAT16, (1,)),  # no linear part: nothing bounds the relative error
        (((30.0, 0.0, 0.0), (1.0, -1.0, 0.0)), FLOAT16, (1,)),  # too steep
        (((1e200, 0.0, 0.0), (1e200, 1e200, 0.0), (2.0, -1.0, 0.0)), FLOAT16, (1, 2)),  # beyond any float
    ],
)
def test_where_the_gram_form_restarts(coefficients, bits, expected):
    assert gram_restarts(coefficients, bits) == expected


@given(st.integers(1, 9), st.floats(1e-6, 0.5), st.floats(0, 0.3))
def test_no_rounding_error_grows_beyond_three_percent_before_the_gram_form_restarts(steps, lower, cushion):
    """Followed through the recursion itself, for eigenvalues that are off by what float16 is off by."""
    coefficients = polar_express_coefficients(steps, lower_bound=lower, cushion=cushion)
    starts = (0, *gram_restarts(coefficients, FLOAT16), steps)
    sigma = np.append(np.geomspace(1e-8, 1.0, 2000), 0.0)[::-1]
    for start, stop in itertools.pairwise(starts):
        exact = sigma**2
        small = exact < 0.01 * exact.max()  # large eigenvalues are as exact as any product
        wrong = exact - 0.25 * 2.0**-FLOAT16 * exact.max()
        factor = wrong_factor = 1.0
        for a, b, c in coefficients[start:stop]:
            h, wrong_h = a + b * exact + c * exact**2, a + b * wrong + c * wrong**2
            factor, wrong_factor = factor * h, wrong_factor * wrong_h
            exact, wrong = exact * h**2, wrong * wrong_h**2
        np.testing.assert_allclose(wrong_factor[small], factor[small], rtol=0.03)
        sigma = sigma * factor
