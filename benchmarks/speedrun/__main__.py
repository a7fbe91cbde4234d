"""The speedrun beside the race that it comes from: on the same shards, validation tokens, attention and schedule.

    python -m benchmarks.speedrun.shards --train train.parquet --val val.parquet --tokenizer FOLDER --out SHARDS
    python -m benchmarks.speedrun --shards SHARDS --peer CHECKOUT --steps 200 --out FOLDER
    python -m benchmarks.speedrun --shards SHARDS --steps 200 --out FOLDER --only quintic --ablate smear skip
    python -m benchmarks.speedrun --shards SHARDS --steps 200 --out FOLDER --only --variant "eager=--no-capture"

Each contestant is a command of its own, under torchrun; what it prints is read, with the moment at which it came.
FOLDER/NAME.json has every step, FOLDER/NAME.md the tables, FOLDER/NAME.svg the curves, all written anew after each
contestant, and FOLDER/NAME-CONTESTANT-SEED.log what it printed, line by line. Contestants that were measured before,
with the same --name, stay in the tables. Where this command itself was stopped, the same with --from-logs makes tables
of the logs, up to where they end. `peer.py` lists the changes to the peer, `optimizer.py` times the step alone.

To try all of this on a CPU, with the text of the Python installation:

    python -m benchmarks.speedrun --preset speedrun-tiny --shards python --only quintic --steps 24 --out FOLDER
"""

import argparse
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.figures import ON_ANY_PAGE
from benchmarks.common.results import (
    add_options,
    device_name,
    git_commit,
    made_by,
    print_table,
    recorded_command,
    table,
    versions,
    write_result,
)
from benchmarks.speedrun.peer import write_peer
from quintic.data.tokenizer import Tokenizer
from quintic.speedrun.presets import preset
from quintic.speedrun.shards import vocabulary_of
from quintic.speedrun.stages import Track

MODULE = "benchmarks.speedrun"
HEADS = (
    "contestant",
    "seed",
    "start to first step (s)",
    "warm-up (s)",
    *(f"ms, stage {number}" for number in range(1, 5)),
)
NOTES = """\
{steps} steps of the track, {tokens:,} tokens, on {machine}; documents cut and batches made alike, {val_tokens:,}
validation tokens; each contestant with a cache of compiled code that is {cache}. Milliseconds: by the contestants' own
clocks, which stand still in warm-up and validations, after eight or nine steps or a quarter of a stage, so that even
and odd steps are as many.
Start: from the command to the end of the first counted step, of which warm-up is what ours says. Peer: {peer}."""

# Of each stage, at most a quarter: the first steps begin with what the stage before left, and ours capture graphs. What
# is left is even steps and odd ones, as many of each: a host that is ahead of its device waits for it in every second
# step, in which AdamW steps, so that by its clock steps of 306 ms take 583 and 30 ms in turns.
SKIPPED_STEPS = 8
STEP = re.compile(r"step[: ](\d+)/(\d+) +train[_ ]time[: ](\d+) ?ms")
SCORE = re.compile(r"step[: ](\d+)/\d+ +(?:val_loss:|validation )([\d.]+|nan) +train[_ ]time[: ](\d+) ?ms")
WARM_UP = re.compile(r"Warm-up took ([\d.]+) s")
PEAK = re.compile(r"peak memory[a-z ]*: (\d+) MiB")


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    track = the_track(options)
    path = options.out / options.name
    result: dict[str, Any] = {"rows": []}
    if Path(f"{path}.json").exists():
        result = json.loads(Path(f"{path}.json").read_text("utf-8"))
    facts = {
        "command": recorded_command(MODULE, words, names(options)),
        "commit": options.commit or git_commit(),
        "machine": f"{options.ranks} x {device_name(torch.cuda.is_available())}",
        "versions": versions(nccl=options.ranks > 1 and torch.cuda.is_available()),
        "steps": track.steps,
    }
    # Logs do not say where they were written.
    result = {**facts, **result} if options.from_logs else {**result, **facts}
    failed = False
    for name, more in contestants(options).items():
        for seed in options.seeds:
            row = {"contestant": name, "seed": seed, **measured(name, more, seed, track, options)}
            kept = [one for one in result["rows"] if (one["contestant"], one["seed"]) != (name, seed)]
            result["rows"] = [*kept, row]
            failed |= "error" in row
            write_result(path, result, page(result, track, options))
            draw(result, Path(f"{path}.svg"))
            print_table(heads(result), [cells(row, result)])
    print_table(heads(result), [cells(row, result) for row in result["rows"]])
    return int(failed)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "speedrun")
    parser.add_argument("--shards", type=Path, required=True, help="folder made by benchmarks.speedrun.shards; python")
    parser.add_argument("--peer", type=Path, help="checkout of modded-nanogpt at f411b3d3")
    parser.add_argument("--only", nargs="*", default=["quintic", "peer"], help="quintic, peer, and names of variants")
    parser.add_argument("--ablate", nargs="*", default=[], metavar="FEATURE", help="ours without each of these")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME=OPTIONS", help="ours with other options"
    )
    parser.add_argument("--preset", default="speedrun", help="speedrun-tiny tries this script on a CPU, without peer")
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stop-after", type=float, default=540, help="seconds of a contestant, at most")
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--val-tokens", type=int, help="by default 1,048,576, of speedrun-tiny its own")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337])
    parser.add_argument("--cache", type=Path, help="folder of compiled code to begin with; by default a new one each")
    parser.add_argument("--from-logs", action="store_true", help="run nothing, read the logs that are in FOLDER")
    options = parser.parse_args(words)
    if options.val_tokens is None:
        options.val_tokens = min(2**20, preset(options.preset).track.validation_tokens)
    if "peer" in options.only and options.peer is None and not options.from_logs:
        parser.error("the peer needs --peer, a checkout of modded-nanogpt; or --only quintic")
    return options


