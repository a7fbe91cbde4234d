"""The metrics log: valid lines, crashes, resuming, and the mirrors of it."""

import contextlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from durability import disk_events, durable_names

from quintic.errors import ConfigError, DataError
from quintic.report.history import RunHistory, read_metrics
from quintic.train.metrics import MetricsLog, Tracker, tensorboard_tracker, wandb_tracker


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def fill(path: Path, steps: int, *, every: int = 2) -> None:
    with MetricsLog(path) as log:
        log.write("run", name="test", total_steps=steps)
        for step in range(1, steps + 1):
            log.write("train", step=step, loss=10.0 - step)
            if step % every == 0:
                log.write("eval", step=step, loss=10.5 - step)
                log.write("sample", step=step, samples=[])
        log.write("final", step=steps)


def test_a_record_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "metrics.jsonl"
    log = MetricsLog(path)
    written = log.write("train", step=1, loss=2.5, lr={"muon": 0.02}, times_ms={"data": 1.5})
    assert lines(path) == [written]
    assert written == {"kind": "train", "step": 1, "loss": 2.5, "lr": {"muon": 0.02}, "times_ms": {"data": 1.5}}
    log.write("eval", step=1, loss=3.0)
    assert [record["kind"] for record in read_metrics(path)] == ["train", "eval"]
    log.close()
    log.close()


def test_what_is_no_json_becomes_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(
            "train",
            nan=float("nan"),
            infinities=[float("inf"), -np.inf, np.float32("nan")],
            scalars=(np.int64(3), np.float32(0.5), torch.tensor(2), torch.tensor(float("nan"))),
            path=Path("runs"),
            dtype=torch.bfloat16,
            nested={1: {"flag": True, "none": None}},
            text='é\n"\u2028\ud800',
        )
    (line,) = path.read_bytes().splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(f"not valid JSON: {constant}")

    assert json.loads(line, parse_constant=refuse) == {
        "kind": "train",
        "nan": None,
        "infinities": [None, None, None],
        "scalars": [3, 0.5, 2, None],
        "path": "runs",
        "dtype": "torch.bfloat16",
        "nested": {"1": {"flag": True, "none": None}},
        "text": 'é\n"\u2028?',
    }


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_truncated_last_line_is_left_out_and_mended(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, 3)
    whole = lines(path)
    path.write_bytes(path.read_bytes()[:-cut])
    # Without its newline alone, the last record is still whole.
    left = whole if cut == 1 else whole[:-1]
    assert read_metrics(path) == left
    with MetricsLog(path) as log:
        log.write("resume", step=3)
    assert lines(path) == [*left, {"kind": "resume", "step": 3}]


def test_a_cut_inside_a_character_is_a_truncated_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind":"run"}\n{"kind":"sample","text":"\xc3')
    assert read_metrics(path) == [{"kind": "run"}]


def test_damage_before_the_last_line_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind":"run"}\n{"kind":\n{"kind":"final"}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: not valid JSON"):
        read_metrics(path)
    path.write_text("[1]\n")
    with pytest.raises(DataError, match="line 1: not a JSON object"):
        read_metrics(path)


def test_a_missing_log_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        read_metrics(tmp_path / "absent" / "metrics.jsonl")


def test_resuming_leaves_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, 6)
    with MetricsLog(path, resume_step=3) as log:
        log.write("resume", step=3)
        for step in range(4, 7):
            log.write("train", step=step, loss=0.0)
    records = lines(path)
    assert [(r["kind"], r.get("step")) for r in records] == [
        ("run", None), ("train", 1), ("train", 2), ("eval", 2), ("sample", 2), ("train", 3),
        ("resume", 3), ("train", 4), ("train", 5), ("train", 6),
    ]  # fmt: skip
    assert [r["loss"] for r in records if r["kind"] == "train"] == [9.0, 8.0, 7.0, 0.0, 0.0, 0.0]
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_begins_again_evaluates_step_0_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write("run", name="r")
        log.write("eval", step=0, loss=9.0)
        log.write("train", step=1, loss=9.0)
    for resume_step, kept in ((1, ["run", "eval", "train"]), (0, ["run"])):
        MetricsLog(path, resume_step=resume_step).close()
        assert [record["kind"] for record in lines(path)] == kept


def test_resuming_where_the_log_ends_keeps_all_but_the_final_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, 4)
    whole = lines(path)
    MetricsLog(path, resume_step=4).close()
    assert lines(path) == whole[:-1]


def test_resuming_a_finished_run_removes_what_follows_the_final_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, 4)
    whole = lines(path)
    with MetricsLog(path) as log:
        log.write("sample", step=4, samples=[{"prompt": "a", "text": "b"}])
    MetricsLog(path, resume_step=4).close()
    assert lines(path) == whole[:-1]


def test_a_crash_while_the_log_is_rewritten_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, 6)
    before = path.read_bytes()

    def crash(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(OSError, match="no space left"):
        MetricsLog(path, resume_step=2)
    assert path.read_bytes() == before


def test_a_mended_log_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, 6)
    events = disk_events(monkeypatch)
    MetricsLog(path, resume_step=2).close()
    assert durable_names(events) == ["metrics.jsonl"]


