"""The arithmetic of `benchmarks.training.quality`, whose runs take hours."""

import json
import math
import statistics

import pytest

from benchmarks.training import quality_page


def run(variant: str, rate: float, seed: int, losses: list[float]) -> quality_page.Run:
    curve = tuple((20 * (index + 1), loss) for index, loss in enumerate(losses))
    return quality_page.Run(variant, rate, seed, losses[-1], losses[-1] / 2, 1.0, curve)


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        ({0.02: 1.3, 0.03: 1.2, 0.04: 1.25}, []),
        ({0.02: 1.3, 0.03: 1.2, 0.04: 1.1}, [0.053]),
        ({0.02: 1.1, 0.04: 1.2, 0.06: math.inf}, [0.01]),
        ({0.02: 1.1}, []),
        ({}, []),
    ],
)
def test_the_grid_grows_where_the_best_rate_is_at_its_end(means, expected):
    assert quality_page.extension(means) == expected


@pytest.mark.parametrize(
    ("loss", "expected"), [(5.0, 20.0), (3.5, 30.0), (3.0, 40.0), (2.75, 45.0), (2.0, 60.0), (1.9, None)]
)
def test_steps_to_reach_lie_on_the_line_between_evaluations(loss, expected):
    assert quality_page.steps_to_reach([(20, 4.0), (40, 3.0), (60, 2.0)], loss) == expected


def test_steps_are_compared_with_the_same_seed():
    baseline = [run("adamw", 0.1, 1, [4.0, 3.0]), run("adamw", 0.1, 2, [4.0, 2.5])]
    runs = [run("muon", 0.1, 2, [3.0, 2.0]), run("muon", 0.1, 1, [3.5, 2.5])]
    assert quality_page.steps_to_baseline(runs, baseline) == [30.0, 30.0]
    assert quality_page.steps_to_baseline([run("muon", 0.1, 1, [4.0, 3.5])], baseline) is None


def test_a_band_has_the_steps_that_all_runs_have():
    runs = [run("muon", 0.1, 1, [4.0, 3.0, 2.0]), run("muon", 0.1, 2, [5.0, math.inf, 2.5])]
    assert quality_page.band(runs) == [(20, 4.0, 4.5, 5.0), (60, 2.0, 2.25, 2.5)]


def test_a_run_that_diverged_is_the_worst():
    row = {"variant": "muon", "rate": 1.0, "seed": 1, "loss": math.nan, "bpb": None, "seconds": 1, "curve": [[20, 3.0]]}
    diverged = quality_page.Run.from_row(json.loads(json.dumps(row)))
    assert math.isinf(diverged.bpb)
    assert math.isinf(diverged.loss)
    assert quality_page.best_rate({1.0: statistics.mean([diverged.bpb]), 2.0: 5.0}) == 2.0