def names(options: argparse.Namespace) -> dict[str, str]:
    """Return this machine's folders and their stand-ins in the recorded command."""
    folders = {options.out: "FOLDER", options.peer: "CHECKOUT", options.shards: "SHARDS", options.cache: "CACHE"}
    return {str(folder): name for folder, name in folders.items() if folder is not None}


def the_track(options: argparse.Namespace) -> Track:
    """Return the track of all contestants."""
    track = preset(options.preset).track.scaled(options.steps).validated(options.val_tokens)
    return replace(track, eval_every=options.eval_every)


def contestants(options: argparse.Namespace) -> dict[str, list[str] | None]:
    """Return name -> more options of ours; None for the peer."""
    found: dict[str, list[str] | None] = {}
    for name in options.only:
        found[name] = None if name == "peer" else []
    for variant in options.variant:
        name, _, more = variant.partition("=")
        found[name] = shlex.split(more)
    for feature in options.ablate:
        found[f"without {feature}"] = ["--without", feature]
    return found


def measured(name: str, more: list[str] | None, seed: int, track: Track, options: argparse.Namespace) -> dict[str, Any]:
    """Run a contestant, or read its log, and return what it printed, as numbers."""
    log = options.out / f"{options.name}-{name.replace(' ', '-')}-{seed}.log"
    if options.from_logs:
        lines = read_log(log)
        found = summary(lines, track)
        return found if track.steps in found["losses"] else {**found, "error": f"its log ends after {len(lines)} lines"}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        work = folder / "work"
        work.mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        tokenizer = options.shards / "tokenizer.json"
        if more is None:
            vocabulary = vocabulary_of(Tokenizer.load(tokenizer), bos_id=50_256)
            write_peer(options.peer, work, shards=options.shards, vocabulary=vocabulary, track=track, seed=seed)
            command = [*torchrun, "train_gpt.py"]
        else:
            values = {
                "data": options.shards if str(options.shards) == "python" else options.shards.resolve(),
                "tokenizer": tokenizer.resolve(),
                "steps": options.steps,
                "eval-every": options.eval_every,
                "val-tokens": options.val_tokens,
                "seed": seed,
            }
            command = [*torchrun, "-m", "quintic", "train", "--preset", options.preset, "--name", "run", *more]
            command += [f"--{option}={value}" for option, value in values.items()]
        cache = options.cache.resolve() if options.cache is not None else folder / "cache"
        paths = [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([*([str(work)] if more is None else []), *filter(None, paths)]),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }
        log.parent.mkdir(parents=True, exist_ok=True)
        lines, code = run(command, work, environment, log, options.stop_after)
        records = work / "runs" / "run" / "metrics.jsonl"
        found = summary(lines, track)
        if records.exists():
            text = records.read_text("utf-8").replace(str(options.shards.resolve()), "SHARDS")
            lines_of_log = [json.loads(line) for line in text.splitlines()]
            # Rates of all groups would be most of the file, and follow from the preset.
            found["records"] = [{key: one[key] for key in one if key != "lr"} for one in lines_of_log]
            found.setdefault("peak_mib", (found["records"][-1].get("peak_memory_bytes") or 0) / 2**20)
        if code:
            found["error"] = f"exit code {code}: " + " ".join(text for _, text in lines[-3:])[-200:]
        return found


def run(
    command: list[str], folder: Path, environment: dict[str, str], log: Path, limit: float
) -> tuple[list[tuple[float, str]], int]:
    """Run a command and return its lines, each with the seconds after which it came, and the exit code."""
    began = time.perf_counter()
    lines: list[tuple[float, str]] = []
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        timer = threading.Timer(limit, process.terminate)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.perf_counter() - began, line.rstrip()))
            file.write(f"{lines[-1][0]:8.2f} {line}")
            file.flush()
        timer.cancel()
    return lines, process.returncode


def read_log(log: Path) -> list[tuple[float, str]]:
    """Return the lines of a log as `run` returns them; of one that was cut off, those that are whole."""
    whole = log.read_text("utf-8").rpartition("\n")[0] if log.exists() else ""
    return [(float(line[:8]), line[9:]) for line in whole.splitlines() if line[:8].strip()]


