"""The gain of each part of the optimizer: the quick-start model trained with AdamW and with Muon, part by part.

    python -m benchmarks.training.quality --out FOLDER --jobs 16

Every variant adds one thing to the one before it. Stage 1 looks for the best learning rate of the matrices of each
variant, with seeds of its own; where the best one lies at the edge of the grid, the grid grows. Stage 2 trains with
that rate and three other seeds. All other options are the quick start's defaults: the same embedding, head and scalar
rates for all Muon variants, AdamW's own where the configuration has them.

Every run is a `quintic train` (see `tune.py`) and a line in FOLDER/NAME.jsonl, with its validation curve; a second call
trains only what is missing there. At the end FOLDER/NAME.md has the table and FOLDER/NAME.svg the figure.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.results import add_options, git_commit, read_rows, recorded_command
from benchmarks.training.quality_page import (
    VARIANTS,
    Run,
    Variant,
    best_rate,
    extension,
    figure,
    page,
    shown,
    summarize,
)
from benchmarks.training.tune import run_setting, share_cores
from quintic.train.config import Config
from quintic.train.saved_config import to_dict

# Evaluations often enough to say at which step a loss was reached; the model is too small to be worth compiling.
FIXED_OPTIONS = ("--compile", "False", "--eval-every", "20")

# The grid grows at most this often at either end.
MOST_EXTENSIONS = 3


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
            print(f"{variant.name:14} rate {rate:<7g} seed {seed:<3} {shown(row['bpb'])} bits per byte", flush=True)
        return Run.from_row(row)


def tune(training: Training, variant: Variant, rates: Iterable[float], seeds: Sequence[int]) -> dict[float, float]:
    """Return the mean bits per byte of every rate tried; only rates whose runs all ended."""
    means: dict[float, float] = {}
    wanted = list(rates)
    for _ in range(1 + MOST_EXTENSIONS):
        futures = {rate: [training.submit(variant, rate, seed) for seed in seeds] for rate in wanted}
        for rate, waiting in futures.items():
            ended = [run for future in waiting if (run := future.result()) is not None]
            if len(ended) == len(seeds):
                means[rate] = statistics.mean(run.bpb for run in ended)
        wanted = extension(means)
        if not wanted or any(rate not in means for rate in futures):
            break
    return means


def row_key(row: Mapping[str, Any]) -> tuple[str, str, float, int]:
    """Return the key that identifies a run."""
    return row["base"], row["variant"], row["rate"], row["seed"]


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


def main() -> int:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    config = options.out / "quick-start-defaults.json"
    config.write_text(json.dumps(to_dict(Config())), encoding="utf-8")
    share_cores(options.jobs)
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
    add_options(parser, "quality")
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
    return parser.parse_args()


def facts(options: argparse.Namespace, rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Describe in words how the runs were made."""
    names = {str(options.out): "FOLDER", **{str(path): path.name for path in options.read}}
    command = recorded_command("benchmarks.training.quality", sys.argv[1:], names)
    row = next(iter(rows), None)
    computing = ""
    if row is not None:
        machine, versions = row["machine"], row["versions"]
        device = machine["cpu"] if machine["device"] == "CPU" else f"one {machine['device']}"
        computing = (
            f"Trained on {device} in {machine['dtype']}, attention by {machine['attention']}, {options.jobs} at a "
            f"time; Python {versions['python']}, torch {versions['torch']}."
        )
    return {"command": command, "commit": options.commit or git_commit(), "computing": computing}


if __name__ == "__main__":
    sys.exit(main())
