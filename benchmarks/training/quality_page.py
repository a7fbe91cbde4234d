"""Variants of the optimizer, what is known of each, and the page and the figure that say it."""

import argparse
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from quintic.report.formatting import format_si


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One line of the table.

    Attributes:
        name: in the results' file and on the command line.
        label: in table and figure.
        options: of `quintic train`, all that tell the variants apart, so that no default decides.
        rate_option: the option of the matrices' learning rate.
        rates: the grid to begin with.
    """

    name: str
    label: str
    options: tuple[str, ...]
    rate_option: str = "--muon-lr"
    rates: tuple[float, ...] = (0.015, 0.02, 0.03, 0.04, 0.06)


def _muon(orthogonalizer: str, normalize: str, cautious: str) -> tuple[str, ...]:
    return ("--optimizer", "muon", "--orthogonalizer", orthogonalizer, "--normalize", normalize, cautious)


VARIANTS = (
    Variant(
        name="adamw",
        label="AdamW",
        options=("--optimizer", "adamw", "--no-cautious"),
        rate_option="--adamw-lr",
        rates=(0.001, 0.002, 0.003, 0.004, 0.006),
    ),
    Variant(name="muon", label="Muon", options=_muon("newton_schulz", "None", "--no-cautious")),
    Variant(name="polar-express", label="+ Polar Express", options=_muon("polar_express", "None", "--no-cautious")),
    Variant(name="normuon", label="+ NorMuon", options=_muon("polar_express", "neuron", "--no-cautious")),
    Variant(name="cautious", label="+ cautious decay", options=_muon("polar_express", "neuron", "--cautious")),
)


@dataclass(frozen=True)
class Run:
    """One training run."""

    variant: str
    rate: float
    seed: int
    loss: float
    bpb: float
    seconds: float
    curve: tuple[tuple[int, float], ...]

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> "Run":
        """Return a run of the results' file; a loss that was no number is infinite."""
        curve = tuple((int(step), _number(loss)) for step, loss in row["curve"])
        return Run(
            row["variant"], row["rate"], row["seed"], _number(row["loss"]), _number(row["bpb"]), row["seconds"], curve
        )


def _number(value: float | None) -> float:
    return math.inf if value is None or not math.isfinite(value) else float(value)


def extension(means: Mapping[float, float]) -> list[float]:
    """Return the next rate beyond the end of the grid where the best one lies, in the same ratio; else nothing."""
    if len(means) < 2:
        return []
    rates = sorted(means)
    best = best_rate(means)
    for end, neighbour in ((rates[0], rates[1]), (rates[-1], rates[-2])):
        if best == end:
            return [float(f"{end * end / neighbour:.2g}")]
    return []


def best_rate(means: Mapping[float, float]) -> float:
    """Return the rate with the least mean, the smaller one of equals."""
    return min(sorted(means), key=lambda rate: means[rate])


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of a variant: the rates tried, and the runs with the best one."""

    variant: Variant
    means: dict[float, float]
    runs: list[Run]

    @property
    def rate(self) -> float:
        """Return the best rate."""
        return best_rate(self.means)

    @property
    def at_edge(self) -> bool:
        """Return whether better rates may lie beyond those tried."""
        return bool(extension(self.means))


def summarize(runs: Sequence[Run], tuning_seeds: Sequence[int], seeds: Sequence[int]) -> list[Result]:
    """Return the variants with a tuned rate, in the order of the table."""
    results = []
    for variant in VARIANTS:
        own = [run for run in runs if run.variant == variant.name]
        means: dict[float, float] = {}
        for rate in sorted({run.rate for run in own}):
            scores = [run.bpb for run in own if run.rate == rate and run.seed in tuning_seeds]
            if len(scores) == len(tuning_seeds):
                means[rate] = statistics.mean(scores)
        if not means:
            continue
        best = best_rate(means)
        final = sorted((run for run in own if run.rate == best and run.seed in seeds), key=lambda run: run.seed)
        results.append(Result(variant=variant, means=means, runs=final))
    return results


def steps_to_reach(curve: Sequence[tuple[int, float]], loss: float) -> float | None:
    """Return the first step at or below a loss, on the straight line between evaluations; None if there is none."""
    for index, (step, value) in enumerate(curve):
        if value > loss:
            continue
        if index == 0:
            return float(step)
        step_before, value_before = curve[index - 1]
        if not math.isfinite(value_before):
            return float(step)
        return step_before + (value_before - loss) / (value_before - value) * (step - step_before)
    return None


def steps_to_baseline(runs: Sequence[Run], baseline: Sequence[Run]) -> list[float] | None:
    """Return for each seed the steps to the baseline's last loss with that seed; None unless all get there."""
    targets = {run.seed: run.loss for run in baseline}
    steps = [steps_to_reach(run.curve, targets[run.seed]) for run in runs if run.seed in targets]
    return None if not steps or None in steps else [step for step in steps if step is not None]


