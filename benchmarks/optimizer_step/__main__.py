"""Time `optimizer.step()` alone, and the memory it takes, beside torch.optim and any other library that is importable.

    python -m benchmarks.optimizer_step --out FOLDER --set gpt124m qwen1.7b --peers FOLDER_OF_OTHER_LIBRARIES
    python -m benchmarks.optimizer_step --out FOLDER --layout ddp sharded fsdp2 hsdp tp --ranks 2 --targets --peers ...

Every contestant runs in a process of its own, one after the other, on the same weights and random normal gradients.
Its row is appended to FOLDER/NAME.jsonl at once; a second call with the same --out goes on where the first stopped and
tries again what failed. At the end FOLDER/NAME.md holds the tables and FOLDER/NAME.json everything that was measured.
What cannot run is reported with its error. `--device cpu --set tiny` tries the script.

With `--layout` each contestant runs on several ranks of this machine, a process each, and is also asked whether its
weights are those of one device to the last bit; `layouts/page.py` says what is measured. The processes of
one library stay for all of its contestants; a peer that tunes its kernels takes minutes for its first step, which
`--caches` keeps. `--targets` prints what the project wants beside what was found.

`--only workspace-` times Quintic with `max_workspace_bytes` from 64 MiB to 2 GiB, and `--only rule-` its update rules.

What is compared stands in `contestants.py` and `layouts/contestants.py`, how it is measured in `measure.py` and
`layouts/measure.py`.
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import (
    add_options,
    git_commit,
    in_cell,
    made_by,
    middle,
    number,
    read_rows,
    recorded_command,
    table,
    write_result,
)
from benchmarks.optimizer_step.contestants import CONTESTANTS, SETS, Contestant, describe
from benchmarks.optimizer_step.layouts import page as layout_page
from benchmarks.optimizer_step.layouts.contestants import LAYOUT_CONTESTANTS, LAYOUTS, LayoutContestant, default_ranks
from benchmarks.optimizer_step.layouts.targets import TARGET_LAYOUTS, targets
from benchmarks.optimizer_step.processes import Team, next_of_another_kind
from benchmarks.optimizer_step.rows import key

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

HEADS = ("optimizer", "step (ms)", "quartiles", "device (ms)", "host (ms)", "replay (ms)", "first step (s)")
HEADS += ("state (MiB)", "peak (MiB)", "work (MiB)", "syncs")


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
    jobs = list(plan_layout_jobs(options) if options.layouts else plan_jobs(options))
    todo = [job for job in jobs if key(job) not in rows or rows[key(job)].get("error")]
    print(f"{len(jobs)} to measure, {len(jobs) - len(todo)} done before", flush=True)
    deadline = time.monotonic() + options.time_limit
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that no process is left behind
    with contextlib.closing(measured(todo, options, deadline)) as found:
        for row in found:
            rows[key(row)] = row
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(layout_page.short_line(row) if "layout" in row else short_line(row), flush=True)
    write_results(list(rows.values()), options)
    return 0


def measured(
    todo: Sequence[dict[str, Any]], options: argparse.Namespace, deadline: float
) -> Generator[dict[str, Any], None, None]:
    """Yield the row of each job, until the deadline."""
    refused: set[tuple[str, ...]] = set()
    team: Team | None = None
    upcoming: Team | None = None
    try:
        for index, job in enumerate(todo):
            if time.monotonic() > deadline:
                print(f"the time is over: {len(todo) - index} not measured; the same command goes on", flush=True)
                break
            if team is None or not team.serves(job):
                if team is not None:
                    team.stop()
                if upcoming is not None and upcoming.serves(job):
                    team, upcoming = upcoming, None
                else:
                    team = Team(job, options)
            team.begin(job | {"no_graph": bool({graph_key(job), (job["family"],)} & refused)})
            if upcoming is None and not options.no_preload:
                # The next ones import meanwhile: on a machine with cores to spare that costs the measured ones nothing.
                another = next_of_another_kind(todo[index:])
                upcoming = Team(another, options) if another is not None else None
            row = team.result(min(options.limit, deadline + 20 - time.monotonic()))
            if "layout" in row and "graph_error" in row:  # what NCCL is left with is not to be relied on
                hangs = "stopped" in row["graph_error"]  # that is too dear to be tried in every layout
                refused.add((row["family"],) if hangs else graph_key(row))
                team.stop()
            yield row
    finally:
        for one in (team, upcoming):
            if one is not None:
                one.stop()


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, name=None)
    parser.add_argument("--set", nargs="+", choices=SETS, dest="sets", help="by default all but tiny")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, dest="layouts", help="measure on several ranks")
    parser.add_argument("--ranks", type=int, help="with --layout; by default as many as there are GPUs")
    parser.add_argument(
        "--targets", action="store_true", help="with --layout: print each target, and whether it is met"
    )
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
    options = parser.parse_args(words)
    options.ranks = options.ranks or default_ranks()
    options.name = options.name or ("optimizer_step_layouts" if options.layouts else "optimizer_step")
    options.sets = options.sets or [*([] if options.layouts else ["params500"]), "gpt124m", "qwen1.7b"]
    return options


def graph_key(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a key; once a contestant could not be captured, no other with its key is."""
    return (row["family"], row.get("layout", "")) if row["family"] == "quintic" else (row["family"],)


