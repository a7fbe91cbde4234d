"""Step one embedding table whose gradient has few rows: whole gradients against touched rows, and where they are equal.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.sparse_rows --out FOLDER

The first rank writes a table to FOLDER/NAME.md and everything that was measured to FOLDER/NAME.json. `--device cpu
--rows 4096 --columns 64 --touched 64 512` tries the script.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import quintic
from benchmarks.common.ranks import Team, join
from benchmarks.common.results import (
    add_options,
    device_name,
    git_commit,
    made_by,
    spread,
    table,
    versions,
    write_result,
)
from benchmarks.common.timing import synchronize
from quintic.optim.plan.bucket import Sharded
from quintic.optim.plan.row_sharding import RowSharding

WAYS = ("whole", "announced", "found")

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
INTEGERS = {2: torch.int16, 4: torch.int32}

# Large enough that weights change: equality of weights that stay would say nothing.
LR = 0.01

WARMUP_STEPS = 3

NOTES = """\
**whole**: `comms="sharded"`. The others `"sharded_sparse"`, made to send touched rows always: **announced** before a
backward pass (products of matrices that take {backward:.1f} ms), **found** in the gradient by the step. Times are those
of `optimizer.step()`, AdamW and the return of all weights included, between events on the device that has the backward
pass before it, so that time is counted in which the device waits for the host; of each step the slowest rank's. Medians
of {steps} steps, the ways in turn; quartiles in brackets.

- **touched**: rows with a gradient on each rank, at random. **share**: of the rows of a whole exchange, what the
  busiest rank sends or receives. **rule**: what `"sharded_sparse"` would send by itself.
