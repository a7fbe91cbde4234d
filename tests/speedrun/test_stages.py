"""The stages of the speedrun against the numbers of the race's table."""

from dataclasses import replace

import pytest

from quintic.errors import ConfigError
from quintic.speedrun.stages import SPEEDRUN, TINY, Track


def test_the_run_has_1270_scheduled_steps_and_15_more():
    assert SPEEDRUN.steps == 1285
    assert SPEEDRUN.starts == (0, 423, 847, 1270)


@pytest.mark.parametrize(
    ("step", "batch", "document", "windows"),
    [
        (0, 131_072, 896, (128, 384)),
        (422, 131_072, 896, (128, 384)),
        (423, 262_144, 2048, (384, 896)),
        (846, 262_144, 2048, (384, 896)),
        (847, 393_216, 2048, (640, 1408)),
        (1269, 393_216, 2048, (640, 1408)),
        (1270, 393_216, 2048, (768, 1664)),
        (1284, 393_216, 2048, (768, 1664)),
        (1285, 393_216, 2048, (768, 2560)),
    ],
)
def test_batches_documents_and_windows_change_with_the_stages(step, batch, document, windows):
    settings = SPEEDRUN.at(step)
    assert (settings.batch_tokens, settings.document_tokens, settings.windows) == (batch, document, windows)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 1.0),
        (422, 1.0),
        (423, 1.52),
        (508, 1.52),
        (889, 1.73 * 0.5 + 0.15 * 0.5),  # half of the 762 steps in which rates fall
        (1269, 1.73 / 762 + 0.15 * 761 / 762),
        (1270, 0.15),
        (1284, 0.15),
    ],
)
def test_rates_follow_the_batch_and_fall_to_15_percent(step, rate):
    assert SPEEDRUN.at(step).rate == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize(
    ("step", "momentum"), [(0, 0.85), (150, 0.9), (300, 0.95), (1235, 0.95), (1236, 0.948), (1260, 0.9), (1284, 0.852)]
)
def test_momentum_rises_in_300_steps_and_falls_in_the_last_50(step, momentum):
    assert SPEEDRUN.at(step).momentum == pytest.approx(momentum, abs=1e-12)


@pytest.mark.parametrize(
    ("step", "weights"),
    [
        (0, (1.0, 0.5, 0.25)),
        (141, (1.0, 0.5, 0.25 * 2 / 3)),
        (423, (1.0, 0.5)),
        (635, (1.0, 0.25)),
        (847, (1.0,)),
        (1285, (1.0,)),
    ],
)
def test_the_predictions_further_ahead_fade_stage_by_stage(step, weights):
    assert SPEEDRUN.at(step).loss_weights[:-1] == pytest.approx(weights, abs=1e-12)


def test_head_and_embedding_part_once_after_the_first_odd_step_of_the_third_stage():
    assert [step for step in range(SPEEDRUN.steps + 1) if SPEEDRUN.at(step).unties] == [847]
    even = SPEEDRUN.scaled(200)
    assert even.starts[2] % 2 == 0 or even.untie_step == even.starts[2]
    assert even.untie_step % 2 == 1


@pytest.mark.parametrize(
    ("untie_at", "expected"), [(0, [1]), (1, [1]), (100, [101]), (101, [101]), (1284, []), (1285, []), (5000, [])]
)
def test_head_and_embedding_part_at_any_step(untie_at: int, expected: list[int]):
    track = replace(SPEEDRUN, untie_at=untie_at)
    assert [step for step in range(SPEEDRUN.steps) if track.at(step).unties] == expected


@pytest.mark.parametrize("steps", [8, 24, 165, 200, 600, 1285, 2570])
@pytest.mark.parametrize("track", [SPEEDRUN, TINY], ids=["speedrun", "tiny"])
def test_a_scaled_track_goes_through_every_stage_in_its_steps(track: Track, steps: int):
    scaled = track.scaled(steps)
    assert scaled.steps == steps
    stages = [scaled.at(step).stage for step in range(steps)]
    assert set(stages) == {0, 1, 2, 3}
    assert stages == sorted(stages)
    assert min(stages.count(stage) for stage in range(4)) >= 2
    assert scaled.at(steps - 1).rate == pytest.approx(0.15)
    assert sum(scaled.at(step).unties for step in range(steps)) == 1


def test_a_scaled_track_keeps_the_proportions():
    scaled = SPEEDRUN.scaled(257)  # a fifth
    assert (scaled.scheduled_steps, scaled.extension_steps) == (254, 3)
    assert (scaled.momentum_rise_steps, scaled.momentum_fall_steps) == (60, 10)
    assert scaled.at(30).momentum == pytest.approx(0.9)


def test_too_few_steps_are_refused():
    with pytest.raises(ConfigError, match="--steps 7: must be at least 8, for the 4 stages"):
        SPEEDRUN.scaled(7)


@pytest.mark.parametrize(("step", "weight"), [(0, 0.25), (422, 0.25), (423, 0.25), (635, 0.125), (847, 0), (1285, 0)])
def test_prefixes_count_until_the_third_stage(step, weight):
    assert SPEEDRUN.at(step).loss_weights[-1] == pytest.approx(weight, abs=1e-12)


@pytest.mark.parametrize(
    ("step", "ranks", "passes"),
    [(0, 1, 2), (423, 1, 4), (847, 1, 8), (0, 2, 1), (423, 2, 2), (847, 2, 4), (0, 8, 1), (847, 8, 1)],
)
def test_chunks_of_a_rank_go_together_up_to_65536_tokens(step, ranks, passes):
    assert SPEEDRUN.passes(SPEEDRUN.at(step), ranks) == passes
