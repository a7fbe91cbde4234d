"""Coefficients of the odd quintics p(s) = a s + b s^3 + c s^5 that orthogonalisation composes.

A list has one triple (a, b, c) per step. Two lists are made here: the Muon post's triple, repeated, and Polar Express,
the best polynomials for a given number of steps, fitted by Remez exchange. `gram_restarts` derives from such a list the
steps at which the Gram form has to restart. Everything is plain Python arithmetic on floats and decimals, no tensors.
Read next: `orthogonalize.py`. The maths and the measurements: docs/explanation/orthogonalization.md.

Sources: Muon's triple, K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/;
Polar Express, N. Amsel et al. 2025, https://arxiv.org/abs/2505.16932, algorithm 1 and section 4.
"""

import decimal
import functools
import math

from quintic.optim.numeric.numbers import is_count

__all__ = [
    "DEFAULT_STEPS",
    "SAFETY",
    "Coefficients",
    "Triple",
    "checked_steps",
    "gram_restarts",
    "newton_schulz_coefficients",
    "polar_express_coefficients",
]

Triple = tuple[float, float, float]
Coefficients = tuple[Triple, ...]

DEFAULT_STEPS = 5

# Polar Express: the guard against rounding (section 4.4). Matrices are normalised to a norm of 1 / (1 + SAFETY) and
# every polynomial but the last is made for arguments that are larger by the same factor.
SAFETY = 2e-2

# Polar Express: the smallest normalised singular value aimed at, with fewer than five steps in order, and the cushion
# (section 4.4). Few steps lift no singular value of 1e-3 to one, and miss all others when they try.
_LOWER_BOUND = 1e-3
_LOWER_BOUNDS_OF_FEW = (2e-2, 2e-2, 2e-2, 5e-3)
_CUSHION = 2e-2

# The triple of the Muon post: chosen for the steepest slope at zero that keeps singular values in about [0.7, 1.2].
_MUON_TRIPLE = (3.4445, -4.7750, 2.0315)

# Below this relative width of [lower, upper] the optimal polynomial equals its limit to the last bit.
_CONVERGED = 5e-6

# Digits of the exchange algorithm, and the relative change of the error at which it has converged.
_REMEZ_DIGITS = 80
_REMEZ_TOLERANCE = decimal.Decimal("1e-12")

# How much the Gram form may enlarge a rounding error of the Gram matrix before it restarts, for products with at least
# `_GRAM_DIGITS` significant bits; with fewer bits the limit is lower. Such an error is half a unit roundoff or less, so
# that 60 of them in float16 change a singular value by some 60 / 2 / 2^11 = 1.5 %, which SAFETY allows for. Measured in
# benchmarks/gram_error.py: up to 120 the errors are close to the standard form's, beyond that they grow.
GRAM_AMPLIFICATION = 60.0
_GRAM_DIGITS = 11

# Intervals of the grid on which the slopes of a polynomial are evaluated.
_GRID = 200


def newton_schulz_coefficients(steps: int = DEFAULT_STEPS) -> Coefficients:
    """Return the Muon post's triple `(a, b, c)`, `steps` times; a ValueError if `steps` < 1."""
    return (_MUON_TRIPLE,) * checked_steps(steps)


@functools.cache
def polar_express_coefficients(
    steps: int = DEFAULT_STEPS,
    *,
    lower_bound: float | None = None,
    safety: float = SAFETY,
    cushion: float = _CUSHION,
) -> Coefficients:
    """Return the `steps` triples `(a, b, c)` whose composition is nearest to one on `[lower_bound, 1]`.

    Five steps with the defaults are the five triples that the modded-nanogpt speedrun publishes for a safety of 2e-2
    and a "cushion" of 2. As a ratio of the two ends of the interval, which is what Polar Express' algorithm and the
    argument here mean, that cushion is 0.02; a ratio of 2 would leave no interval.

    Args:
        steps: how many polynomials are composed, >= 1.
        lower_bound: smallest singular value (after normalisation, in (0, 1)) that must reach one; None for 1e-3, with
            four steps 5e-3 and with fewer 2e-2.
        safety: every polynomial but the last is evaluated at x / (1 + safety), so that rounding cannot push a singular
            value past the interval the next one is made for.
        cushion: no polynomial is fitted to an interval whose lower end is below `cushion` times its upper end.

    Raises:
        ValueError: an argument is out of range.

    Source: arXiv 2505.16932, theorem 3.1 (greedy choice is optimal), algorithm 1, section 4.4 (safety, cushion).
    """
    steps = checked_steps(steps)
    if lower_bound is None:
        lower_bound = _LOWER_BOUND if steps > len(_LOWER_BOUNDS_OF_FEW) else _LOWER_BOUNDS_OF_FEW[steps - 1]
    if not 0.0 < lower_bound < 1.0:
        raise ValueError(f"lower_bound={lower_bound}: must lie strictly between 0 and 1")
    if safety < 0.0 or not 0.0 <= cushion < 1.0:
        raise ValueError(f"safety={safety}, cushion={cushion}: need safety >= 0 and 0 <= cushion < 1")
    # Greedy: fit each polynomial to the interval [lower, upper] that the ones before it map [lower_bound, 1] to.
    lower, upper = lower_bound, 1.0
    triples = []
    for index in range(steps):
        a, b, c = _minimax_quintic(max(lower, cushion * upper), upper)
        if cushion * upper > lower:
            # Fitted to a narrower interval than the true one: centre the image of the true one around 1 again.
            centre = (_evaluate(a, b, c, lower) + _evaluate(a, b, c, upper)) / 2
            a, b, c = a / centre, b / centre, c / centre
        if index < steps - 1:
            shrink = 1 + safety
            a, b, c = a / shrink, b / shrink**3, c / shrink**5
        triples.append((a, b, c))
        # A minimax polynomial equioscillates around 1, so its image is symmetric about 1.
        lower = _evaluate(a, b, c, lower)
        upper = 2 - lower
    return tuple(triples)


