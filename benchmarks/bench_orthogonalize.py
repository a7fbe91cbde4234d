"""Time orthogonalisation alone, beside a floor of arithmetic and every other library that is importable.

    python benchmarks/bench_orthogonalize.py --out FOLDER --peers FOLDER_OF_OTHER_LIBRARIES... --targets

Every batch of bf16 matrices is orthogonalised by Quintic and by everyone else, on the same random normal inputs: the
time of one call, and its error against the same polynomial of the same input in float64. Contestants of one library
share a process. A row is appended to FOLDER/NAME.jsonl at once; a second call with the same --out goes on where the
first stopped and tries again what failed. At the end FOLDER/NAME.md holds the tables, FOLDER/NAME.json everything.
What cannot run is reported with its error. `--device cpu --shapes 2x16x24` tries the script.

Shapes, limits and contestants stand in `orthogonalize_contestants.py`, how they are measured in
`orthogonalize_measure.py`.
"""

import argparse
import contextlib
import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from optimizer_step import REPOSITORY, git_commit, in_cell, read_rows
from orthogonalize_contestants import (
    CEILING,
    CONTESTANTS,
    LIMITS,
    NOMINAL_TFLOPS,
    PEER_LIMIT,
    Shape,
    floor_ms,
    of,
)

COLUMNS = """\
- **device**: CUDA events before and after one call, the device kept busy until the host is done: what the call costs in
  a training loop whose host runs ahead. Floors, ratios and limits are about this one.
- **idle**: the same, from an idle device: launches and the host's work included.
- **floor**: the fewest operations known for five quintic polynomials (symmetric products counted half; the best of the
  standard form, the Gram form, and the Gram form with one restart) at the rate of a bf16 product of 8192 x 8192 random
  matrices in the same run; in brackets at {nominal:.0f} TFLOP/s.
- **error**: relative Frobenius error against the contestant's own polynomials of the same bf16 input in float64; the
  larger one of the first and the last matrix of the batch.
- Medians; p10 to p90 in brackets. Inputs are random normal, several sets in turn."""

# Wrong results are not a way to be fast. Plain bf16 is at 2e-2.
LARGEST_ERROR = 0.1

# What a process reports between two looks of its parent.
POLL_SECONDS = 0.05

Row = dict[str, Any]


def main() -> int:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget
    log = options.out / f"{options.name}.jsonl"
    rows = {key(row): row for row in read_rows(log)}
    jobs = plan_jobs(options)
    todo = [job for job in jobs if key(job) not in rows or rows[key(job)].get("error")]
    print(f"{len(jobs)} to measure, {len(jobs) - len(todo)} done before", flush=True)
    with log.open("a", encoding="utf-8") as file:
        for row in run_jobs(todo, options, deadline):
            rows[key(row)] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(short_line(row), flush=True)
    write_results(rows.values(), jobs, options)
    return 0


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--name", default="orthogonalize", help="of the results' files, without ending")
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, default=list(LIMITS), help="as in 40x768x3072")
    parser.add_argument(
        "--contestants", nargs="+", help="names of contestants, or parts of them; then for all shapes asked for"
    )
    parser.add_argument("--all", action="store_true", help="every contestant, also what is slow or only of interest")
    parser.add_argument("--targets", action="store_true", help="compare with the limits, and tell which are kept")
    parser.add_argument("--peers", nargs="+", default=[], help="folders with the packages of other libraries")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=460, help="seconds for everything")
    parser.add_argument("--limit", type=float, default=45, help="seconds for one contestant and shape, at most")
    parser.add_argument("--seconds", type=float, default=0.35, help="for the timed calls of one kind")
    parser.add_argument("--caches", type=Path, default=Path(tempfile.gettempdir(), "orthogonalize-caches"))
    parser.add_argument("--no-preload", action="store_true", help="start no process before its turn")
    parser.add_argument("--commit", help="of this repository, for the record; by default what git says")
    return parser.parse_args()


def plan_jobs(options: argparse.Namespace) -> list[Row]:
    """Return what is to be measured, in order: contestants of a family one after the other, each over all shapes."""
    jobs = []
    for contestant in CONTESTANTS:
        named = any(part in contestant.name for part in options.contestants or ())
        exactly = contestant.name in (options.contestants or ())
        if options.contestants and not (exactly or (named and (contestant.default or options.all))):
            continue
        if not options.contestants and not (contestant.default or options.all):
            continue
        for shape in options.shapes:
            if named or options.all or contestant.takes(shape):
                jobs.append(
                    {
                        "contestant": contestant.name,
                        "shape": str(shape),
                        "family": contestant.family,
                        "device": options.device,
                        "seconds": options.seconds,
                    }
                )
    return jobs


