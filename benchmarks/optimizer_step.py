"""Time `optimizer.step()` alone, and the memory it takes, beside torch.optim and any other library that is importable.

    python benchmarks/optimizer_step.py --out FOLDER --set gpt124m qwen1.7b --peers FOLDER_OF_OTHER_LIBRARIES

Every contestant runs in a process of its own, one after the other, on the same weights and random normal gradients.
Its row is appended to FOLDER/NAME.jsonl at once; a second call with the same --out goes on where the first stopped and
tries again what failed. At the end FOLDER/NAME.md holds the tables and FOLDER/NAME.json everything that was measured.
What cannot run is reported with its error. `--device cpu --set tiny` tries the script.

What is compared stands in `optimizer_step_contestants.py`, how it is measured in `optimizer_step_measure.py`.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from optimizer_step_contestants import CONTESTANTS, SETS, WeightSet

REPOSITORY = Path(__file__).resolve().parent.parent

COLUMNS = """\
- **step**: CUDA events before and after `step()`, the device idle before: what one call takes, host included.
- **device**: the same with the device kept busy until the host is done: what the step costs in a training loop whose
  host runs ahead.
- **host**: wall clock of the call `step()` on the empty queue of an idle device.
- **replay**: the step captured as a CUDA graph, one replay; for Quintic with `upload_hyperparameters()` before it.
- **first step**: wall clock of the first `step()`. A star: the compilers' caches were empty; else they held what
  earlier rows of the same library left, with the results of Triton's autotuner.
- **state**: optimizer state on the device. **peak**: most memory allocated over weights and gradients, of a later step
  / of the whole process with its first step. **work**: that peak of the whole process, less the state.
