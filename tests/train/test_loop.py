"""The files of a run that diverges, or in which something fails after its last step."""

import gc
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Killed, course, error_of, final_weights, tiny_config, tiny_options

from quintic.cli import main
from quintic.data.dataset import Dataset
from quintic.errors import DivergedError
from quintic.model.gpt import GPT
from quintic.report.history import METRICS_FILE, RunHistory, read_metrics
from quintic.train.checkpoint import checkpoints
from quintic.train.config import Config
from quintic.train.loop import Result, train
from quintic.train.runs import create_run
from quintic.train.trainer import Trainer


def run(config: Config, dataset: Dataset, *, resume: bool = False) -> Result:
    assert config.run.run is not None
    run_dir = config.run.runs_dir / config.run.run if resume else create_run(config)
    return train(config, dataset, run_dir, resume=resume, command="test")


def spoil(monkeypatch: pytest.MonkeyPatch, step: int, value: float, *, before: bool) -> None:
    """Overwrite a weight of every output before or after a step is made."""
    make_step = Trainer.train_step

    def train_step(self: Trainer) -> dict[str, Any]:
        def overwrite() -> None:
            if self.step == step - before:
                with torch.no_grad():
                    self.model.head.weight[:, 0] = value

        if before:
            overwrite()
        record = make_step(self)
        if not before:
            overwrite()
        return record

    monkeypatch.setattr(Trainer, "train_step", train_step)


def saved_steps(run_dir: Path) -> list[str]:
    return [path.name for path in checkpoints(run_dir)]


def kinds(run_dir: Path) -> list[tuple[str, int]]:
    records = read_metrics(run_dir / METRICS_FILE)
    return [(record["kind"], record["step"]) for record in records if record["kind"] not in ("run", "resume")]


