"""`write_report` makes the page of a training run, for readers without background knowledge.

The text of the page is in ``templates/run.html``, which reads the records of the run's log (`history`); this file
chooses the charts and figures. A page is one file without scripts, which can be mailed, printed and opened offline.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quintic.durable import json_object
from quintic.report.charts import Chart, Curve, Point, curve_of, curves_by_kind, learning_panels, some_of
from quintic.report.history import SOURCE_FILE, RunHistory
from quintic.report.page import write_page

__all__ = ["write_report"]

_REPORT_FILE = "report.html"
_MAX_EVALUATIONS = 40
_MAX_SAMPLES = 12
_PHASES = ("data", "forward_backward", "optimizer")


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run, finished or not, from its ``metrics.jsonl``, and return its path.

    An older page is replaced by one rename.

    Args:
        folder: the folder of the run.
        out: the file to write; by default ``report.html`` in that folder.

    Raises:
        ConfigError: the folder holds no log, or a log without any step, or the page cannot be written.
        DataError: the log is damaged.
    """
    history = RunHistory.load(folder)
    path = out or folder / _REPORT_FILE
    core = curve_of(history.core, "step", "core", label="")
    gradients, updates = (curves_by_kind(history.train, field).values() for field in ("grad_rms", "update_rms"))
    norm = curve_of(history.train, "step", "grad_norm", label="", look=4)
    write_page(
        path,
        "run.html",
        history=history,
        name=str(history.run.get("name") or folder.resolve().name),
        learning=_learning(history),
        core=Chart([core], title="Mean centred accuracy", unit="share of right answers"),
        rates=_rates(history),
        layers=[
            Chart(gradients, title="Gradients", unit="RMS, nats per token, per weight", log_y=True),
            Chart(updates, title="Changes of the weights in one step", unit="RMS", log_y=True),
            Chart([norm], title="Norm of the whole gradient", unit="nats per token", log_y=True),
        ],
        speed=_speed(history),
        evals=some_of(history.evals, _MAX_EVALUATIONS),
        samples=some_of(history.samples, _MAX_SAMPLES),
        sources=list(_sources(folder)),
    )
    return path


def _sources(folder: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the source code of the run and of each resumed section: (title, facts, diff to the commit)."""
    first = Path(SOURCE_FILE)
    for path in sorted(folder.glob(f"{first.stem}*{first.suffix}"), key=lambda path: path.stem):
        facts = json_object(path)
        facts.pop("files", None)
        step = path.stem.rpartition("-")[2].lstrip("0")
        diff, text = path.with_suffix(".diff"), ""
        if facts.get("diff_bytes"):
            text = diff.read_text("utf-8", errors="replace") if diff.is_file() else f"{diff.name} is gone."
        yield "" if path.name == first.name else f"From step {step} on", facts, text


def _learning(history: RunHistory) -> dict[str, list[Chart]]:
    """Return charts of bits per byte and loss over steps, tokens and time."""
    baselines = history.final.get("baselines") or {}
    named = (("xz -9", baselines.get("xz_bpb")), ("byte bigram", baselines.get("bigram_bpb")))
    references = {f"{label}: {bpb:.2f}": bpb for label, bpb in named if bpb is not None}
    lines: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
        (history.train, {"label": "on the training text", "noisy": True, "look": 1}),
        (history.evals, {"label": "on the validation text"}),
    ]
    titles = {"bpb": "Bits per byte", "loss": "Loss"}
    return learning_panels(titles, lines, {"bpb": references})


def _rates(history: RunHistory) -> list[Chart]:
    """Return charts of learning rates and weight decay relative to their peaks, and of momentum."""
    series = curves_by_kind(history.train, "lr")
    series["weight decay"] = curve_of(history.train, "step", "weight_decay", label="weight decay")
    # Equal schedules are one line with one entry in the legend, since equal lines would hide each other.
    curves: list[Curve] = []
    for name, curve in series.items():
        peak = max(curve.values, default=0.0)
        if peak <= 0:
            continue
        label = f"{name} (peak {peak:.3g})"
        points = [point._replace(y=100 * point.y / peak) for point in curve.points]
        same = next((i for i, other in enumerate(curves) if _are_one_line(points, other.points)), None)
        if same is None:
            curves.append(Curve(label=label, points=points, look=len(curves)))
        else:
            curves[same] = replace(curves[same], label=f"{curves[same].label}, {label}")
    momentum = curve_of(history.train, "step", "momentum", label="", look=3)
    return [
        Chart(curves, title="Learning rates and weight decay", unit="percent of the peak", low=0.0),
        Chart([momentum], title="Momentum", unit="share of earlier gradients that is kept"),
    ]


def _are_one_line(first: Sequence[Point], second: Sequence[Point]) -> bool:
    """Return whether two curves, in percent, differ by less than the width of a line where both have values."""
    places = [[point.x for point in points] for points in (first, second)]
    return places[0] == places[1] and not any(abs(a.y - b.y) >= 0.1 for a, b in zip(first, second, strict=True))


def _speed(history: RunHistory) -> dict[str, Any]:
    """Return ``chart`` and ``median`` of tokens per second, ``step`` (milliseconds) and ``shares`` of its phases."""
    curve = curve_of(history.train, "step", "tokens_per_second", label="", noisy=True, look=2)
    sums = {phase: sum(times.get(phase) or 0.0 for times in history.times) for phase in _PHASES}
    total = sum(sums.values())
    steps = [sum(filter(None, times.values())) for times in history.times]
    return {
        "chart": Chart([curve], title="Tokens per second", low=0.0),
        "median": statistics.median(curve.values) if curve.values else None,
        "step": statistics.median(steps) if steps else None,
        "shares": {phase: milliseconds / total for phase, milliseconds in sums.items() if total},
    }
