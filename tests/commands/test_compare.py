"""The comparison: two runs that differ in the optimizer of the matrices alone."""

import html
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Killed, course, error_of, final_weights, tiny_config, tiny_options

from quintic.cli import main
from quintic.commands import compare as module
from quintic.commands.compare import compare, variants
from quintic.commands.options import training_options
from quintic.data.dataset import Dataset
from quintic.errors import ConfigError
from quintic.launch import program
from quintic.report.history import RunHistory
from quintic.train.loop import train
from quintic.train.saved_config import changed_options, load_config
from quintic.train.trainer import Trainer


def test_both_runs_start_alike_and_see_the_same_text(
    tiny_dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tiny_dataset, tmp_path, run="c", eval_tokens=4096)  # several documents
    found = compare(*variants(config), tiny_dataset, command="quintic compare")
    adamw, muon = (load_config(tmp_path / f"c-{kind}" / "config.json") for kind in ("adamw", "muon"))
    assert changed_options(adamw, muon).keys() == {"optimizer", "run"}
    histories = [RunHistory.load(tmp_path / f"c-{kind}") for kind in ("adamw", "muon")]
    # The same weights and batch: the losses of the first step agree to the last bit, later ones do not.
    first, last = ([history.train[index]["loss"] for history in histories] for index in (0, -1))
    assert first[0] == first[1]
    assert last[0] != last[1]
    assert found.endswith(f"report: {tmp_path / 'c.html'}")
    # The difference of the last scores, document by document.
    scores = [history.evals[-1] for history in histories]
    told = re.search(r"Muon ended (\S+) bits per byte (below|above) AdamW, ± (\S+) over the documents", found)
    assert told is not None
    difference = scores[1]["bpb"] - scores[0]["bpb"]
    assert (float(told[1]), told[2]) == (
        pytest.approx(abs(difference), abs=1e-4),
        "below" if difference < 0 else "above",
    )
    assert 0 < float(told[3]) < sum(score["bpb_stderr"] for score in scores)
    assert "This is one seed." in found
    page = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert "AdamW" in page
    assert "Muon" in page
    # One option per optimizer: the page tells what each run really used.
    rates = [max(record["lr"]["matrices"] for record in history.train) for history in histories]
    row = re.search(r"peak learning rate, matrices</th>\s*<td[^>]*>([^<]*)</td>\s*<td[^>]*>([^<]*)</td>", page)
    assert row is not None
    assert [float(row[1]), float(row[2])] == pytest.approx(rates, rel=1e-3)
    printed = capsys.readouterr().out
    assert printed.index("=== AdamW ===") < printed.index("=== Muon ===")


@pytest.mark.slow
def test_several_seeds_are_compared_by_their_medians(
    tiny_dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tiny_dataset, tmp_path, run="c", steps=2)
    compare(*variants(config, seeds=2), tiny_dataset, command="quintic compare")
    first = config.run.seed
    losses = {}
    for kind in ("adamw", "muon"):
        folders = [tmp_path / f"c-{kind}-seed{seed}" for seed in (first, first + 1)]
        losses[kind] = [RunHistory.load(folder).final["loss"] for folder in folders]
        assert load_config(folders[1] / "config.json").run.seed == first + 1
        assert losses[kind][0] != losses[kind][1]
    page = (tmp_path / "c.html").read_text(encoding="utf-8").replace("\u00a0", " ")
    assert "Muon (median and range of 2 runs)" in page
    for low, high in map(sorted, losses.values()):
        assert f">{(low + high) / 2:.4f} ({low:.4f} to {high:.4f})<" in page
    printed = capsys.readouterr().out
    assert re.findall("=== (.*) ===", printed) == [
        f"{n}, seed {s}" for s in (first, first + 1) for n in ("AdamW", "Muon")
    ]