def key(row: Row) -> tuple[str, str, str]:
    """Return what makes a row one of its kind."""
    return row["contestant"], row["shape"], row["device"]


# -- the parent: one process per family, each watched -----------------------------------------------------------------


def run_jobs(jobs: Sequence[Row], options: argparse.Namespace, deadline: float) -> Iterator[Row]:
    """Yield a row for every job, in order, until the time is over."""
    families = [list(group) for _, group in itertools.groupby(jobs, key=lambda job: job["family"])]
    worker: Worker | None = None
    upcoming: Worker | None = None
    try:
        for index, left in enumerate(families):
            worker, upcoming = upcoming, None
            if index + 1 < len(families) and not options.no_preload:
                # It imports meanwhile: on a machine with a core to spare that costs the measured one nothing.
                upcoming = Worker(families[index + 1][0], options)
            while left:
                worker = worker or Worker(left[0], options)
                worker.begin(left)
                for row in worker.rows(options.limit, deadline):
                    if row["contestant"] != CEILING:
                        left = left[1:]
                    yield row
                worker.stop()
                worker = None  # if it died, or was ended, another one does the rest
                if time.monotonic() > deadline:
                    number = len(left) + sum(map(len, families[index + 1 :]))
                    print(f"the time is over: {number} not measured; the same command goes on", flush=True)
                    return
    finally:
        for one in filter(None, (worker, upcoming)):
            one.stop()


