"""Statistics of few paired runs, in plain Python: differences, p values, and steps to a loss."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Mean(NamedTuple):
    """A mean of n numbers and its standard error, nan with fewer than two."""

    mean: float
    error: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Return the mean of at least one number; infinite, with no error, if one of them is."""
        n = len(values)
        if not all(map(math.isfinite, values)):
            return cls(math.inf, math.nan, n)
        error = statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
        return cls(statistics.fmean(values), error, n)


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Mean | None:
    """Return the mean of first - second over the seeds that both have; None without any."""
    seeds = sorted(first.keys() & second.keys())
    return Mean.of([first[seed] - second[seed] for seed in seeds]) if seeds else None


def p_value(difference: Mean) -> float:
    """Return the two-sided p value of a paired t-test against a difference of zero; nan without a standard error."""
    if math.isnan(difference.error):
        return math.nan
    if difference.error == 0:
        return 1.0 if difference.mean == 0 else 0.0
    return t_tail(difference.mean / difference.error, difference.n - 1)


def t_tail(t: float, freedom: int) -> float:
    """Return P(|T| >= |t|) of Student's distribution with a whole number of degrees of freedom.

    By the finite sums for whole degrees (Abramowitz and Stegun, 26.7.3 and 26.7.4), exact but for rounding.
    """
    theta = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(theta), math.cos(theta)
    # Odd: cos + 2/3 cos^3 + 2*4/(3*5) cos^5 + ...; even: 1 + 1/2 cos^2 + 1*3/(2*4) cos^4 + ...; to cos^(freedom - 2).
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    inside = 2 / math.pi * (theta + sine * total) if odd else sine * total
    return max(0.0, 1.0 - inside)


def steps_to(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """Return the step at which a curve of (step, loss) first reaches a loss, between evaluations by a line.

    None if it never does; the first evaluation if it has done so by then.
    """
    if curve and curve[0][1] <= loss:
        return curve[0][0]
    for (before, higher), (after, lower) in itertools.pairwise(curve):
        if higher > loss >= lower:
            return before + (after - before) * (higher - loss) / (higher - lower)
    return None


def equal_length(losses: Mapping[int, float], loss: float) -> float:
    """Return the number of steps with which the baseline has a loss, from its losses at several lengths.

    Between lengths by a line over the logarithm of the length, and nothing is extrapolated: 0 if the loss is above that
    of the least length, infinite if it is below that of the greatest. nan if the losses do not fall from each length to
    the next.

    Args:
        losses: length of a run, with its whole schedule -> loss at its end; at least two.
        loss: to reach.
    """
    pairs = list(itertools.pairwise(sorted(losses)))
    if any(losses[short] <= losses[long] for short, long in pairs):
        return math.nan
    for short, long in pairs:
        if loss > losses[short]:
            return 0.0
        if loss >= losses[long]:
            part = (losses[short] - loss) / (losses[short] - losses[long])
            return math.exp(math.log(short) + math.log(long / short) * part)
    return math.inf
