"""The search and the workers of `benchmarks.training.baseline`, whose runs take minutes on GPUs."""

import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_config

from benchmarks.training import baseline, workers
from quintic.data.dataset import Dataset
from quintic.train.config import Config
from quintic.train.loop import train
from quintic.train.runs import create_run
from quintic.train.saved_config import to_dict, values_of


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
        assert {option: values_of(config)[option] for option in space} == setting
    rates = [setting[f"{name}_lr"] for setting in drawn]
    least, most = space[f"{name}_lr"]
    assert statistics.median(rates) == pytest.approx(math.sqrt(least * most), rel=0.35)
    again = random.Random(3)
    assert [baseline.draw(name, again) for _ in range(100)] == drawn
    default = {option: values_of(Config())[option] for option in space}
    baseline.vary(default, name, rng)  # the default is in the space, too


def job(config: Config, dataset: Dataset, *, seconds: float = 100) -> dict[str, Any]:
    end = time.time() + seconds
    return {"config": to_dict(config), "data": str(dataset.path), "deadline": end, "start_by": end}


@pytest.mark.slow
def test_a_job_is_a_run_of_the_harness(tiny_dataset: Dataset, tmp_path: Path) -> None:
    config = tiny_config(tiny_dataset, tmp_path, run="run", optimizer="adamw", clip_norm=0.5, eval_every=2)
    result = workers.train(job(config, tiny_dataset))
    expected = train(config, tiny_dataset, create_run(config), resume=False, command="")
    assert result["bpb"] == expected.final["bpb"]
    assert [step for step, _ in result["curve"]] == [2, 4, 6]
    high = dict.fromkeys(("adamw_lr", "adamw_weight_decay", "embedding_lr", "scalar_lr"), 1e6)
    diverging = tiny_config(tiny_dataset, tmp_path, optimizer="adamw", **high)
    assert workers.train(job(diverging, tiny_dataset))["bpb"] is None
    assert "at step 0 of 6" in workers.train(job(config, tiny_dataset, seconds=-1))["cut"]
