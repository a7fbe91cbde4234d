"""The best AdamW that a search finds for the quick-start model, five seeds of it, and when Muon reaches their median.

    python -m benchmarks.training.baseline --out FOLDER --devices cuda:0 cuda:1 --at-once 16 --budget-seconds 400
    python -m benchmarks.training.baseline --page FOLDER/NAME.json

AdamW is searched over learning rates, warm-up, coefficients, weight decay and clipping, Muon over its own, with
equally many trials: random settings at half the length; variations of the best of these; the best of both at full
length; the best of those with two more seeds. Then five other seeds of the best AdamW, the best Muon, and the two
defaults. One seed has the same initial weights and batches under all settings. Writes NAME.json, and NAME.md from it.

When the time is short, rounds of the search are cut, never the seeds at the end; the page says what was left out.
"""

import argparse
import json
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.results import git_commit, recorded_command, write_result
from benchmarks.training.baseline_page import page
from benchmarks.training.workers import Pool, given_values, with_values
from quintic.commands.text import prepared
from quintic.train.config import Config
from quintic.train.saved_config import to_dict, values_of

Setting = Mapping[str, float | None]

SEARCH_SEEDS = (101, 102, 103)
FINAL_SEEDS = (1, 2, 3, 4, 5)
EVAL_EVERY = 20

# Milliseconds of a step of the default size before anything was measured: on a GPU that 16 processes share, on a core.
_GUESSED_STEP_MS = {"cuda": 75.0, "cpu": 850.0}
_START_SECONDS = 25.0
_BEST_OF_ROUND = 8

# Share of the search's time after which no trial of a round begins, so that the later rounds have theirs.
_START_BY = {"random": 0.35, "variations": 0.5, "whole": 0.75}


class Log(NamedTuple):
    """A range in which equal factors are equally likely."""

    least: float
    most: float


SPACES: Mapping[str, Mapping[str, Log | tuple[float | None, ...]]] = {
    "adamw": {
        "adamw_lr": Log(0.001, 0.012),
        "embedding_lr": Log(0.1, 1.2),
        "adamw_head_lr": Log(0.003, 0.03),
        "warmup_frac": (0.02, 0.05, 0.1, 0.2, 0.3),
        "beta1": (0.8, 0.9, 0.95),
        "beta2": (0.95, 0.98, 0.99, 0.995, 0.999),
        "clip_norm": (None, 2.0, 1.0, 0.5, 0.25),
        "adamw_weight_decay": (0.0, 0.03, 0.1, 0.3, 1.0),
    },
    "muon": {"muon_lr": Log(0.01, 0.1)},
}


def draw(name: str, rng: random.Random) -> dict[str, float | None]:
    """Return a setting from anywhere in the space of an optimizer."""
    setting: dict[str, float | None] = {}
    for option, values in SPACES[name].items():
        if isinstance(values, Log):
            setting[option] = _rounded(math.exp(rng.uniform(math.log(values.least), math.log(values.most))))
        else:
            setting[option] = rng.choice(values)
    return setting


def vary(setting: Setting, name: str, rng: random.Random) -> dict[str, float | None]:
    """Return a setting near another one: rates change by about a quarter, some of the others by one place."""
    varied = dict(setting)
    for option, values in SPACES[name].items():
        old = setting[option]
        if isinstance(values, Log):
            assert old is not None
            varied[option] = _rounded(min(values.most, max(values.least, old * math.exp(rng.gauss(0, 0.25)))))
        elif rng.random() < 0.3:
            place = values.index(old) + rng.choice((-1, 1))
            varied[option] = values[min(len(values) - 1, max(0, place))]
    return varied


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