def names_contestant(part: str, name: str) -> bool:
    """Return whether a word of `--only` means a contestant: its name, or a part of names that is not itself one."""
    is_name = any(part == each.name for each in (*CONTESTANTS, *LAYOUT_CONTESTANTS))
    return part == name if is_name else part in name


def job_of(
    name: str, dtype: str, contestant: Contestant | LayoutContestant, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the job of a process."""
    return {
        "set": name,
        "dtype": dtype,
        "contestant": contestant.name,
        "family": contestant.family,
        "preload": list(contestant.preload) if options.device == "cuda" else ["torch"],
        "device": options.device,
        "steps": options.steps,
        "seconds": options.seconds,
        "peers": [str(Path(folder).resolve()) for folder in options.peers],
    }


def plan_layout_jobs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the jobs on several ranks, one family after the other; those of one device come first."""
    layouts = [layout for layout in LAYOUTS if layout in options.layouts]
    for family in dict.fromkeys(contestant.family for contestant in LAYOUT_CONTESTANTS):
        jobs = [
            job_of(name, dtype, contestant, options) | {"layout": layout, "ranks": options.ranks}
            for name in options.sets
            for contestant in LAYOUT_CONTESTANTS
            if not options.only or any(names_contestant(part, contestant.name) for part in options.only)
            for dtype in options.dtype or SETS[name].dtypes[:1]
            for layout in layouts
            if contestant.family == family and layout in contestant.layouts and dtype in contestant.dtypes
        ]
        if family != "quintic":  # which keeps what it is compared with; of the others the time may not suffice for all
            jobs.sort(key=lambda job: job["layout"] not in TARGET_LAYOUTS)
        yield from jobs


def plan_jobs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the jobs in order."""
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
                yield job_of(name, dtype, contestant, options)


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


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row."""
    if row.get("error"):
        return [row["contestant"], f"failed: {in_cell(row['error'])}", *[""] * (len(HEADS) - 2)]
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
    return [
        row["contestant"] + ("" if row.get("finite", True) else " (**weights not finite**)"),
        middle(row, "step_ms"),
        f"{times['q1']:.3g} to {times['q3']:.3g} (n {times['n']})",
        middle(row, "device_ms"),
        middle(row, "host_ms"),
        replay,
        f"{row['first_step_s']:.1f}" + ("*" if row.get("caches") == "empty" else ""),
        number(row, "state_mib"),
        peak,
        work,
        {"none": "none", None: "-"}.get(row.get("syncs"), "**yes**"),
    ]


def page(rows: Sequence[dict[str, Any]], command: str, commit: str) -> str:
    """Return the result as markdown."""
    known = next((row for row in rows if "versions" in row), None)
    device = known["device"] if known else "an unknown device"
    lines = [
        f"# `optimizer.step()` alone, on one {device}",
        "",
        f"{made_by(command, commit, known['versions'] if known else {})}.",
        "",
        "Medians of n steps; each optimizer in a process of its own, with the same weights and random normal "
        "gradients, weight decay 0.1. Quintic's learning rate changes before every step, as under a scheduler; its "
        "momentum is float32 for bf16 weights, bfloat16 in `quintic-bf16-state`; that of the others has the weights' "
        "dtype.",
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
            lines += ["", f"## {name}, {dtype} weights: {describe(shapes)}", "", *table(HEADS, map(cells, found))]
    refusals = [row for row in rows if "graph_error" in row or row.get("syncs", "none") != "none"]
    if refusals:
        lines += ["", "## Why not captured, where synchronised", ""]
    for row in refusals:
        reasons = [row[name] for name in ("graph_error", "syncs") if row.get(name, "none") != "none"]
        lines.append(f"- {row['contestant']}, {row['set']}, {row['dtype']}: {in_cell('; '.join(reasons))}")
    return "\n".join(lines) + "\n"


def write_results(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write everything, and print the tables."""
    names = {str(options.out): "FOLDER", str(options.caches): "CACHES", **dict.fromkeys(options.peers, "PEERS")}
    names |= {str(path): path.name for path in options.read}
    command = recorded_command("benchmarks.optimizer_step", sys.argv[1:], names)
    commit = options.commit or git_commit()
    text = layout_page.page(rows, command, commit) if options.layouts else page(rows, command, commit)
    write_result(options.out / options.name, {"command": command, "commit": commit, "rows": rows}, text)
    print()
    if options.layouts:
        print(layout_page.tables(rows))
        if options.targets:
            print("\n".join(map(str, targets(rows))))
        return
    for row in sorted(rows, key=lambda row: (row["set"], row["dtype"])):
        print(short_line(row))


if __name__ == "__main__":
    sys.exit(main())