- **syncs**: whether `step()` passes `torch.cuda.set_sync_debug_mode("error")`."""


def main() -> int:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / f"{options.name}.jsonl"
    rows = {key(row): row for row in read_rows(log)}
    with log.open("a", encoding="utf-8") as file:  # what was read is part of this result, too
        for row in [row for path in options.read for row in read_rows(path)]:
            if rows.get(key(row), {"error": "none"}).get("error"):
                rows[key(row)] = row
                file.write(json.dumps(row) + "\n")
    jobs = list(plan_jobs(options))
    todo = [job for job in jobs if key(job) not in rows or rows[key(job)].get("error")]
    print(f"{len(jobs)} to measure, {len(jobs) - len(todo)} done before", flush=True)
    deadline = time.monotonic() + options.time_limit
    upcoming: Process | None = None
    for index, job in enumerate(todo):
        if time.monotonic() > deadline:
            print(f"the time is over: {len(todo) - index} not measured; the same command goes on", flush=True)
            break
        process = upcoming or Process(job, options)
        process.begin()
        # The next one imports meanwhile: on a machine with a core to spare that costs the measured one nothing.
        upcoming = Process(todo[index + 1], options) if index + 1 < len(todo) and not options.no_preload else None
        row = process.result(min(options.limit, deadline + 20 - time.monotonic()))
        rows[key(row)] = row
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(short_line(row), flush=True)
    if upcoming is not None:
        upcoming.stop()
    write_results(list(rows.values()), options)
    return 0


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--name", default="optimizer_step", help="of the results' files, without ending")
    parser.add_argument("--set", nargs="+", choices=SETS, default=["params500", "gpt124m", "qwen1.7b"], dest="sets")
    parser.add_argument("--dtype", nargs="+", choices=("bf16", "fp32"), help="of the weights; by default the set's")
    parser.add_argument(
        "--only", nargs="+", help="names of contestants, or parts of several; also where not measured else"
    )
    parser.add_argument("--peers", action="append", default=[], help="folder with the packages of other libraries")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=30, help="timed steps, at most")
    parser.add_argument(
        "--seconds", type=float, default=5, help="for the timed steps of one kind; at least ten are timed"
    )
    parser.add_argument("--limit", type=float, default=200, help="seconds for one contestant")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="start none after this many seconds")
    parser.add_argument("--read", type=Path, nargs="*", default=[], help="more .jsonl files of the same machine kind")
    parser.add_argument("--caches", type=Path, default=Path(tempfile.gettempdir(), "optimizer-step-caches"))
    parser.add_argument("--no-preload", action="store_true", help="start no process before its turn")
    parser.add_argument("--commit", help="of this repository, for the record; by default what git says")
    return parser.parse_args()


def names_contestant(part: str, name: str) -> bool:
    """Return whether a word of `--only` means a contestant: its name, or a part of names that is not itself one."""
    return part == name if any(part == each.name for each in CONTESTANTS) else part in name


def plan_jobs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what is to be measured, in order."""
    for name in options.sets:
        for dtype in options.dtype or SETS[name].dtypes:
            for contestant in CONTESTANTS:
                if dtype not in contestant.dtypes:
                    continue
                if options.only:
                    if not any(names_contestant(part, contestant.name) for part in options.only):
                        continue
                elif name not in contestant.sets:
                    continue
                yield {
                    "set": name,
                    "dtype": dtype,
                    "contestant": contestant.name,
                    "family": contestant.family,
                    "preload": list(contestant.preload),
                    "device": options.device,
                    "steps": options.steps,
                    "seconds": options.seconds,
                    "peers": [str(Path(folder).resolve()) for folder in options.peers],
                }


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return what makes a row one of its kind."""
    return row["set"], row["dtype"], row["contestant"]


class Process:
    """A contestant's process: started early, it imports; told to begin, it measures."""

    def __init__(self, job: dict[str, Any], options: argparse.Namespace) -> None:
        self.job = job
        self.caches = options.caches / job["family"]
        self.had_caches = True
        self.folder = tempfile.TemporaryDirectory()
        self.result_path = Path(self.folder.name, "row.json")
        self.log_path = Path(self.folder.name, "log")
        environment = {
            **os.environ,
            "OPTIMIZER_STEP_PRELOAD": ",".join(job["preload"]),
            "TRITON_CACHE_DIR": str(self.caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.caches / "inductor"),
            "TRITON_CACHE_AUTOTUNING": os.environ.get("TRITON_CACHE_AUTOTUNING", "1"),
        }
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(REPOSITORY / "benchmarks" / "optimizer_step_measure.py")],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def begin(self) -> None:
        """Let it measure."""
        self.had_caches = self.caches.exists()
        self.caches.mkdir(parents=True, exist_ok=True)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died while importing: `result` tells
            self.process.stdin.write((json.dumps({**self.job, "result": str(self.result_path)}) + "\n").encode())
            self.process.stdin.close()

    def result(self, limit: float) -> dict[str, Any]:
        """Wait for it, and return its row: with an error if it failed or took too long."""
        start = time.monotonic()
        timed_out = False
        try:
            self.process.wait(max(limit, 1))
        except subprocess.TimeoutExpired:
            timed_out = True
        self._kill_all()
        row = {name: self.job[name] for name in ("set", "dtype", "contestant", "family")}
        row |= {"seconds": round(time.monotonic() - start, 1), "caches": "kept" if self.had_caches else "empty"}
        if self.result_path.exists():
            row |= json.loads(self.result_path.read_text(encoding="utf-8"))
        if row.get("part") != "done" and "error" not in row:
            how = f"stopped after {limit:.0f} seconds" if timed_out else f"ended with code {self.process.returncode}"
            # The graph comes last: what was measured before it holds.
            name = "graph_error" if row.get("part") == "graph" else "error"
            row[name] = f"{how}, in the part: {row.get('part', 'imports')}"
        if {"error", "graph_error"} & row.keys() or row.get("syncs", "none") != "none":
            log = self.log_path.read_text(encoding="utf-8", errors="replace")[-4000:]
            row["log"] = log.replace(f"{Path(__file__).resolve().parent.parent}/", "")
        self.folder.cleanup()
        return row

    def stop(self) -> None:
        """End it unmeasured."""
        self._kill_all()
        self.folder.cleanup()

    def _kill_all(self) -> None:
        """End the process and what it started (compilers' workers), which share its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file, none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def short_line(row: dict[str, Any]) -> str:
    """Return one row for the terminal."""
    start = f"{row['set']:10} {row['dtype']:5} {row['contestant']:22}"
    if row.get("error"):
        return f"{start} failed: {row['error']}"
    times = " ".join(f"{label} {middle(row, f'{label}_ms'):>6}" for label in ("step", "device", "host", "replay"))
    memory = " / ".join(number(row, f"{label}_mib") for label in ("state", "peak", "workspace"))
    syncs = {"none": "no sync", None: ""}.get(row.get("syncs"), "SYNC")
    bound = {True: "", None: ""}.get(row.get("within_bound"), "OVER ITS BOUND")
    ignored = "LR IGNORED" if row.get("replay_follows_lr") is False else ""
    notes = " ".join(note for note in (syncs, bound, ignored) if note)
    return f"{start} {times} ms, first {row['first_step_s']:.1f} s, state / peak / work {memory} MiB {notes}".rstrip()


def middle(row: dict[str, Any], name: str) -> str:
    """Return the median of a time with three digits, or a dash."""
    if name not in row:
        return "-"
    median = row[name]["median"]
    return f"{median:.0f}" if median >= 99.5 else f"{median:.1f}" if median >= 9.95 else f"{median:.2f}"


def number(row: dict[str, Any], name: str) -> str:
    """Return a whole number with thousands separated, or a dash."""
    return f"{row[name]:,.0f}" if name in row else "-"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a markdown table of contestants on the same weights."""
    lines = [
        "| optimizer | step (ms) | quartiles | device (ms) | host (ms) | replay (ms) | first step (s) | state (MiB) "
        "| peak (MiB) | work (MiB) | syncs |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.get("error"):
            lines.append(f"| {row['contestant']} | failed: {in_cell(row['error'])} | | | | | | | | | |")
            continue
        times = row["step_ms"]
        peak = f"{number(row, 'peak_mib')} / {number(row, 'whole_peak_mib')}" if "peak_mib" in row else "-"
        work = number(row, "workspace_mib")
        if "within_bound" in row:
            work += f" (bound {number(row, 'workspace_bound_mib')}: {'kept' if row['within_bound'] else '**broken**'})"
        replay = middle(row, "replay_ms")
        if row.get("replay_follows_lr") is False:
            replay += " (**learning rate ignored**)"
        if "graph_error" in row:
            replay = "no"
        syncs = {"none": "none", None: "-"}.get(row.get("syncs"), "**yes**")
        star = "*" if row.get("caches") == "empty" else ""
        cells = [
            row["contestant"] + ("" if row.get("finite", True) else " (**weights not finite**)"),
            middle(row, "step_ms"),
            f"{times['q1']:.3g} to {times['q3']:.3g} (n {times['n']})",
            middle(row, "device_ms"),
            middle(row, "host_ms"),
            replay,
            f"{row['first_step_s']:.1f}{star}",
            number(row, "state_mib"),
            peak,
            work,
            syncs,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def in_cell(text: str) -> str:
    """Return a message that fits a table's cell and names no folder of the machine."""
    return re.sub(r"(/[\w.+-]+){2,}", "FOLDER", text).replace("|", "/").replace("\n", " ")[:160]


def page(rows: Sequence[dict[str, Any]], command: str, commit: str) -> str:
    """Return the result as markdown."""
    known = next((row for row in rows if "versions" in row), None)
    device = known["device"] if known else "an unknown device"
    version_text = ", ".join(f"{name} {version}" for name, version in (known["versions"] if known else {}).items())
    lines = [
        f"# `optimizer.step()` alone, on one {device}",
        "",
        f"`{command}` at commit {commit}; {version_text}. Medians of n steps; each optimizer in a process of its own, "
        "with the same weights and random normal gradients, weight decay 0.1. Quintic's learning rate changes before "
        "every step, as under a scheduler; its momentum is float32 for bf16 weights, that of the others has the "
        "weights' dtype.",
        "",
        COLUMNS,
    ]
    order = {contestant.name: index for index, contestant in enumerate(CONTESTANTS)}
    for name, shapes in SETS.items():
        for dtype in ("bf16", "fp32"):
            found = [row for row in rows if row["set"] == name and row["dtype"] == dtype]
            if not found:
                continue
            found.sort(key=lambda row: order.get(row["contestant"], len(order)))
            lines += ["", f"## {name}, {dtype} weights: {describe(shapes)}", "", *table(found)]
    refusals = [row for row in rows if "graph_error" in row or row.get("syncs", "none") != "none"]
    if refusals:
        lines += ["", "## Why not captured, where synchronised", ""]
    for row in refusals:
        reasons = [row[name] for name in ("graph_error", "syncs") if row.get(name, "none") != "none"]
        lines.append(f"- {row['contestant']}, {row['set']}, {row['dtype']}: {in_cell('; '.join(reasons))}")
    return "\n".join(lines) + "\n"


def describe(shapes: WeightSet) -> str:
    """Return the shapes of a set in words."""
    parts = [f"{count} of {'x'.join(str(n) for n in shape)}" for count, *shape in [*shapes.matrices, *shapes.others]]
    return ", ".join(parts)


def write_results(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write everything, and print the tables."""
    command = recorded_command(sys.argv, options)
    commit = options.commit or git_commit()
    result = {"command": command, "commit": commit, "rows": rows}
    text = page(rows, command, commit)
    options.out.joinpath(f"{options.name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    options.out.joinpath(f"{options.name}.md").write_text(text, encoding="utf-8")
    print()
    for row in sorted(rows, key=lambda row: (row["set"], row["dtype"])):
        print(short_line(row))


def recorded_command(argv: Sequence[str], options: argparse.Namespace) -> str:
    """Return the command as others would type it: without the folders of this machine."""
    names = {str(options.out): "FOLDER", **dict.fromkeys(options.peers, "PEERS")}
    names |= {str(path): path.name for path in options.read}
    return shlex.join(["python", "benchmarks/optimizer_step.py", *(names.get(word, word) for word in argv[1:])])


def git_commit() -> str:
    """Return the commit of this repository."""
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return "unknown"


if __name__ == "__main__":
    sys.exit(main())
