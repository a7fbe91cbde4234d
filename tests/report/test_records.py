"""Edited and damaged logs: one line that names the place, never a traceback."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import error_of

from quintic.errors import QuinticError
from quintic.report.comparison import write_comparison
from quintic.report.history import METRICS_FILE
from quintic.report.records import wrong_in
from quintic.report.report import write_report
from quintic.train.metrics import MetricsLog

GOOD: list[dict[str, Any]] = [
    {"kind": "run", "name": "x", "time": "2026-01-01T00:00:00+00:00", "config": {"a": {"b": 1}}, "total_steps": 2},
    {
        "kind": "train", "step": 1, "tokens": 10, "seconds": 0.5, "loss": 2.5, "bpb": 1.5, "lr": {"muon": 0.02},
        "momentum": None, "weight_decay": 0.1, "tokens_per_second": 20.0, "times_ms": {"data": 1.0},
        "grad_rms": {"a": 1}, "update_rms": {"a": None},
    },
    {"kind": "eval", "step": 1, "tokens": 10, "seconds": 0.5, "loss": 2.0, "bpb": 1.0},
    {"kind": "sample", "step": 1, "samples": [{"prompt": "a", "text": "b"}]},
    {"kind": "resume", "step": 1, "time": "2026-01-01T00:00:00+00:00"},
    {"kind": "train", "step": 2, "tokens": 20, "seconds": 1.0, "loss": 2.4, "bpb": 1.4},
    {"kind": "final", "step": 2, "loss": 1.9, "bpb": 0.9, "seconds": 1, "baselines": {"xz_bpb": 2.0}, "breakdown": {}},
]  # fmt: skip


def write_log(folder: Path, records: list[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / METRICS_FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.mark.parametrize(
    ("line", "change", "wrong"),
    [
        (2, {"loss": "high"}, '"loss" is not a number'),
        (2, {"loss": True}, '"loss" is not a number'),
        (2, {"tokens": 10**400}, '"tokens" is not a number'),
        (2, {"step": "1"}, '"step" is not a count'),
        (2, {"step": 1.5}, '"step" is not a count'),
        (2, {"step": -1}, '"step" is not a count'),
        (2, {"step": 10**30}, '"step" is not a count'),
        (2, {"step": None}, 'it has no "step"'),
        (2, {"lr": 0.02}, '"lr" does not hold numbers by name'),
        (2, {"lr": {"muon": "0.02"}}, '"lr" does not hold numbers by name'),
        (2, {"times_ms": [1.0]}, '"times_ms" does not hold numbers by name'),
        (1, {"total_steps": "many"}, '"total_steps" is not a count'),
        (1, {"ranks": "8"}, '"ranks" is not a count'),
        (1, {"config": [1]}, '"config" does not hold values by name'),
        (1, {"time": 5}, '"time" is not a text'),
        (1, {"repeat": 5}, '"repeat" is not a text'),
        (1, {"git": "c0ffee"}, '"git" does not hold values by name'),
        (1, {"track": [1]}, '"track" does not hold values by name'),
        (1, {"warmup_seconds": "1"}, '"warmup_seconds" is not a number'),
        (2, {"stage": 0.5}, '"stage" is not a count'),
        (2, {"mfu": "high"}, '"mfu" is not a number'),
        (2, {"epoch": 0.5}, '"epoch" is not a count'),
        (2, {"spike": [1], "on_spike": "warn"}, '"spike" is not a number'),
        (5, {"kind": "rollback", "spike_step": -1}, '"spike_step" is not a count'),
        (5, {"kind": "rollback", "step": None}, 'it has no "step"'),
        (3, {"kind": ["eval"]}, '"kind" is not a text'),
        (4, {"samples": {"prompt": "a"}}, '"samples" is not a list of samples'),
        (4, {"samples": ["a"]}, '"samples" is not a list of samples'),
        (4, {"missing": ["a", 1]}, '"missing" is not a list of texts'),
        (4, {"document_nats": [1.5, "a"]}, '"document_nats" is not a list of numbers'),
        (4, {"centred": {"copa": "a"}}, '"centred" does not hold numbers by name'),
        (5, {"step": None}, 'it has no "step"'),
        (7, {"step": None}, 'it has no "step"'),
        (7, {"baselines": 3}, '"baselines" does not hold numbers by name'),
    ],
)
def test_a_field_of_the_wrong_kind_is_one_line(
    line: int, change: dict[str, Any], wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record | change if number == line else record for number, record in enumerate(GOOD, start=1)]
    folder = write_log(tmp_path / "x", records)
    expected = f"{folder / METRICS_FILE}, line {line}: {wrong}; remove the line or restore the file"
    assert error_of(capsys, "report", "--runs-dir", str(tmp_path), "--run", "x") == expected
    with pytest.raises(QuinticError, match="remove the line"):
        MetricsLog(folder / METRICS_FILE, resume_step=1)


@pytest.mark.parametrize("depth", [5_000, 200_000])
def test_deeply_nested_json_is_one_line(depth: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_log(tmp_path / "x", GOOD)
    nested = '{"kind":"run","config":' + '{"a":' * depth + "1" + "}" * depth + "}\n"
    with (folder / METRICS_FILE).open("a") as file:
        file.write(nested + '{"kind":"final"}\n')
    message = error_of(capsys, "report", "--runs-dir", str(tmp_path), "--run", "x")
    assert message.startswith(f"{folder / METRICS_FILE}, line 8: ")
    (folder / METRICS_FILE).unlink()
    (folder / "config.json").write_text("[" * depth + "]" * depth)
    message = error_of(capsys, "train", "--config", str(folder / "config.json"))
    assert message.startswith(f"{folder}/config.json: ")


def test_right_and_unknown_fields_are_not_refused() -> None:
    assert wrong_in({"kind": "run", "name": "résumé", "unknown": [{}], "loss": None}) is None
    assert [wrong_in(record) for record in GOOD] == [None] * len(GOOD)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@settings(max_examples=30)  # each draws eighteen charts
@given(data=st.data())
def test_no_change_of_a_field_is_a_traceback(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "edited-log"
    index = data.draw(st.integers(0, len(GOOD) - 1))
    name = data.draw(st.sampled_from(sorted({name for record in GOOD for name in record})))
    records = list(GOOD)
    records[index] = records[index] | {name: data.draw(ANYTHING)}
    write_log(folder, records)
    page = folder / "c.html"
    for act in (lambda: write_report(folder), lambda: write_comparison({"a": folder, "b": folder}, page, title="c")):
        with contextlib.suppress(QuinticError):
            act()