@functools.cache
def gram_restarts(
    coefficients: Coefficients, significant_bits: int, amplification: float = GRAM_AMPLIFICATION
) -> tuple[int, ...]:
    """Return the steps before which the Gram form computes its Gram matrix anew, in ascending order; never 0.

    Between two restarts the Gram matrix R = X X^T is updated without X: an eigenvalue l becomes l h(l)^2, with
    h(l) = a + b l + c l^2. A rounding error e of an eigenvalue grows with the slope of that map (a^2 for small
    eigenvalues), every product adds an error of its own, and the next h changes by b e / a in relation to itself. A
    step at which this would exceed the limit starts from a fresh R, whose error is e again.

    The bound holds for every matrix: it takes the largest slope over all singular values in [0, 1]. A list that is too
    steep for even one step without a restart restarts at every step, which makes the Gram form the standard form.

    Args:
        coefficients: one triple per step.
        significant_bits: mantissa bits of the products' dtype with the implicit one: 8 for bfloat16, 11 for float16.
        amplification: the limit for 11 bits and more.
    """
    limit = amplification * min(1.0, 2.0 ** (significant_bits - _GRAM_DIGITS))
    restarts = []
    error = 1.0  # in units of a fresh R's rounding error
    sigmas = [index / _GRID for index in range(_GRID + 1)]  # singular values before the current step
    for step, (a, b, c) in enumerate(coefficients):
        top = max(s * s for s in sigmas)
        eigenvalues = [top * index / _GRID for index in range(_GRID + 1)]
        # Relative change of h for an error of one: the largest |h'(l)| = |b + 2 c l|, over a = h(0).
        sensitivity = max(abs(b + 2 * c * x) for x in eigenvalues) / abs(a) if a else math.inf
        # `not <=` rather than `>`: a list that leaves the range of floats gives NaN or infinity and must restart, too.
        if step > 0 and not error * sensitivity <= limit:
            restarts.append(step)
            error = 1.0
        # Slope of l -> l h(l)^2: the product rule gives h (h + 2 l h').
        slopes = [(h := a + x * (b + x * c)) * (h + 2 * x * (b + 2 * c * x)) for x in eigenvalues]
        error = error * max(map(abs, slopes)) + 1.0
        sigmas = [_evaluate(a, b, c, s) for s in sigmas]
    return tuple(restarts)


def checked_steps(steps: int) -> int:
    """Return the number of steps; a ValueError if it is no integer of at least one."""
    if not is_count(steps):
        raise ValueError(f"steps={steps!r}: orthogonalisation needs a whole number of steps, at least one")
    return steps


def _evaluate(a: float, b: float, c: float, s: float) -> float:
    return s * (a + s * s * (b + s * s * c))


def _minimax_quintic(lower: float, upper: float) -> tuple[float, float, float]:
    """Return the odd quintic whose largest distance from 1 on [lower, upper] is least, by Remez exchange.

    1 - p is +e, -e, +e, -e at lower, q, r, upper, where q < r are the extrema of p inside. Decimal arithmetic is
    needed because the columns s, s^3, s^5 are nearly dependent on a narrow interval.
    """
    # A narrow interval: the limit is p(s) = (15 s - 10 s^3 + 3 s^5) / 8, flat at s = 1, scaled to `upper`.
    if lower / upper >= 1 - _CONVERGED:
        return 15 / 8 / upper, -10 / 8 / upper**3, 3 / 8 / upper**5
    with decimal.localcontext(prec=_REMEZ_DIGITS):
        low, high = decimal.Decimal(lower), decimal.Decimal(upper)
        q, r = (3 * low + high) / 4, (low + 3 * high) / 4
        error = decimal.Decimal("Infinity")
        while True:
            # Solve for the polynomial and the error that it has at the four points, then move the inner two.
            a, b, c, new_error = _solve([[s, s**3, s**5, sign] for s, sign in ((low, 1), (q, -1), (r, 1), (high, -1))])
            # p'(s) = a + 3 b s^2 + 5 c s^4 vanishes at the two inner extrema.
            root = (9 * b * b - 20 * a * c).sqrt()
            q, r = ((-3 * b - root) / (10 * c)).sqrt(), ((-3 * b + root) / (10 * c)).sqrt()
            if abs(error - new_error) <= abs(new_error) * _REMEZ_TOLERANCE:
                return float(a), float(b), float(c)
            error = new_error


def _solve(rows: list[list[decimal.Decimal | int]]) -> list[decimal.Decimal]:
    """Solve the square system `rows` x = 1 by Gauss-Jordan elimination with partial pivoting."""
    system = [[decimal.Decimal(value) for value in row] + [decimal.Decimal(1)] for row in rows]
    for column in range(len(system)):
        pivot = max(range(column, len(system)), key=lambda row: abs(system[row][column]))
        system[column], system[pivot] = system[pivot], system[column]
        head = system[column]
        system[column] = head = [value / head[column] for value in head]
        for index, row in enumerate(system):
            if index != column:
                system[index] = [value - row[column] * top for value, top in zip(row, head, strict=True)]
    return [row[-1] for row in system]
