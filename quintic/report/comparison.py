"""Several runs side by side on one page, and how much sooner one reaches the result of another.

Here: `write_comparison`. Not here: the page of one run (`report`), drawings (`figures`), tables and styles (`page`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from quintic.errors import ConfigError
from quintic.report.figures import Bar, Curve, Reference, bar_chart, line_chart, upper_edge
from quintic.report.history import METRICS_FILE, RunHistory
from quintic.report.page import (
    axis_tabs,
    duration,
    finite,
    flatten,
    large_number,
    number_table,
    render_page,
    section,
    write_text_atomically,
)

__all__ = ["write_comparison"]


_MEASURED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("tokens per second", "tokens_per_second", large_number),
    ("model FLOPs utilisation", "mfu", "{:.1%}".format),
    ("floating-point operations", "flops", "{:.3g}".format),
    ("most memory (GiB)", "peak_memory_bytes", lambda value: f"{value / 2**30:.3g}"),
    ("least smoothed training loss", "least_loss", "{:.4f}".format),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """One evaluation; tokens and seconds are None where the log lacks them."""

    step: float
    loss: float
    bpb: float | None
    tokens: float | None
    seconds: float | None


def write_comparison(runs: Mapping[str, str | Path], out: str | Path, *, title: str) -> dict[str, Any]:
    """Draw the validation curves of several runs on one page and measure them against the first.

    The figure per candidate is the step at which its validation loss first is at or below the baseline's last one. It
    lies on the straight line between the evaluations before and after; a candidate that is there at its first
    evaluation gets that evaluation's step, since nothing is known before it. Evaluations whose loss was not finite are
    left out.

    Args:
        runs: name -> run folder, two at least; the first is the baseline, the others are candidates.
        out: the HTML file to write; replaced in one move.
        title: the heading of the page.

    Returns:
        ``baseline``: its name. ``runs``: name -> ``steps``, ``tokens``, ``seconds``, ``loss`` and ``bpb`` of the last
        evaluation. ``candidates``: name -> ``steps_to_baseline_loss`` and ``percent_of_steps``, the same for
        ``seconds`` (``seconds_to_baseline_loss``, ``percent_of_seconds``), each None if that loss was never reached (or
        not timed), and ``sentence``, which says it in words. ``percent_*`` is relative to the baseline's whole run.

    Raises:
        ConfigError: if there are fewer than two runs, or one has no log or no finite validation loss.
        DataError: if a log is damaged.
    """
    if len(runs) < 2:
        raise ConfigError(f"a comparison needs two runs at least, got {len(runs)}: give a baseline and a candidate")
    histories = {name: RunHistory.load(folder) for name, folder in runs.items()}
    curves = {name: _points(history) for name, history in histories.items()}
    for name, points in curves.items():
        if not points:
            raise ConfigError(
                f"{Path(runs[name]) / METRICS_FILE} ({name}) has no finite validation loss: let the run evaluate once"
            )
    baseline, *others = runs
    candidates = {name: _against(baseline, curves[baseline], name, curves[name]) for name in others}
    ends = {name: points[-1] for name, points in curves.items()}
    figures: dict[str, Any] = {
        "baseline": baseline,
        "runs": {
            name: {"steps": int(p.step), "tokens": p.tokens, "seconds": p.seconds, "loss": p.loss, "bpb": p.bpb}
            for name, p in ends.items()
        },
        "candidates": candidates,
    }
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="status">{escape(", ".join(runs))}: the same task, trained in different ways.</p>',
        _headline(baseline, candidates),
        _results(histories, ends, [name for name, history in histories.items() if _is_lost(history)]),
        _learning(histories, ends[baseline].loss, baseline),
        _differences(histories),
    ]
    write_text_atomically(Path(out), render_page(title, "\n".join(body)))
    return figures


def _points(history: RunHistory) -> list[_Point]:
    """The run's finite evaluations."""
    return [
        _Point(
            step=float(record["step"]),
            loss=loss,
            bpb=finite(record.get("bpb")),
            tokens=finite(record.get("tokens")),
            seconds=finite(record.get("seconds")),
        )
        for record in history.evals
        if (loss := finite(record.get("loss"))) is not None
    ]


def _reached(points: Sequence[_Point], loss: float) -> tuple[float, float | None] | None:
    """The step, and the seconds, at which the curve first is at or below ``loss``; None for never."""
    for index, after in enumerate(points):
        if after.loss > loss:
            continue
        if index == 0:
            return after.step, after.seconds
        before = points[index - 1]
        part = (before.loss - loss) / (before.loss - after.loss)
        step = before.step + part * (after.step - before.step)
        if before.seconds is None or after.seconds is None:
            return step, None
        return step, before.seconds + part * (after.seconds - before.seconds)
    return None


def _against(baseline: str, target: Sequence[_Point], name: str, points: Sequence[_Point]) -> dict[str, Any]:
    """The figures of one candidate (see `write_comparison`)."""
    end = target[-1]
    reached = _reached(points, end.loss)
    if reached is None:
        return {
            "steps_to_baseline_loss": None,
            "percent_of_steps": None,
            "seconds_to_baseline_loss": None,
            "percent_of_seconds": None,
            "sentence": f"{name} never reached {baseline}'s final validation loss in its {points[-1].step:,.0f} steps",
        }
    step, seconds = reached
    percent = 100 * step / end.step if end.step > 0 else None
    timed = seconds is not None and end.seconds is not None and end.seconds > 0
    # Where a run has few steps, a tenth of a step still matters.
    shown = f"{step:,.0f}" if end.step >= 100 else f"{step:.3g}"
    words = f" ({percent:.1f} %)" if percent is not None else ""
    return {
        "steps_to_baseline_loss": step,
        "percent_of_steps": percent,
        "seconds_to_baseline_loss": seconds,
        "percent_of_seconds": 100 * seconds / end.seconds if timed and seconds and end.seconds else None,
        "sentence": f"{name} reached {baseline}'s final validation loss after {shown} of {end.step:,.0f} steps{words}",
    }


