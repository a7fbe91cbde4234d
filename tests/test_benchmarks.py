"""The benchmarks' arithmetic and tables; what they measure needs hours and a GPU, and is in benchmarks/results."""

import argparse
import json
import math
import statistics
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from quintic.train.config import Config
from quintic.train.options import parse

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import optimizer_step
import optimizer_step_contestants as contestants
import optimizer_step_measure as measure
import quality

# -------------------------------------------------------------------------------- optimizer_step


def numel(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(math.prod(shape) for shape in shapes)


@pytest.mark.parametrize(
    ("name", "matrices", "others", "count"),
    [
        ("gpt124m", 40 * 768 * 768 + 22 * 3072 * 768, 2 * 50304 * 768, 64),
        ("qwen1.7b", 28 * 2048 * (2 * 2048 + 2 * 1024 + 3 * 6144), 151936 * 2048, 28 * 7 + 1),
        ("params500", 60 * 128 * (4 * 128 + 2 * 512), 128 * (2 * 4096 + 138), 500),
    ],
)
def test_the_sets_have_the_parameters_they_are_named_for(name, matrices, others, count):
    shapes = contestants.SETS[name]
    assert numel(shapes.matrices) == matrices
    assert numel(shapes.others) == others
    assert sum(shape[0] for shape in [*shapes.matrices, *shapes.others]) == count


def test_weights_come_with_normal_gradients_and_are_the_same_for_everyone():
    first, second = (measure.make_weights(contestants.SETS["tiny"], torch.device("cpu"), torch.float32) for _ in "ab")
    assert [tuple(param.shape) for param in first.all] == [(64, 64)] * 4 + [(128, 64)] * 2 + [(512, 64)] + [(64,)] * 3
    for one, other in zip(first.all, second.all, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.grad, other.grad)
    gradients = torch.cat([param.grad.flatten() for param in first.matrices])
    assert gradients.std().item() == pytest.approx(0.001, rel=0.05)
    assert (gradients != 0).all()


def test_state_counts_every_storage_once():
    flat = torch.zeros(100)
    state = {0: {"momentum": flat[:60], "more": [flat[60:], torch.zeros(3, dtype=torch.bfloat16)], "step": 7}}
    assert measure.state_bytes(state) == 400 + 6


def test_spread_is_median_and_quartiles():
    assert measure.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "least": 1.0, "n": 5}


def options(**changes: object) -> argparse.Namespace:
    values = {
        "sets": ["gpt124m"],
        "dtype": None,
        "only": None,
        "device": "cpu",
        "steps": 1,
        "seconds": 1.0,
        "peers": [],
    }
    return argparse.Namespace(**{**values, **changes})


def test_jobs_are_those_of_the_set_and_of_its_dtypes():
    jobs = [optimizer_step.key(job) for job in optimizer_step.plan_jobs(options())]
    assert len(jobs) == len(set(jobs))
    assert jobs[0] == ("gpt124m", "bf16", "quintic")
    assert ("gpt124m", "bf16", "quintic-mantissa") in jobs
    assert ("gpt124m", "fp32", "quintic-mantissa") not in jobs  # nothing to keep beside float32 weights
    small = [optimizer_step.key(job) for job in optimizer_step.plan_jobs(options(sets=["params500"]))]
    assert {dtype for _, dtype, _ in small} == {"bf16"}
    assert ("params500", "bf16", "dion-muon") not in small
    asked = optimizer_step.plan_jobs(options(sets=["params500"], only=["dion-muon"], dtype=["fp32"]))
    assert [optimizer_step.key(job) for job in asked] == [("params500", "fp32", "dion-muon")]


def measured(**changes: object) -> dict[str, object]:
    times = {"median": 12.34, "q1": 12.0, "q3": 13.0, "least": 11.9, "n": 30}
    row = {
        "set": "tiny", "dtype": "fp32", "contestant": "quintic", "caches": "empty", "first_step_s": 3.21,
        "step_ms": times, "host_ms": {**times, "median": 1.234}, "device_ms": times, "replay_ms": times,
        "state_mib": 1234.5, "peak_mib": 10.0, "whole_peak_mib": 20.0, "workspace_mib": 5.0, "syncs": "none",
        "device": "NVIDIA H200", "versions": {"python": "3.12.3"},
    }  # fmt: skip
    return {**row, **changes}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_of_the_table():
    header, _, line = optimizer_step.table([measured()])
    assert dict(zip(cells(header), cells(line), strict=True)) == {
        "optimizer": "quintic", "step (ms)": "12.3", "quartiles": "12 to 13 (n 30)", "device (ms)": "12.3",
        "host (ms)": "1.23", "replay (ms)": "12.3", "first step (s)": "3.2*", "state (MiB)": "1,234",
        "peak (MiB)": "10 / 20", "work (MiB)": "5", "syncs": "none",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"error": "OSError: no /home/me/thing.py | really"}, "failed: OSError: no FOLDER / really"),
        ({"syncs": "called a synchronizing operation"}, "**yes**"),
        ({"replay_follows_lr": False}, "12.3 (**learning rate ignored**)"),
        ({"graph_error": "RuntimeError: x"}, "no"),
        ({"within_bound": False, "workspace_bound_mib": 4.0}, "5 (bound 4: **broken**)"),
        ({"within_bound": True, "workspace_bound_mib": 2048.0}, "5 (bound 2,048: kept)"),
        ({"finite": False}, "quintic (**weights not finite**)"),
    ],
)
def test_what_went_wrong_is_in_the_table(changes, expected):
    header, _, line = optimizer_step.table([measured(**changes)])
    assert expected in cells(line)
    assert len(cells(line)) == len(cells(header))


