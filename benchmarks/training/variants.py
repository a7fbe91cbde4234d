r"""Does an option change the loss? Runs of `quintic train` with and without it, some seeds each.

    python -m benchmarks.training.variants --out FOLDER --base "--depth 6" \
        --variant "float32=" --variant "bfloat16=--state-dtype bf16"

Every run is a `quintic train` of its own (see `tune.py`), and a line in FOLDER/NAME.jsonl; a second call trains only
what is missing there. FOLDER/NAME.md and FOLDER/NAME.json have the table: runs of one seed see the same batches, so
each is compared with its twin of the first variant. Speeds are those of single runs only with --jobs 1.
"""

import argparse
import json
import shlex
import statistics
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.common.results import (
    add_options,
    git_commit,
    made_by,
    read_rows,
    recorded_command,
    table,
    write_result,
)
from benchmarks.training.tune import run_setting, share_cores

HEADS = (
    *("variant", "validation loss, mean", "by seed", "bits per byte, mean", "more than the first, same seed"),
    *("tokens/s", "peak (GiB)"),
)


def lines_of(rows: Sequence[Mapping[str, Any]], variants: Sequence[str]) -> list[str]:
    """Return the table: one line for each variant, of the seeds that all have."""
    by_variant = {name: {row["seed"]: row for row in rows if row["variant"] == name} for name in variants}
    seeds = sorted(set.intersection(*(set(runs) for runs in by_variant.values())))
    if not seeds:
        return ["No seed was trained with all variants."]
    first = by_variant[variants[0]]
    lines = []
    for name, runs in by_variant.items():
        losses = [runs[seed]["loss"] for seed in seeds]
        apart = [runs[seed]["loss"] - first[seed]["loss"] for seed in seeds]
        lines.append(
            (
                name,
                f"{statistics.mean(losses):.4f}",
                ", ".join(f"{loss:.4f}" for loss in losses),
                f"{statistics.mean(runs[seed]['bpb'] for seed in seeds):.4f}",
                "-"
                if name == variants[0]
                else f"{statistics.mean(apart):+.4f} ({min(apart):+.4f} to {max(apart):+.4f})",
                _median(runs[seed]["tokens_per_second"] for seed in seeds),
                _median((runs[seed]["peak_memory_bytes"] or 0) / 2**30 for seed in seeds),
            )
        )
    return table(HEADS, lines)


def _median(values: Any) -> str:
    known = [value for value in values if value]
    middle = statistics.median(known) if known else 0
    return f"{middle:,.{0 if middle > 1000 else 1}f}" if known else "-"


def main() -> int:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / f"{options.name}.jsonl"
    rows = [row for row in read_rows(log) if row["base"] == options.base]
    done = {(row["variant"], row["seed"]) for row in rows}
    todo = [(name, more, seed) for seed in options.seeds for name, more in options.variant if (name, seed) not in done]
    share_cores(options.jobs)
    lock = threading.Lock()

    def train(job: tuple[str, str, int]) -> None:
        name, more, seed = job
        setting = [*shlex.split(more), "--seed", str(seed)]
        result = run_setting(options.base, setting, float("inf"))
        if result is None:
            return
        row = {**result, "variant": name, "seed": seed, "base": options.base}
        with lock:
            rows.append(row)
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{name:12} seed {seed:<4} loss {row['loss']:.4f}", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(train, todo))
    names = [name for name, _ in options.variant]
    wanted = [row for row in rows if row["seed"] in options.seeds and row["variant"] in names]
    command = recorded_command("benchmarks.training.variants", sys.argv[1:], {str(options.out): "FOLDER"})
    commit = options.commit or git_commit()
    lines = lines_of(wanted, names)
    machine = wanted[0]["machine"]["device"] if wanted else "no machine"
    versions = wanted[0]["versions"] if wanted else {}
    page = [f"# Loss of variants, {machine}", "", f"{made_by(command, commit, versions)}.", "", *lines]
    result = {"command": command, "commit": commit, "rows": wanted}
    write_result(options.out / options.name, result, "\n".join(page) + "\n")
    print("\n".join(lines))
    return 0 if len(wanted) == len(names) * len(options.seeds) else 1


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "variants")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--seeds", nargs="+", type=int, default=[21, 22, 23])
    parser.add_argument("--base", default="", help="options of every run")
    parser.add_argument(
        "--variant", action="append", required=True, metavar="NAME=OPTIONS", help="several; the first is the reference"
    )
    options = parser.parse_args()
    options.variant = [tuple(text.split("=", 1)) for text in options.variant if "=" in text]
    if len(options.variant) < 2:
        parser.error("--variant NAME=OPTIONS: need at least two")
    return options


if __name__ == "__main__":
    sys.exit(main())
