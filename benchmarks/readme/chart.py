"""Draws curves of two optimizers with the spread of their seeds, as SVG files for light and for dark pages.

Two panels: bits per byte against steps, and against seconds of training; beside each other for wide windows, and one
below the other for phones. A band reaches from the least to the most of
the seeds at each evaluation, the line is their median. A dashed line marks the level at which AdamW ends, and an arrow
where Muon passes it.
"""

import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.training.quality_page import steps_to_reach

__all__ = ["THEMES", "Curves", "curves_of", "draw", "shares"]

LABELS = {"adamw": "AdamW", "muon": "Muon"}

THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {"ink": "#1f2328", "soft": "#59636e", "grid": "#d1d9e0", "adamw": "#b35900", "muon": "#0a58ca"},
    "dark": {"ink": "#f0f6fc", "soft": "#9198a1", "grid": "#3d444d", "adamw": "#f0a35e", "muon": "#6cb6ff"},
}
"""Colours by name, for each theme. The background is transparent."""

# The vertical scale begins at the medians after this part of the run: curves fall too steeply before that.
_SHOWN_FROM = 0.15


@dataclass(frozen=True)
class Curves:
    """The runs of one optimizer, all evaluated after the same steps.

    Attributes:
        steps: (evaluations,) after how many steps.
        seconds: (evaluations,) of training until then, medians over the seeds; empty if they were not measured.
        values: (seeds, evaluations) bits per byte.
    """

    steps: Sequence[float]
    seconds: Sequence[float]
    values: Sequence[Sequence[float]]

    @property
    def medians(self) -> list[float]:
        """Return the median of the seeds at each evaluation."""
        return [statistics.median(column) for column in zip(*self.values, strict=True)]


def curves_of(runs: Sequence[Mapping[str, Any]]) -> Curves:
    """Return the curves of some runs: rows with `curve`, [[step, bits per byte], ...], and perhaps `curve_seconds`.

    Raises:
        ValueError: there is no run, or the runs were evaluated after different steps.
    """
    steps = [[step for step, _ in run["curve"]] for run in runs]
    if not steps or any(one != steps[0] for one in steps):
        raise ValueError("a chart needs runs that were evaluated after the same steps")
    timed = [run["curve_seconds"] for run in runs if "curve_seconds" in run]
    seconds = [statistics.median(column) for column in zip(*timed, strict=True)] if len(timed) == len(runs) else []
    return Curves(steps[0], seconds, [[value for _, value in run["curve"]] for run in runs])


def shares(curves: Mapping[str, Curves], name: str) -> list[float]:
    """Return for each of Muon's seeds the share of AdamW's `steps` or `seconds` after which it has AdamW's last median.

    Seeds that never get there are left out.
    """
    goal, muon = curves["adamw"].medians[-1], curves["muon"]
    reached = [steps_to_reach(list(zip(getattr(muon, name), values, strict=True)), goal) for values in muon.values]
    return [one / getattr(curves["adamw"], name)[-1] for one in reached if one is not None]


def draw(curves: Mapping[str, Curves], theme: str, *, is_narrow: bool = False) -> str:
    """Return the chart as the text of an SVG file.

    Args:
        curves: of `"adamw"` and `"muon"`.
        theme: a name in `THEMES`.
        is_narrow: one panel below the other, so that text can be read in a column of 360 pixels.
    """
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    colors = THEMES[theme]
    # Text stays text, and names of elements do not change from one drawing to the next.
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "quintic",
        "font.family": "sans-serif",
        "font.sans-serif": ["system-ui", "-apple-system", "Segoe UI", "Helvetica", "Arial", "sans-serif"],
        "font.size": 11,
        "text.color": colors["ink"],
        "axes.edgecolor": colors["grid"],
        "axes.labelcolor": colors["soft"],
        "xtick.color": colors["soft"],
        "ytick.color": colors["soft"],
    }
    # The first of the fonts that this machine has only measures the text; without any, matplotlib warns of each.
    settings["font.sans-serif"].insert(0, "DejaVu Sans")
    axes_of = {"steps": "steps"}
    if all(one.seconds for one in curves.values()):
        axes_of["seconds"] = "seconds of training"
    with mpl.rc_context(settings):
        rows, columns = (len(axes_of), 1) if is_narrow else (1, len(axes_of))
        width, height = (4.1, 2.9) if is_narrow else (4.6, 3.3)  # inches, of a panel
        figure, panels = plt.subplots(
            rows, columns, figsize=(width * columns, height * rows), sharey=True, squeeze=False, layout="constrained"
        )
        for axes, (name, label) in zip(panels.flat, axes_of.items(), strict=True):
            _panel(axes, curves, name, label, colors)
        for axes in panels[:, 0]:
            axes.set_ylabel("validation bits per byte")
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    lines = text.getvalue().replace("DejaVu Sans, ", "").replace("'DejaVu Sans', ", "")
    return "\n".join(line.rstrip() for line in lines.splitlines()) + "\n"


def _panel(axes: Any, curves: Mapping[str, Curves], name: str, label: str, colors: Mapping[str, str]) -> None:
    """Draw the curves against `steps` or `seconds`."""
    goal = curves["adamw"].medians[-1]
    # Names of curves stand where these are far apart: AdamW's above it on the way, Muon's below its end.
    for optimizer, one in curves.items():
        x, columns, color = getattr(one, name), list(zip(*one.values, strict=True)), colors[optimizer]
        axes.fill_between(x, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.25, linewidth=0)
        axes.plot(x, one.medians, color=color, linewidth=2)
        place = int(0.6 * len(x)) if optimizer == "adamw" else -1
        axes.annotate(
            f"{LABELS[optimizer]} {one.medians[-1]:.2f}",
            (x[place], one.medians[place]),
            xytext=(6, 8) if optimizer == "adamw" else (0, -16),
            textcoords="offset points",
            ha="left" if optimizer == "adamw" else "right",
            color=color,
            fontweight="bold",
        )
    axes.axhline(goal, color=colors["soft"], linewidth=1, linestyle=(0, (4, 3)))
    if found := shares(curves, name):
        share = statistics.median(found)
        reached = share * getattr(curves["adamw"], name)[-1]
        axes.plot([reached], [goal], marker="o", color=colors["muon"], markersize=6)
        axes.annotate(
            f"{100 * share:.0f} % of AdamW's {name}",
            (reached, goal),
            xytext=(-8, -22),
            textcoords="offset points",
            ha="right",
            color=colors["muon"],
        )
    medians = [value for one in curves.values() for value in one.medians]
    first = max(one.medians[int(_SHOWN_FROM * len(one.medians))] for one in curves.values())
    least = min(medians)
    axes.set_ylim(least - 0.18 * (first - least), first)
    axes.set_xlim(left=0)
    axes.set_xlabel(label)
    axes.grid(color=colors["grid"], linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