def test_another_rule_has_its_name(tiny_dataset: Dataset, tmp_path: Path) -> None:
    config = tiny_config(tiny_dataset, tmp_path, run="c", update_rule="two_rate")
    found = compare(*variants(config), tiny_dataset, command="quintic compare")
    assert found.strip().startswith("two-rate momentum ")
    page = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert "two-rate momentum and AdamW on the same model" in page
    assert "update_rule</" in page or "update_rule" in (tmp_path / "c-muon" / "config.json").read_text("utf-8")


def test_seeds_are_an_option_of_the_command() -> None:
    assert training_options(["--seeds", "3"], "compare").seeds == 3
    assert training_options([], "compare").seeds == 1
    reasons = {"0": "must be at least 1", "1001": "must be at most 1,000", "two": "give a whole number"}
    for wrong, reason in reasons.items():
        with pytest.raises(ConfigError, match=f"--seeds {wrong}: {reason}"):
            training_options(["--seeds", wrong], "compare")
    with pytest.raises(ConfigError, match="--seeds"):
        training_options(["--seeds", "3"], "train")


def act_at(monkeypatch: pytest.MonkeyPatch, optimizer: str, step: int, act: Callable[[], None]) -> None:
    """Let something happen at the end of a step of the run with this optimizer."""
    make_step = Trainer.train_step

    def train_step(self: Trainer) -> dict[str, Any]:
        record = make_step(self)
        if (self.config.optim.optimizer, self.step) == (optimizer, step):
            act()
        return record

    monkeypatch.setattr(Trainer, "train_step", train_step)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def kill() -> None:
    raise Killed


