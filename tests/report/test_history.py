"""Edited and damaged logs: one line that names the place."""

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import error_of

from quintic.errors import QuinticError
from quintic.report.comparison import write_comparison
from quintic.report.history import METRICS_FILE, read_metrics
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
        (2, {"step": "1"}, '"step" is not a number'),
        (2, {"step": None}, 'it has no "step"'),
        (2, {"lr": 0.02}, '"lr" is not an object of numbers'),
        (2, {"lr": {"muon": "0.02"}}, '"lr" is not an object of numbers'),
        (2, {"times_ms": {"data": [1.0]}}, '"times_ms" is not an object of numbers'),
        (1, {"total_steps": "many"}, '"total_steps" is not a number'),
        (1, {"config": [1]}, '"config" is not an object'),
        (1, {"time": 5}, '"time" is not a text'),
        (3, {"kind": ["eval"]}, '"kind" is not a text'),
        (3, {"document_nats": [1.0, "2"]}, '"document_nats" is not a list of numbers'),
        (4, {"samples": {"prompt": "a"}}, '"samples" is not a list of objects'),
        (4, {"samples": [None]}, '"samples" is not a list of objects'),
        (1, {"model": {"parameters": "many"}}, '"parameters" is not a number'),
        (1, {"machine": {"matrix_flops_per_second": [1]}}, '"matrix_flops_per_second" is not a number'),
        (1, {"data": {"source": ["a", "b"]}}, '"source" is not a text'),
        (5, {"kind": "rollback", "step": None}, 'it has no "step"'),
        (7, {"baselines": 3}, '"baselines" is not an object of numbers'),
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


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value in a record."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (key,)
        yield from ((key, *rest) for rest in places(inner))


@pytest.mark.parametrize("value", [None, 1e300, 10**200, "x", [None]])
def test_a_log_with_any_value_is_a_page_or_one_line(value: Any, tmp_path: Path) -> None:
    documents = {"document_nats": [3.0, 4.0], "document_bytes": [2, 3]}
    good = [record | documents if record["kind"] == "eval" else record for record in GOOD[:-1]]
    good[0] = good[0] | {"model": {"parameters": 5, "flops_per_token": 2}, "machine": {"matrix_flops_per_second": 7}}
    other = write_log(tmp_path / "other", good)
    for number, record in enumerate(good):
        for *path, last in places(record):
            records = copy.deepcopy(good)
            inner: Any = records[number]
            for key in path:
                inner = inner[key]
            inner[last] = value
            folder = write_log(tmp_path / "x", records)
            for write in (
                lambda folder=folder: write_report(folder),
                lambda folder=folder: write_comparison({"a": other, "b": folder}, tmp_path / "c.html", title="t"),
                lambda folder=folder: write_comparison({"b": folder, "a": other}, tmp_path / "c.html", title="t"),
            ):
                with contextlib.suppress(QuinticError):  # any other error fails the test
                    write()


def test_numbers_that_no_run_writes_are_missing(tmp_path: Path) -> None:
    records = [*GOOD[:1], {"kind": "eval", "step": 1, "loss": 1e300, "bpb": -(10**200), "document_nats": [1e101, 3e38]}]
    read = read_metrics(write_log(tmp_path / "x", records) / METRICS_FILE)[1]
    assert read == {"kind": "eval", "step": 1, "loss": None, "bpb": None, "document_nats": [None, 3e38]}


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


def test_right_and_unknown_fields_are_not_refused(tmp_path: Path) -> None:
    records = [*GOOD, {"kind": "run", "name": "résumé", "unknown": [{}], "loss": None}]
    assert read_metrics(write_log(tmp_path / "x", records) / METRICS_FILE) == records
