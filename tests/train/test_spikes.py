"""Losses that jump: what is said, left out or rolled back, and that a resumed run does the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_resume import after_step
from test_saving import late_writes  # noqa: F401
from tiny_runs import Killed, course, error_of, final_weights, tiny_config, tiny_options

from quintic.data.dataset import Dataset
from quintic.errors import ConfigError, DivergedError
from quintic.report.history import METRICS_FILE, RunHistory, read_metrics
from quintic.train.config import Config
from quintic.train.loop import train
from quintic.train.metrics import LossWatch
from quintic.train.runs import create_run
from quintic.train.trainer import Trainer

STEPS = 30
SPIKES = (13, 22)


def add(self: LossWatch, loss: float, sigmas: float) -> float | None:
    """Call the losses of two steps spikes, each until the run has gone back from it."""
    take(self, loss, sigmas)
    return 7.0 if self.steps in SPIKES[self.rollbacks :] else None


take = LossWatch.add


@pytest.fixture(scope="module", autouse=True)
def _spikes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossWatch, "add", add)
        yield


def config(dataset: Dataset, runs_dir: Path, **changes: Any) -> Config:
    options = {"steps": STEPS, "save_every": 8, "eval_every": 0, "rms_every": 0}
    return tiny_config(dataset, runs_dir, **options | changes)


def run(wanted: Config, dataset: Dataset, *, resume: Path | None = None) -> Path:
    folder = create_run(wanted) if resume is None else resume
    train(wanted, dataset, folder, resume=resume is not None, command="test")
    return folder


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder / METRICS_FILE) if record["kind"] == kind]


def spikes(folder: Path) -> list[int]:
    return [int(record["step"]) for record in RunHistory.load(folder).spikes]


@pytest.fixture(scope="module")
def warned(tiny_dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(config(tiny_dataset, tmp_path_factory.mktemp("warned")), tiny_dataset)


@pytest.mark.slow
def test_a_spike_is_in_the_record_and_on_the_display(
    warned: Path, tiny_dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = spikes(warned)
    assert steps
    assert all(record["spike"] == 7.0 and record["on_spike"] == "warn" for record in RunHistory.load(warned).spikes)
    again = run(config(tiny_dataset, tmp_path), tiny_dataset)
    assert final_weights(again) == final_weights(warned)
    printed = capsys.readouterr().out
    assert f"step {steps[0]}/{STEPS}  spike: loss " in printed
    # To warn changes nothing in the weights.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossWatch, "add", take)
        calm = run(config(tiny_dataset, tmp_path / "calm"), tiny_dataset)
    assert final_weights(calm) == final_weights(warned)
    assert spikes(calm) == []


def test_skip_leaves_the_update_out(warned: Path, tiny_dataset: Dataset, tmp_path: Path) -> None:
    first = spikes(warned)[0]
    weights = []
    make_step = Trainer.train_step

    def train_step(self: Trainer) -> dict[str, Any]:
        before = [param.detach().clone() for param in self.model.parameters()]
        record = make_step(self)
        weights.append(any(bool((a != b).any()) for a, b in zip(before, self.model.parameters(), strict=True)))
        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        skipped = run(config(tiny_dataset, tmp_path, on_spike="skip"), tiny_dataset)
    assert spikes(skipped)[0] == first
    assert [step for step, moved in enumerate(weights, start=1) if not moved] == spikes(skipped)
    # The same course up to there, another one after it.
    ours, theirs = ([r["loss"] for r in records(folder, "train")] for folder in (skipped, warned))
    assert ours[:first] == theirs[:first]
    assert ours[first] != theirs[first]


def test_rollback_goes_back_and_on_with_new_text(warned: Path, tiny_dataset: Dataset, tmp_path: Path) -> None:
    back = run(config(tiny_dataset, tmp_path, on_spike="rollback"), tiny_dataset)
    first = spikes(back)[0]
    assert first == spikes(warned)[0]
    rollback = records(back, "rollback")[0]
    target = (first - 1) // 8 * 8
    assert (rollback["step"], rollback["spike_step"]) == (target, first)
    after = [r for r in records(back, "train") if r["tokens"] == 256 * (first + 1)]
    assert [r["step"] for r in after] == [target + 1]  # tokens go on, steps go back
    before = next(r for r in records(back, "train") if r["step"] == target + 1)
    assert after[0]["loss"] != before["loss"]
    assert after[0]["lr"] == before["lr"]
    assert records(back, "train")[-1]["step"] == STEPS


def test_damaged_checkpoints_do_not_end_a_run_that_spikes(
    warned: Path, tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quintic.train.checkpoint._damage", lambda path: "damaged")
    going_on = run(config(tiny_dataset, tmp_path, on_spike="rollback"), tiny_dataset)
    assert records(going_on, "rollback") == []
    assert [r["loss"] for r in records(going_on, "train")] == [r["loss"] for r in records(warned, "train")]


@pytest.mark.usefixtures("late_writes")
def test_rollback_waits_for_the_checkpoint_that_is_being_written(
    warned: Path, tiny_dataset: Dataset, tmp_path: Path
) -> None:
    first = spikes(warned)[0]
    back = run(config(tiny_dataset, tmp_path, on_spike="rollback", save_every=first - 1), tiny_dataset)
    rollback = records(back, "rollback")[0]
    assert (rollback["step"], rollback["spike_step"]) == (first - 1, first)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_killed_run_does_the_same_again(action: Any, tiny_dataset: Dataset, tmp_path: Path) -> None:
    wanted = config(tiny_dataset, tmp_path / "whole", on_spike=action)
    whole = run(wanted, tiny_dataset)
    assert spikes(whole)
    for position, kill in enumerate((spikes(whole)[0] - 1, spikes(whole)[0] + 1, STEPS - 1)):
        other = config(tiny_dataset, tmp_path / str(position), on_spike=action)
        folder = create_run(other)
        with pytest.MonkeyPatch.context() as patch:
            after_step(patch, kill, _kill)
            with pytest.raises(Killed):
                run(other, tiny_dataset, resume=folder)
        run(other, tiny_dataset, resume=folder)
        assert final_weights(folder) == final_weights(whole)
        assert course(folder) == course(whole)


def _kill() -> None:
    raise Killed


def test_a_loss_that_spikes_for_ever_ends_the_run(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(self: LossWatch, loss: float, sigmas: float) -> float | None:
        take(self, loss, sigmas)
        return 9.0 if self.steps >= 9 else None

    monkeypatch.setattr(LossWatch, "add", add)
    wanted = config(tiny_dataset, tmp_path, on_spike="rollback")
    with pytest.raises(DivergedError, match="the loss spiked again at step 9 after 10 rollbacks"):
        run(wanted, tiny_dataset)


def test_rollback_needs_checkpoints(tiny_dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--on-spike rollback needs checkpoints to go back to: give --save-every"):
        config(tiny_dataset, tmp_path, on_spike="rollback", save_every=0)
    options = tiny_options(tiny_dataset, tmp_path / "runs", run="r", steps=2, on_spike="rollback")
    from quintic.cli import main

    assert main(["train", *options]) == 0
    resumed = ["--resume", "--run", "r", "--runs-dir", str(tmp_path / "runs"), "--save-every", "3"]
    assert error_of(capsys, "train", *resumed).startswith("--save-every cannot change when a run is resumed")