def summary(lines: Sequence[tuple[float, str]], track: Track) -> dict[str, Any]:
    """Return times of stages, losses and the start from the lines of a contestant."""
    steps: dict[int, float] = {}
    losses: dict[int, float] = {}
    found: dict[str, Any] = {"score_ms": {}}
    for seconds, line in lines:
        if score := SCORE.search(line):
            losses[int(score[1])] = float(score[2])
            found["train_ms"] = found["score_ms"][int(score[1])] = float(score[3])
        elif step := STEP.search(line):
            steps[int(step[1])] = float(step[3])
            if step[1] == "1":
                found["start_seconds"] = seconds
        elif warm_up := WARM_UP.search(line):
            found["warmup_seconds"] = float(warm_up[1])
        elif peak := PEAK.search(line):
            found["peak_mib"] = float(peak[1])
    found["losses"], found["step_ms"] = losses, steps
    found["stage_ms"] = []
    for start, end in zip(track.starts, (*track.starts[1:], track.steps), strict=True):
        first = start + min(SKIPPED_STEPS, (end - start) // 4)  # the first step is number 1
        if end - first > 1:
            first += (end - first) % 2
        known = end in steps and (first == 0 or first in steps)
        found["stage_ms"].append((steps[end] - steps.get(first, 0.0)) / (end - first) if known else None)
    return found


def heads(result: dict[str, Any]) -> list[str]:
    """Return the heads of the table: the losses are those of all steps that were scored."""
    scored = sorted({int(step) for row in result["rows"] for step in row["losses"]})
    return [*HEADS, "train time (s)", *(f"loss, {step} steps" for step in scored), "peak (GiB)"]


def cells(row: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """Return a contestant's line of the table."""
    losses = {int(step): loss for step, loss in row["losses"].items()}
    scored = sorted({int(step) for other in result["rows"] for step in other["losses"]})

    def shown(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    train_ms, peak = row.get("train_ms"), row.get("peak_mib")
    return [
        row["contestant"] + (" (failed)" if "error" in row else ""),
        str(row["seed"]),
        shown(row.get("start_seconds"), 1),
        shown(row.get("warmup_seconds"), 1),
        *(shown(value, 2) for value in row["stage_ms"]),
        shown(None if train_ms is None else train_ms / 1000, 2),
        *(shown(losses.get(step), 4) for step in scored),
        shown(None if peak is None else peak / 1024, 1),
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the validation losses after the first over the time of training, a curve for each contestant and seed."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(ON_ANY_PAGE):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for row in result["rows"]:
            losses = {int(step): loss for step, loss in row["losses"].items() if int(step)}
            seconds = [row["score_ms"][step] / 1000 for step in row["score_ms"] if int(step)]
            axes.plot(seconds, list(losses.values()), marker=".", label=f"{row['contestant']}, seed {row['seed']}")
        axes.set(xlabel="training time (s)", ylabel="validation loss (nats per token)", title="The speedrun")
        axes.legend()
        figure.savefig(path, metadata={"Date": None})


def against_peer(result: dict[str, Any]) -> list[str]:
    """Return lines that say how ours compares with the peer: means over the runs of each."""
    both = [
        [row for row in result["rows"] if row["contestant"] == name and "error" not in row]
        for name in ("quintic", "peer")
    ]
    if not all(both):
        return []
    times = [
        [
            None if None in values else statistics.mean(values)
            for values in zip(*(row["stage_ms"] for row in rows), strict=True)
        ]
        for rows in both
    ]
    pairs = zip(*times, strict=True)
    ratios = ", ".join("-" if None in (ours, peers) else f"{ours / peers:.3f}" for ours, peers in pairs)
    last = [[list(row["losses"].values())[-1] for row in rows] for rows in both]
    difference = statistics.mean(last[0]) - statistics.mean(last[1])
    known = "standard error unknown: it takes two runs of each"
    if all(len(losses) > 1 for losses in last):
        error = math.sqrt(sum(statistics.variance(losses) / len(losses) for losses in last))
        known = f"standard error {error:.4f}"
    starts = [statistics.mean(row["start_seconds"] for row in rows) for rows in both]
    return [
        "",
        f"Ours over the peer's: milliseconds by stage {ratios}; start {starts[0] / starts[1]:.3f}; last loss "
        f"{difference:+.4f} ({known}).",
    ]


def page(result: dict[str, Any], track: Track, options: argparse.Namespace) -> str:
    """Return the Markdown page."""
    notes = NOTES.format(
        steps=track.steps,
        tokens=sum(track.at(step).batch_tokens for step in range(track.steps)),
        machine=result["machine"],
        val_tokens=track.validation_tokens,
        cache="empty" if options.cache is None else "shared",
        peer="modded-nanogpt at f411b3d3, with the changes that benchmarks/speedrun/peer.py lists",
    )
    errors = [f"- {row['contestant']}: {row['error']}" for row in result["rows"] if "error" in row]
    lines = [
        "# The speedrun beside the race",
        "",
        *made_by(result["command"], result["commit"], result["versions"]).splitlines(),
        "",
        *notes.splitlines(),
        "",
        f"![Validation losses over the time of training]({options.name}.svg)",
        "",
        *table(heads(result), [cells(row, result) for row in result["rows"]]),
        *against_peer(result),
        *errors,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
