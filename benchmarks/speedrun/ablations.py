r"""What is each feature of the speedrun worth? Short runs of the preset with all of them, and without one at a time.

    python -m benchmarks.speedrun.ablations --shards SHARDS --steps 120 --share 4 --seeds 1 2 --out FOLDER

Batches have 1 / SHARE of the preset's tokens, so that many runs fit into an hour of one GPU; sizes of the model and
the schedule stay. Up to --jobs processes compile at the same time, and one trains at a time: another's warm-up may fall
into single steps, so times are medians. FOLDER/NAME.jsonl has a line for each run, written when it ends; a second call
makes only those that are missing there. FOLDER/NAME.md and .json have the table. Features that are off on this machine
(8 bits on a CPU) are refused. To try it on a CPU:

    python -m benchmarks.speedrun.ablations --preset speedrun-tiny --shards python --steps 8 --out FOLDER
"""

import argparse
import io
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.results import (
    add_options,
    git_commit,
    made_by,
    print_table,
    read_rows,
    recorded_command,
    table,
    write_result,
)
from benchmarks.training.tune import share_cores
from quintic.report.history import METRICS_FILE, read_metrics
from quintic.speedrun.presets import FP8_FEATURES, SpeedrunOptions, preset, switches, without
from quintic.speedrun.stages import Track
from quintic.train.config import RunConfig
from quintic.train.hardware import choose_hardware, multiplies_fp8

MODULE = "benchmarks.speedrun.ablations"
WHOLE = "all features"
HEADS = ("without", "validation loss", "more than with it", "ms by stage", "in all (s)", "longer than with it")
NOTES = """\
{steps} steps of the track, {tokens:,} tokens{share}, on one {device}; losses in nats per token,
on {val_tokens:,} validation tokens. Milliseconds are medians of the steps of a stage, `in all` is their sum over the
steps. A difference of losses is the mean over seeds, each against all features with the same seed{noise}."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / f"{options.name}.jsonl"
    rows = read_rows(log)
    wanted = [(name, seed) for seed in options.seeds for name in (WHOLE, *options.only)]
    jobs = [job for job in wanted if job not in done(rows)]
    share_cores(options.jobs)
    started = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        options.jobs, started, initializer=set_turn, initargs=(started.Lock(),), max_tasks_per_child=1
    ) as pool:
        waiting = {pool.submit(measure, name, seed, options): (name, seed) for name, seed in jobs}
        for future in as_completed(waiting):
            if (error := future.exception()) is not None:
                print(f"{waiting[future]} failed: {error}", flush=True)
                continue
            rows.append(future.result())
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            shown = {key: rows[-1][key] for key in ("without", "seed", "loss", "stage_ms", "start_seconds")}
            print(json.dumps(shown), flush=True)
            write(rows, words, options)
    write(rows, words, options)
    print_table(HEADS, table_rows(rows))
    return int(not done(rows).issuperset(wanted))


def done(rows: Sequence[Mapping[str, Any]]) -> set[tuple[str, int]]:
    """Return (feature left out, seed) of the runs that were made."""
    return {(row["without"], row["seed"]) for row in rows}


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "ablations")
    parser.add_argument("--shards", required=True, help="folder made by benchmarks.speedrun.shards; python")
    parser.add_argument("--preset", default="speedrun", help="speedrun-tiny tries this script on a CPU")
    parser.add_argument("--only", nargs="*", metavar="FEATURE", help="to leave out, one at a time; by default each")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--share", type=int, default=1, help="batches have 1 / SHARE of the preset's tokens")
    parser.add_argument("--pass-tokens", type=int, default=32_768, help="of a pass, at most: jobs share the memory")
    parser.add_argument("--val-tokens", type=int, help="by default 1,048,576, of speedrun-tiny its own")
    parser.add_argument("--jobs", type=int, default=1, help="processes at the same time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337])
    options = parser.parse_args(words)
    has_fp8 = multiplies_fp8(choose_hardware(RunConfig()).device)
    names = [name for name in switches() if has_fp8 or name not in FP8_FEATURES]
    options.only = names if options.only is None else options.only
    if unknown := [name for name in options.only if name not in names]:
        parser.error(f"--only {' '.join(unknown)}: not a feature here; choose among {', '.join(names)}")
    if options.val_tokens is None:
        options.val_tokens = min(2**20, preset(options.preset).track.validation_tokens)
    return options


def the_track(options: argparse.Namespace) -> Track:
    """Return the track of all runs."""
    track = preset(options.preset).track.scaled(options.steps).validated(options.val_tokens)
    stages = tuple(replace(one, batch_tokens=one.batch_tokens // options.share) for one in track.stages)
    return replace(track, stages=stages, eval_every=options.steps, pass_tokens=options.pass_tokens)


# ------------------------------------------------------------------------------------------------------ in the process

_turn: AbstractContextManager[Any]
"""Held by the process that trains."""


def set_turn(lock: AbstractContextManager[Any]) -> None:
    global _turn
    _turn = lock


def measure(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train without a feature, after a warm-up beside others; return its loss and its times."""
    began = time.perf_counter()
    from quintic.speedrun.race import Race
    from quintic.speedrun.run import train
    from quintic.speedrun.shards import open_data

    chosen, track, hardware = preset(options.preset), the_track(options), choose_hardware(RunConfig())
    left_out = [] if multiplies_fp8(hardware.device) else [*FP8_FEATURES]
    model = without(chosen.model, left_out if name == WHOLE else [*left_out, name])
    with tempfile.TemporaryDirectory() as made:
        run_dir = Path(made)
        tokenizer = str(Path(options.shards) / "tokenizer.json")
        of_text = SpeedrunOptions(data=options.shards, data_dir=run_dir, shards=1, tokenizer=tokenizer)
        data = open_data(of_text, model)
        race = Race(track, model, data, hardware, seed=seed, capture=hardware.device.type == "cuda")
        race.warm_up()
        start = time.perf_counter() - began
        with _turn, redirect_stdout(io.StringIO()):
            result = train(race, run_dir, facts={}, warm_up=False)
        records = read_metrics(run_dir / METRICS_FILE)
    steps = [record for record in records if record["kind"] == "train"]
    by_stage = [
        [one["times_ms"]["step"] for one in steps if one["stage"] == stage] for stage in range(len(track.starts))
    ]
    return {
        "without": name,
        "seed": seed,
        "loss": result["loss"],
        "stage_ms": [statistics.median(times) for times in by_stage],
        "seconds": sum(statistics.median(times) * len(times) for times in by_stage) / 1000,
        "start_seconds": start,
        "peak_memory_bytes": records[-1].get("peak_memory_bytes"),
        **{key: records[0][key] for key in ("machine", "versions")},
    }


