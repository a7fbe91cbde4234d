"""A run that is made longer: its schedules from there on, the bits that stay the same, and what the report says."""

import contextlib
import dataclasses
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Killed, course, error_of, final_weights, tiny_config

from quintic.cli import main
from quintic.data.dataset import Dataset
from quintic.errors import ConfigError
from quintic.report.history import RunHistory
from quintic.train.config import Config
from quintic.train.loop import train
from quintic.train.runs import create_run
from quintic.train.saved_config import load_config
from quintic.train.trainer import Trainer


def run(config: Config, dataset: Dataset, *, into: Path | None = None, step: int | None = None) -> list[str]:
    """Start a run, or continue the one in a folder; returns what was said."""
    folder = create_run(config) if into is None else into
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train(config, dataset, folder, resume=into is not None, resume_step=step, command="test")
    return said.getvalue().splitlines()


def of_length(config: Config, steps: int | None) -> Config:
    return dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, steps=steps))


@pytest.fixture(scope="module")
def short(tiny_dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 4 steps, the last two with falling rates; without decay or a share of steps as warm-up."""
    config = tiny_config(
        tiny_dataset, tmp_path_factory.mktemp("short"), run="run", steps=4, warmup_steps=1, warmdown_frac=0.5,
        weight_decay=0.0, sample_tokens=1,
    )  # fmt: skip
    run(config, tiny_dataset)
    return config.run.runs_dir / "run"


def copied(short: Path, folder: Path) -> tuple[Path, Config]:
    path = Path(shutil.copytree(short, folder / "run"))
    return path, load_config(path / "config.json")


def test_from_before_the_warm_down_it_is_the_longer_run_bit_for_bit(
    short: Path, tiny_dataset: Dataset, tmp_path: Path
) -> None:
    folder, config = copied(short, tmp_path)
    run(of_length(config, 8), tiny_dataset, into=folder, step=2)
    whole = dataclasses.replace(config, run=dataclasses.replace(config.run, runs_dir=tmp_path, run="whole"))
    run(of_length(whole, 8), tiny_dataset)
    assert final_weights(folder) == final_weights(tmp_path / "whole")
    assert course(folder) == course(tmp_path / "whole")
    history = RunHistory.load(folder)
    assert history.repeat is not None
    assert history.repeat.endswith(" && quintic train --resume --steps 8 --resume-step 2")


def test_a_longer_run_that_goes_back_is_repeated_from_there(short: Path, tiny_dataset: Dataset, tmp_path: Path) -> None:
    folder, config = copied(short, tmp_path)
    config = of_length(config, 6)
    run(dataclasses.replace(config, run=dataclasses.replace(config.run, keep=9)), tiny_dataset, into=folder)
    run(load_config(folder / "config.json"), tiny_dataset, into=folder, step=2)
    history = RunHistory.load(folder)
    assert history.total_steps == 6
    assert history.repeat is not None
    # Steps 3 and 4 were made anew, with the rates of six steps.
    assert history.repeat.endswith(" && quintic train --resume --steps 6 --resume-step 2")


def test_after_the_warm_down_rates_go_up_again_and_it_is_said(
    short: Path, tiny_dataset: Dataset, tmp_path: Path
) -> None:
    folder, config = copied(short, tmp_path)
    said = run(of_length(config, 8), tiny_dataset, into=folder)
    # Half of the peak at the end of four steps; in eight, step 5 is the first of the falling ones and has the peak.
    (line,) = [line for line in said if line.startswith("From 4 to 8 steps: ")]
    assert "from step 5 on, rates are those of a run of that length" in line
    assert "matrices from 0.01 to 0.02, " in line
    history = RunHistory.load(folder)
    rates = [record["lr"]["matrices"] / 0.02 for record in history.train]
    assert rates == pytest.approx([1, 1, 1, 0.5, 1, 0.75, 0.5, 0.25])
    assert history.final["step"] == history.steps == history.total_steps == 8
    assert load_config(folder / "config.json").schedule.steps == 8
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "finished after 8 steps; continued from step 4; made longer after step 4, from 4 to 8 steps." in page
    assert history.repeat is not None
    assert history.repeat.endswith(" && quintic train --resume --steps 8")


def test_a_longer_run_that_is_killed_resumes_exactly(
    short: Path, tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, config = copied(short, tmp_path / "whole")
    run(of_length(config, 8), tiny_dataset, into=whole)
    killed, config = copied(short, tmp_path / "killed")
    make_step = Trainer.train_step

    def train_step(self: Trainer) -> dict[str, Any]:
        if self.step == 5:
            raise Killed
        return make_step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        with pytest.raises(Killed):
            run(of_length(config, 8), tiny_dataset, into=killed)
    run(load_config(killed / "config.json"), tiny_dataset, into=killed)  # as without --steps
    assert final_weights(killed) == final_weights(whole)
    assert course(killed) == course(whole)
    assert RunHistory.load(killed).total_steps == 8


def test_a_length_that_was_derived_is_known_too(short: Path, tiny_dataset: Dataset, tmp_path: Path) -> None:
    folder, config = copied(short, tmp_path)
    # The run's own length, were it not given: many steps, from tokens per parameter.
    (folder / "config.json").write_text(
        (folder / "config.json").read_text(encoding="utf-8").replace('"steps": 4', '"steps": null'), encoding="utf-8"
    )
    before = (folder / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"^--steps 8: a resumed run can only be made longer, .* has \d,?\d+ steps"):
        run(of_length(config, 8), tiny_dataset, into=folder)
    assert (folder / "config.json").read_bytes() == before
    assert RunHistory.load(folder).final["step"] == 4


@pytest.mark.usefixtures("same_threads")
def test_the_command_makes_runs_longer(
    short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = copied(short, tmp_path)
    runs = ["train", "--resume", "--runs-dir", str(tmp_path)]
    assert main([*runs, "--steps", "6"]) == 0
    assert "From 4 to 6 steps" in capsys.readouterr().out.replace("\n    ", " ")
    assert RunHistory.load(folder).final["step"] == 6
    assert error_of(capsys, *runs, "--steps", "6", "--depth", "3").startswith("--depth cannot change")
    assert error_of(capsys, *runs, "--steps", "4") == (
        "--steps 4: a resumed run can only be made longer, and this one has 6 steps: leave --steps out, or start "
        "a new run"
    )
