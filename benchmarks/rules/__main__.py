"""Which update rule learns most from the same tokens? Every rule and pairs of them against tuned Muon, several seeds.

    python -m benchmarks.rules --size depth4 --out FOLDER                              # two cores, 10 to 15 minutes
    python -m benchmarks.rules --size depth8 --gpus 4 --at-once 4 --minutes 22 --out FOLDER
    python -m benchmarks.rules --page FOLDER/NAME.json

Under one seed all runs have the same initial weights and the same batches in the same order, so differences are paired.
Settings are chosen on other seeds than those of the table:

1. Each candidate's steps are timed alone on a device.
2. Muon, and AdamW for all: the rate of the matrices (half, once and twice the default, then further out or between),
   the rates of embeddings, head and scalars (half and twice, then further out), then rates beside the best.
3. Every other rule, with these rates of AdamW: its own rate on such a grid around Muon's best, then its other settings.
4. The seeds of the table. Muon also with fewer and with more steps.
5. The best rules: the rates of AdamW's groups tuned as Muon's were, since a rule may gain from that alone.
6. More seeds of Muon and of all that are within two standard errors of the best.

Every run is a line of FOLDER/NAME.jsonl; the same command again trains what is missing there. When --minutes are over,
later parts are cut, and the page says so; where the same command will go on later, --tuning-share 1 keeps it from
filling the table before all is tuned. FOLDER/NAME.md and NAME.json have the results.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import git_commit, recorded_command, write_result
from benchmarks.rules.candidates import (
    ADAMW_NAME,
    BASELINE,
    candidate,
    names_of_all,
    next_factors,
    next_rates,
    rounded,
)
from benchmarks.rules.page import Study, page
from benchmarks.rules.text import PYTORCH, text_of
from benchmarks.training.workers import Pool, Runs, given_values, with_values
from quintic.commands.presets import preset
from quintic.commands.text import prepared
from quintic.data.dataset import Dataset
from quintic.train.config import Config
from quintic.train.saved_config import to_dict

MODULE = "benchmarks.rules"
LENGTHS = (0.8, 1.25)

_BESIDE = (0.71, 1.41)
_MOST_ROUNDS = 8

_SMALL = {
    "aspect_ratio": 16, "head_dim": 32, "seq_len": 64, "vocab_size": 1024, "batch_tokens": 512, "rows": 8,
    "steps": 96, "momentum_warmup_steps": 30, "muon_lr": 0.02, "adamw_lr": 0.006, "eval_tokens": 8192,
    "dtype": "float32",
}  # fmt: skip
# Size -> the preset that it changes, and the changes.
SIZES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "tiny": ("cpu", {**_SMALL, "depth": 1, "steps": 20, "eval_tokens": 512}),
    "depth4": ("cpu", _SMALL),
    "depth8": ("gpu-small", {}),
    "depth12": (
        "gpu-small",
        {"depth": 12, "batch_tokens": 32_768, "rows": 16, "steps": 600, "vocab_size": 8192, "weight_decay": 0.6},
    ),
}


Cell = dict[str, Any]
NextOf = Callable[[str], list[dict[str, Any]]]
"""Candidate -> its settings that are to be tried next."""


class Training:
    """What is trained next, part by part."""

    def __init__(self, options: argparse.Namespace, base: Config, data: Dataset, runs: Runs, start: float) -> None:
        self.options, self.base, self.data, self.runs = options, base, str(data.path.resolve()), runs
        self.begin, self.end = start, start + 60 * options.minutes
        self.share = options.tuning_share
        """Of the time, after which no run that tunes begins, so that the table has its time."""
        self.candidates = {name: candidate(name) for name in options.rules}
        self.study = Study(runs.rows.values(), options.rules, options.tuning_seeds, self.steps)

    @property
    def steps(self) -> int:
        """Steps of the runs that are compared."""
        steps = self.base.schedule.steps
        assert steps is not None
        return steps

    def job(self, cell: Cell, *, share: float = 1.0, timed_steps: int = 0) -> dict[str, Any]:
        """Return the job of a cell, which begins before this share of the time is over."""
        values = self.candidates[cell["rule"]].values(cell["setting"], cell["rate"], cell["aux"], self.base)
        every = max(1, cell["steps"] // 20)
        values |= {"seed": cell["seed"], "steps": cell["steps"], "eval_every": every}
        return {
            "config": to_dict(with_values(self.base, values)), "data": self.data, "deadline": self.end,
            "start_by": self.begin + share * (self.end - self.begin), "eval_from": 0.7 * cell["steps"],
            "candidate": cell["rule"], "setting": cell["setting"], "timed_steps": timed_steps,
        }  # fmt: skip

    def train(self, pool: Pool, cells: Iterable[Cell], *, share: float = 1.0) -> None:
        """Train the cells that are not there, and wait."""
        jobs = [(cell, self.job(cell, share=share)) for cell in cells]
        if jobs:
            self.runs.train(pool, jobs)

    def cell(self, name: str, seed: int, *, rate: float, aux: float, setting: str = "", steps: int = 0) -> Cell:
        """Return what tells a run from others."""
        steps = steps or self.steps
        return {"rule": name, "setting": setting, "rate": rate, "aux": aux, "seed": seed, "steps": steps}

    def time(self, pool: Pool) -> None:
        """Time each candidate with nothing beside it on its device."""
        jobs = []
        for name, found in self.candidates.items():
            cell = self.cell(name, 0, rate=rounded(found.center(self.base)), aux=1.0)
            jobs.append(({**cell, "part": "time"}, self.job(cell, timed_steps=self.options.timed_steps)))
        self.runs.train(pool, jobs)

    def tune(self, pool: Pool, next_of: NextOf, names: Iterable[str], *, rounds: int = _MOST_ROUNDS) -> None:
        """Train what is to be tried next of candidates, side by side, until there is nothing more."""
        names, seeds = list(names), self.options.tuning_seeds
        for _ in range(rounds):
            settings = [(name, setting) for name in names for setting in next_of(name)]
            before = len(self.runs.rows)
            cells = [self.cell(name, seed, **setting) for name, setting in settings for seed in seeds]
            self.train(pool, cells, share=self.share)
            if len(self.runs.rows) == before:  # all is known, or there is no time
                return

    def rates_of(self, aux: float, *, factor: float = 1.0) -> NextOf:
        """Return the search of the rate of the matrices, at a factor on AdamW's rates.

        Args:
            aux: factor on AdamW's rates.
            factor: on the middle of the first grid.
        """

        def next_of(name: str) -> list[dict[str, Any]]:
            center = factor * self.candidates[name].center(self.base)
            return [{"rate": rate, "aux": aux} for rate in next_rates(self.study.by_rate(name, aux), center)]

        return next_of

    def aux_of(self, name: str) -> list[dict[str, Any]]:
        """Return the factors on AdamW's rates to try next, with all else as in the best setting."""
        best = self.study.best(name)
        return [] if best is None else [{**best, "aux": x} for x in next_factors(self.study.by_aux(name, best))]

    def others_of(self, name: str) -> list[dict[str, Any]]:
        """Return the best setting with a candidate's other stages or options, or with rates beside the best."""
        best = self.study.best(name)
        if best is None:
            return []
        settings = [{**best, "setting": label} for label in self.candidates[name].settings if label]
        # Their rate was chosen with other rates of AdamW.
        rates = [rounded(best["rate"] * factor) for factor in _BESIDE] if name in (BASELINE, ADAMW_NAME) else []
        return [*settings, *({**best, "rate": rate} for rate in rates)]

    def compare(self, pool: Pool, names: Iterable[str], seeds: Sequence[int]) -> None:
        """Train the best setting of candidates with seeds of the table, seed by seed."""
        best = {name: found for name in names if (found := self.study.best(name)) is not None}
        self.train(pool, [self.cell(name, seed, **found) for seed in seeds for name, found in best.items()])

    def lengths(self, pool: Pool, seeds: Sequence[int]) -> None:
        """Train Muon with other numbers of steps."""
        best = self.study.best(BASELINE)
        if best is not None:
            steps = [round(share * self.steps) for share in LENGTHS]
            self.train(pool, [self.cell(BASELINE, seed, **best, steps=n) for seed in seeds for n in steps])

    def learn(self, pool: Pool) -> None:
        """Tune, and train the seeds of the table."""
        options = self.options
        others = [name for name in self.candidates if name != BASELINE]
        first = [name for name in self.candidates if name in (BASELINE, ADAMW_NAME)]
        rules = [name for name in others if name != ADAMW_NAME]
        seeds = options.seeds[: options.first_seeds]
        self.tune(pool, self.rates_of(1.0), first)
        self.tune(pool, self.aux_of, first)
        self.tune(pool, self.others_of, first, rounds=1)
        # All rules are tuned with the rates of AdamW's groups that suit Muon, and around the rate that suits it.
        best = self.study.best(BASELINE) or {"aux": 1.0, "rate": self.base.optim.muon_lr}
        self.tune(pool, self.rates_of(best["aux"], factor=best["rate"] / self.base.optim.muon_lr), rules)
        self.tune(pool, self.others_of, rules, rounds=1)
        self.compare(pool, self.candidates, seeds)
        self.lengths(pool, seeds)
        self.share = 1.0
        again = self.study.ranked(rules)[: options.retuned]
        self.tune(pool, self.aux_of, again)
        self.compare(pool, again, seeds)
        self.compare(pool, [BASELINE, *self.study.near_best(others)], options.seeds)

    def all(self) -> None:
        """Do everything in order."""
        devices = devices_of(self.options)
        for at_once, do in ((1, self.time), (self.options.at_once, self.learn)):
            pool = Pool(devices, at_once, self.options.threads, f"{MODULE}.run")
            try:
                do(pool)
            finally:
                pool.close()


