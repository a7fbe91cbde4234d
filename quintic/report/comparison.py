"""`write_comparison` puts several runs on one page, and measures how much sooner they reach the baseline's result.

The text of the page is in ``templates/comparison.html``. `arms` reads the runs and decides whether they can be
compared, `charts` draws, and `report` makes the page of a single run.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quintic.report.arms import Arm, final_difference, load_arm, median, texts_of, tokens_differ, unequal_speed, unit_of
from quintic.report.charts import Chart, curve_of, curves_by_kind, learning_panels
from quintic.report.formatting import duration, flatten, humanize, large_number
from quintic.report.history import RunHistory
from quintic.report.page import write_page

__all__ = ["ComparedArm", "write_comparison"]

Form = Callable[[float], str]

# The rows of the table of results: what, its format, and the value of a run.
_ROWS: tuple[tuple[str, Form, Callable[[RunHistory], float | None]], ...] = (
    ("steps", "{:,.0f}".format, lambda run: run.steps),
    ("step of this evaluation", "{:,.0f}".format, lambda run: run.scored[-1]["step"]),
    ("tokens read", large_number, lambda run: run.scored[-1].get("tokens")),
    ("training time", duration, lambda run: run.scored[-1].get("seconds")),
    ("loss (nats per token)", "{:.4f}".format, lambda run: run.scored[-1]["loss"]),
    ("bits per byte", "{:.4f}".format, lambda run: run.scored[-1].get("bpb")),
    ("standard error over documents (bits per byte)", "{:.4f}".format, lambda run: run.scored[-1].get("bpb_stderr")),
    ("tokens per second", large_number, lambda run: run.newest("tokens_per_second")),
    ("model FLOPs utilisation", "{:.1%}".format, lambda run: run.newest("mfu")),
    ("floating-point operations", large_number, lambda run: run.newest("flops")),
    ("most memory (GiB)", "{:.3g}".format, lambda run: run.peak_memory_gib),
    ("least smoothed training loss (nats per token)", "{:.4f}".format, lambda run: run.newest("least_loss")),
    (
        "speed of plain matrix products at the start (operations per second)",
        large_number,
        lambda run: run.run["machine"].get("matrix_flops_per_second"),
    ),
)
# Entries that differ between any two runs, and so are not settings.
_NOT_SETTINGS = frozenset({"config.run.run", "config.run", "machine.matrix_flops_per_second"})


class ComparedArm:
    """The comparison of one arm with the baseline.

    Attributes:
        sentence: the main result in words: at which step it reached the baseline's last loss.
        seconds: the training time until then; None if it never did, cannot be compared, or was not timed.
        percent_of_seconds: that time in percent of the baseline's until its last evaluation.
        ended: how far they were from each other at the end, in words; None without bits per byte.
        difference_stderr: the standard error of that, None if it is not known.
        unequal_speed: how many times as long one run's passes took as another's, if times cannot be compared for that.
    """

    def __init__(self, baseline: Arm, arm: Arm) -> None:
        self.seconds: float | None = None
        self.ended: str | None = None
        self.difference_stderr: float | None = None
        unit, obstacle = unit_of(baseline, arm)
        target = None if obstacle else baseline.end[unit]
        if target is None:
            self.sentence = f"{arm.name} and {baseline.name}: {obstacle}"
        else:
            reached = [_reached(run.scored, target, unit) for run in arm.histories]
            self.sentence = _sentence(baseline, arm, [step for step, _ in reached])
            self.seconds = median(seconds for _, seconds in reached)
            self.ended, self.difference_stderr = final_difference(baseline, arm)
        total = baseline.end["seconds"]
        self.percent_of_seconds = 100 * self.seconds / total if self.seconds and total and total > 0 else None
        self.unequal_speed = unequal_speed([*baseline.histories, *arm.histories])


def write_comparison(runs: Mapping[str, Path | Sequence[Path]], out: Path, *, title: str) -> dict[str, ComparedArm]:
    """Write a page with the validation curves of several runs, and return how each compares with the first.

    The main number of a candidate is the first step at which its validation loss is at or below the baseline's last
    one, interpolated linearly between evaluations. If a candidate is there at its first evaluation, that evaluation's
    step is taken. Evaluations without a finite loss are left out. For several runs under one name, which may differ
    only in their seeds, medians are taken.

    Losses are compared in bits per byte, which do not depend on the tokenizer; in nats per token only if a log lacks
    bits per byte and both runs have the same tokenizer. Runs with different validation texts are not compared.

    Args:
        runs: name -> run folder or folders; at least two names. The first is the baseline, the others are candidates.
        out: the HTML file to write, replaced by one rename.
        title: heading of the page.

    Raises:
        ConfigError: a run has no log or no finite validation loss, or the runs of one name were never evaluated at the
            same step, differ in more than their seeds, or have equal seeds.
        DataError: a log is damaged.
    """
    groups = {name: [folders] if isinstance(folders, Path) else folders for name, folders in runs.items()}
    # Standard errors are shown only then: next to the range of several runs one could be mistaken for a range.
    is_single = all(len(folders) == 1 for folders in groups.values())
    arms = [load_arm(name, folders, errors=is_single) for name, folders in groups.items()]
    baseline, *others = arms
    candidates = {arm.name: ComparedArm(baseline, arm) for arm in others}
    histories = [(arm.name, history) for arm in arms for history in arm.histories]
    write_page(
        out,
        "comparison.html",
        title=title,
        names=list(runs),
        candidates=list(candidates.values()),
        bars=[_bar(arm) for arm in arms if arm.end["bpb"] is not None],
        rows=_results(arms),
        lost=[arm.name for arm in arms if any(h.newest_score.get("loss") is None for h in arm.histories)],
        unfinished=[arm.name for arm in arms if not all(history.final for history in arm.histories)],
        is_single=is_single,
        tokenizers_differ=tokens_differ(arms),
        has_errors=any(arm.end.get("bpb_stderr") is not None for arm in arms),
        panels=_learning_curves(arms),
        differences=_differences(arms),
        typed=list(dict.fromkeys(history.run["command"] for _, history in histories if history.run.get("command"))),
        repeats=[(name, history.repeat) for name, history in histories if history.repeat],
    )
    return candidates


def _reached(points: Sequence[Mapping[str, Any]], loss: float, unit: str) -> tuple[float, float | None]:
    """Return the step and the seconds at which a run's evaluations are first at or below ``loss``; else infinity."""
    index = next((index for index, point in enumerate(points) if point[unit] <= loss), None)
    if index is None:
        return math.inf, math.inf
    after = points[index]
    if index == 0:
        return after["step"], after.get("seconds")
    # On the line from the evaluation before.
    before = points[index - 1]
    fraction = (before[unit] - loss) / (before[unit] - after[unit])
    step = before["step"] + fraction * (after["step"] - before["step"])
    start, end = before.get("seconds"), after.get("seconds")
    return step, None if start is None or end is None else start + fraction * (end - start)


