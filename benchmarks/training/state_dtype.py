"""Does bfloat16 state change the loss? The quick-start model with float32 and with bfloat16 state, some seeds each.

    python -m benchmarks.training.state_dtype --out FOLDER --jobs 6

Every run is a `quintic train` of its own with the quick start's defaults (see `tune.py`), and a line in
FOLDER/NAME.jsonl; a second call trains only what is missing there. FOLDER/NAME.md and FOLDER/NAME.json have the table:
runs of one seed see the same batches, so each is compared with its twin.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.common.results import (
    REPOSITORY,
    add_options,
    git_commit,
    made_by,
    read_rows,
    recorded_command,
    table,
    write_result,
)
from benchmarks.training.tune import run_setting

STATES = ("None", "bf16")
HEADS = ("state", "validation loss, mean", "by seed", "bits per byte, mean", "less float32 state, same seed", "seconds")


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table: one line for each dtype of the state, of the seeds that all have."""
    by_state = {state: {row["seed"]: row for row in rows if row["state"] == state} for state in STATES}
    seeds = sorted(set.intersection(*(set(found) for found in by_state.values())))
    if not seeds:
        return ["No seed was trained with both."]
    wide = by_state["None"]
    lines = []
    for state, found in by_state.items():
        losses = [found[seed]["loss"] for seed in seeds]
        apart = [found[seed]["loss"] - wide[seed]["loss"] for seed in seeds]
        lines.append(
            (
                {"None": "float32", "bf16": "bfloat16"}[state],
                f"{statistics.mean(losses):.4f}",
                ", ".join(f"{loss:.4f}" for loss in losses),
                f"{statistics.mean(found[seed]['bpb'] for seed in seeds):.4f}",
                "-" if state == "None" else f"{statistics.mean(apart):+.4f} ({min(apart):+.4f} to {max(apart):+.4f})",
                f"{statistics.median(found[seed]['seconds'] for seed in seeds):.0f}",
            )
        )
    return table(HEADS, lines)


def main() -> int:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / f"{options.name}.jsonl"
    rows = [row for row in read_rows(log) if row["base"] == options.base]
    done = {(row["state"], row["seed"]) for row in rows}
    todo = [(state, seed) for seed in options.seeds for state in STATES if (state, seed) not in done]
    if options.jobs > 1:  # the runs share the cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    lock = threading.Lock()

    def train(job: tuple[str, int]) -> None:
        state, seed = job
        setting = ["--state-dtype", state, "--seed", str(seed), *shlex.split(options.base)]
        found = run_setting("--compile False", setting, float("inf"))
        if found is None:
            return
        row = {**found, "state": state, "seed": seed, "base": options.base}
        with lock:
            rows.append(row)
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"state {state:5} seed {seed:<4} loss {row['loss']:.4f}", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(train, todo))
    wanted = [row for row in rows if row["seed"] in options.seeds]
    command = recorded_command("benchmarks.training.state_dtype", sys.argv[1:], {str(options.out): "FOLDER"})
    commit = options.commit or git_commit()
    lines = lines_of(wanted)
    found = wanted[0]["versions"] if wanted else {}
    page = ["# Loss with float32 and with bfloat16 state", "", f"{made_by(command, commit, found)}.", "", *lines]
    result = {"command": command, "commit": commit, "rows": wanted}
    write_result(options.out / options.name, result, "\n".join(page) + "\n")
    print("\n".join(lines))
    return 0 if len(wanted) == len(STATES) * len(options.seeds) else 1


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "state_dtype")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--seeds", nargs="+", type=int, default=[21, 22, 23])
    parser.add_argument("--base", default="", help="more options of every run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
