"""The section on in-context tasks: what was answered, what was missing, and how it went over the steps."""

from pathlib import Path
from typing import Any

from report_pages import read

from quintic.report.report import write_report
from quintic.report.tasks import about_tasks
from quintic.train.metrics import MetricsLog

RECORD: dict[str, Any] = {
    "step": 40,
    "core": 0.125,
    "core_stderr": 0.01,
    "centred": {"copa": 0.25, "piqa": 0.0},
    "accuracy": {"copa": 0.625, "piqa": None},
    "missing": ["squad", "<coqa>"],
}


def written(folder: Path, *records: dict[str, Any]) -> str:
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.write("eval", step=40, loss=1.0)
        for record in records:
            log.write("core", **record)
    return read(write_report(folder)).text


def test_the_newest_answers_are_a_table(tmp_path: Path) -> None:
    text = written(tmp_path, RECORD | {"step": 20, "core": 0.1, "core_stderr": None}, RECORD)
    assert "Their mean, without the tasks that were missing, is 0.1250 ± 0.0100 after 40 steps" in text
    assert "task accuracy centred copa 0.6250 0.2500 piqa – 0.0000" in text
    assert "Missing: squad, <coqa>." in text
    assert "CORE, their mean," not in text
    assert " 0.1 0.125 (0.115 to 0.135) mean centred accuracy (share of right answers) " in text


def test_all_tasks_are_core_and_one_record_needs_no_chart(tmp_path: Path) -> None:
    text = written(tmp_path, RECORD | {"missing": [], "core_stderr": None, "core": None})
    assert "CORE, their mean, is – after 40 steps." in text
    assert "Missing" not in text
    assert about_tasks([]) is None
    found = about_tasks([{"step": 3}])
    assert found is not None
    assert (found["chart"], found["rows"]) == (None, [])
