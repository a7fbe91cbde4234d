"""The section on in-context tasks: what was answered, what was missing, and how it went over the steps."""

from quintic.report.tasks import tasks_section

RECORD = {
    "step": 40,
    "core": 0.125,
    "core_stderr": 0.01,
    "centred": {"copa": 0.25, "piqa": 0.0},
    "accuracy": {"copa": 0.625, "piqa": None},
    "missing": ["squad", "<coqa>"],
}


def test_the_newest_answers_are_a_table() -> None:
    page = tasks_section([RECORD | {"step": 20, "core": 0.1}, RECORD])
    assert "is <b>0.1250 ± 0.0100</b> after 40 steps" in page
    assert "<td>copa</td>" in page
    assert ">0.6250<" in page
    assert ">0.2500<" in page
    assert ">–<" in page
    assert "Missing: squad, &lt;coqa&gt;." in page
    assert "CORE, their mean," not in page
    assert "<svg" in page


def test_all_tasks_are_core_and_one_record_needs_no_chart() -> None:
    page = tasks_section([RECORD | {"missing": [], "core_stderr": None, "core": None}])
    assert "CORE, their mean, is <b>–</b>" in page
    assert "Missing" not in page
    assert "<svg" not in page
    assert tasks_section([]) == ""
    assert "What it can answer" in tasks_section([{"step": 3}])
