"""Orthogonalisation: the polar factor of a batch of matrices, by matrix products alone.

For x = U S V^T the polar factor is U V^T: every singular value becomes one. `polar_express` and `newton_schulz`
apply a short composition of odd quintic polynomials p(s) = a s + b s^3 + c s^5 to the singular values; `svd` computes
the factor exactly and is the reference the others are measured against. Nothing here knows of parameters, learning
rates or ranks. Read next: `update.py`.

Sources: Muon's Newton-Schulz triple, K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/;
Polar Express, N. Amsel et al. 2025, https://arxiv.org/abs/2505.16932, algorithm 1 and section 4.
"""

import decimal
import functools
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = [
    "DEFAULT_STEPS",
    "Method",
    "newton_schulz",
    "newton_schulz_coefficients",
    "orthogonalization_flops",
    "orthogonalize",
    "polar_express",
    "polar_express_coefficients",
    "svd",
]

Method = Literal["polar_express", "newton_schulz", "svd"]
Coefficients = tuple[tuple[float, float, float], ...]

DEFAULT_STEPS = 5

# The triple of the Muon post: chosen for the steepest slope at zero that keeps singular values in about [0.7, 1.2].
_MUON_TRIPLE = (3.4445, -4.7750, 2.0315)

# Polar Express: smallest normalised singular value aimed at, and the two guards against rounding (section 4.4).
_LOWER_BOUND = 1e-3
_SAFETY = 2e-2
_CUSHION = 2e-2

# Below this relative width of [lower, upper] the optimal polynomial equals its limit to the last bit.
_CONVERGED = 5e-6

# Digits of the exchange algorithm, and the relative change of the error at which it has converged.
_REMEZ_DIGITS = 80
_REMEZ_TOLERANCE = decimal.Decimal("1e-12")


def newton_schulz_coefficients(steps: int = DEFAULT_STEPS) -> Coefficients:
    """Return the Muon post's triple `(a, b, c)`, `steps` times."""
    return (_MUON_TRIPLE,) * _checked_steps(steps)


@functools.cache
def polar_express_coefficients(
    steps: int = DEFAULT_STEPS,
    *,
    lower_bound: float = _LOWER_BOUND,
    safety: float = _SAFETY,
    cushion: float = _CUSHION,
) -> Coefficients:
    """Return the `steps` triples `(a, b, c)` whose composition is nearest to one on `[lower_bound, 1]`.

    Args:
        steps: how many polynomials are composed, >= 1.
        lower_bound: smallest singular value (after normalisation, in (0, 1)) that must reach one.
        safety: every polynomial but the last is evaluated at x / (1 + safety), so that rounding cannot push a singular
            value past the interval the next one is made for.
        cushion: no polynomial is fitted to an interval whose lower end is below `cushion` times its upper end.

    Raises:
        ValueError: an argument is out of range.

    Source: arXiv 2505.16932, theorem 3.1 (greedy choice is optimal), algorithm 1, section 4.4 (safety, cushion).
    """
    steps = _checked_steps(steps)
    if not 0.0 < lower_bound < 1.0:
        raise ValueError(f"lower_bound={lower_bound}: must lie strictly between 0 and 1")
    if safety < 0.0 or not 0.0 <= cushion < 1.0:
        raise ValueError(f"safety={safety}, cushion={cushion}: need safety >= 0 and 0 <= cushion < 1")
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
        lower = _evaluate(a, b, c, lower)
        upper = 2 - lower
    return tuple(triples)


