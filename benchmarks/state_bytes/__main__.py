"""What do fewer bytes of state cost in loss, and what do they save in memory and time?

    python -m benchmarks.state_bytes --size depth4 --parts loss --out FOLDER                   # two cores
    python -m benchmarks.state_bytes --size depth8 --gpus 4 --parts loss --out FOLDER
    python -m benchmarks.state_bytes --parts step layout --gpus 2 --peers FOLDER_OF_OTHER_LIBRARIES --out FOLDER
    python -m benchmarks.state_bytes --page FOLDER/NAME.json

Three parts, all of them with one call or by and by:

- `loss`: runs of `quintic train` with the forms of state and weights of `run.py`, each with the same seeds. Under one
  seed all have the same initial weights and batches, so differences are paired.
- `step`: the optimizer's step on one device, by `benchmarks.optimizer_step`.
- `layout`: the same under FSDP2 on several ranks, for the shapes of Qwen3 8B.

Every run is a line of FOLDER/NAME-SIZE.jsonl or FOLDER/NAME-step.jsonl; the same command again does what is missing
there. FOLDER/NAME.md and NAME.json have the results of all parts that were ever made there.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import REPOSITORY, git_commit, read_rows, recorded_command, write_result
from benchmarks.optimizer_step.contestants import SETS
from benchmarks.rules.__main__ import SIZES
from benchmarks.rules.text import PYTORCH, text_of
from benchmarks.state_bytes.page import page
from benchmarks.state_bytes.run import BASELINE, SETTINGS
from benchmarks.training.workers import Pool, Runs, given_values, with_values
from quintic.commands.presets import preset
from quintic.commands.text import prepared
from quintic.train.saved_config import to_dict

MODULE = "benchmarks.state_bytes"
PARTS = ("loss", "step", "layout")
CONTESTANTS = (
    "quintic", "quintic-mantissa", "quintic-bf16-state", "quintic-int8", "quintic-int8-8bit", "torch-adamw",
    "flash-adamw",
)  # fmt: skip
# What the page needs of a run.
_KEPT = {"cell", "loss", "training_seconds", "bytes"}


def measure_losses(options: argparse.Namespace) -> dict[str, Any]:
    """Train what is missing of a size, and return all of its runs."""
    start = time.time()
    name, changes = SIZES[options.size]
    values = {**changes, **given_values(options.set)}
    kind = "cuda" if options.gpus else "cpu"
    fixed = {"device": kind, "compile": False, "rms_every": 0, "save_every": 0, "threads": options.threads}
    text = text_of(options.data or (PYTORCH if options.size == "depth12" else "python"), options.data_dir)
    base = with_values(preset(name), {"data": text, "data_dir": str(options.data_dir), **values, **fixed})
    dataset = prepared(base.data)
    deadline = start + 60 * options.minutes
    jobs = []
    for seed in options.seeds:
        for name in options.settings:
            weights = "float32" if SETTINGS[name].master is None else "mantissa"
            # Before the optimizer is given its setting, which is not of the harness.
            config = with_values(base, {"seed": seed, "eval_every": 0, "state_dtype": None, "weights": weights})
            job = {"config": to_dict(config), "data": str(dataset.path.resolve()), "setting": name}
            jobs.append(({"setting": name, "seed": seed}, job | {"deadline": deadline, "start_by": deadline}))
    runs = Runs(options.out / f"{options.name}-{options.size}.jsonl", {**values, "text": dataset.key})
    devices = [f"cuda:{number}" for number in range(options.gpus)] or ["cpu"]
    pool = Pool(devices, options.at_once, options.threads, f"{MODULE}.run")
    try:
        runs.train(pool, jobs)
    finally:
        pool.close()
    return {
        "steps": base.schedule.steps,
        "batch_tokens": base.schedule.batch_tokens,
        "computing": runs.computing,
        "failures": runs.failures,
        "rows": [{name: row[name] for name in _KEPT} for row in runs.rows.values()],
    }


def measure_steps(options: argparse.Namespace, part: str) -> list[dict[str, Any]]:
    """Time steps in `benchmarks.optimizer_step`, which keeps what it measured before; return its rows."""
    name = f"{options.name}-{part}"
    words = ["--out", str(options.out), "--name", name, "--dtype", "bf16", "--only", *options.contestants]
    if part == "layout":
        words += ["--layout", "fsdp2", "--ranks", str(options.ranks), "--set", *options.layout_sets]
    else:
        words += ["--set", *options.sets]
    words += ["--device", "cuda" if options.gpus else "cpu", "--limit", str(options.limit)]
    words += [word for folder in options.peers for word in ("--peers", folder)]
    words += ["--commit", options.commit or git_commit()]
    subprocess.run([sys.executable, "-m", "benchmarks.optimizer_step", *words], cwd=REPOSITORY, check=True)
    latest = {
        (row["set"], row["contestant"], row.get("layout")): row for row in read_rows(options.out / f"{name}.jsonl")
    }
    return list(latest.values())


def measure(options: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Do the parts that were asked for and return them, with those that were there."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"losses": {}, "by_part": {}}
    losses, by_part = dict(before["losses"]), dict(before["by_part"])
    if "loss" in options.parts:
        losses[options.size] = measure_losses(options)
    for part in PARTS[1:]:
        if part in options.parts:
            by_part[part] = measure_steps(options, part)
    named = {str(options.out): "FOLDER", str(options.data_dir): "DATA", **dict.fromkeys(options.peers, "PEERS")}
    return {
        "command": recorded_command(MODULE, words, named),
        "commit": options.commit or git_commit(),
        "losses": losses,
        "by_part": by_part,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure, or write the page of what was measured."""
    words = list(sys.argv[1:] if words is None else words)
    options = arguments(words)
    if options.page is None:
        result, path = measure(options, words), options.out / options.name
    else:
        result, path = json.loads(options.page.read_text(encoding="utf-8")), options.page.with_suffix("")
    text = page(result)
    write_result(path, result, text)
    print("\n" + text)
    return int(any(part["failures"] for part in result["losses"].values()))


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("state-bytes"), help="folder of the results")
    parser.add_argument("--name", default="state-bytes", help="of the results' files, without ending")
    parser.add_argument("--commit", help="of this repository, for the record; by default what git says")
    parser.add_argument("--page", type=Path, help="measure nothing: write the page of this .json beside it")
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs; 0 for the CPU")
    parser.add_argument("--size", choices=SIZES, default="depth4", help="of the models that are trained")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1, 9)))
    parser.add_argument("--at-once", type=int, help="runs at the same time on each device; by default 4, or the cores")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each run")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for the runs; those beyond it are cut")
    parser.add_argument("--data", help=f"text, as --data of quintic train, or {PYTORCH}: the Python files of PyTorch")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="where prepared text is kept")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="for all runs: steps=300")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["gpt124m", "qwen1.7b"], help="of the part step")
    parser.add_argument("--layout-sets", nargs="+", choices=SETS, default=["qwen8b"], help="of the part layout")
    parser.add_argument("--ranks", type=int, default=2, help="of the part layout")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--peers", action="append", default=[], help="folder with the packages of other libraries")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one contestant")
    options = parser.parse_args(words)
    if BASELINE not in options.settings:
        options.settings = [BASELINE, *options.settings]
    options.at_once = options.at_once or (4 if options.gpus else os.cpu_count() or 1)
    return options


if __name__ == "__main__":
    sys.exit(main())