def test_history_has_one_record_per_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write("run", name="a")
        for step, loss in ((1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5)):
            log.write("train", step=step, loss=loss, tokens=step * 10)
        log.write("eval", step=2, loss=4.2)
        log.write("sample", step=2, samples=[{"prompt": "a", "text": "b"}])
        log.write("resume", step=1)
        log.write("final", step=3, loss=3.1, samples=[])
    history = RunHistory.load(tmp_path)
    assert [(r["step"], r["loss"]) for r in history.train] == [(1, 5.0), (2, 4.5), (3, 3.0)]
    assert [(r["step"], r["loss"], r.get("tokens")) for r in history.evals] == [(2, 4.2, None), (3, 3.1, 30)]
    assert history.samples[-1]["samples"] == [{"prompt": "a", "text": "b"}]
    assert [record["step"] for record in history.resumed] == [1]
    assert history.run["name"] == "a"


def test_a_final_record_at_the_last_evaluation_is_no_second_one(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write("eval", step=3, loss=3.0)
        log.write("final", step=3, loss=2.9)
    assert [r["loss"] for r in RunHistory.load(tmp_path).evals] == [3.0]


def test_trackers_get_every_record_as_written(tmp_path: Path) -> None:
    records: list[Any] = []
    closed: list[bool] = []

    @contextlib.contextmanager
    def tracker() -> Iterator[Tracker]:
        yield records.append
        closed.append(True)

    with MetricsLog(tmp_path / "metrics.jsonl", trackers=[tracker()]) as log:
        log.write("train", step=1, loss=float("inf"))
        assert not closed
    assert records == lines(tmp_path / "metrics.jsonl") == [{"kind": "train", "step": 1, "loss": None}]
    log.close()
    assert closed == [True]


RECORDS: list[dict[str, Any]] = [
    {"kind": "run", "config": {"seed": 1}, "name": "x"},
    {"kind": "train", "step": 1, "loss": 2.5, "bpb": None, "lr": {"muon": 0.02, "adamw": 0.001}},
    {"kind": "eval", "step": 1, "loss": 2.0},
    {"kind": "sample", "step": 1, "samples": [{"prompt": "Once", "text": " upon\na time"}]},
    {"kind": "final", "step": 1, "loss": 2.0, "baselines": {"xz_bpb": 2.1, "v1.2/a.txt": 3.0}, "samples": []},
]


def test_tensorboard_shows_the_numbers(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tensorboard_tracker(tmp_path) as track:
        for record in RECORDS:
            track(record)
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        "train/loss", "train/lr/muon", "train/lr/adamw", "eval/loss", "final/loss", "final/baselines/xz_bpb",
        "final/baselines/v1.2/a.txt",
    }  # fmt: skip
    (point,) = events.Scalars("train/loss")
    assert (point.step, point.value) == (1, 2.5)
    assert {"config/text_summary", "sample/0/text_summary"} <= set(events.Tags()["tensors"])


def test_wandb_gets_the_numbers_and_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    class Run:
        config = types.SimpleNamespace(update=lambda values, **_: calls.append(("config", values)))

        def log(self, values: dict[str, float], step: int) -> None:
            calls.append((f"log {step}", values))

        def finish(self) -> None:
            calls.append(("finish", None))

    def init(**options: Any) -> Run:
        calls.append(("init", options))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with wandb_tracker("project", folder=tmp_path, run_id="abc") as track:
        for record in RECORDS:
            track(record)
    assert calls == [
        ("init", {"project": "project", "name": tmp_path.name, "dir": str(tmp_path), "id": "abc", "resume": "allow"}),
        ("config", {"config": {"seed": 1}}),
        ("log 1", {"train/loss": 2.5, "train/lr/muon": 0.02, "train/lr/adamw": 0.001}),
        ("log 1", {"eval/loss": 2.0}),
        ("log 1", {"final/loss": 2.0, "final/baselines/xz_bpb": 2.1, "final/baselines/v1.2/a.txt": 3.0}),
        ("finish", None),
    ]


def test_a_service_that_refuses_is_an_error_that_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options: Any) -> Any:
        raise RuntimeError("no API key")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    tracker = wandb_tracker("project", folder=tmp_path, run_id="abc")
    with pytest.raises(ConfigError, match=r"--wandb project: no API key; log in, set WANDB_MODE=offline"), tracker:
        pass


@pytest.mark.parametrize(("resume_step", "kept"), [(2, 0), (3, 1)])
def test_a_rollback_is_forgotten_where_it_will_come_again(resume_step: int, kept: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in (1, 2, 3, 4):
            log.write("train", step=step)
        log.write("rollback", step=2, spike_step=4)
        log.write("train", step=3)
    MetricsLog(path, resume_step=resume_step).close()
    assert sum(record["kind"] == "rollback" for record in lines(path)) == kept