def newton_schulz(
    x: Tensor,
    coefficients: Sequence[tuple[float, float, float]] | None = None,
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return p_k(... p_1(x)) after normalising each matrix, p_i(x) = a_i x + b_i (x x^T) x + c_i (x x^T)^2 x.

    Args:
        x: (..., m, n) floating point, any strides; not modified. A zero matrix gives a zero result.
        coefficients: one triple per step; None is the Muon post's triple, `DEFAULT_STEPS` times.
        compute_dtype: dtype of the products; the normalisation before them is always float32.

    Returns:
        (..., m, n) in `compute_dtype`, a new tensor.

    Source: https://kellerjordan.github.io/posts/muon/
    """
    triples = newton_schulz_coefficients() if coefficients is None else tuple(coefficients)
    return _compose(x, triples, margin=0.0, compute_dtype=compute_dtype)


def polar_express(x: Tensor, steps: int = DEFAULT_STEPS, *, compute_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the Polar Express approximation of the polar factor of each matrix of `x`.

    Args:
        x: (..., m, n) floating point, any strides; not modified. A zero matrix gives a zero result.
        steps: number of polynomials, >= 1.
        compute_dtype: dtype of the products; the normalisation before them is always float32.

    Returns:
        (..., m, n) in `compute_dtype`, a new tensor.

    Source: arXiv 2505.16932, algorithm 1.
    """
    return _compose(x, polar_express_coefficients(steps), margin=_SAFETY, compute_dtype=compute_dtype)


def svd(x: Tensor) -> Tensor:
    """Return the exact polar factor U V^T of each matrix of `x` (singular directions of size zero stay zero).

    Args:
        x: (..., m, n) floating point; not modified. Computed in float64 for float64 input, else in float32.

    Returns:
        (..., m, n) in the dtype of the computation.
    """
    work = x if x.dtype == torch.float64 else _normalized(x, margin=0.0)
    u, s, vh = torch.linalg.svd(work, full_matrices=False)
    if s.numel() == 0:
        return torch.zeros_like(work)
    cutoff = s[..., :1] * max(x.shape[-2:]) * torch.finfo(work.dtype).eps
    factor: Tensor = (u * (s > cutoff).to(u.dtype).unsqueeze(-2)) @ vh
    return factor


def orthogonalize(
    x: Tensor,
    method: Method = "polar_express",
    steps: int = DEFAULT_STEPS,
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return an approximation of the polar factor of each matrix of `x`.

    Args:
        x: (..., m, n) floating point, any strides; not modified. The result does not depend on its scale.
        method: `"polar_express"` (singular values end within about [0.85, 1.15]), `"newton_schulz"` (the Muon post's
            triple; within about [0.68, 1.15]) or `"svd"` (exact, slow).
        steps: polynomial steps, >= 1; `"svd"` takes none and ignores it.
        compute_dtype: dtype of the matrix products (bfloat16, float16, float32 or float64).

    Returns:
        (..., m, n) in the shape and dtype of `x`.

    Raises:
        ValueError: fewer than two dimensions, an unknown method, or `steps` < 1.
        TypeError: `x` is not floating point.
    """
    if x.ndim < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: orthogonalize needs matrices (..., m, n)")
    if not x.is_floating_point():
        raise TypeError(f"x has dtype {x.dtype}: orthogonalize needs a floating-point tensor")
    if method == "polar_express":
        return polar_express(x, steps, compute_dtype=compute_dtype).to(x.dtype)
    if method == "newton_schulz":
        return newton_schulz(x, newton_schulz_coefficients(steps), compute_dtype=compute_dtype).to(x.dtype)
    if method == "svd":
        return svd(x).to(x.dtype)
    raise ValueError(f"method={method!r}: choose one of {', '.join(map(repr, get_args(Method)))}")


def orthogonalization_flops(m: int, n: int, steps: int = DEFAULT_STEPS) -> int:
    """Return the floating-point operations of the standard form for one (m, n) matrix: steps (4 s^2 l + 2 s^3)."""
    short, long = min(m, n), max(m, n)
    return steps * (4 * short * short * long + 2 * short**3)


def _checked_steps(steps: int) -> int:
    if steps < 1:
        raise ValueError(f"steps={steps}: orthogonalisation needs at least one step")
    return steps


def _evaluate(a: float, b: float, c: float, s: float) -> float:
    return s * (a + s * s * (b + s * s * c))


def _minimax_quintic(lower: float, upper: float) -> tuple[float, float, float]:
    """Return the odd quintic with the least largest distance from 1 on [lower, upper], by Remez exchange.

    The best p equioscillates: 1 - p is +e, -e, +e, -e at lower, q, r, upper, where q < r are the extrema of p inside.
    In decimal arithmetic, because the columns s, s^3, s^5 of a narrow interval are all but dependent.
    """
    if lower / upper >= 1 - _CONVERGED:
        return 15 / 8 / upper, -10 / 8 / upper**3, 3 / 8 / upper**5
    with decimal.localcontext(prec=_REMEZ_DIGITS):
        low, high = decimal.Decimal(lower), decimal.Decimal(upper)
        q, r = (3 * low + high) / 4, (low + 3 * high) / 4
        error = decimal.Decimal("Infinity")
        while True:
            a, b, c, new_error = _solve([[s, s**3, s**5, sign] for s, sign in ((low, 1), (q, -1), (r, 1), (high, -1))])
            # p'(s) = a + 3 b s^2 + 5 c s^4 vanishes at the two inner extrema.
            root = (9 * b * b - 20 * a * c).sqrt()
            q, r = ((-3 * b - root) / (10 * c)).sqrt(), ((-3 * b + root) / (10 * c)).sqrt()
            if abs(error - new_error) <= abs(new_error) * _REMEZ_TOLERANCE:
                return float(a), float(b), float(c)
            error = new_error


def _solve(rows: list[list[decimal.Decimal | int]]) -> list[decimal.Decimal]:
    """Return x of the square system `rows` x = 1, by elimination with row exchanges."""
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


def _normalized(x: Tensor, margin: float, *, double: bool = False) -> Tensor:
    """Return `x` over (1 + margin) times its Frobenius norm, in float32 or float64, for any scale; zero stays zero."""
    work = x.double() if double else x.float()
    if work.numel() == 0:
        return work
    # Two divisions: squares of entries below 1e-19 or above 1e19 would leave float32's range.
    peak = work.abs().amax(dim=(-2, -1), keepdim=True)
    work = work / torch.where(peak > 0, peak, torch.ones_like(peak))
    norm = torch.linalg.vector_norm(work, dim=(-2, -1), keepdim=True) * (1 + margin)
    return work / torch.where(norm > 0, norm, torch.ones_like(norm))


def _compose(x: Tensor, coefficients: Coefficients, *, margin: float, compute_dtype: torch.dtype) -> Tensor:
    out = _normalized(x, margin, double=compute_dtype == torch.float64).to(compute_dtype)
    batch_shape, (m, n) = out.shape[:-2], out.shape[-2:]
    if out.numel() == 0:
        return out
    tall = m > n
    if tall:
        out = out.mT  # the small Gram matrix is the one on the short side
    out = out.reshape(-1, min(m, n), max(m, n)).contiguous()
    for a, b, c in coefficients:
        gram = out @ out.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        out = torch.baddbmm(out, polynomial, out, beta=a)
    out = out.reshape(*batch_shape, min(m, n), max(m, n))
    return out.mT if tall else out
