"""What each part of the optimizer brings: train the quick-start model with AdamW and with Muon, one part after another.

    python benchmarks/quality.py --out FOLDER --jobs 16

Every variant adds one thing to the one before it. Stage 1 looks for the best learning rate of the matrices of each
variant, with seeds of its own; where the best one lies at the edge of the grid, the grid grows. Stage 2 trains with
that rate and three other seeds. All other options are the quick start's defaults: the same embedding, head and scalar
rates for all Muon variants, AdamW's own where the configuration has them.

Every run is a `quintic train` (see `tune.py`) and a line in FOLDER/NAME.jsonl, with its validation curve; a second call
trains only what is missing there. At the end FOLDER/NAME.md has the table and FOLDER/NAME.svg the figure.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tune import run_setting

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # the repository's quintic, also where it is not installed

from quintic.train.config import Config, to_dict  # noqa: E402
from quintic.train.figures import format_si, nice_ticks  # noqa: E402

# Evaluations often enough to say at which step a loss was reached; the model is too small to be worth compiling.
FIXED_OPTIONS = ("--compile", "False", "--eval-every", "20")

# The grid grows at most this often at either end.
MOST_EXTENSIONS = 3


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


# -- training ---------------------------------------------------------------------------------------------------------


class Training:
    """Runs `quintic train` for all variants, several at a time, and keeps what it found in a file."""

    def __init__(self, options: argparse.Namespace, path: Path, config: Path) -> None:
        self.options = options
        self.path = path
        self.base = shlex.join(["--config", str(config), *FIXED_OPTIONS, *shlex.split(options.base)])
        self.deadline = time.monotonic() + options.time_limit
        self.pool = ThreadPoolExecutor(options.jobs)
        self.lock = threading.Lock()
        self.rows = {row_key(row): row for row in read_rows(path)}
        with path.open("a", encoding="utf-8") as file:  # what was read is part of this result, too
            for row in [row for source in options.read for row in read_rows(source)]:
                if row_key(row) not in self.rows:
                    self.rows[row_key(row)] = row
                    file.write(json.dumps(row) + "\n")
        self.trained = 0

    def submit(self, variant: Variant, rate: float, seed: int) -> "Future[Run | None]":
        """Train, if that was not done before; the result is None for a run that failed or had no time."""
        return self.pool.submit(self._train, variant, rate, seed)

    def runs(self) -> list[Run]:
        """Return all runs made with the options of now."""
        return [Run.from_row(row) for row in self.rows.values() if row["base"] == self.options.base]

    def _train(self, variant: Variant, rate: float, seed: int) -> Run | None:
        key = (self.options.base, variant.name, rate, seed)
        if key in self.rows:
            return Run.from_row(self.rows[key])
        setting = [*variant.options, variant.rate_option, f"{rate:g}", "--seed", str(seed)]
        result = run_setting(self.base, setting, self.deadline)
        if result is None:
            return None
        row = {"variant": variant.name, "rate": rate, "seed": seed, **result, "base": self.options.base}
        if not math.isfinite(row["bpb"]):
            row["bpb"] = None
        with self.lock:
            self.rows[key] = row
            self.trained += 1
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{variant.name:14} rate {rate:<7g} seed {seed:<3} {_shown(row['bpb'])} bits per byte", flush=True)
        return Run.from_row(row)


def tune(training: Training, variant: Variant, rates: Iterable[float], seeds: Sequence[int]) -> dict[float, float]:
    """Return the mean bits per byte of every rate tried; only rates whose runs all ended."""
    means: dict[float, float] = {}
    wanted = list(rates)
    for _ in range(1 + MOST_EXTENSIONS):
        futures = {rate: [training.submit(variant, rate, seed) for seed in seeds] for rate in wanted}
        for rate, waiting in futures.items():
            found = [run for future in waiting if (run := future.result()) is not None]
            if len(found) == len(seeds):
                means[rate] = statistics.mean(run.bpb for run in found)
        wanted = extension(means)
        if not wanted or any(rate not in means for rate in futures):
            break
    return means


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


def row_key(row: Mapping[str, Any]) -> tuple[str, str, float, int]:
    """Return what makes a run one of its kind."""
    return row["base"], row["variant"], row["rate"], row["seed"]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file, none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def work(training: Training, options: argparse.Namespace) -> None:
    """Tune every variant and train it with its best rate; variants go on independently of each other."""
    variants = [variant for variant in VARIANTS if not options.only or variant.name in options.only]

    def one(variant: Variant) -> None:
        rates = options.adamw_rates if variant.name == "adamw" else options.muon_rates
        means = tune(training, variant, rates or variant.rates, options.tuning_seeds)
        if options.stage == "1" or not means or time.monotonic() > training.deadline:
            return
        rate = best_rate(means)
        print(f"{variant.name:14} best rate {rate:g}", flush=True)
        for future in [training.submit(variant, rate, seed) for seed in options.seeds]:
            future.result()

    with ThreadPoolExecutor(len(variants)) as threads:
        list(threads.map(one, variants))
    training.pool.shutdown()


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Result:
    """What is known of a variant: the rates tried, and the runs with the best one."""

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
            found = [run.bpb for run in own if run.rate == rate and run.seed in tuning_seeds]
            if len(found) == len(tuning_seeds):
                means[rate] = statistics.mean(found)
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


def _shown(bpb: float | None) -> str:
    return "no number" if bpb is None else f"{bpb:.4f}"


# -- figure -----------------------------------------------------------------------------------------------------------

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
    for tick in nice_ticks(low, high):
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick)}h{plot_width}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick)}" dy="4.5" text-anchor="end">{format_si(tick)}</text>')
    for tick in nice_ticks(0, last):
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


# -- command ----------------------------------------------------------------------------------------------------------


def main() -> int:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    config = options.out / "quick-start-defaults.json"
    config.write_text(json.dumps(to_dict(Config())), encoding="utf-8")
    if options.jobs > 1:  # the runs share the cores; PyTorch's own threads would fight over them
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    training = Training(options, options.out / f"{options.name}.jsonl", config)
    start = time.monotonic()
    if not options.report_only:
        work(training, options)
    print(f"\n{training.trained} runs in {time.monotonic() - start:.0f} seconds")
    results = summarize(training.runs(), options.tuning_seeds, options.seeds)
    text = page(results, options, facts(options, training.rows.values()))
    options.out.joinpath(f"{options.name}.md").write_text(text, encoding="utf-8")
    options.out.joinpath(f"{options.name}.svg").write_text(figure(results), encoding="utf-8")
    print("\n".join(line for line in text.splitlines() if line.startswith(("|", "- "))))
    wanted = [variant.name for variant in VARIANTS if not options.only or variant.name in options.only]
    complete = {result.variant.name for result in results if len(result.runs) == len(options.seeds)}
    missing = [name for name in wanted if name not in complete]
    if missing and options.stage != "1":
        print(f"incomplete: {', '.join(missing)}; the same command goes on")
        return 1
    return 0


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--name", default="quality", help="of the results' files, without ending")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument(
        "--stage", choices=("1", "2", "all"), default="all", help="1: only tune; 2 tunes what is missing"
    )
    parser.add_argument("--base", default="", help="more options of every run")
    parser.add_argument("--only", nargs="+", choices=[variant.name for variant in VARIANTS], help="variants")
    parser.add_argument("--muon-rates", nargs="+", type=float, help="another grid for Muon")
    parser.add_argument("--adamw-rates", nargs="+", type=float, help="another grid for AdamW")
    parser.add_argument("--tuning-seeds", nargs="+", type=int, default=[11, 12])
    parser.add_argument("--seeds", nargs="+", type=int, default=[21, 22, 23])
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="start no run after this many seconds")
    parser.add_argument("--read", type=Path, nargs="*", default=[], help="more .jsonl files of earlier runs")
    parser.add_argument("--report-only", action="store_true", help="train nothing, write table and figure")
    parser.add_argument("--commit", help="of this repository, for the record; by default what git says")
    return parser.parse_args()


def facts(options: argparse.Namespace, rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return how the runs were made, in words."""
    names = {str(options.out): "FOLDER", **{str(path): path.name for path in options.read}}
    command = shlex.join(["python", "benchmarks/quality.py", *(names.get(word, word) for word in sys.argv[1:])])
    commit = options.commit
    if commit is None:
        git = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
        with contextlib.suppress(OSError):
            commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    row = next(iter(rows), None)
    computing = ""
    if row is not None:
        machine, versions = row["machine"], row["versions"]
        device = machine["cpu"] if machine["device"] == "CPU" else f"one {machine['device']}"
        computing = (
            f"Trained on {device} in {machine['dtype']}, attention by {machine['attention']}, {options.jobs} at a "
            f"time; Python {versions['python']}, torch {versions['torch']}."
        )
    return {"command": command, "commit": commit or "unknown", "computing": computing}


if __name__ == "__main__":
    sys.exit(main())
