"""Schedules: exact values at the edges, and their shape between them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintic.train.config import Config, OptimConfig, ScheduleConfig
from quintic.train.schedule import automatic_batch, is_due, lr_multiplier, momentum_at, weight_decay_multiplier


def lr(step: int, total: int, warmup: float, warmdown: float, final: float = 0.0) -> float:
    return lr_multiplier(ScheduleConfig(warmup_frac=warmup, warmdown_frac=warmdown, final_lr_frac=final), step, total)


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


def config(start: float, peak: float, end: float | None, warmup: int, warmdown: float) -> Config:
    momenta = OptimConfig(momentum_start=start, momentum=peak, momentum_end=end, momentum_warmup_steps=warmup)
    return Config(optim=momenta, schedule=ScheduleConfig(warmup_frac=0, warmdown_frac=warmdown))


def test_the_momentum_rises_and_falls() -> None:
    def course(end: float | None, warmup: int = 4) -> list[float]:
        return [momentum_at(config(0.85, 0.95, end, warmup, warmdown=0.4), step, 10) for step in range(10)]

    rise = [0.85, 0.875, 0.9, 0.925]
    assert course(None) == pytest.approx([*rise, *[0.95] * 6], abs=1e-15)
    assert course(None, warmup=0) == [0.95] * 10
    assert course(0.75) == pytest.approx([*rise, 0.95, 0.95, 0.95, 0.9, 0.85, 0.8], abs=1e-15)
    # The warm-up goes first where the two overlap, as in nanochat.
    assert course(0.75, warmup=8)[:8] == pytest.approx([0.85 + step / 80 for step in range(8)], abs=1e-15)


@given(st.integers(0, 499), st.integers(0, 500), *[st.floats(0, 0.99)] * 3, st.floats(0, 1))
def test_the_momentum_stays_between_its_ends(
    step: int, warmup: int, start: float, peak: float, end: float, warmdown: float
) -> None:
    value = momentum_at(config(start, peak, end, warmup, warmdown), step, 500)
    assert min(start, peak, end) - 1e-12 <= value <= max(start, peak, end) + 1e-12
    assert step < warmup or step >= 500 - round(500 * warmdown) or value == peak


def test_the_weight_decay() -> None:
    assert [weight_decay_multiplier(step, 4) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert weight_decay_multiplier(0, 1) == 1.0
    half_cosine = [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]
    assert [weight_decay_multiplier(step, 4, "cosine") for step in range(4)] == pytest.approx(half_cosine, abs=1e-15)


def test_a_warm_up_in_steps_takes_the_place_of_a_share() -> None:
    rates = [lr_multiplier(ScheduleConfig(warmup_frac=0.9, warmdown_frac=0.5, warmup_steps=2), s, 10) for s in range(6)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1])
    rates = [lr_multiplier(ScheduleConfig(warmup_frac=0, warmdown_frac=0.5, warmup_steps=40), s, 4) for s in range(4)]
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1])


@given(st.integers(1, 10**13), st.integers(1, 10**13))
def test_the_automatic_batch_is_the_power_of_two_nearest_to_the_law(tokens: int, reference: int) -> None:
    batch = automatic_batch(tokens, reference)
    assert batch & (batch - 1) == 0
    ideal = 524288.0 * (tokens / reference) ** 0.383
    assert batch == 1 or ideal / 2**0.5 * (1 - 1e-9) <= batch <= ideal * 2**0.5 * (1 + 1e-9)


def test_what_is_due() -> None:
    assert [step for step in range(1, 10) if is_due(step, 3)] == [3, 6, 9]
    assert not any(is_due(step, 0) for step in range(10))