# ------------------------------------------------------------------------------------------------------------ the table


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the table's lines: all features first, then each that was left out, the dearest in loss first."""
    whole = {row["seed"]: row for row in rows if row["without"] == WHOLE}
    found = []
    for name in dict.fromkeys(row["without"] for row in rows):
        runs = [row for row in rows if row["without"] == name]
        losses = [row["loss"] for row in runs]
        seconds = [row["seconds"] for row in runs]
        stages = zip(*(row["stage_ms"] for row in runs), strict=True)
        times = ", ".join(f"{statistics.median(times):.1f}" for times in stages)
        pairs = [(row, whole[row["seed"]]) for row in runs if row["seed"] in whole]
        cells = [
            name,
            ", ".join(f"{loss:.4f}" for loss in losses),
            "-",
            times,
            f"{statistics.median(seconds):.2f}",
            "-",
        ]
        worse = 0.0
        if name != WHOLE and pairs:
            apart = [row["loss"] - other["loss"] for row, other in pairs]
            worse = statistics.mean(apart)
            longer = statistics.median(row["seconds"] / other["seconds"] - 1 for row, other in pairs)
            cells[2], cells[5] = f"{worse:+.4f}", f"{100 * longer:+.1f} %"
        found.append((name != WHOLE, -worse, cells))
    return [cells for *_, cells in sorted(found, key=lambda one: one[:2])]


def write(rows: Sequence[Mapping[str, Any]], words: Sequence[str], options: argparse.Namespace) -> None:
    """Write the table of all runs so far."""
    if not rows:
        return
    track = the_track(options)
    names = {str(options.out): "FOLDER", options.shards: "SHARDS"}
    command = recorded_command(MODULE, words, names)
    commit = options.commit or git_commit()
    whole = [row["loss"] for row in rows if row["without"] == WHOLE]
    notes = NOTES.format(
        steps=track.steps,
        share=f" in batches of 1/{options.share} of the preset's" if options.share > 1 else "",
        tokens=sum(track.at(step).batch_tokens for step in range(track.steps)),
        device=rows[0]["machine"]["device"],
        val_tokens=track.validation_tokens,
        noise=f"; seeds alone make {max(whole) - min(whole):.4f}" if len(whole) > 1 else "",
    )
    lines = ["# What the speedrun's features are worth", "", made_by(command, commit, rows[0]["versions"]) + ".", ""]
    lines += [*notes.splitlines(), "", *table(HEADS, table_rows(rows))]
    result = {"command": command, "commit": commit, "rows": list(rows)}
    write_result(options.out / options.name, result, "\n".join(lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
