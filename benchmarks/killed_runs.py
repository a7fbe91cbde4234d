"""Kill training runs at random moments, resume them, and compare every loss and the final weights with a whole run's.

    python -m benchmarks.killed_runs --out FOLDER --kills 200

A run that is killed (SIGKILL) and resumed must end with the bits of one that was not. Runs follow each other, beside a
busy process that multiplies matrices on as many threads, until there were --kills of them or --minutes are over. With
--at-once, several runs share the processors; each is bound to --threads of them. FOLDER/NAME.md says how many runs
ended with other bits, and at which step each of them left the way; FOLDER/NAME.json has all of it. Both are written
anew after each run.
"""

import argparse
import concurrent.futures
import hashlib
import json
import multiprocessing
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import (
    add_options,
    git_commit,
    made_by,
    processor,
    recorded_command,
    table,
    versions,
    write_result,
)

RUN = "--depth 2 --steps 60 --save-every 2 --eval-every 0 --sample-tokens 1"
# A run that is killed more often than this would be killed for ever.
MOST_KILLS = 12


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    busy = [multiprocessing.Process(target=multiply, args=(options.threads,), daemon=True) for _ in range(options.busy)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "quintic", "prepare", "--data-dir", str(folder / "data")], check=True)
        start = time.monotonic()
        expected = trained(folder, "whole", options, None, place=0)[0]
        seconds = time.monotonic() - start
        for process in busy:
            process.start()
        deadline = time.monotonic() + 60 * options.minutes
        runs: list[dict[str, Any]] = []
        result = {
            "command": recorded_command("benchmarks.killed_runs", words, {str(options.out): "FOLDER"}),
            "commit": options.commit or git_commit(),
            "machine": f"{processor()}, {os.cpu_count()} processors",
            "versions": versions(),
            "seconds_of_a_whole_run": seconds,
            "runs": runs,
        }
        with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
            waiting: set[concurrent.futures.Future[dict[str, Any]]] = set()
            while True:
                kills = sum(run["kills"] for run in runs)
                more = kills < options.kills and time.monotonic() < deadline
                while more and len(waiting) < options.at_once:
                    number = len(runs) + len(waiting)
                    waiting.add(pool.submit(attempt, folder, number, options, seconds, expected))
                if not waiting:
                    break
                done, waiting = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    runs.append(future.result())
                    print(json.dumps(runs[-1]), flush=True)
                write_result(options.out / options.name, result, page(result, options))
        for process in busy:
            process.terminate()
    print(page(result, options))
    return int(any(run["first_difference"] is not None for run in runs))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "killed-runs")
    parser.add_argument("--run", default=RUN, help="options of quintic train")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--threads", type=int, default=2, help="of each run and each busy process")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--busy", type=int, default=1, help="processes that keep the processors busy")
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which runs are killed")
    return parser.parse_args(words)


def attempt(folder: Path, number: int, options: argparse.Namespace, seconds: float, expected: Any) -> dict[str, Any]:
    """Train a run that is killed again and again; return how often, and where it left the way of the whole run."""
    moments = random.Random(f"{options.seed}, {number}")
    place = number % options.at_once
    found, kills = trained(folder, f"killed-{number}", options, lambda: moments.uniform(0, 1.5 * seconds), place)
    return {"number": number, "kills": kills, "first_difference": first_difference(expected, found)}


def trained(
    folder: Path, name: str, options: argparse.Namespace, moment: Any, place: int
) -> tuple[tuple[dict[int, float], str], int]:
    """Return the losses of a run by step and a hash of its weights, and how often it was killed on the way."""
    command = [sys.executable, "-m", "quintic", "train", "--data-dir", str(folder / "data"), "--runs-dir", str(folder)]
    command += ["--threads", str(options.threads), "--device", "cpu", *shlex.split(options.run)]
    first = options.threads * place
    processors = sorted(os.sched_getaffinity(0))[first : first + options.threads]
    kills = 0
    while True:
        resume = ["--resume"] if (folder / name / "config.json").exists() else []
        limit = None if moment is None or kills >= MOST_KILLS else moment()
        process = subprocess.Popen(
            [*command, "--run", name, *resume],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=None if options.at_once == 1 else lambda: os.sched_setaffinity(0, processors),
        )
        try:
            _, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
            continue
        if process.returncode:
            raise RuntimeError(errors.decode()[-2000:])
        return ending(folder / name), kills


def ending(run: Path) -> tuple[dict[int, float], str]:
    """Return the losses of a finished run by step, and a hash of the tensors in its last checkpoint."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
    newest = max((run / "checkpoints").glob("step-*"))
    digest = hashlib.sha256()
    for path in sorted(newest.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return losses, digest.hexdigest()


def first_difference(expected: Any, found: Any) -> str | None:
    """Return the first difference between two runs, or None."""
    for step, loss in expected[0].items():
        if found[0].get(step) != loss:
            return f"step {step}: loss {found[0].get(step)} instead of {loss}"
    return None if found[1] == expected[1] else "final weights"


def multiply(threads: int) -> None:
    """Keep processors busy."""
    import torch

    torch.set_num_threads(threads)
    matrix = torch.randn(512, 512, dtype=torch.bfloat16)
    while True:
        matrix @ matrix


def page(result: dict[str, Any], options: argparse.Namespace) -> str:
    """Return the result as Markdown."""
    runs = result["runs"]
    different = [run for run in runs if run["first_difference"] is not None]
    kills = sum(run["kills"] for run in runs)
    whole = f"a whole run of `quintic train {options.run}` takes {result['seconds_of_a_whole_run']:.0f} s"
    lines = [
        "# Killed and resumed runs",
        "",
        made_by(result["command"], result["commit"], result["versions"]),
        "",
        f"{result['machine']}; {options.at_once} runs at a time on {options.threads} threads each, busy processes "
        f"beside them: {options.busy}; {whole}.",
        "",
        f"**{len(runs)} runs, {kills} kills, {len(different)} ended with other bits** than the whole run.",
    ]
    if different:
        rows = [[str(run["number"]), str(run["kills"]), run["first_difference"]] for run in different]
        lines += ["", *table(["run", "kills", "first difference"], rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
