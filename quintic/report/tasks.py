"""The report's section on in-context tasks, for runs that answered those of CORE."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from quintic.report.figures import Curve, line_chart
from quintic.report.page import finite, number_table, section

__all__ = ["tasks_section"]


def tasks_section(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the newest answers as a table, and their mean over the steps if it was taken more than once.

    Args:
        records: those of kind ``core``; without any the section is empty.
    """
    if not records:
        return ""
    newest = records[-1]
    centred, accuracy = newest.get("centred") or {}, newest.get("accuracy") or {}
    missing = [str(label) for label in newest.get("missing") or ()]
    name = "CORE, their mean," if not missing else "Their mean, without the tasks that were missing,"
    value, error = finite(newest.get("core")), finite(newest.get("core_stderr"))
    figure = "–" if value is None else f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")
    text = (
        "<p>Questions with a few solved examples before them, from the tasks of CORE (DCLM). Accuracies are centred: 0 "
        f"is chance, 1 is no mistake. {name} is <b>{figure}</b> after {newest['step']:,} steps.</p>"
    )
    if missing:
        text += f"<p>Missing: {escape(', '.join(missing))}.</p>"
    rows = [[label, _figure(accuracy.get(label)), _figure(value)] for label, value in centred.items()]
    table = number_table(["task", "accuracy", "centred"], rows, num_text_columns=1) if rows else ""
    chart = ""
    if len(records) > 1:
        curve = Curve(
            label="mean of the centred accuracies",
            x=[float(record["step"]) for record in records],
            y=[finite(record.get("core")) for record in records],
            style="points",
        )
        chart = line_chart([curve], title="Tasks", x_label="step", y_label="centred accuracy")
    return section("What it can answer", text, chart, table)


def _figure(value: Any) -> str:
    number = finite(value)
    return "–" if number is None else f"{number:.4f}"