def _headline(baseline: str, candidates: Mapping[str, Mapping[str, Any]]) -> str:
    items = []
    for figures in candidates.values():
        seconds, percent = figures["seconds_to_baseline_loss"], figures["percent_of_seconds"]
        time = ""
        if percent is not None:
            whose = f"{escape(baseline)}'s time"
            time = f"<small>and after {duration(seconds)} of training, {percent:.1f} % of {whose}</small>"
        items.append(f"<li>{escape(figures['sentence'])}.{time}</li>")
    text = (
        "<p>Fewer steps to the same loss means that less text has to be read to learn as much. The figure is read off "
        "the validation curve, on the straight line between two evaluations. Time depends on the machine: compare it "
        "only between runs on the same one.</p>"
    )
    return section("Who gets there sooner", f'<ul class="claims">{"".join(items)}</ul>', text)


def _is_lost(history: RunHistory) -> bool:
    """Whether the run's last evaluation was not finite."""
    return finite(history.evals[-1].get("loss")) is None


def _results(histories: Mapping[str, RunHistory], ends: Mapping[str, _Point], lost: Sequence[str]) -> str:
    """The last finite evaluation of each run, with a warning for those that ended in a loss that is no number."""
    bars = [
        Bar(label=name, value=point.bpb, text=f"{point.bpb:.3f}", color=index)
        for index, (name, point) in enumerate(ends.items())
        if point.bpb is not None
    ]
    points = ends.values()
    rows = [
        ["steps", *(f"{point.step:,.0f}" for point in points)],
        ["tokens read", *("–" if point.tokens is None else large_number(point.tokens) for point in points)],
        ["training time", *("–" if point.seconds is None else duration(point.seconds) for point in points)],
        ["loss (nats per token)", *(f"{point.loss:.4f}" for point in points)],
        ["bits per byte", *("–" if point.bpb is None else f"{point.bpb:.4f}" for point in points)],
    ]
    for label, field, form in _MEASURED:
        values = [history.newest(field) for history in histories.values()]
        if any(value is not None for value in values):
            rows.append([label, *("–" if value is None else form(value) for value in values)])
    text = "<p>The last evaluation on the validation text, which no run was trained on. Lower is better.</p>"
    if lost:
        names = escape(", ".join(lost))
        text += f"<p><b>{names}: the loss was not a finite number at the end;</b> shown is the last finite one.</p>"
    chart = f"<h3>Bits per byte</h3>{bar_chart(bars, title='Bits per byte')}" if bars else ""
    return section("Where they ended", text, chart, number_table(["", *ends], rows, num_text_columns=1))


def _learning(histories: Mapping[str, RunHistory], target: float, baseline: str) -> str:
    """Validation loss and bits per byte of all runs over steps, tokens and time."""
    records = [record for history in histories.values() for record in history.evals]
    edges = {
        field: upper_edge([(r["step"], v) for r in records if (v := finite(r.get(field))) is not None])
        for field in ("loss", "bpb")
    }

    def draw(x: str, x_label: str, divisor: float) -> str:
        charts = []
        for field, title, unit in (
            ("loss", "Validation loss", "nats per token"),
            ("bpb", "Validation bits per byte", "bits per byte"),
        ):
            curves = [
                Curve(
                    label=name,
                    x=[r[x] / divisor for r in history.evals if finite(r.get(x)) is not None],
                    y=[finite(r.get(field)) for r in history.evals if finite(r.get(x)) is not None],
                    style="points",
                    color=index,
                )
                for index, (name, history) in enumerate(histories.items())
            ]
            label = f"{baseline}'s final loss: {target:.3f}"
            lines = [Reference(label=label, y=target, side="left")] if field == "loss" else []
            limits = (None, edges[field])
            charts.append(
                line_chart(curves, title=title, x_label=x_label, y_label=unit, references=lines, y_limits=limits)
            )
        return "".join(charts)

    return section("How they learnt", axis_tabs(draw, records, name="learning"))


def _peak_rates(history: RunHistory) -> dict[str, str]:
    """The largest learning rate of each group of weights, and the largest weight decay, of a run."""
    peaks: dict[str, float] = {}
    for record in history.train:
        rates = {f"peak learning rate, {name}": rate for name, rate in (record.get("lr") or {}).items()}
        for key, value in {**rates, "peak weight decay": record.get("weight_decay")}.items():
            if isinstance(value, int | float):
                peaks[key] = max(value, peaks.get(key, value))
    return {key: f"{value:.4g}" for key, value in peaks.items()}


def _differences(histories: Mapping[str, RunHistory]) -> str:
    """The settings in which the runs differ."""
    settings = {
        name: dict(flatten({key: history.run.get(key) or {} for key in ("config", "machine", "versions")}))
        for name, history in histories.items()
    }
    # An option may hold one value for each optimizer: what a run really used stands in its training records.
    for name, history in histories.items():
        settings[name].update(_peak_rates(history))
    keys = dict.fromkeys(key for entries in settings.values() for key in entries)
    rows = []
    for key in keys:
        values = [str(entries.get(key, "–")) for entries in settings.values()]
        if len(set(values)) > 1:
            rows.append([key.removeprefix("config."), *values])
    if not rows:
        return section("Settings", "<p>The logs show no difference in settings.</p>")
    text = "<p>Everything else in their settings is the same.</p>"
    table = number_table(["setting", *histories], rows, num_text_columns=len(histories) + 1)
    return section("Settings in which they differ", text, table)