@pytest.fixture(scope="module")
def whole(tiny_dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs of a comparison that nothing happened to."""
    runs_dir = tmp_path_factory.mktemp("whole")
    assert main(["compare", *tiny_options(tiny_dataset, runs_dir, run="c", sample_tokens=1)]) == 0
    return runs_dir


@pytest.mark.parametrize(
    ("stopped", "step", "act"),
    [
        ("muon", 3, kill),
        ("adamw", 3, interrupt),
        pytest.param("muon", 1, kill, marks=pytest.mark.slow),
        pytest.param("adamw", 1, kill, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_comparison_goes_on_with_what_it_has(
    stopped: str, step: int, act: Callable[[], None], whole: Path, tiny_dataset: Dataset, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    options = tiny_options(tiny_dataset, tmp_path, run="c", sample_tokens=1)
    with pytest.MonkeyPatch.context() as patch:
        act_at(patch, stopped, step, act)
        if act is kill:
            with pytest.raises(Killed):
                main(["compare", *options])
        else:
            assert main(["compare", *options]) == 130
            line = capsys.readouterr().out.rstrip().splitlines()[-1]
            assert line.endswith(f"quintic compare --resume --run c --runs-dir {tmp_path}")
    assert not (tmp_path / "c.html").exists()
    assert error_of(capsys, "compare", *options).startswith(
        f"{tmp_path / 'c.json'} exists: choose another --run, or continue that comparison: "
    )
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c-adamw").rglob("*") if path.is_file()}
    assert main(["compare", "--resume", "--runs-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    if stopped == "muon":
        assert f"=== AdamW === finished before: {tmp_path / 'c-adamw'}\n" in printed
        assert {path: path.stat().st_mtime_ns for path in before} == before
    else:
        assert "finished before" not in printed
    for kind in ("adamw", "muon"):
        assert final_weights(tmp_path / f"c-{kind}") == final_weights(whole / f"c-{kind}")
        assert course(tmp_path / f"c-{kind}") == course(whole / f"c-{kind}")
    # Times differ, and nothing else.
    sentences = [
        re.search(
            r"Muon (?:never )?reached AdamW's .*? steps[^<.]*",
            html.unescape((folder / "c.html").read_text(encoding="utf-8")),
        )
        for folder in (tmp_path, whole)
    ]
    assert sentences[0] is not None
    assert sentences[1] is not None
    assert sentences[0][0] == sentences[1][0]
    typed = [line for line in (tmp_path / "c.html").read_text("utf-8").splitlines() if "quintic compare --" in line]
    assert not [line for line in typed if "--resume" in line]  # it tells how the comparison was begun


def test_a_finished_comparison_is_drawn_again(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(whole, tmp_path / "moved")
    (tmp_path / "moved" / "c.html").unlink()
    assert main(["compare", "--resume", "--run", "c", "--runs-dir", str(tmp_path / "moved")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("finished before") == 2
    assert (tmp_path / "moved" / "c.html").exists()


def test_a_run_that_is_not_as_the_comparison_made_it_is_named(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "moved")
    file = tmp_path / "moved" / "c-adamw" / "config.json"
    config = json.loads(file.read_text())
    steps = config["schedule"]["steps"]
    config["schedule"]["steps"] += 10  # as a longer run leaves it
    file.write_text(json.dumps(config))
    message = error_of(capsys, "compare", "--resume", "--run", "c", "--runs-dir", str(tmp_path / "moved"))
    assert message.startswith(f"{file}: --steps is {steps + 10} in this run, and {steps} in the comparison, which so")


def test_what_a_resumed_comparison_refuses(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    there = ["compare", "--resume", "--runs-dir", str(whole)]
    assert error_of(capsys, "compare", "--resume") == (
        f"runs holds no comparison to continue; check --run and --runs-dir, or start one: {program()} compare"
    )
    assert "other.json is not a comparison to continue" in error_of(capsys, *there, "--run", "other")
    message = "--seeds: a resumed comparison continues its own runs; leave --seeds out"
    assert error_of(capsys, *there, "--seeds", "3") == message
    assert error_of(capsys, *there, "--resume-step", "3") == "unknown option --resume-step: did you mean --resume?"
    steps = error_of(capsys, *there, "--steps", "9")
    assert steps.startswith(
        "--steps cannot change when a comparison is resumed, because the schedules of all its steps"
    )
    rate = error_of(capsys, *there, "--muon-lr", "9")
    assert rate.startswith("--muon-lr cannot change when a comparison is resumed: leave it out (it is ")
    # Its file is no --config of quintic train.
    assert all(message.endswith(", or start a new one") for message in (steps, rate))
    (tmp_path / "runs").mkdir()
    for damaged in (
        '{"comparison": {"seeds": "two"}}',
        '{"comparison": {"seeds": "two", "command": ""}, "config": {}}',
        '{"comparison": {"seeds": 1, "command": ""}, "config": []}',
    ):
        (tmp_path / "runs" / "c.json").write_text(damaged)
        assert "c.json: damaged" in error_of(capsys, "compare", "--resume")
    (tmp_path / "runs" / "c.json").write_text(
        '{"comparison": {"seeds": 1, "command": ""}, "config": {"data": {"x": 1}}}'
    )
    assert error_of(capsys, "compare", "--resume") == "runs/c.json: unknown field data.x; remove it"


def test_a_comparison_without_any_run_leaves_nothing(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise ConfigError("no")

    monkeypatch.setattr(module, "train", fail)
    assert error_of(capsys, "compare", *tiny_options(tiny_dataset, tmp_path, run="c")) == "no"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_both_names_are_checked_before_the_first_run(kind: str, tiny_dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / f"c-{kind}").mkdir()
    (tmp_path / f"c-{kind}" / "config.json").touch()
    with pytest.raises(ConfigError, match=f"c-{kind} exists: choose another --run"):
        variants(tiny_config(tiny_dataset, tmp_path, run="c"))
    assert [path.name for path in tmp_path.iterdir()] == [f"c-{kind}"]


@pytest.mark.slow
def test_a_run_that_fails_before_its_first_step_leaves_no_folder(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: Any, *args: Any, **options: Any) -> Any:
        if config.optim.optimizer == "muon":
            raise ConfigError("no")
        return train(config, *args, **options)

    monkeypatch.setattr(module, "train", fail)
    with pytest.raises(ConfigError, match="no"):
        compare(*variants(tiny_config(tiny_dataset, tmp_path, run="c")), tiny_dataset, command="")
    assert [path.name for path in tmp_path.iterdir()] == ["c-adamw"]
