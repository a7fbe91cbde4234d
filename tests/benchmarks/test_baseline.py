"""The search, the workers and the page of `benchmarks.training.baseline`, whose runs take minutes on GPUs."""

import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_config

from benchmarks.training import baseline, baseline_page, workers
from quintic.data.dataset import Dataset
from quintic.train.config import Config
from quintic.train.loop import train
from quintic.train.runs import create_run
from quintic.train.saved_config import to_dict


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_settings_lie_in_the_space_and_are_options(name: str) -> None:
    rng = random.Random(3)
    space = baseline.SPACES[name]
    drawn = [baseline.draw(name, rng) for _ in range(100)]
    varied = [baseline.vary(setting, name, rng) for setting in drawn for _ in range(3)]
    for setting in [*drawn, *varied]:
        assert list(setting) == list(space)
        for option, values in space.items():
            value = setting[option]
            if isinstance(values, baseline.Log):
                assert value is not None
                assert values.least <= value <= values.most
            else:
                assert value in values
        config = workers.with_values(Config(), setting)
        assert {option: workers.field_of(config, option) for option in space} == setting
    rates = [setting[f"{name}_lr"] for setting in drawn]
    least, most = space[f"{name}_lr"]
    assert statistics.median(rates) == pytest.approx(math.sqrt(least * most), rel=0.35)
    again = random.Random(3)
    assert [baseline.draw(name, again) for _ in range(100)] == drawn
    default = {option: workers.field_of(Config(), option) for option in space}
    baseline.vary(default, name, rng)  # the default is in the space, too


def job(config: Config, dataset: Dataset, *, seconds: float = 100) -> dict[str, Any]:
    end = time.time() + seconds
    return {"config": to_dict(config), "data": str(dataset.path), "deadline": end, "start_by": end}


@pytest.mark.slow
def test_a_job_is_a_run_of_the_harness(tiny_dataset: Dataset, tmp_path: Path) -> None:
    config = tiny_config(tiny_dataset, tmp_path, run="run", optimizer="adamw", clip_norm=0.5, eval_every=2)
    result = workers.train(job(config, tiny_dataset))
    expected = train(config, tiny_dataset, create_run(config), resume=False, command="", say=lambda line: None)
    assert result["bpb"] == expected.score.bpb
    assert [step for step, _ in result["curve"]] == [2, 4, 6]
    high = dict.fromkeys(("adamw_lr", "adamw_weight_decay", "embedding_lr", "scalar_lr"), 1e6)
    diverging = tiny_config(tiny_dataset, tmp_path, optimizer="adamw", **high)
    assert workers.train(job(diverging, tiny_dataset))["bpb"] is None
    assert "at step 0 of 6" in workers.train(job(config, tiny_dataset, seconds=-1))["cut"]


def result() -> dict[str, Any]:
    adamw, muon = {"adamw_lr": 0.004, "clip_norm": None}, {"muon_lr": 0.02}
    runs = []
    for seed in range(5):
        for setting, end in ((adamw, 2.0 + 0.1 * seed), ({"adamw_lr": 0.003, "clip_norm": None}, 2.5)):
            curve = [[20, 4.0], [40, 3.0], [60, end]]
            run = {"optimizer": "adamw", "part": "final", "setting": setting, "seed": seed, "curve": curve, "bpb": end}
            runs.append(run)
        end = 1.0 + 0.5 * seed
        curve = [[20, 4.0], [40, 3.0], [60, end]]
        runs.append({"optimizer": "muon", "part": "final", "setting": muon, "seed": seed, "curve": curve, "bpb": end})
    runs.append({"optimizer": "muon", "part": "random", "setting": muon, "seed": 9, "failed": "it broke"})
    return {
        "command": "c", "commit": "abc", "seconds": 9.0, "planned": 20, "at_once": 3, "devices": ["cpu"], "changed": {},
        "machine": {"cpu": "a CPU", "device": "CPU", "cores": 2, "dtype": "float32", "attention": "sdpa"},
        "versions": {"python": "3.12.3", "torch": "2"},
        "data": {"source": "python", "train_tokens": 5, "val_tokens": 4},
        "spaces": {
            "adamw": {"adamw_lr": {"least": 0.001, "most": 0.01}, "clip_norm": [None, 1.0]},
            "muon": {"muon_lr": {"least": 0.01, "most": 0.021}},
        },
        "sizes": {"trials": 1, "variations": 2, "whole": 3, "again": 4, "search_seed": 0},
        "defaults": {"adamw": {"adamw_lr": 0.003, "clip_norm": None}, "muon": muon},
        "best": {name: {"setting": best, "chosen_by": "x"} for name, best in (("adamw", adamw), ("muon", muon))},
        "runs": runs,
    }  # fmt: skip


def test_shares_are_those_of_a_line_between_evaluations() -> None:
    muon = baseline_page.finals(result(), "muon", "default")
    # To 2.2, the median of AdamW's ends: from 3.0 at step 40 to 1.0, 1.5, 2.0 at step 60; the others end above it.
    expected = [100 * (40 + 20 * 0.8 / fall) / 60 for fall in (2.0, 1.5, 1.0)] + [math.inf] * 2
    assert baseline_page.shares(muon, 2.2) == pytest.approx(expected)
    assert baseline_page.shares(muon._replace(diverged=1), 2.2)[-1] == math.inf