# -- divergence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(
    optimizer: str,
    tiny_dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The step that diverges is one that would be saved and evaluated, and the only checkpoint would be replaced.
    spoil(monkeypatch, 4, math.nan, before=True)
    options = tiny_options(tiny_dataset, tmp_path, run="run", keep=1, optimizer=optimizer)
    rates, decay = {
        "muon": ("--muon-lr, --head-lr", "--weight-decay"),
        "adamw": ("--adamw-lr, --adamw-head-lr", "--adamw-weight-decay"),
    }[optimizer]
    assert error_of(capsys, "train", *options) == (
        f"{tmp_path / 'run'}: the training loss of step 4 is nan: training has diverged and was stopped (step-000002 "
        f"is kept); start a new run with lower learning rates ({rates}, --embedding-lr, --scalar-lr), a lower weight "
        f"decay ({decay}) or a longer warm-up (--warmup-frac)"
    )
    assert saved_steps(tmp_path / "run") == ["step-000002"]
    assert kinds(tmp_path / "run") == [
        ("eval", 0), ("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4)
    ]  # fmt: skip
    history = RunHistory.load(tmp_path / "run")
    assert [record["loss"] is None for record in history.train] == [False, False, False, True]
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "not finished: step 4 of 6" in report
    assert "not a finite number in 1 record, first at step 4" in report


def test_a_run_that_diverges_in_its_first_step_has_a_report(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 1, math.nan, before=True)
    with pytest.raises(DivergedError, match=r"step 1 is nan.* \(it has no checkpoint\)"):
        run(tiny_config(tiny_dataset, tmp_path, run="run"), tiny_dataset)
    assert "not finished: step 1 of 6" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("step", "value"),
    [
        (3, math.nan),
        (6, -math.inf),
        pytest.param(6, math.nan, marks=pytest.mark.slow),
        pytest.param(3, math.inf, marks=pytest.mark.slow),
    ],
)
def test_weights_that_are_not_finite_are_not_saved(
    step: int, value: float, tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a step is that of the weights before it: at the step of the save it is still finite."""
    spoil(monkeypatch, step, value, before=False)
    monkeypatch.setattr(Trainer, "evaluate", lambda self: {"step": self.step, "loss": 1.0, "bpb": 1.0})
    config = tiny_config(tiny_dataset, tmp_path, run="run", keep=1, save_every=1)
    with pytest.raises(
        DivergedError, match=f"weights are not finite after step {step}: .*step-00000{step - 1} is kept"
    ):
        run(config, tiny_dataset)
    assert saved_steps(tmp_path / "run") == [f"step-00000{step - 1}"]


def test_a_validation_loss_that_is_not_finite_stops_the_run(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 6, math.nan, before=False)
    with pytest.raises(DivergedError, match="the validation loss of step 6 is nan"):
        run(tiny_config(tiny_dataset, tmp_path, run="run"), tiny_dataset)
    assert saved_steps(tmp_path / "run")[0] == "step-000004"
    assert kinds(tmp_path / "run")[-1] == ("eval", 6)
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "the last validation result was not a finite number" in report


def test_a_diverged_run_is_not_an_interrupted_one(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 3, math.nan, before=True)
    make_step = Trainer.train_step

    def train_step(self: Trainer) -> dict[str, Any]:
        if self.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return make_step(self)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    with pytest.raises(DivergedError):
        run(tiny_config(tiny_dataset, tmp_path, run="run"), tiny_dataset)
    assert saved_steps(tmp_path / "run")[0] == "step-000002"


# -- failures after the last step -------------------------------------------------------------------------------------


class Broken(RuntimeError):
    """An error of an operation on a device."""


def break_at_the_end(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    method = getattr(Trainer, name)

    def fail(self: Trainer) -> Any:
        if self.step == self.total:
            raise Broken("out of memory")
        return method(self)

    monkeypatch.setattr(Trainer, name, fail)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("evaluate", "finish")), "sample"]
)
def test_a_failure_after_the_last_step_loses_nothing(
    name: str,
    tiny_dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = run(tiny_config(tiny_dataset, tmp_path, run="whole"), tiny_dataset)
    config = tiny_config(tiny_dataset, tmp_path, run="run")
    with monkeypatch.context() as patch:
        break_at_the_end(patch, name)
        capsys.readouterr()
        with pytest.raises(Broken, match="out of memory"):
            run(config, tiny_dataset)
    printed = capsys.readouterr().out
    run_dir = tmp_path / "run"
    assert saved_steps(run_dir)[0] == "step-000006"
    history = RunHistory.load(run_dir)
    assert len(history.train) == 6
    report = (run_dir / "report.html").read_text(encoding="utf-8")
    if name == "evaluate":
        assert "not finished: step 6 of 6" in report
        assert "run is trained and saved; its evaluation failed" in printed
    elif name == "sample":
        assert history.final["bpb"] == whole.final["bpb"]
        assert "finished after 6 steps" in report
        assert f"{whole.final['bpb']:.3f}" in report
        assert "What it writes" not in report
        assert f"run is trained, saved and reported in {run_dir / 'report.html'}; writing samples failed" in printed
    # What is missing is made by a resume, and nothing else is made again.
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", None)
        resumed = run(config, tiny_dataset, resume=True)
    assert (resumed.samples, resumed.final["bpb"]) == (whole.samples, whole.final["bpb"])
    assert course(run_dir) == course(whole.run_dir)
    assert final_weights(run_dir) == final_weights(whole.run_dir)
    assert "What it writes" in (run_dir / "report.html").read_text(encoding="utf-8")


def test_the_final_record_and_the_report_are_there_before_samples(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the process does not live to the end of sampling."""

    def kill(self: Trainer) -> None:
        raise Killed

    monkeypatch.setattr(Trainer, "sample", kill)
    with pytest.raises(Killed):
        run(tiny_config(tiny_dataset, tmp_path, run="run"), tiny_dataset)
    assert kinds(tmp_path / "run")[-1] == ("final", 6)
    assert "finished after 6 steps" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_the_least_score_of_all_evaluations_is_in_the_final_record(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([9.0, 3.0, 2.0, 2.5])
    evaluate = Trainer.evaluate
    monkeypatch.setattr(Trainer, "evaluate", lambda self: evaluate(self) | {"bpb": next(scores)})
    result = run(tiny_config(tiny_dataset, tmp_path, run="run", eval_every=2), tiny_dataset)
    assert (result.final["least_bpb"], result.final["least_bpb_step"]) == (2.0, 4)
    assert result.final == RunHistory.load(result.run_dir).final


def test_a_failure_between_steps_leaves_a_report(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Trainer) -> None:
        raise Broken("out of memory")

    monkeypatch.setattr(Trainer, "save", fail)
    with pytest.raises(Broken):
        main(["train", *tiny_options(tiny_dataset, tmp_path, run="run")])
    assert "not finished: step 2 of 6" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_a_report_that_cannot_be_written_does_not_hide_what_happened(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(run_dir: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quintic.train.loop.write_report", full)
    spoil(monkeypatch, 2, math.nan, before=True)
    with pytest.raises(DivergedError):
        run(tiny_config(tiny_dataset, tmp_path, run="run"), tiny_dataset)


# -- what is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiling_and_its_time_are_shown(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Compiling itself takes long, and is not in question here.
    monkeypatch.setattr(GPT, "compile_parts", lambda self: None)
    monkeypatch.setattr("quintic.train.loop.compile_seconds", lambda: 12.34)
    result = run(tiny_config(tiny_dataset, tmp_path, run="run", steps=2, compile=True), tiny_dataset)
    lines = capsys.readouterr().out.splitlines()
    first_step = next(number for number, line in enumerate(lines) if line.startswith("step 1/2"))
    assert lines.index("Compiling, until the first step is made") < first_step
    seconds = RunHistory.load(result.run_dir).train[0]["seconds"]
    assert lines[first_step + 1] == f"Compiled in 12.3 s; the first step took {seconds:.1f} s"
    assert sum(line.startswith("Compil") for line in lines) == 2
    run(tiny_config(tiny_dataset, tmp_path, run="plain", steps=1), tiny_dataset)
    assert "Compil" not in capsys.readouterr().out


# -- the garbage collector --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_collected_between_steps_only(
    fails: bool,
    tiny_dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unfreeze: Callable[[], None],
) -> None:
    unfreeze()
    monkeypatch.setattr(gc, "unfreeze", unfreeze)
    monkeypatch.setattr("quintic.train.loop._STEPS_PER_COLLECTION", 3)
    seen: list[tuple[bool, bool]] = []
    collected: list[int] = []
    make_step, collect = Trainer.train_step, gc.collect

    def train_step(self: Trainer) -> dict[str, Any]:
        seen.append((gc.isenabled(), gc.get_freeze_count() > 0))
        if fails and len(seen) == 5:
            raise RuntimeError("x")
        return make_step(self)

    def counted() -> int:
        collected.append(len(seen))
        return collect()

    monkeypatch.setattr(Trainer, "train_step", train_step)
    monkeypatch.setattr(gc, "collect", counted)
    if fails:
        with pytest.raises(RuntimeError, match="x"):
            run(tiny_config(tiny_dataset, tmp_path, run="r"), tiny_dataset)
    else:
        run(tiny_config(tiny_dataset, tmp_path, run="r"), tiny_dataset)
    assert seen == [(True, False), *[(False, True)] * (4 if fails else 5)]
    assert [step for step in collected if step] == ([1, 3] if fails else [1, 3, 6])
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.freeze()


@pytest.mark.parametrize("killed_at", [2, 4])
def test_a_run_that_went_back_and_was_killed_continues_from_there(
    killed_at: int,
    tiny_dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not from the checkpoints of later steps, whose records in the log are gone."""

    config = tiny_config(tiny_dataset, tmp_path, run="run", save_every=1, keep=9)
    whole = run(config, tiny_dataset)
    expected = course(whole.run_dir), final_weights(whole.run_dir)
    make_step = Trainer.train_step

    def train_step(self: Trainer) -> dict[str, Any]:
        if self.step == killed_at:
            self.background.wait()
            raise Killed
        return make_step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        with pytest.raises(Killed):
            train(config, tiny_dataset, whole.run_dir, resume=True, resume_step=2, command="test")
    kept = ", ".join(f"set-aside-step-00000{step}" for step in (3, 4, 5, 6))
    expected_line = f"Set aside the checkpoints of later steps in {whole.run_dir / 'checkpoints'}, as {kept}\n"
    assert expected_line in capsys.readouterr().out
    assert saved_steps(whole.run_dir)[0] == f"step-00000{killed_at}"
    resumed = run(config, tiny_dataset, resume=True)
    assert (course(resumed.run_dir), final_weights(resumed.run_dir)) == expected
    # Going back again sets aside under other names.
    run_again = train(config, tiny_dataset, whole.run_dir, resume=True, resume_step=5, command="test")
    assert ", as set-aside-step-000006-2\n" in capsys.readouterr().out
    assert (course(run_again.run_dir), final_weights(run_again.run_dir)) == expected
