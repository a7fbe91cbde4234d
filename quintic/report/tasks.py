"""The in-context tasks on the page of a run that answered those of CORE."""

from collections.abc import Mapping, Sequence
from typing import Any

from quintic.report.charts import Curve, line_chart
from quintic.report.words import finite

__all__ = ["about_tasks"]


def about_tasks(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The newest answers as rows of a table, and a chart of their mean over the steps if it was taken more than once.

    Args:
        records: those of kind ``core``; without any the result is None.
    """
    if not records:
        return None
    newest = records[-1]
    centred, accuracy = newest.get("centred") or {}, newest.get("accuracy") or {}
    error = finite(newest.get("core_stderr"))
    chart = None
    if len(records) > 1:
        means = [finite(record.get("core")) for record in records]
        errors = [finite(record.get("core_stderr")) for record in records]
        curve = Curve(
            label="mean of the centred accuracies",
            x=[float(record["step"]) for record in records],
            y=means,
            spread=[None if m is None or e is None else (m - e, m + e) for m, e in zip(means, errors, strict=True)],
            style="points",
        )
        chart = line_chart([curve], title="Tasks", y_label="mean centred accuracy (share of right answers)")
    return {
        "core": _figure(newest.get("core")) + ("" if error is None else f" ± {error:.4f}"),
        "step": newest["step"],
        "missing": [str(label) for label in newest.get("missing") or ()],
        "rows": [[label, _figure(accuracy.get(label)), _figure(value)] for label, value in centred.items()],
        "chart": chart,
    }


def _figure(value: Any) -> str:
    number = finite(value)
    return "–" if number is None else f"{number:.4f}"