def _sentence(baseline: Arm, arm: Arm, steps: Sequence[float]) -> str:
    """Say after which of ``steps``, one of each of the candidate's runs, it reached the baseline's last loss."""
    whose = f"{baseline.name}'s {'median ' if len(baseline.histories) > 1 else ''}{baseline.last} validation loss"
    if tokens_differ([baseline, arm]):
        whose += " in bits per byte"
    step = median(steps)
    some = [at for at in steps if math.isfinite(at)]
    if step is None and some:
        return f"{arm.name} reached {whose} in {len(some)} of {len(steps)} runs only"
    if step is None:
        made = statistics.median(history.steps for history in arm.histories)
        if arm.is_stopped:
            return f"{arm.name} has not reached {whose} in its {made:,.0f} steps so far"
        return f"{arm.name} never reached {whose} in its {made:,.0f} steps"
    last = baseline.end["step"]
    made = statistics.median(history.steps for history in baseline.histories)
    # In a run of few steps, a tenth of a step matters.
    form = "{:,.0f}" if last >= 100 else "{:.3g}"
    sentence = f"{arm.name} reached {whose} after {form.format(step)} of {last:,.0f} steps"
    if last > 0:
        sentence += f" ({100 * step / last:.1f} %)"
    if len(steps) > 1:
        ends = dict.fromkeys(form.format(at) for at in (min(some), max(some)))
        never = f", never in {len(steps) - len(some)}" if len(some) < len(steps) else ""
        sentence += f"; median of {len(steps)} runs, which took {' to '.join(ends)}{never}"
    if made > last:
        sentence += f"; {baseline.name} made {made:,.0f} steps, and was last validated after {last:,.0f}"
    return sentence


