"""Schedules: exact values at the edges, and their shape between them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintic.train.schedule import is_due, lr_multiplier, momentum_at, weight_decay_multiplier


def lr(step: int, total: int, warmup: float, warmdown: float, final: float = 0.0) -> float:
    return lr_multiplier(step, total, warmup_frac=warmup, warmdown_frac=warmdown, final_frac=final)


@pytest.mark.parametrize(
    ("warmup", "warmdown", "final", "expected"),
    [
        (0.4, 0.4, 0.0, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]),
        (0.0, 0.0, 0.0, [1.0] * 10),
        (0.0, 0.5, 0.5, [1.0] * 5 + [1.0, 0.9, 0.8, 0.7, 0.6]),
        (0.0, 1.0, 0.0, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        (1.0, 0.0, 0.0, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
        (0.0, 0.3, 1.0, [1.0] * 10),
    ],
)
def test_the_learning_rate_of_every_step(warmup: float, warmdown: float, final: float, expected: list[float]) -> None:
    # The first listed row warms down over the last 4 steps, the first of which still has the peak.
    assert [lr(step, 10, warmup, warmdown, final) for step in range(10)] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(("warmup", "warmdown"), [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.4, 0.4), (0.02, 0.4)])
def test_a_run_of_one_step_learns_at_the_peak(warmup: float, warmdown: float) -> None:
    assert lr(0, 1, warmup, warmdown) == 1.0


@given(st.integers(1, 2000), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_the_learning_rate_rises_stays_and_falls(total: int, warmup: float, rest: float, final: float) -> None:
    warmdown = (1 - warmup) * rest
    rates = [lr(step, total, warmup, warmdown, final) for step in range(total)]
    top = rates.index(1.0)
    assert all(a < b for a, b in pairwise(rates[: top + 1]))
    assert all(a >= b - 1e-12 for a, b in pairwise(rates[top:]))
    assert 0 < rates[0] <= 1
    assert rates[-1] >= final - 1e-12 or round(warmdown * total) == 0


def test_the_momentum() -> None:
    values = [momentum_at(step, start=0.85, end=0.95, warmup_steps=4) for step in range(6)]
    assert values == pytest.approx([0.85, 0.875, 0.9, 0.925, 0.95, 0.95], abs=1e-15)
    assert momentum_at(0, start=0.85, end=0.95, warmup_steps=0) == 0.95


@given(st.integers(0, 500), st.integers(0, 500), st.floats(0, 0.99), st.floats(0, 0.99))
def test_the_momentum_stays_between_its_ends(step: int, warmup: int, start: float, end: float) -> None:
    value = momentum_at(step, start=start, end=end, warmup_steps=warmup)
    assert min(start, end) - 1e-12 <= value <= max(start, end) + 1e-12
    assert step < warmup or value == end


def test_the_weight_decay() -> None:
    assert [weight_decay_multiplier(step, 4) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert weight_decay_multiplier(0, 1) == 1.0


def test_what_is_due() -> None:
    assert [step for step in range(1, 10) if is_due(step, 3)] == [3, 6, 9]
    assert not any(is_due(step, 0) for step in range(10))
