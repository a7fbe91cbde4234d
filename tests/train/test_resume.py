"""A run that is stopped, killed or interrupted, and resumed, ends exactly like one that was not."""

import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Killed, course, final_weights, start, tiny_config, tiny_options

from quintic import stopping
from quintic.cli import main
from quintic.data.dataset import Dataset
from quintic.errors import CheckpointError
from quintic.eval.core import CoreScore
from quintic.launch import program
from quintic.report.history import METRICS_FILE, RunHistory, read_metrics
from quintic.train.checkpoint import checkpoints
from quintic.train.config import Config
from quintic.train.loop import train
from quintic.train.runs import create_run
from quintic.train.trainer import Trainer

STEPS = 6


def run(config: Config, dataset: Dataset, *, resume: Path | None = None) -> Path:
    run_dir = create_run(config) if resume is None else resume
    train(config, dataset, run_dir, resume=resume is not None, command="test")
    return run_dir


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Let something happen at the end of a step, once."""
    make_step = Trainer.train_step

    def train_step(self: Trainer) -> dict[str, Any]:
        record = make_step(self)
        if self.step == step:
            act()
        return record

    monkeypatch.setattr(Trainer, "train_step", train_step)


def killed_run(step: int, config: Config, dataset: Dataset, **options: Any) -> None:
    """Start or resume a run, and kill it at the end of a step."""

    def kill() -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        after_step(patch, step, kill)
        with pytest.raises(Killed):
            run(config, dataset, **options)


@pytest.fixture(scope="module")
def whole(tiny_dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    return run(tiny_config(tiny_dataset, tmp_path_factory.mktemp("whole"), run="run"), tiny_dataset)


@pytest.mark.slow
def test_two_runs_with_the_same_seed_are_the_same(whole: Path, tiny_dataset: Dataset, tmp_path: Path) -> None:
    again = run(tiny_config(tiny_dataset, tmp_path), tiny_dataset)
    assert final_weights(again) == final_weights(whole)
    assert course(again) == course(whole)
    other = run(tiny_config(tiny_dataset, tmp_path, seed=1), tiny_dataset)
    assert final_weights(other) != final_weights(whole)


def test_a_resumed_run_goes_on_under_its_wandb_id(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    class Run:
        config = types.SimpleNamespace(update=lambda values, **_: None)

        def log(self, values: dict[str, float], step: int) -> None: ...

        def finish(self) -> None: ...

    def init(**options: Any) -> Run:
        asked.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    configs = [tiny_config(tiny_dataset, tmp_path / place, run="run", wandb="project") for place in ("a", "b")]
    killed_run(3, configs[0], tiny_dataset)
    run(configs[0], tiny_dataset, resume=tmp_path / "a" / "run")
    killed_run(3, configs[1], tiny_dataset)
    assert [options["name"] for options in asked] == ["run"] * 3
    first, resumed, other = (options["id"] for options in asked)
    assert first == resumed
    assert first != other


@pytest.mark.parametrize(
    "killed_after",
    [1, *(pytest.param(step, marks=pytest.mark.slow) for step in range(2, STEPS - 1)), STEPS - 1, STEPS],
)
def test_a_run_killed_after_any_step_resumes_exactly(
    killed_after: int, whole: Path, tiny_dataset: Dataset, tmp_path: Path
) -> None:
    config = tiny_config(tiny_dataset, tmp_path, run="run")
    killed_run(killed_after, config, tiny_dataset)
    saved = (killed_after - 1) // 2 * 2  # every second step; the kill comes before the save
    assert [path.name for path in checkpoints(tmp_path / "run")][:1] == [f"step-{saved:06d}"][: bool(saved)]
    run_dir = run(config, tiny_dataset, resume=tmp_path / "run")
    assert final_weights(run_dir) == final_weights(whole)
    assert course(run_dir) == course(whole)
    steps = [record["step"] for record in read_metrics(run_dir / METRICS_FILE) if record["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"normalize": "neuron"}, marks=pytest.mark.slow),
        pytest.param({"state_dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param({"weights": "mantissa", "dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"weights": "8bit", "dtype": "bfloat16"}, marks=pytest.mark.slow),
        {"optimizer": "adamw", "cautious": False},
        pytest.param({"dtype": "bfloat16", "depth": 2, "kv_ratio": 2, "seq_len": 16}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_kind_of_optimizer_state_is_resumed(
    changes: dict[str, Any], tiny_dataset: Dataset, tmp_path: Path
) -> None:
    whole = run(tiny_config(tiny_dataset, tmp_path, run="whole", **changes), tiny_dataset)
    config = tiny_config(tiny_dataset, tmp_path, run="killed", **changes)
    for step in (3, 5):
        killed_run(step, config, tiny_dataset, resume=tmp_path / "killed" if step > 3 else None)
    killed = run(config, tiny_dataset, resume=tmp_path / "killed")
    assert final_weights(killed) == final_weights(whole)
    assert course(killed) == course(whole)


def test_a_finished_run_that_is_resumed_stays_as_it_is(
    whole: Path, tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quintic.train.metrics._UNSTEADY_STEPS", 2)
    run_dir = run(tiny_config(tiny_dataset, tmp_path), tiny_dataset)
    before, final = (final_weights(run_dir), course(run_dir)), RunHistory.load(run_dir).final
    run(tiny_config(tiny_dataset, tmp_path), tiny_dataset, resume=run_dir)
    assert (final_weights(run_dir), course(run_dir)) == before
    assert before[1] == course(whole)
    again = RunHistory.load(run_dir).final
    assert {"tokens_per_second", "mfu", "first_step_extra_seconds", "compile_seconds"} <= final.keys()
    assert again == final


@pytest.mark.usefixtures("same_threads")
def test_plain_resume_leaves_a_finished_run_alone(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in mine.rglob("*")}
    resume = ["train", "--resume", "--runs-dir", str(mine.parent)]
    assert main([*resume, "--threads", "1"]) == 0
    finished = (
        f"{mine} is already finished, after step 6; to make it longer: {program()} train --resume --run run "
        f"--runs-dir {mine.parent} --steps 12\n"
    )
    assert capsys.readouterr().out == finished
    assert {path: path.stat().st_mtime_ns for path in mine.rglob("*")} == before
    # An earlier run that was stopped is named; a run without samples is not finished either.
    stopped = Path(shutil.copytree(mine, mine.parent / "stopped"))
    os.utime(stopped / "config.json", (1, 1))
    (stopped / "metrics.jsonl").write_text(
        "".join(line for line in (mine / "metrics.jsonl").read_text().splitlines(True) if '"kind":"sample"' not in line)
    )
    assert main(resume) == 0
    go_on = f"{program()} train --resume --run stopped --runs-dir {mine.parent}"
    assert capsys.readouterr().out == f"{finished}{stopped} is not finished; to continue it: {go_on}\n"
    # Options that ask for more are heard.
    said: list[str] = []
    monkeypatch.setattr("quintic.commands.train.train", lambda *args, **options: said.append("trained"))
    monkeypatch.setattr("quintic.commands.train._print_result", lambda result: None)
    assert main([*resume, "--steps", "8"]) == 0
    assert main([*resume, "--run", "stopped"]) == 0
    # A damaged checkpoint is mended by making its steps again.
    (checkpoints(mine)[0] / "model.safetensors").write_bytes(b"")
    assert main(resume) == 0
    assert said == ["trained"] * 3


@pytest.mark.slow
def test_a_run_with_a_damaged_newest_checkpoint_resumes_from_the_one_before(
    whole: Path, tiny_dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tiny_dataset, tmp_path, run="run", keep=2)
    killed_run(5, config, tiny_dataset)
    damaged = tmp_path / "run" / "checkpoints" / "step-000004" / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    capsys.readouterr()
    # A save at step 3, below the damaged one, must survive: another kill is to fall back on it.
    every_step = tiny_config(tiny_dataset, tmp_path, run="run", keep=1, save_every=1)
    killed_run(4, every_step, tiny_dataset, resume=tmp_path / "run")
    said = capsys.readouterr().out.splitlines()
    assert any("optimizer.safetensors has" in line and "using the checkpoint before it" in line for line in said)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-000004", "step-000003"]
    run(config, tiny_dataset, resume=tmp_path / "run")
    assert "Continuing run after step 3" in capsys.readouterr().out.splitlines()
    assert final_weights(tmp_path / "run") == final_weights(whole)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-000006", "step-000004"]


def test_other_text_is_refused(tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = run(tiny_config(tiny_dataset, tmp_path), tiny_dataset)
    monkeypatch.setitem(tiny_dataset.manifest, "key", "0123")
    with pytest.raises(CheckpointError, match=r"was trained on other text .* restore that text, or start a new run"):
        run(tiny_config(tiny_dataset, tmp_path), tiny_dataset, resume=run_dir)


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def heeded_hang_up() -> Iterator[None]:
    """SIGHUP as a terminal's program has it, also where the tests themselves were started with `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeded_hang_up")
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGHUP))],
    ids=lambda number: number.name,
)
def test_a_signal_saves_the_step_and_says_how_to_go_on(
    number: signal.Signals,
    whole: Path,
    tiny_dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = signal.getsignal(number)
    options = tiny_options(tiny_dataset, tmp_path / "my runs", run="run")
    with monkeypatch.context() as patch:
        after_step(patch, 3, lambda: signal.raise_signal(number))
        assert main(["train", *options]) == 130
    assert signal.getsignal(number) is handler
    printed = capsys.readouterr()
    assert "stopped after step 3 of 6, which is saved" in printed.out
    assert printed.out.rstrip().endswith(f"quintic train --resume --run run --runs-dir '{tmp_path / 'my runs'}'")
    run_dir = tmp_path / "my runs" / "run"
    assert checkpoints(run_dir)[0].name == "step-000003"
    assert "not finished" in (run_dir / "report.html").read_text(encoding="utf-8")
    assert main(["train", "--resume", "--runs-dir", str(tmp_path / "my runs")]) == 0
    history = RunHistory.load(run_dir)
    assert [record["command"] for record in history.resumed] == [
        f"quintic train --resume --runs-dir '{tmp_path / 'my runs'}'"
    ]
    assert history.changes == []
    assert final_weights(run_dir) == final_weights(whole)
    assert course(run_dir) == course(whole)


def test_a_second_ctrl_c_stops_at_once(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    after_step(monkeypatch, 3, twice)
    assert main(["train", *tiny_options(tiny_dataset, tmp_path, run="run")]) == 130
    printed = capfd.readouterr()
    assert printed.err == "\nquintic: stopped\n"
    # The first one is answered at once, the step may take long.
    assert printed.out.count("stopping when this step is made and saved; Ctrl-C again stops at once") == 1
    assert checkpoints(tmp_path / "run")[0].name == "step-000002"


@pytest.mark.parametrize(("waited", "saved"), [(0.0, 3), (2.0, 2)])
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_sigterm_is_one_with_a_signal_just_before_it(
    first: signal.Signals,
    waited: float,
    saved: int,
    tiny_dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`timeout` sends two, torchrun one after a Ctrl-C."""

    def twice() -> None:
        signal.raise_signal(first)
        monkeypatch.setattr(stopping, "_SAME_REQUEST_SECONDS", 1.0 - waited)
        signal.raise_signal(signal.SIGTERM)

    after_step(monkeypatch, 3, twice)
    assert main(["train", *tiny_options(tiny_dataset, tmp_path, run="run")]) == 130
    assert checkpoints(tmp_path / "run")[0].name == f"step-{saved:06d}"


def test_hang_ups_do_not_kill(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shell and the system may both send one, and who shuts the machine down a SIGTERM on top."""

    def hang_up() -> None:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)

    after_step(monkeypatch, 3, hang_up)
    assert main(["train", *tiny_options(tiny_dataset, tmp_path, run="run")]) == 130
    assert "stopped after step 3 of 6, which is saved" in capsys.readouterr().out
    assert checkpoints(tmp_path / "run")[0].name == "step-000003"


def test_a_run_under_nohup_is_not_stopped_by_a_hang_up(
    whole: Path, tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_step(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(["train", *tiny_options(tiny_dataset, tmp_path, run="run")]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert course(tmp_path / "run") == course(whole)


@pytest.mark.slow
def test_a_signal_during_a_save_is_honoured_after_the_next_step(
    whole: Path,
    tiny_dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save = Trainer.save

    def interrupted(self: Trainer) -> None:
        save(self)
        if self.step == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save", interrupted)
        assert main(["train", *tiny_options(tiny_dataset, tmp_path, run="run")]) == 130
    # It says that a step is saved; that step must be the one on disk.
    assert "stopped after step 3 of 6, which is saved" in capsys.readouterr().out
    assert checkpoints(tmp_path / "run")[0].name == "step-000003"
    assert main(["train", "--resume", "--run", "run", "--runs-dir", str(tmp_path)]) == 0
    assert final_weights(tmp_path / "run") == final_weights(whole)


def test_ctrl_c_in_the_last_step_lets_the_run_finish(
    whole: Path, tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_step(monkeypatch, STEPS, lambda: signal.raise_signal(signal.SIGINT))
    assert main(["train", *tiny_options(tiny_dataset, tmp_path, run="run")]) == 0
    assert course(tmp_path / "run") == course(whole)


def test_ctrl_c_among_the_last_tasks_of_core_keeps_the_run(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing would be lost, so the first one is heard at once; going on answers the tasks."""
    answered = Trainer.answer_core
    asked = []

    def interrupted(self: Trainer) -> CoreScore:
        asked.append(self.step)
        if len(asked) == 1:
            signal.raise_signal(signal.SIGINT)
        return answered(self)

    monkeypatch.setattr(Trainer, "answer_core", interrupted)
    (tmp_path / "core").mkdir()
    item = {"query": "def", "choices": ["model", "zyx zyx"], "gold": 1}
    (tmp_path / "core" / "copa.jsonl").write_text((json.dumps(item) + "\n") * 6)
    options = [*tiny_options(tiny_dataset, tmp_path, run="run"), "--core", str(tmp_path / "core")]
    assert main(["train", *options]) == 130
    said = capsys.readouterr().out
    assert re.search(r"run is trained, saved and reported in \S+; stopped while answering CORE; continue with:", said)
    assert not [one for one in read_metrics(tmp_path / "run" / "metrics.jsonl") if one["kind"] == "core"]
    assert main(["train", "--resume", "--run", "run", "--runs-dir", str(tmp_path)]) == 0
    assert [one["step"] for one in read_metrics(tmp_path / "run" / "metrics.jsonl") if one["kind"] == "core"] == [STEPS]


@pytest.mark.parametrize("step", [3, STEPS])
def test_a_run_whose_log_is_gone_goes_on_and_begins_a_new_one(
    step: int,
    tiny_dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also a finished one, whose new log has no step."""
    with monkeypatch.context() as patch:
        if step < STEPS:
            after_step(patch, step, lambda: signal.raise_signal(signal.SIGINT))
        assert main(["train", *tiny_options(tiny_dataset, tmp_path, run="run")]) == (130 if step < STEPS else 0)
    log = tmp_path / "run" / METRICS_FILE
    log.unlink()
    (tmp_path / "run" / "report.html").unlink(missing_ok=True)
    capsys.readouterr()
    assert main(["report", "--run", "run", "--runs-dir", str(tmp_path)]) == 2
    assert (
        f"{tmp_path / 'run'} holds no {METRICS_FILE}, from which reports are made: give the folder that a training run "
        "wrote to; of a run whose log is lost, `quintic sample`, `eval` and `export` still work, and `quintic train "
        "--resume --run run` begins a new log"
    ) in capsys.readouterr().err
    assert main(["train", "--resume", "--run", "run", "--runs-dir", str(tmp_path)]) == 0
    told = f"{log} is missing: a new log starts here, without the steps up to {step}\n"
    assert told in capsys.readouterr().out
    kinds = [record["kind"] for record in read_metrics(log)]
    assert kinds[:2] == ["run", "resume"]
    assert kinds.count("train") == STEPS - step
    assert kinds[-2:] == ["final", "sample"]
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert f"finished after {STEPS} steps; continued from step {step}" in page


# -- real processes ---------------------------------------------------------------------------------------------------

LONG = {"steps": 60, "save_every": 7, "eval_every": 20, "threads": 1}


@pytest.fixture(scope="module")
def long_run(tiny_dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    """A run of 60 steps in a process of its own, and its dataset."""
    folder = tmp_path_factory.mktemp("long")
    process = start(["train", *tiny_options(tiny_dataset, folder, run="long", **LONG)], folder)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    return folder / "long", tiny_dataset


def wait_for_step(process: "subprocess.Popen[str]", run_dir: Path, step: int) -> None:
    """Wait until a run has logged a step, or has ended."""
    deadline = time.monotonic() + 60
    path = run_dir / METRICS_FILE
    while process.poll() is None:
        assert time.monotonic() < deadline, f"step {step} was not logged within a minute"
        if path.exists():
            steps = [
                json.loads(line).get("step", 0) for line in path.read_text("utf-8").splitlines(True) if "\n" in line
            ]
            if max(steps, default=0) >= step:
                return
        time.sleep(0.002)


@pytest.mark.slow
def test_a_process_killed_at_a_random_moment_resumes_exactly(long_run: tuple[Path, Dataset], tmp_path: Path) -> None:
    whole, dataset = long_run
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    process = start(["train", *tiny_options(dataset, tmp_path, run="killed", **LONG)], tmp_path)
    run_dir = tmp_path / "killed"
    resume = ["train", "--resume", "--run", "killed", "--runs-dir", str(tmp_path), "--threads", "1"]
    for _ in range(rng.choice((1, 2))):
        step = rng.randint(1, LONG["steps"])
        print(f"killed at step {step} or a moment later")
        wait_for_step(process, run_dir, step)
        time.sleep(rng.random() * 0.03)  # somewhere in a step, a save or an evaluation
        process.kill()
        process.communicate()
        process = start(resume, tmp_path)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert final_weights(run_dir) == final_weights(whole)
    assert course(run_dir) == course(whole)
    assert list((run_dir / "checkpoints").glob(".*")) == []


# Trains with the options given; killed when half of the weights of step 4 are on the disk and step 5 is made.
KILLED_WHILE_WRITING = """
import os, signal, sys, threading
import safetensors.torch
from quintic.cli import main
from quintic.train.metrics import MetricsLog

save_file, write, trained_on = safetensors.torch.save_file, MetricsLog.write, threading.Event()

def half(tensors, path, *more):
    save_file(tensors, path, *more)
    if "step-000004" in str(path):
        os.truncate(path, path.stat().st_size // 2)
        assert trained_on.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)

def logged(self, kind, **record):
    written = write(self, kind, **record)
    if record.get("step") == 5:
        trained_on.set()
        threading.Event().wait(60)
    return written

safetensors.torch.save_file, MetricsLog.write = half, logged
main(["train", *sys.argv[1:]])
"""


@pytest.mark.slow
def test_a_process_killed_while_it_writes_keeps_the_checkpoint_before(
    whole: Path, tiny_dataset: Dataset, tmp_path: Path
) -> None:
    options = tiny_options(tiny_dataset, tmp_path, run="run", keep=1, threads=torch.get_num_threads())
    process = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, *options], capture_output=True, timeout=200)
    assert process.returncode == -signal.SIGKILL, process.stderr
    run_dir = tmp_path / "run"
    folder = run_dir / "checkpoints"
    assert [path.name for path in checkpoints(run_dir)] == ["step-000002"]
    assert [path.name for path in folder.glob(".step-000004.*.tmp/*")] == ["model.safetensors"]
    assert read_metrics(run_dir / METRICS_FILE)[-1]["step"] == 5
    assert main(["train", "--resume", "--run", "run", "--runs-dir", str(tmp_path)]) == 0
    assert final_weights(run_dir) == final_weights(whole)
    assert course(run_dir) == course(whole)
    assert [path.name for path in folder.iterdir()] == ["step-000006"]


@pytest.mark.slow
def test_a_second_process_leaves_the_run_to_the_first(
    whole: Path, tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the first one is saving: it would lose the folder that it is writing."""
    save, run_dir = Trainer.save, tmp_path / "run"
    resume = ["train", "--resume", "--run", "run", "--runs-dir", str(tmp_path)]
    ends: list[tuple[int, str]] = []

    def save_and_resume(self: Trainer) -> None:
        save(self)
        if self.step == 4:
            self.background.wait()  # so that files change by the second process alone
            unfinished = run_dir / "checkpoints" / ".step-000005.1.tmp"
            unfinished.mkdir()
            before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
            process = start(resume, tmp_path)
            _, errors = process.communicate(timeout=60)
            ends.append((process.returncode, errors))
            assert unfinished.is_dir()
            assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before

    monkeypatch.setattr(Trainer, "save", save_and_resume)
    run(tiny_config(tiny_dataset, tmp_path, run="run"), tiny_dataset)
    (code, errors) = ends[0]
    assert code == 2
    assert errors.startswith(
        f"quintic: error: {run_dir} is being trained by another process (process {os.getpid()} on "
    )
    assert errors.count("\n") == 1
    assert final_weights(run_dir) == final_weights(whole)
    assert course(run_dir) == course(whole)


@pytest.mark.slow
@pytest.mark.usefixtures("heeded_hang_up")
def test_a_closed_terminal_saves(tiny_dataset: Dataset, tmp_path: Path) -> None:
    """With nothing left to print to."""
    terminal, inner = os.openpty()
    changes = LONG | {"steps": 10_000, "save_every": 10_000}
    process = subprocess.Popen(
        [sys.executable, "-m", "quintic", "train", *tiny_options(tiny_dataset, tmp_path, run="run", **changes)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"},
        preexec_fn=lambda: os.login_tty(inner),
    )
    try:
        os.close(inner)
        shown = b""
        while not re.search(rb"step [1-9]", shown):
            assert select.select([terminal], [], [], 60)[0], shown
            shown += os.read(terminal, 4096)
        os.close(terminal)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
    run_dir = tmp_path / "run"
    last = RunHistory.load(run_dir).train[-1]["step"]
    assert [path.name for path in checkpoints(run_dir)] == [f"step-{last:06d}"]
    assert "not finished" in (run_dir / "report.html").read_text(encoding="utf-8")