def _bar(arm: Arm) -> tuple[str, str, float, float, float]:
    """Return (name, text, value, low, high) of an arm's bar; its median bits per byte must be known."""
    [(_, value, low, high)] = curve_of([arm.end], "step", "bpb", label="").points
    if math.isnan(low):
        return arm.name, f"{value:.3f}", value, value, value
    some = f"({low:.3f} to {high:.3f})" if len(arm.histories) > 1 else f"± {high - value:.3f}"
    return arm.name, f"{value:.3f} {some}", value, low, high


def _results(arms: Sequence[Arm]) -> list[list[str]]:
    """Return the rows of a table with the last finite evaluation and the measurements of each arm."""

    def text(values: Sequence[float | None], form: Form) -> str:
        known = [value for value in values if value is not None]
        if not known:
            return "–"
        middle, low, high = form(statistics.median(known)), form(min(known)), form(max(known))
        return middle if low == high else f"{middle} ({low} to {high})"

    warning = "; not comparable here" if tokens_differ(arms) else ""
    rows: list[list[str]] = []
    for label, form, value_of in _ROWS:
        texts = [text([value_of(history) for history in arm.histories], form) for arm in arms]
        # A run may have made steps after its last finite evaluation.
        is_repeated = label == "step of this evaluation" and texts == rows[0][1:]
        if set(texts) != {"–"} and not is_repeated:
            rows.append([label.replace("nats per token", f"nats per token{warning}"), *texts])
    return rows


def _learning_curves(arms: Sequence[Arm]) -> dict[str, list[Chart]]:
    """Return charts of validation loss and bits per byte of all arms: axis -> charts."""
    titles = {"loss": "Validation loss", "bpb": "Validation bits per byte"}
    if tokens_differ(arms):
        del titles["loss"]
    decisive = next(iter(titles))
    is_comparable = not any(unit_of(arms[0], arm)[1] for arm in arms[1:])
    target = arms[0].end[decisive] if is_comparable else None
    line = {f"{arms[0].name}'s {arms[0].last} loss: {target:.3f}": target} if target else {}
    lines = []
    for look, arm in enumerate(arms):
        seeds = f" (median and range of {len(arm.histories)} runs)" if len(arm.histories) > 1 else ""
        lines.append((arm.course, {"label": arm.name + seeds, "look": look}))
    return learning_panels(titles, lines, {decisive: line})


def _differences(arms: Sequence[Arm]) -> list[list[str]]:
    """Return the rows of a table with the settings in which the arms differ."""
    columns = []
    for arm in arms:
        texts = texts_of([_shown_settings(history) for history in arm.histories])
        columns.append({key: ", ".join(dict.fromkeys(values)) for key, values in texts.items()})
    return [
        [key.removeprefix("config.") if key.startswith("config.") else humanize(key.split(".")[-1]), *values]
        for key, values in texts_of(columns).items()
        if len(set(values)) > 1
    ]


def _shown_settings(history: RunHistory) -> dict[str, Any]:
    """Return the settings of a run, and the largest learning rate of each group of weights and weight decay.

    An option may hold a value for each optimizer; the training records have the values that were used.
    """
    settings = dict(flatten({key: history.run[key] for key in ("config", "machine", "versions")}))
    series = {f"learning rate, {name}": curve for name, curve in curves_by_kind(history.train, "lr").items()}
    series["weight decay"] = curve_of(history.train, "step", "weight_decay", label="")
    peaks = {f"peak {name}": f"{max(curve.values):.4g}" for name, curve in series.items() if curve.values}
    return {key: value for key, value in settings.items() if key not in _NOT_SETTINGS} | peaks