class Worker:
    """A family's process: started early, it imports; told to begin, it measures job after job."""

    def __init__(self, job: Row, options: argparse.Namespace) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        caches = options.caches.resolve() / job["family"]
        contestant = of(job["contestant"])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [
                    str(REPOSITORY),
                    *(str(Path(folder).resolve()) for folder in options.peers),
                    *filter(None, [os.environ.get("PYTHONPATH")]),
                ]
            ),
            "BENCH_ORTHOGONALIZE_PRELOAD": ",".join(contestant.preload),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_AUTOTUNING": os.environ.get("TRITON_CACHE_AUTOTUNING", "1"),
            "QUACK_CACHE_DIR": str(caches / "quack"),
            "QUACK_COMPILE_WORKERS": os.environ.get("QUACK_COMPILE_WORKERS", str(os.cpu_count() or 8)),
        }
        with (self.path / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(REPOSITORY / "benchmarks" / "orthogonalize_measure.py"), str(self.path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.jobs: Sequence[Row] = ()
        self.seen = 0

    def begin(self, jobs: Sequence[Row]) -> None:
        """Let it measure."""
        self.jobs = jobs
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died while importing: `rows` tells
            self.process.stdin.write((json.dumps(jobs) + "\n").encode())
            self.process.stdin.close()

    def rows(self, limit: float, deadline: float) -> Iterator[Row]:
        """Yield what it finds; where it dies or takes too long, a row with the error, as the last one."""
        done, started = 0, time.monotonic()
        warm = set()  # contestants that need not compile everything any more
        while True:
            ended = self.process.poll() is not None  # before reading: what it wrote last is not missed
            for row in self._new_rows():
                yield row
                if row["contestant"] == CEILING:
                    continue
                done, started = done + 1, time.monotonic()
                if not row.get("error"):
                    warm.add(row["contestant"])
            if done == len(self.jobs) or time.monotonic() > deadline:
                return
            job = self.jobs[done]
            allowed = limit if job["contestant"] in warm else max(limit, of(job["contestant"]).first_limit)
            if ended:
                yield {**job, "error": f"its process ended: {self._last_words()}"}
                return
            if time.monotonic() - started > allowed:
                yield {**job, "error": f"took more than {allowed:g} s"}
                return
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """End the process and what it started (compilers' workers), which share its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.folder.cleanup()

    def _new_rows(self) -> list[Row]:
        path = self.path / "rows.jsonl"
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # the last one may be half written
        new, self.seen = lines[self.seen :], len(lines)
        return [json.loads(line) for line in new]

    def _last_words(self) -> str:
        code = self.process.returncode
        text = (self.path / "log").read_text(encoding="utf-8", errors="replace").strip()
        return f"exit status {code}, {text.splitlines()[-1] if text else 'no output'}"[:300]


# -- the tables -------------------------------------------------------------------------------------------------------


def milliseconds(row: Row) -> float:
    """Return the time that a row is compared by: on a busy device, or on a CPU that of a call."""
    return float(row.get("device_ms", row["idle_ms"])["median"])


def is_valid(row: Row) -> bool:
    """Return whether a row has a time, and a result worth timing."""
    error = row.get("error_frobenius")
    return not row.get("error") and row.get("finite", True) and error is not None and error <= LARGEST_ERROR


class Summary:
    """What rows say of each shape."""

    def __init__(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        self.rows = [row for row in rows if row["contestant"] != CEILING]
        ceilings = [row["tflops"] for row in rows if row["contestant"] == CEILING]
        self.ceilings = sorted(ceilings)
        self.tflops = statistics.median(ceilings) if ceilings else None

    def of_shape(self, shape: Shape) -> list[Row]:
        """Return its rows."""
        return [row for row in self.rows if row["shape"] == str(shape)]

    def quintic(self, shape: Shape) -> Row | None:
        """Return the row of Quintic's default."""
        found = (row for row in self.of_shape(shape) if row["contestant"] == "quintic" and not row.get("error"))
        return next(found, None)

    def best_peer(self, shape: Shape) -> Row | None:
        """Return the fastest row of another library whose result is right."""
        rows = [row for row in self.of_shape(shape) if of(row["contestant"]).is_peer and is_valid(row)]
        return min(rows, key=milliseconds, default=None)

    def multiples(self, shape: Shape) -> tuple[float | None, float | None]:
        """Return Quintic's time over the floor, at the measured and at the nominal rate."""
        row = self.quintic(shape)
        if row is None or row["device"] != "cuda":
            return None, None
        time_ms = milliseconds(row)
        measured = time_ms / floor_ms(shape, self.tflops) if self.tflops else None
        return measured, time_ms / floor_ms(shape, NOMINAL_TFLOPS)

    def ratio(self, shape: Shape) -> float | None:
        """Return Quintic's time over that of the fastest other library."""
        mine, best = self.quintic(shape), self.best_peer(shape)
        return milliseconds(mine) / milliseconds(best) if mine and best else None


def digits(value: float | None) -> str:
    """Return three digits, or a dash."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.3g}"


def times(row: Row, name: str) -> str:
    """Return median and spread of one kind of time, or a dash."""
    if name not in row:
        return "-"
    found = row[name]
    return f"{digits(found['median'])} ({digits(found['p10'])} to {digits(found['p90'])})"


def error_text(row: Row | None) -> str:
    """Return the relative error of a row's result."""
    if row is None or row.get("error"):
        return "-"
    error = row.get("error_frobenius")
    return "**not finite**" if error is None else f"{error:.1e}" if error <= LARGEST_ERROR else f"**{error:.1e}**"


def main_table(summary: Summary, shapes: Sequence[Shape]) -> list[str]:
    """Return one line per shape."""
    lines = [
        "| batch x m x n | floor (ms) | Quintic: device (ms) | idle (ms) | x floor | best other: device (ms) | which | "
        "Quintic / best | Quintic's error | its error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in shapes:
        mine, best = summary.quintic(shape), summary.best_peer(shape)
        measured, nominal = summary.multiples(shape)
        floors = [floor_ms(shape, rate) if rate else None for rate in (summary.tflops, NOMINAL_TFLOPS)]
        cells = [
            str(shape),
            f"{digits(floors[0])} ({digits(floors[1])})",
            times(mine, "device_ms") if mine else "-",
            times(mine, "idle_ms") if mine else "-",
            f"{digits(measured)} ({digits(nominal)})",
            digits(milliseconds(best)) if best else "-",
            best["contestant"] if best else "-",
            digits(summary.ratio(shape)),
            error_text(mine),
            error_text(best),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def targets_table(summary: Summary, shapes: Sequence[Shape]) -> list[str]:
    """Return one line per shape that has a limit: kept or not, against the floor and against the fastest other."""
    lines = [
        "| batch x m x n | x floor | limit | | x floor at nominal rate | Quintic / best | limit | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    verdicts = []
    for shape in shapes:
        if shape not in LIMITS:
            continue
        (measured, nominal), ratio = summary.multiples(shape), summary.ratio(shape)
        found = [verdict(measured, LIMITS[shape]), verdict(ratio, PEER_LIMIT)]
        verdicts += found
        cells = [str(shape), digits(measured), f"{LIMITS[shape]:g}", found[0], digits(nominal)]
        cells += [digits(ratio), f"{PEER_LIMIT:g}", found[1]]
        lines.append("| " + " | ".join(cells) + " |")
    passed = verdicts.count("pass")
    return [*lines, "", f"{passed} of {len(verdicts)} limits kept, {verdicts.count('not measured')} not measured."]


def verdict(value: float | None, limit: float) -> str:
    """Return whether a value keeps its limit."""
    return "not measured" if value is None else "pass" if value <= limit else "**miss**"


def details_table(summary: Summary, shape: Shape, jobs: Sequence[Row]) -> list[str]:
    """Return the lines of everyone for one shape, the fastest first; then what failed or was not measured."""
    lines = [
        "| contestant | device (ms) | idle (ms) | host (ms) | error | repeatable | first call (s) |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = summary.of_shape(shape)
    for row in sorted((row for row in rows if not row.get("error")), key=milliseconds):
        cells = [
            row["contestant"],
            times(row, "device_ms"),
            times(row, "idle_ms"),
            times(row, "host_ms"),
            error_text(row),
            "yes" if row.get("repeatable") else "no",
            f"{row['first_s']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    for row in rows:
        if row.get("error"):
            lines.append(f"| {row['contestant']} | {in_cell(row['error'])} | | | | | |")
    known = {row["contestant"] for row in rows}
    for job in jobs:
        if job["shape"] == str(shape) and job["contestant"] not in known:
            lines.append(f"| {job['contestant']} | not measured: the time was over | | | | | |")
    return lines


def page(rows: Iterable[Row], jobs: Sequence[Row], options: argparse.Namespace, command: str, commit: str) -> str:
    """Return the result as Markdown."""
    summary = Summary(rows)
    known = next((row for row in summary.rows if "versions" in row), None)
    found: dict[str, str] = {}
    for row in summary.rows:
        found |= row.get("versions", {})
    device = known["device_name"] if known else "an unknown device"
    version_text = ", ".join(f"{name} {version}" for name, version in found.items())
    rate = "not measured"
    if summary.tflops:
        low, high = summary.ceilings[0], summary.ceilings[-1]
        rate = f"{summary.tflops:.0f} TFLOP/s ({low:.0f} to {high:.0f}, once per library)"
    lines = [
        f"# Orthogonalisation alone, on one {device}",
        "",
        f"`{command}` at commit {commit}; {version_text}. The product of 8192 x 8192 matrices: {rate}.",
        "",
        COLUMNS.format(nominal=NOMINAL_TFLOPS),
        "",
        *main_table(summary, options.shapes),
    ]
    if options.targets:
        lines += ["", "## Limits", "", *targets_table(summary, options.shapes)]
    lines += ["", "## Everyone"]
    for shape in options.shapes:
        lines += ["", f"### {shape}", "", *details_table(summary, shape, jobs)]
    return "\n".join(lines) + "\n"


def short_line(row: Row) -> str:
    """Return one row for the terminal."""
    if row["contestant"] == CEILING:
        return f"{CEILING} ({row['shape']}): {row['tflops']:.0f} TFLOP/s"
    start = f"{row['shape']:14} {row['contestant']:28}"
    if row.get("error"):
        return f"{start} failed: {row['error']}"
    parts = [f"{name[:-3]} {times(row, name)}" for name in ("device_ms", "idle_ms") if name in row]
    return f"{start} {', '.join(parts)} ms, error {error_text(row)}, first {row['first_s']:.1f} s"


def write_results(rows: Iterable[Row], jobs: Sequence[Row], options: argparse.Namespace) -> None:
    """Write everything, and print the short tables."""
    rows = list(rows)
    command = recorded_command(sys.argv[1:], options)
    commit = options.commit or git_commit()
    result = {"command": command, "commit": commit, "rows": rows}
    options.out.joinpath(f"{options.name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = page(rows, jobs, options, command, commit)
    options.out.joinpath(f"{options.name}.md").write_text(text, encoding="utf-8")
    print("\n" + text.split("\n## Everyone")[0])


def recorded_command(arguments: Sequence[str], options: argparse.Namespace) -> str:
    """Return the command as others would type it: without the folders of this machine."""
    names = {str(options.out): "FOLDER", str(options.caches): "CACHES", **dict.fromkeys(options.peers, "PEERS")}
    words = [names.get(word, word) for word in arguments]
    return shlex.join(["python", "benchmarks/bench_orthogonalize.py", *(word for word, _ in itertools.groupby(words))])


if __name__ == "__main__":
    sys.exit(main())
