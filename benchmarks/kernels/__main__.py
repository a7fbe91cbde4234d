"""Measure every kernel on this machine beside what PyTorch does: time, bandwidth, memory, error.

    python -m benchmarks.kernels --out FOLDER --only optimizer,loss

Subjects: copy (always measured, the bandwidth that others are compared with), optimizer, loss, linear, fp8, transpose,
attention. What cannot run is reported with its error. FOLDER/NAME.md holds the tables, FOLDER/NAME.json everything.
`--device cpu` tries the script, with tiny sizes. The cases are in `cases.py` and `optimizer_cases.py`.
"""

import argparse
import gc
import itertools
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import quintic
from benchmarks.common.results import (
    add_options,
    describe_error,
    device_name,
    git_commit,
    in_cell,
    made_by,
    percentiles,
    recorded_command,
    table,
    versions,
    write_result,
)
from benchmarks.common.timing import MIB, Memory, time_device, time_steps
from benchmarks.kernels.cases import SUBJECTS
from benchmarks.kernels.optimizer_cases import FULL, TINY, Case, Where

# More than any L2 cache.
FLUSHED_BYTES = 2**28
LEAST_REPETITIONS = 10

NOTES = """\
Medians and, in brackets, the 10th and 90th percentile of n calls, by CUDA events with the device kept busy until the
host is done; random inputs, {sets} sets of them in turn, L2 overwritten before each call. Differentiable functions are
timed forward and backward. **GB/s** counts the bytes that must be read and written, and their share of the bandwidth of
a device copy; **TFLOP/s** the operations of the products alone. **peak**: most memory allocated over the inputs.
**error**: the largest relative Frobenius error of results and gradients against float64."""

HEADS = ("case", "ms", "GB/s (of a copy)", "TFLOP/s", "peak (MiB)", "error")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    options = parse(arguments)
    cuda = options.device == "cuda"
    where = Where(torch.device(options.device), FULL if cuda else TINY)
    rows: list[dict[str, Any]] = []
    for subject in SUBJECTS:
        if subject != "copy" and options.only and subject not in options.only:
            continue
        for case in cases_of(subject, where, rows):
            row = measured(case, where, options)
            rows.append(row)
            print(short_line(row, rows), flush=True)
    words = list(sys.argv[1:] if arguments is None else arguments)
    result = {
        "command": recorded_command("benchmarks.kernels", words, {str(options.out): "FOLDER"}),
        "commit": options.commit or git_commit(),
        "device": device_name(cuda),
        "versions": versions(),
        "active": quintic.kernels.active(where.device),
        "sets": options.sets,
        "rows": rows,
    }
    write_result(options.out / options.name, result, page(result))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""

    def subjects(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in SUBJECTS:
                raise argparse.ArgumentTypeError(f"{name!r}: choose from {', '.join(SUBJECTS)}")
        return found

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "kernels")
    parser.add_argument("--only", type=subjects, default=[], help="subjects, separated by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repetitions", type=int, default=50, help="timed calls, at most")
    parser.add_argument("--seconds", type=float, default=4, help=f"for one case; {LEAST_REPETITIONS} calls at least")
    parser.add_argument("--sets", type=int, default=3, help="sets of inputs")
    return parser.parse_args(arguments)