def page(results: Sequence[Result], options: argparse.Namespace, facts: Mapping[str, str]) -> str:
    """Return the result as markdown."""
    baseline = next((result.runs for result in results if result.variant.name == "adamw"), [])
    total = max((run.curve[-1][0] for result in results for run in result.runs), default=0)
    lines = [
        "# What each part of the optimizer brings",
        "",
        f"The quick-start model (depth 4, {total} steps of 4,096 tokens of the `python` text), validation loss at "
        "equal steps. Every variant adds one thing to the one above it, each with its own best learning rate of the "
        f"matrices, found with {_count(options.tuning_seeds, 'other seed')}; {_count(options.seeds, 'seed')} per line: "
        f"mean (least to most). {facts['computing']}",
        "",
        f"`{facts['command']}` at commit {facts['commit']}.",
        "",
    ]
    if options.base:
        lines += [f"Other options than the defaults: `{options.base}`.", ""]
    lines += [
        "| variant | learning rate | loss (nats per token) | bits per byte | steps to AdamW's last loss |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        steps = steps_to_baseline(result.runs, baseline)
        if not result.runs:
            cells = ["not trained yet"] + [""] * 2
        else:
            reached = "never in all runs" if steps is None else f"{_range(steps, 0)}, {_share(steps, total)} %"
            losses, bpbs = [run.loss for run in result.runs], [run.bpb for run in result.runs]
            cells = [_range(losses, 3), _range(bpbs, 4), "-" if result.variant.name == "adamw" else reached]
            if len(result.runs) < len(options.seeds):
                cells[0] += f", {_count(result.runs, 'seed')} only"
        edge = " (end of the grid)" if result.at_edge else ""
        lines.append(f"| {result.variant.label} | {result.rate:g}{edge} | {' | '.join(cells)} |")
    lines += ["", f"![Validation loss against steps]({options.name}.svg)", ""]
    lines += [f"All runs with their curves: [{options.name}.jsonl]({options.name}.jsonl).", ""]
    lines += [
        "Steps to AdamW's last loss: linear between evaluations every 20 steps, same seed for both. The rates fall to "
        "zero over the last 40 % of each run, so a run planned for fewer steps would be there even sooner.",
        "",
        "## Options",
        "",
    ]
    for result in results:
        variant = result.variant
        lines.append(f"- {variant.label}: `{shlex.join([*variant.options, variant.rate_option, f'{result.rate:g}'])}`")
    lines += ["", f"## Rates tried: mean bits per byte of {_count(options.tuning_seeds, 'seed')}", ""]
    for result in results:
        tried = ", ".join(
            f"**{rate:g}: {mean:.4f}**" if rate == result.rate else f"{rate:g}: {mean:.4f}"
            for rate, mean in sorted(result.means.items())
        )
        lines.append(f"- {result.variant.label}: {tried}")
    return "\n".join(lines) + "\n"


def _range(values: Sequence[float], digits: int) -> str:
    return (
        f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
        if values
        else "-"
    )


def _share(steps: Sequence[float], total: int) -> str:
    return f"{100 * statistics.mean(steps) / max(total, 1):.0f}"


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def shown(bpb: float | None) -> str:
    return "no number" if bpb is None else f"{bpb:.4f}"


WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 34, 52

# The colours of the training report, for light and for dark pages.
LIGHT = ("#2a6fbb", "#c8541b", "#2d8a5f", "#8c4fb0", "#b08900")
DARK = ("#6aaaf0", "#f08a52", "#5cc492", "#c490e6", "#dcb648")


def figure(results: Sequence[Result]) -> str:
    """Return an SVG of its own: loss against steps, the mean of the seeds as a line and their range as a band."""
    curves = [(result, band(result.runs)) for result in results if result.runs]
    curves = [(result, points) for result, points in curves if points]
    if not curves:
        return ""
    last = max(points[-1][0] for _, points in curves)
    # The first fifth falls from 8 to 4 and would flatten the rest.
    shown = [value for _, points in curves for step, *values in points if step >= last / 5 for value in values]
    low, high = min(shown), max(shown)
    low, high = low - 0.04 * (high - low or 1), high + 0.02 * (high - low or 1)
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(step: float) -> str:
        return f"{LEFT + step / last * plot_width:.1f}"

    def y(loss: float) -> str:
        return f"{TOP + (high - loss) / (high - low) * plot_height:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="Validation loss against steps, one line per variant">',
        _style(),
        '<text class="label" x="4" y="18">validation loss (nats per token)</text>',
    ]
    bottom = TOP + plot_height
    for tick in _nice_ticks(low, high):
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick)}h{plot_width}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick)}" dy="4.5" text-anchor="end">{format_si(tick)}</text>')
    for tick in _nice_ticks(0, last):
        parts.append(f'<path class="grid" d="M{x(tick)} {bottom}v5"/>')
        parts.append(f'<text x="{x(tick)}" y="{bottom + 20}" text-anchor="middle">{format_si(tick)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {bottom}h{plot_width}"/>')
    parts.append(
        f'<text class="label" x="{LEFT + plot_width / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">step</text>'
    )
    # The inner drawing clips what lies above the shown range.
    parts.append(
        f'<svg x="{LEFT}" y="{TOP}" width="{plot_width}" height="{plot_height}" '
        f'viewBox="{LEFT} {TOP} {plot_width} {plot_height}">'
    )
    baseline = next((points for result, points in curves if result.variant.name == "adamw"), None)
    if baseline is not None:
        parts.append(f'<path class="reference" d="M{LEFT} {y(baseline[-1][2])}h{plot_width}"/>')
    for index, (_, points) in enumerate(curves):
        edge = [f"{x(step)} {y(most)}" for step, _, _, most in points]
        edge += [f"{x(step)} {y(least)}" for step, least, _, _ in reversed(points)]
        parts.append(f'<path class="band c{index}" d="M{"L".join(edge)}Z"/>')
    for index, (_, points) in enumerate(curves):
        line = "L".join(f"{x(step)} {y(mean)}" for step, _, mean, _ in points)
        parts.append(f'<path class="line c{index}" d="M{line}"/>')
    parts.append("</svg>")
    for index, (result, points) in enumerate(curves):  # upper right: falling curves leave it free
        row = TOP + 20 + 22 * index
        left = WIDTH - RIGHT - 230
        parts.append(f'<path class="line c{index}" d="M{left} {row - 4}h26"/>')
        label = f"{result.variant.label}: {points[-1][2]:.3f}"
        parts.append(f'<text class="label" x="{left + 34}" y="{row}">{escape(label)}</text>')
    return "".join([*parts, "</svg>\n"])


