"""`about_tasks` returns the results of the tasks of CORE for the page of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from quintic.report.charts import curve_of, line_chart
from quintic.report.formatting import finite, or_dash

__all__ = ["about_tasks"]

_figure = or_dash("{:.4f}".format)


def about_tasks(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the newest results as rows of a table, and a chart of their mean if there are several evaluations.

    Args:
        records: the records of kind ``core``; without any the result is None.
    """
    if not records:
        return None
    newest = records[-1]
    centred, accuracy = newest.get("centred") or {}, newest.get("accuracy") or {}
    error = finite(newest.get("core_stderr"))
    chart = None
    if len(records) > 1:
        curve = curve_of(records, "step", "core", label="mean of the centred accuracies", style="points")
        chart = line_chart([curve], title="Tasks", y_label="mean centred accuracy (share of right answers)")
    return {
        "core": _figure(newest.get("core")) + ("" if error is None else f" ± {error:.4f}"),
        "step": newest["step"],
        "missing": [str(label) for label in newest.get("missing") or ()],
        "rows": [[label, _figure(accuracy.get(label)), _figure(value)] for label, value in centred.items()],
        "chart": chart,
    }