def devices_of(options: argparse.Namespace) -> list[str]:
    """Return the devices as PyTorch names them."""
    return [f"cuda:{number}" for number in range(options.gpus)] or ["cpu"]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train everything and return it."""
    start = time.time()
    name, changes = SIZES[options.size]
    kind = "cuda" if options.gpus else "cpu"
    values = {**changes, **given_values(options.set)}
    # Smaller models are trained before they would be compiled.
    compiled = options.size == "depth12"
    fixed = {"device": kind, "compile": compiled, "rms_every": 0, "save_every": 0, "threads": options.threads}
    text = text_of(options.data, options.data_dir)
    base = with_values(preset(name), {"data": text, "data_dir": str(options.data_dir), **values, **fixed})
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    dataset = prepared(base.data)
    print(f"text ready after {time.time() - start:.0f} s", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    shared = {"size": options.size, **values, "text": dataset.key}
    runs = Runs(options.out / f"{options.name}.jsonl", shared)
    training = Training(options, base, dataset, runs, start)
    training.all()
    named = {str(options.out): "FOLDER", str(options.data_dir): "DATA"}
    if "/" in options.data:
        named[options.data] = "TEXT"
    model, schedule = base.model, base.schedule
    return {
        "command": recorded_command(MODULE, sys.argv[1:], named),
        "commit": options.commit or git_commit(),
        "seconds": time.time() - start,
        "minutes": options.minutes if math.isfinite(options.minutes) else None,
        "load": load,
        "devices": devices_of(options),
        "at_once": options.at_once,
        "size": options.size,
        "model": {name: getattr(model, name) for name in ("depth", "aspect_ratio", "head_dim", "seq_len")},
        "steps": training.steps,
        "batch_tokens": schedule.batch_tokens,
        "rules": options.rules,
        "seeds": options.seeds,
        "first_seeds": options.first_seeds,
        "tuning_seeds": options.tuning_seeds,
        "data": {**dataset.summary(), "source": Path(text).name, "path": None},
        **runs.computing,
        "failures": runs.failures,
        "rows": [{k: v for k, v in row.items() if k in _KEPT} for row in runs.rows.values()],
    }  # fmt: skip


# What the page needs of a run.
_KEPT = {"cell", "loss", "losses", "seconds", "optimizer_ms", "step_ms", "state_bytes", "parameters"}


def main() -> int:
    options = arguments()
    if options.page is None:
        result, path = measure(options), options.out / options.name
    else:
        result, path = json.loads(options.page.read_text(encoding="utf-8")), options.page.with_suffix("")
    text = page(result)
    write_result(path, result, text)
    print("\n" + text)
    return 1 if result["failures"] or "Not complete" in text else 0


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="depth4")
    parser.add_argument("--out", type=Path, default=Path("rules"), help="folder of the results")
    parser.add_argument("--name", help="of the results' files, without ending; by default date, machine and size")
    parser.add_argument("--commit", help="of this repository, for the record; by default what git says")
    parser.add_argument("--page", type=Path, help="train nothing: write the page of this .json beside it")
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs; 0 for the CPU")
    parser.add_argument("--at-once", type=int, help="runs at the same time on each device; by default 4, or the cores")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each run")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for all of it; runs beyond it are cut")
    parser.add_argument("--tuning-share", type=float, default=0.6, help="of the time, for tuning before the table")
    parser.add_argument("--rules", nargs="+", metavar="NAME", help="a+b is a pair; by default all, pairs and adamw")
    parser.add_argument("--data", help=f"text, as --data of quintic train, or {PYTORCH}: the Python files of PyTorch")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="where prepared text is kept")
    parser.add_argument("--tuning-seeds", nargs="+", type=int, default=[101])
    parser.add_argument("--seeds", nargs="+", type=int, help="by default 8 on a GPU, 6 on a CPU")
    parser.add_argument("--first-seeds", type=int, default=3, help="how many of them all candidates get")
    parser.add_argument("--retuned", type=int, default=4, help="best rules whose rates of AdamW are tuned, too")
    parser.add_argument("--timed-steps", type=int, default=16, help="of each candidate")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="for all runs: steps=300")
    options = parser.parse_args()
    options.data = options.data or (PYTORCH if options.size == "depth12" else "python")
    options.rules = options.rules or names_of_all()
    if BASELINE not in options.rules:
        options.rules = [BASELINE, *options.rules]
    options.seeds = options.seeds or list(range(1, 9 if options.gpus else 7))
    if {*options.tuning_seeds} & {*options.seeds}:
        parser.error("--tuning-seeds: settings must be chosen on other seeds than --seeds")
    for name in options.rules:
        candidate(name)
    options.at_once = options.at_once or (4 if options.gpus else os.cpu_count() or 1)
    kind = f"{options.gpus}xgpu" if options.gpus else "cpu"
    options.name = options.name or f"{time.strftime('%Y-%m-%d')}-{kind}-{options.size}-rules"
    return options


if __name__ == "__main__":
    sys.exit(main())