def test_the_page_tells_why():
    rows = [measured(), measured(contestant="torch-muon", graph_error="RuntimeError: not capturable")]
    text = optimizer_step.page(rows, "python x.py", "abc")
    assert text.startswith("# `optimizer.step()` alone, on one NVIDIA H200\n")
    assert "- torch-muon, tiny, fp32: RuntimeError: not capturable\n" in text


# -------------------------------------------------------------------------------- quality


def run(variant: str, rate: float, seed: int, losses: list[float]) -> quality.Run:
    curve = tuple((20 * (index + 1), loss) for index, loss in enumerate(losses))
    return quality.Run(variant, rate, seed, losses[-1], losses[-1] / 2, 1.0, curve)


@pytest.mark.parametrize("variant", quality.VARIANTS, ids=lambda variant: variant.name)
def test_the_variants_are_what_they_are_called(variant):
    arguments = [*variant.options, variant.rate_option, "0.5", *quality.FIXED_OPTIONS]
    config = parse(Config, arguments, "train", "", default=Config()).optim
    steps = [one.name for one in quality.VARIANTS].index(variant.name)
    assert (config.adamw_lr if steps == 0 else config.muon_lr) == 0.5
    assert config.optimizer == ("muon" if steps > 0 else "adamw")
    if steps > 0:
        assert config.orthogonalizer == ("polar_express" if steps > 1 else "newton_schulz")
    assert config.normalize == ("neuron" if steps > 2 else None)
    assert config.cautious == (steps > 3)


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
    assert quality.extension(means) == expected


@pytest.mark.parametrize(
    ("loss", "expected"), [(5.0, 20.0), (3.5, 30.0), (3.0, 40.0), (2.75, 45.0), (2.0, 60.0), (1.9, None)]
)
def test_steps_to_reach_lie_on_the_line_between_evaluations(loss, expected):
    assert quality.steps_to_reach([(20, 4.0), (40, 3.0), (60, 2.0)], loss) == expected


def test_steps_are_compared_with_the_same_seed():
    baseline = [run("adamw", 0.1, 1, [4.0, 3.0]), run("adamw", 0.1, 2, [4.0, 2.5])]
    runs = [run("muon", 0.1, 2, [3.0, 2.0]), run("muon", 0.1, 1, [3.5, 2.5])]
    assert quality.steps_to_baseline(runs, baseline) == [30.0, 30.0]
    assert quality.steps_to_baseline([run("muon", 0.1, 1, [4.0, 3.5])], baseline) is None


def some_results() -> list[quality.Result]:
    runs = []
    for number, variant in enumerate(quality.VARIANTS):
        for rate, excess in ((0.01, 0.2), (0.02, 0.0), (0.03, 0.1)):
            for seed in (11, 21, 22):
                end = 3.0 - 0.1 * number + excess + 0.01 * (seed - 21)
                runs.append(run(variant.name, rate, seed, [end + 2.0, end + 1.0, end]))
    return quality.summarize(runs, [11], [21, 22])


def test_the_best_rate_is_chosen_by_the_tuning_seeds_alone():
    results = some_results()
    assert [result.variant for result in results] == list(quality.VARIANTS)
    for result in results:
        assert result.rate == 0.02
        assert not result.at_edge
        assert [one.seed for one in result.runs] == [21, 22]


def test_a_band_has_the_steps_that_all_runs_have():
    runs = [run("muon", 0.1, 1, [4.0, 3.0, 2.0]), run("muon", 0.1, 2, [5.0, math.inf, 2.5])]
    assert quality.band(runs) == [(20, 4.0, 4.5, 5.0), (60, 2.0, 2.25, 2.5)]


def test_the_figure_is_an_svg_with_a_line_and_a_band_for_each_variant():
    root = ET.fromstring(quality.figure(some_results()))
    names = [path.get("class") for path in root.iter("{http://www.w3.org/2000/svg}path")]
    for index in range(len(quality.VARIANTS)):
        assert names.count(f"band c{index}") == 1
        assert names.count(f"line c{index}") == 2  # the curve and its sign in the legend
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "+ cautious decay: 2.605" in texts
    assert quality.figure([]) == ""


def test_the_table_has_means_and_ranges():
    wanted = argparse.Namespace(tuning_seeds=[11], seeds=[21, 22], name="quality", base="")
    text = quality.page(some_results(), wanted, {"computing": "", "command": "python x.py", "commit": "abc"})
    lines = [cells(line) for line in text.splitlines() if line.startswith("|")]
    # Both curves fall by 1 in 20 steps, so 0.1 less at the end is 2 steps sooner.
    assert lines[2] == ["AdamW", "0.02", "3.005 (3.000 to 3.010)", "1.5025 (1.5000 to 1.5050)", "-"]
    assert lines[3] == ["Muon", "0.02", "2.905 (2.900 to 2.910)", "1.4525 (1.4500 to 1.4550)", "58 (58 to 58), 97 %"]


def test_a_run_that_diverged_is_the_worst():
    row = {"variant": "muon", "rate": 1.0, "seed": 1, "loss": math.nan, "bpb": None, "seconds": 1, "curve": [[20, 3.0]]}
    diverged = quality.Run.from_row(json.loads(json.dumps(row)))
    assert math.isinf(diverged.bpb)
    assert math.isinf(diverged.loss)
    assert quality.best_rate({1.0: statistics.mean([diverged.bpb]), 2.0: 5.0}) == 2.0