class Study:
    """All runs, made or to be made, and the time they have."""

    def __init__(self, options: argparse.Namespace, base: Config, data: Path, pool: Pool, start: float) -> None:
        self.options, self.base, self.data, self.pool = options, base, str(data), pool
        self.begin, self.end = time.time(), start + options.budget_seconds
        self.runs: list[dict[str, Any]] = []
        self.computing: dict[str, Any] = {}
        """Machine and versions, as the workers see them."""
        self.lock = threading.Lock()
        self.guess = guessed_seconds(options, base)
        self.whole_seconds: list[float] = []

    def search_end(self) -> float:
        """Return when the search has to stop, so that the seeds at the end have their time."""
        rounds = math.ceil(2 * len(FINAL_SEEDS) / self.pool.size)
        seconds = statistics.median(self.whole_seconds) if self.whole_seconds else self.guess
        return self.end - 1.25 * rounds * seconds - 3

    def submit(self, name: str, part: str, setting: Setting, seed: int, *, short: bool = False) -> "Future[None]":
        """Train; the run is among `runs` when the future is done."""
        steps = self.base.schedule.steps
        assert steps is not None
        values = {"optimizer": name, "seed": seed, "eval_every": EVAL_EVERY if part == "final" else 0, **setting}
        config = with_values(self.base, {**values, "steps": max(1, steps // 2) if short else steps})
        run = {"optimizer": name, "part": part, "setting": dict(setting), "seed": seed, "short": short}
        done: Future[None] = Future()

        def keep(future: "Future[dict[str, Any]]") -> None:
            try:
                result = future.result()
            except Exception as error:
                result = {"failed": f"{type(error).__name__}: {error}"}
            with self.lock:
                self.computing.update({key: result.pop(key) for key in ("machine", "versions") if key in result})
                self.runs.append({**run, **result})
                if not short and result.get("bpb") is not None:
                    self.whole_seconds.append(result["seconds"])
            if "failed" in result:
                print(f"FAILED {name} {part} {dict(setting)} seed {seed}: {result['failed']}", flush=True)
            done.set_result(None)

        def job() -> dict[str, Any]:
            deadline = self.end if part == "final" else self.search_end()
            start_by = (
                self.begin + _START_BY.get(part, 1.0) * (deadline - self.begin) if math.isfinite(deadline) else deadline
            )
            return {"config": to_dict(config), "data": self.data, "deadline": deadline, "start_by": start_by}

        self.pool.submit(job).add_done_callback(keep)
        return done

    def round(self, name: str, part: str, settings: Sequence[Setting], seeds: Sequence[int], *, short: bool) -> None:
        """Train settings with seeds, and wait."""
        begin = time.time()
        for future in [self.submit(name, part, s, seed, short=short) for seed in seeds for s in settings]:
            future.result()
        best = self.ranked(name, short=short)
        shown = f"best {best[0][0]:.4f} {best[0][1]}" if best else "nothing yet"
        print(f"{name} {part}: {time.time() - begin:.0f} s; {shown}", flush=True)

    def ranked(self, name: str, *, short: bool) -> list[tuple[float, dict[str, float | None], int]]:
        """Return (mean bits per byte, setting, seeds) of what was tried with the most seeds, best first."""
        with self.lock:
            made = [r for r in self.runs if r["optimizer"] == name and r["part"] != "final" and r["short"] == short]
        groups: dict[str, list[float]] = {}
        for run in made:
            if "bpb" in run:
                bpb = math.inf if run["bpb"] is None else run["bpb"]
                groups.setdefault(json.dumps(run["setting"]), []).append(bpb)
        most = max(map(len, groups.values()), default=0)
        means = [(statistics.mean(values), key) for key, values in groups.items() if len(values) == most]
        return [(mean, json.loads(key), most) for mean, key in sorted(means)]

    def search(self, name: str) -> dict[str, Any]:
        """Look for the best setting of an optimizer; return it, and what it was chosen by."""
        options, rng = self.options, random.Random(f"{self.options.search_seed} {name}")
        default = {option: values_of(self.base)[option] for option in SPACES[name]}
        first = [default, *(draw(name, rng) for _ in range(options.trials - 1))]
        self.round(name, "random", first, SEARCH_SEEDS[:1], short=True)
        parents = [setting for _, setting, _ in self.ranked(name, short=True)[:_BEST_OF_ROUND]] or [default]
        children = [vary(parents[i % len(parents)], name, rng) for i in range(options.variations)]
        self.round(name, "variations", children, SEARCH_SEEDS[:1], short=True)
        halved = [setting for _, setting, _ in self.ranked(name, short=True)[: options.whole]] or [default]
        # The default takes part to the end, so that the best is no worse than it on the search's own seeds.
        whole = [default, *(setting for setting in halved if setting != default)]
        self.round(name, "whole", whole, SEARCH_SEEDS[:1], short=False)
        best = [setting for _, setting, _ in self.ranked(name, short=False)[: options.again]]
        self.round(name, "again", best, SEARCH_SEEDS[1:], short=False)
        ranked, short = self.ranked(name, short=False), False
        if not ranked:
            ranked, short = self.ranked(name, short=True), True
        if not ranked:
            return {"setting": default, "chosen_by": "nothing: no trial ended, so this is the default"}
        mean, setting, seeds = ranked[0]
        length = "half the length" if short else "full length"
        return {"setting": setting, "mean": mean, "chosen_by": f"the mean of {seeds} seed(s) at {length}"}


def guessed_seconds(options: argparse.Namespace, base: Config) -> float:
    """Return the seconds of a whole run before any was measured, with its worker's start."""
    kind = "cuda" if options.devices[0].startswith("cuda") else "cpu"
    steps = base.schedule.steps
    assert steps is not None
    step_ms = options.step_ms or _GUESSED_STEP_MS[kind] / (options.threads if kind == "cpu" else 1)
    return 1.2 * steps * step_ms / 1000


def predicted(options: argparse.Namespace, base: Config, slots: int) -> tuple[int, float]:
    """Return the number of runs, and the seconds that they take if nothing is cut."""
    searched = [(options.trials + options.variations, 0.5), (options.whole + 1 + 2 * options.again, 1.0)]
    count = 2 * sum(number for number, _ in searched) + 4 * len(FINAL_SEEDS)
    lengths = 2 * sum(number * length for number, length in searched) + 4 * len(FINAL_SEEDS)
    return count, _START_SECONDS + guessed_seconds(options, base) * (lengths / slots + 1)


def study(options: argparse.Namespace) -> dict[str, Any]:
    """Search, train the seeds, and return everything."""
    start = time.time()
    values = given_values(options.set)
    kind = "cuda" if options.devices[0].startswith("cuda") else "cpu"
    fixed = {"device": kind, "compile": False, "rms_every": 0, "save_every": 0, "threads": options.threads}
    base = with_values(Config(), {"data_dir": str(options.out / "data"), **values, **fixed})
    pool = Pool(options.devices, options.at_once, options.threads)
    count, seconds = predicted(options, base, pool.size)
    budget = f"the budget is {options.budget_seconds:.0f}" if math.isfinite(options.budget_seconds) else "no budget"
    print(f"{count} runs, {pool.size} at once: about {seconds:.0f} seconds, and the text's preparation; {budget}")
    dataset = prepared(base.data)
    print(f"text ready after {time.time() - start:.0f} s", flush=True)
    made = Study(options, base, dataset.path.resolve(), pool, start)
    names = list(SPACES)
    defaults = {name: {option: values_of(base)[option] for option in SPACES[name]} for name in names}
    waiting = [made.submit(name, "final", defaults[name], seed) for name in names for seed in FINAL_SEEDS]
    with ThreadPoolExecutor(len(names)) as threads:
        best = dict(zip(names, threads.map(made.search, names), strict=True))
    print(f"search ended after {time.time() - start:.0f} s", flush=True)
    for name in names:
        if best[name]["setting"] != defaults[name]:
            waiting += [made.submit(name, "final", best[name]["setting"], seed) for seed in FINAL_SEEDS]
    for future in waiting:
        future.result()
    pool.close()
    named = {str(options.out): "FOLDER"}
    return {
        "command": recorded_command("benchmarks.training.baseline", sys.argv[1:], named),
        "commit": options.commit or git_commit(),
        "seconds": time.time() - start,
        "planned": count,
        "predicted_seconds": seconds,
        "budget_seconds": options.budget_seconds if math.isfinite(options.budget_seconds) else None,
        "at_once": options.at_once,
        "devices": options.devices,
        "data": {key: value for key, value in dataset.summary().items() if key != "path"},
        "changed": values,
        "spaces": {
            name: {k: v._asdict() if isinstance(v, Log) else v for k, v in space.items()}
            for name, space in SPACES.items()
        },
        "sizes": {name: getattr(options, name) for name in ("trials", "variations", "whole", "again", "search_seed")},
        "defaults": defaults,
        "best": best,
        **made.computing,
        "runs": made.runs,
    }


def main() -> int:
    options = arguments()
    if options.page is not None:
        result = json.loads(options.page.read_text(encoding="utf-8"))
        options.page.with_suffix(".md").write_text(page(result), encoding="utf-8")
        return 0
    result = study(options)
    write_result(options.out / options.name, result, page(result))
    print("\n" + page(result))
    failed = sum("failed" in run for run in result["runs"])
    missing = sum("curve" not in run for run in result["runs"] if run["part"] == "final")
    return 1 if failed or missing else 0


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("adamw-baseline"), help="folder of the results")
    parser.add_argument("--name", default="adamw-baseline", help="of the results' files, without ending")
    parser.add_argument("--commit", help="of this repository, for the record; by default what git says")
    parser.add_argument("--page", type=Path, help="train nothing: write the page of this .json beside it")
    parser.add_argument("--devices", nargs="+", default=["cpu"], help="cpu, or cuda:0 cuda:1 ...")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time on each device")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each run")
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="all of it, from the start")
    parser.add_argument("--trials", type=int, default=48, help="random settings of each optimizer, at half the length")
    parser.add_argument("--variations", type=int, default=24, help="settings near the best of these")
    parser.add_argument("--whole", type=int, default=12, help="the best of both, at full length")
    parser.add_argument("--again", type=int, default=6, help="the best of those, with two more seeds")
    parser.add_argument("--search-seed", type=int, default=0, help="of the settings that are drawn")
    parser.add_argument("--step-ms", type=float, help="milliseconds of a step, for the prediction")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="for all runs: depth=1 steps=10")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