def band(runs: Sequence[Run]) -> list[tuple[int, float, float, float]]:
    """Return (step, least, mean, most) of the runs' losses, at the steps where all have a finite one."""
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for step, loss in run.curve:
            by_step.setdefault(step, []).append(loss)
    return [
        (step, min(losses), statistics.mean(losses), max(losses))
        for step, losses in sorted(by_step.items())
        if len(losses) == len(runs) and all(math.isfinite(loss) for loss in losses)
    ]


def _style() -> str:
    def colours(palette: Sequence[str]) -> str:
        return "".join(f".c{index}{{color:{colour}}}" for index, colour in enumerate(palette))

    return (
        "<style>text{font:13px system-ui,sans-serif;fill:#5c616b}.label{fill:#1d1f23}path{fill:none}"
        ".grid{stroke:#e3e3de}.axis,.reference{stroke:#5c616b}.reference{stroke-dasharray:5 4}"
        ".line{stroke:currentColor;stroke-width:2;stroke-linejoin:round}.band{fill:currentColor;opacity:.18}"
        f"{colours(LIGHT)}@media(prefers-color-scheme:dark){{text{{fill:#a5abb6}}.label{{fill:#e8e8e4}}"
        f".grid{{stroke:#32363e}}.axis,.reference{{stroke:#a5abb6}}{colours(DARK)}}}</style>"
    )


def _nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) inside [low, high], about ``count`` of them."""
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= (high - low) / count * 0.999)
    # Rounding removes the dirt of the multiplication: 0.1 * 3 is 0.30000000000000004.
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