- **saved**: whole less announced.
- **differing**: entries whose bits are not those of whole after all steps so far, on the worst rank."""


@dataclass
class Contestant:
    """A copy of the table, and its optimizer."""

    way: str
    param: nn.Parameter
    optimizer: quintic.Muon


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the other processes, measure, and write."""
    options = parse(arguments)
    team = join(options.device, "benchmarks.sparse_rows")
    result = measure(options, team)
    if dist.get_rank() == 0:
        write_result(options.out / options.name, result, page(result))
        print(page(result))
    dist.destroy_process_group()
    return int(any(row["differing"] for row in result["rows"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "sparse-rows")
    parser.add_argument("--rows", type=int, default=5 * 50304, help="of the table")
    parser.add_argument("--columns", type=int, default=768)
    parser.add_argument("--touched", type=int, nargs="+", default=[4096 * 2**n for n in range(6)] + [3 * 2**16])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--backward-products", type=int, default=20, help="of 4096 x 4096 matrices, on CUDA devices")
    options = parser.parse_args(arguments)
    too_many = max(options.touched) > options.rows
    if too_many or options.steps < 1:
        parser.error(f"--touched: the table has {options.rows} rows" if too_many else "--steps: at least 1")
    words = ["FOLDER" if word == str(options.out) else word for word in (arguments or sys.argv[1:])]
    start = f"torchrun --standalone --nproc-per-node {os.environ.get('WORLD_SIZE', 1)} -m benchmarks.sparse_rows"
    options.command = f"{start} {shlex.join(words)}"
    return options


# ---------------------------------------------------------------------------------------------------------- measurement


def measure(options: argparse.Namespace, team: Team) -> dict[str, Any]:
    """Return the benchmark's result. All ranks must call it."""
    device, cuda = team.device, team.device.type == "cuda"
    contestants = [contestant(way, options, device) for way in WAYS]
    backward, backward_ms = busy(options, device)
    rows = []
    for touched in options.touched:
        generator = torch.Generator(device).manual_seed(1000 * touched + dist.get_rank())
        tokens = torch.randperm(options.rows, generator=generator, device=device)[:touched]
        gradient = torch.zeros_like(contestants[0].param)
        gradient[tokens] = torch.randn(
            touched, options.columns, generator=generator, device=device, dtype=gradient.dtype
        )
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(WARMUP_STEPS + options.steps):
            for one in contestants:
                elapsed = timed(one, gradient, tokens, backward, team)
                if number >= WARMUP_STEPS:
                    times[one.way].append(elapsed)
        spreads = {way: spread(team.slowest(own)) for way, own in times.items()}
        rows.append({"touched": touched, **spreads, **volume(contestants[1], tokens, team)})
        rows[-1]["differing"] = max(team.from_all(differing(contestants)))
    return {
        "command": options.command,
        "commit": options.commit or git_commit(),
        "device": device_name(cuda),
        "ranks": dist.get_world_size(),
        "versions": versions(nccl=cuda),
        "table": {"rows": options.rows, "columns": options.columns, "dtype": options.dtype},
        "backward_ms": backward_ms,
        "steps": options.steps,
        "plan": str(contestants[1].optimizer.plan()),
        "rows": rows,
    }


def contestant(way: str, options: argparse.Namespace, device: torch.device) -> Contestant:
    """Return a copy of the table. All ranks must call it."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randn(options.rows, options.columns, generator=generator, device=device, dtype=DTYPES[options.dtype])
    param = nn.Parameter(values)
    group = {"params": [("table", param)], "algorithm": "adamw", "lr": LR, "weight_decay": 0.1}
    return Contestant(way, param, quintic.Muon([group], comms="sharded" if way == "whole" else "sharded_sparse"))


def busy(options: argparse.Namespace, device: torch.device) -> tuple[Callable[[], None], float]:
    """Return a stand-in for a backward pass, and its milliseconds."""
    if device.type != "cuda":
        return (lambda: None), 0.0
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16) / 64
    out = torch.empty_like(a)

    def run() -> None:
        for _ in range(options.backward_products):
            torch.mm(a, a, out=out)

    run()
    synchronize(True)
    start = time.perf_counter()
    run()
    synchronize(True)
    return run, 1e3 * (time.perf_counter() - start)


def timed(one: Contestant, gradient: Tensor, tokens: Tensor, backward: Callable[[], None], team: Team) -> float:
    """Return the milliseconds of a step on this rank. All ranks must call it."""
    cuda = team.device.type == "cuda"
    synchronize(cuda)
    dist.barrier(group=team.control)
    one.param.grad = gradient
    # The rule is what is to be found.
    with mock.patch.object(RowSharding, "is_sparse", return_value=True):
        if one.way == "announced":
            one.optimizer.announce_rows(one.param, tokens)
        backward()
        if not cuda:
            start = time.perf_counter()
            one.optimizer.step()
            return 1e3 * (time.perf_counter() - start)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        one.optimizer.step()
        events[1].record()
        synchronize(cuda)
        return events[0].elapsed_time(events[1])


def volume(one: Contestant, tokens: Tensor, team: Team) -> dict[str, Any]:
    """Return the busiest rank's share of the rows to send or receive, and the rule's choice. All ranks must call it."""
    [bucket] = one.optimizer.plan()
    if not isinstance(bucket, Sharded) or bucket.rows is None:
        return {"share": None, "rule": "whole"}
    division = bucket.rows
    owners = tokens.cpu() // division.rows_per_rank
    counts = team.from_all(torch.bincount(owners, minlength=division.num_ranks).tolist())
    busiest = max(max(map(sum, counts)), max(map(sum, zip(*counts, strict=True))))
    return {"share": busiest / division.padded_rows, "rule": "rows" if division.is_sparse(counts) else "whole"}


def differing(contestants: Sequence[Contestant]) -> int:
    """Return the number of entries that differ from those of the first."""
    first, *others = (one.param.detach() for one in contestants)
    kind = INTEGERS[first.element_size()]
    return max(int((first.view(kind) != other.view(kind)).sum()) for other in others)


# ---------------------------------------------------------------------------------------------------------------- page


def page(result: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    sizes = result["table"]
    heads = ("touched", "share", "rule", *(f"{way} (ms)" for way in WAYS), "saved (ms)", "differing")
    lines = [
        f"# Touched rows of a table, on {result['ranks']} x {result['device']}",
        "",
        f"{made_by(result['command'], result['commit'], result['versions'])}.",
        "",
        f"One table of {sizes['rows']:,} x {sizes['columns']:,}, {sizes['dtype']}.",
        "",
        NOTES.format(backward=result["backward_ms"], steps=result["steps"]),
        "",
        *table(heads, map(cells, result["rows"])),
    ]
    equal = break_even(result["rows"])
    lines += ["", f"Whole gradients and announced rows take the same time {equal}.", "", "```", result["plan"], "```"]
    return "\n".join(lines) + "\n"


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row."""
    share = "-" if row["share"] is None else f"{row['share']:.1%}"
    saved = row["whole"]["median"] - row["announced"]["median"]
    times = [time_cell(row[way]) for way in WAYS]
    return [f"{row['touched']:,}", share, row["rule"], *times, f"{saved:.2f}", str(row["differing"])]


def time_cell(times: dict[str, Any]) -> str:
    """Return the median of some times, and what half of them lie between."""
    return f"{times['median']:.2f} ({times['q1']:.2f} to {times['q3']:.2f})"


def break_even(rows: Sequence[dict[str, Any]]) -> str:
    """Return, in words, how many rows may be touched before sending whole gradients is faster."""
    saved = [row["whole"]["median"] - row["announced"]["median"] for row in rows]
    for number, (row, gain) in enumerate(zip(rows, saved, strict=True)):
        if gain > 0:
            continue
        if number == 0:
            return f"below {row['touched']:,} touched rows, if anywhere"
        before, gain_before = rows[number - 1], saved[number - 1]
        part = gain_before / (gain_before - gain)
        return f"at about {round(before['touched'] + part * (row['touched'] - before['touched'])):,} touched rows"
    return f"above {rows[-1]['touched']:,} touched rows, if anywhere"


if __name__ == "__main__":
    sys.exit(main())
