"""Time orthogonalisation alone, beside a floor of arithmetic and every other library that is importable.

    python -m benchmarks.orthogonalize --out FOLDER --peers FOLDER_OF_OTHER_LIBRARIES... --targets

Every batch of bf16 matrices is orthogonalised by Quintic and by everyone else, on the same random normal inputs: the
time of one call, and its error against the same polynomial of the same input in float64. Contestants of one library
share a process. A row is appended to FOLDER/NAME.jsonl at once; a second call with the same --out goes on where the
first stopped and tries again what failed. At the end FOLDER/NAME.md holds the tables, FOLDER/NAME.json everything.
What cannot run is reported with its error. `--device cpu --shapes 2x16x24` tries the script.

Shapes and limits stand in `shapes.py`, contestants in `contestants.py`, how they are measured in `measure.py`.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import REPOSITORY, add_options, git_commit, read_rows, recorded_command, write_result
from benchmarks.orthogonalize.contestants import CONTESTANTS, of
from benchmarks.orthogonalize.page import page, short_line
from benchmarks.orthogonalize.shapes import CEILING, LIMITS, Shape

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
    add_options(parser, "orthogonalize")
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
    return parser.parse_args()


def plan_jobs(options: argparse.Namespace) -> list[Row]:
    """Return the measurements to make, in order: contestants family by family, each over all shapes."""
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
    """Return the key that identifies a row."""
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
                [sys.executable, "-P", "-m", "benchmarks.orthogonalize.measure", str(self.path)],
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
        """Yield its results; where it dies or takes too long, a row with the error, as the last one."""
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


def write_results(rows: Iterable[Row], jobs: Sequence[Row], options: argparse.Namespace) -> None:
    """Write everything, and print the short tables."""
    rows = list(rows)
    names = {str(options.out): "FOLDER", str(options.caches): "CACHES", **dict.fromkeys(options.peers, "PEERS")}
    command = recorded_command("benchmarks.orthogonalize", sys.argv[1:], names)
    commit = options.commit or git_commit()
    text = page(rows, jobs, options.shapes, command, commit, limits=options.targets)
    write_result(options.out / options.name, {"command": command, "commit": commit, "rows": rows}, text)
    print("\n" + text.split("\n## Everyone")[0])


if __name__ == "__main__":
    sys.exit(main())