def cases_of(subject: str, where: Where, rows: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield the cases of a subject; one that cannot even be made ends it, with a row that says so."""
    try:
        yield from SUBJECTS[subject](where)
    except Exception as error:  # whatever an implementation may raise: it is the result
        traceback.print_exc()
        rows.append({"subject": subject, "name": subject, "failed": describe_error(error)})


def measured(case: Case, where: Where, options: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of one case."""
    row: dict[str, Any] = {"subject": case.subject, "name": case.name, "moved": case.moved, "flops": case.flops}
    try:
        torch.manual_seed(1)
        sets = [case.make() for _ in range(options.sets)]
        for inputs in sets:  # compiles, too
            case.run(*inputs)
        row["peak_mib"] = peak(case, sets[0], where)
        if case.exact is not None:
            row["errors"] = errors(case.run(*sets[0]) or (), case.exact(*sets[0]))
        row["ms"] = percentiles(times(case, sets, where, options))
    except Exception as error:  # the same
        traceback.print_exc()
        row["failed"] = describe_error(error)
    sets = []
    gc.collect()
    return row


def peak(case: Case, inputs: tuple[Any, ...], where: Where) -> float:
    """Return the most memory that a call allocates, its results included, in MiB; 0 on a CPU."""
    memory = Memory(where.cuda)
    case.run(*inputs)
    return memory.peak() / MIB


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Return the relative Frobenius error of each result."""
    if len(found) != len(exact):
        raise ValueError(f"{len(found)} results, {len(exact)} exact ones")
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True)]


def times(case: Case, sets: list[tuple[Any, ...]], where: Where, options: argparse.Namespace) -> list[float]:
    """Return milliseconds of calls that go round the sets of inputs."""
    upcoming = itertools.cycle(sets)
    flushed = torch.empty(FLUSHED_BYTES if where.cuda else 1, dtype=torch.uint8, device=where.device)

    def call() -> None:
        case.run(*next(upcoming))

    def before(index: int) -> None:
        flushed.fill_(index % 2)

    start = time.perf_counter()
    _, host_ms = time_steps(call, before, 5, where.cuda)
    number = int(options.seconds / max((time.perf_counter() - start) / 5, 1e-6))
    number = min(options.repetitions, max(LEAST_REPETITIONS, number))
    if where.cuda:
        return time_device(call, before, number, statistics.median(host_ms))
    return time_steps(call, before, number, False)[0]


def bandwidth(row: dict[str, Any]) -> float:
    """Return GB/s, 0 where bytes are not what counts."""
    return row["moved"] / row["ms"]["median"] / 1e6 if row.get("moved") else 0.0


def cells(row: dict[str, Any], copy: float) -> list[str]:
    """Return the row's cells; `copy` is the bandwidth of a copy in GB/s, or 0."""
    if "failed" in row:
        return [row["name"], f"failed: {in_cell(row['failed'])}", "", "", "", ""]
    rate, taken = bandwidth(row), row["ms"]
    share = f" ({100 * rate / copy:.0f} %)" if copy and row["subject"] != "copy" else ""
    return [
        row["name"],
        f"{taken['median']:.4g} ({taken['p10']:.4g} to {taken['p90']:.4g}; n {taken['n']})",
        f"{rate:,.0f}{share}" if rate else "",
        f"{row['flops'] / taken['median'] / 1e9:.4g}" if row["flops"] else "",
        f"{row['peak_mib']:,.0f}",
        f"{max(row['errors']):.2g}" if row.get("errors") else "",
    ]


def copy_bandwidth(rows: Sequence[dict[str, Any]]) -> float:
    """Return the bandwidth of the copy among rows, in GB/s; 0 if there is none."""
    return next((bandwidth(row) for row in rows if row["subject"] == "copy" and "failed" not in row), 0.0)


def short_line(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return one row for the terminal."""
    name, taken, rate, operations, memory, error = cells(row, copy_bandwidth(rows))
    parts = [rate and f"{rate} GB/s", operations and f"{operations} TFLOP/s", memory and f"{memory} MiB"]
    notes = ", ".join(part for part in [*parts, error and f"error {error}"] if part)
    return f"{row['subject']:10} {name:52} {taken} ms, {notes}" if notes else f"{row['subject']:10} {name:52} {taken}"


def page(result: dict[str, Any]) -> str:
    """Return the result as markdown."""
    rows = result["rows"]
    lines = [
        f"# Kernels on one {result['device']}",
        "",
        f"{made_by(result['command'], result['commit'], result['versions'])}.",
        "",
        *NOTES.format(sets=result["sets"]).splitlines(),
        "",
        "`quintic.kernels.active()` for bfloat16: "
        + ", ".join(f"{name} {in_cell(found)}" for name, found in result["active"].items())
        + ".",
    ]
    for subject in dict.fromkeys(row["subject"] for row in rows):
        copy = copy_bandwidth(rows)
        found = [cells(row, copy) for row in rows if row["subject"] == subject]
        lines += ["", f"## {subject}", "", *table(HEADS, found)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
