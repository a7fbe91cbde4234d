"""Train one configuration with many settings of its options and rank them by validation bits per byte.

    python -m benchmarks.training.tune --out FILE.jsonl --jobs 8 --base "--steps 600" --grid "--muon-lr 0.01 0.02 0.04"

Every `--grid` is one option with its values; the product of all grids is run (`--around` instead varies one option at a
time, the others at the first value given). Each run is a `quintic train` of its own; results already in the output file
are not run again, so a stopped search continues.
"""

import argparse
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.common.results import REPOSITORY, read_rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of results, one JSON object per line")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--base", default="", help="options of every run")
    parser.add_argument("--grid", action="append", default=[], help="an option and its values")
    parser.add_argument("--around", action="store_true", help="vary one option at a time")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="start no run after this many seconds")
    options = parser.parse_args()
    grids = [shlex.split(grid) for grid in options.grid]
    settings = list(_around(grids) if options.around else _product(grids))
    done = _read(options.out)
    todo = [setting for setting in settings if _key(options.base, setting) not in done]
    print(f"{len(settings)} settings, {len(settings) - len(todo)} done before", flush=True)
    deadline = time.monotonic() + options.time_limit
    with ThreadPoolExecutor(options.jobs) as pool, options.out.open("a", encoding="utf-8") as out:
        for result in pool.map(lambda setting: run_setting(options.base, setting, deadline), todo):
            if result is not None:
                out.write(json.dumps(result) + "\n")
                out.flush()
                print(f"{result['bpb']:.4f}  {result['setting']}", flush=True)
    wanted = {_key(options.base, setting) for setting in settings}
    results = [result for key, result in _read(options.out).items() if key in wanted]
    print("\nbest mean first:")
    print(_table(results))
    return 0


def _table(results: list[dict[str, object]]) -> str:
    """Group results that differ by their seed alone; mean, least and most bits per byte."""
    groups: dict[str, list[float]] = {}
    for result in results:
        groups.setdefault(re.sub(r"--seed \S+ ?", "", result["setting"]).strip(), []).append(result["bpb"])
    lines = ["| setting | seeds | mean bits per byte | least | most |", "|---|---|---|---|---|"]
    for setting, values in sorted(groups.items(), key=lambda item: statistics.mean(item[1])):
        row = f"{statistics.mean(values):.4f} | {min(values):.4f} | {max(values):.4f}"
        lines.append(f"| `{setting}` | {len(values)} | {row} |")
    return "\n".join(lines)


def _product(grids: list[list[str]]) -> "itertools.chain[list[str]]":
    values = [[[grid[0], value] for value in grid[1:]] for grid in grids]
    return itertools.chain(list(itertools.chain(*choice)) for choice in itertools.product(*values))


def _around(grids: list[list[str]]) -> list[list[str]]:
    centre = [[grid[0], grid[1]] for grid in grids]
    settings = [list(itertools.chain(*centre))]
    for index, grid in enumerate(grids):
        for value in grid[2:]:
            varied = [*centre[:index], [grid[0], value], *centre[index + 1 :]]
            settings.append(list(itertools.chain(*varied)))
    return settings


def share_cores(jobs: int) -> None:
    """Let child processes import the benchmarks, and take one thread each where several share the cores."""
    if jobs > 1:  # PyTorch's own threads would fight over them
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def run_setting(base: str, setting: list[str], deadline: float) -> dict[str, object] | None:
    """Train once and return the result; None if the run failed or the deadline (of `time.monotonic`) is over."""
    if time.monotonic() > deadline:
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "quintic", "train", *shlex.split(base), *setting]
        command += ["--runs-dir", folder, "--run", "tune", "--save-every", "0", "--rms-every", "0"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
        log = Path(folder, "tune", "metrics.jsonl")
        if done.returncode != 0 or not log.exists():
            print(f"failed: {shlex.join(setting)}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
            return None
        records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    first = next(record for record in records if record["kind"] == "run")
    final = next(record for record in records if record["kind"] == "final")
    curve = [[record["step"], record["loss"]] for record in records if record["kind"] == "eval"]
    bpb = float("inf") if final["bpb"] is None else final["bpb"]
    return {
        "base": base,
        "setting": shlex.join(setting),
        "bpb": bpb,
        "loss": final["loss"],
        "seconds": final["seconds"],
        "tokens_per_second": final.get("tokens_per_second"),
        "peak_memory_bytes": final.get("peak_memory_bytes"),
        "curve": curve,
        "machine": first["machine"],
        "versions": first["versions"],
    }


def _read(path: Path) -> dict[str, dict[str, object]]:
    return {f"{result['base']} | {result['setting']}": result for result in read_rows(path)}


def _key(base: str, setting: list[str]) -> str:
    return f"{base} | {shlex.join(setting)}"


if __name__ == "__main__":
    sys.exit(main())
