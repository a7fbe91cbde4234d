"""The processes that measure: started early, they import; given a job, they measure it.

Without `--layout` a process measures one contestant. With it as many processes as there are ranks form a team, which
measures the contestants of one library one after the other, until one fails: then the team ends, and the next
contestant gets a new one.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import REPOSITORY
from benchmarks.optimizer_step.rows import key, merge_ranks

# Seconds that the other ranks get to tell their errors when one has failed.
GRACE = 3.0

# Seconds for a CUDA graph: ranks that do not capture the same wait for each other.
GRAPH_LIMIT = 60.0

# What was measured before these holds.
LATE_PARTS = ("syncs", "collectives", "orthogonalization", "graph")

# Seconds for the imports of processes that were not started early.
IMPORT_LIMIT = 120.0


def team_key(job: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key; jobs with the same one are measured by the same processes."""
    return (job["family"], job["ranks"]) if "layout" in job else key(job)


class Team:
    """One process for each rank.

    Args:
        job: the first that it is meant for.
        options: the command line's.
    """

    def __init__(self, job: dict[str, Any], options: argparse.Namespace) -> None:
        self.key = team_key(job)
        self.in_layout = "layout" in job
        self.alive = True
        self.job: dict[str, Any] = {}
        self.caches = options.caches / job["family"]
        self.had_caches = True
        self.jobs_begun = 0
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.logs = [Path(self.folder.name, f"log-{rank}") for rank in range(job.get("ranks", 1))]
        self.processes = [self._start(rank, log, job) for rank, log in enumerate(self.logs)]

    def _start(self, rank: int, log: Path, job: dict[str, Any]) -> "subprocess.Popen[bytes]":
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OPTIMIZER_STEP_PRELOAD": ",".join(job["preload"]),
            "TRITON_CACHE_DIR": str(self.caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.caches / "inductor"),
            "TRITON_CACHE_AUTOTUNING": os.environ.get("TRITON_CACHE_AUTOTUNING", "1"),
        }
        if self.in_layout:
            number = len(self.logs)
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number)}
            environment |= {"LOCAL_WORLD_SIZE": str(number)}
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number)))
            # All ranks are on this machine, whose own name need not lead anywhere.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with log.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "benchmarks.optimizer_step.worker"],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def serves(self, job: dict[str, Any]) -> bool:
        """Return whether it can measure a job."""
        return self.alive and self.key == team_key(job) and (self.in_layout or not self.jobs_begun)

    def begin(self, job: dict[str, Any]) -> None:
        """Let it measure a job."""
        self.job = job
        self.had_caches = self.jobs_begun > 0 or self.caches.exists()
        self.caches.mkdir(parents=True, exist_ok=True)
        self.jobs_begun += 1
        for rank, process in enumerate(self.processes):
            told = {**job, "result": str(self._result(rank)), "store": str(Path(self.folder.name, "store"))}
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died while importing: `result` tells
                process.stdin.write((json.dumps(told) + "\n").encode())
                process.stdin.flush()

    def result(self, limit: float) -> dict[str, Any]:
        """Wait for it, and return its row: with an error if it failed or took too long; then the team has ended."""
        start = time.monotonic()
        deadline = start + IMPORT_LIMIT
        began = graph_began = False
        timed_out = False
        found = self._read()
        while not all(_is_over(row) for row in found):
            if time.monotonic() > deadline:
                timed_out = True
                break
            dead = [process.poll() is not None for process in self.processes]
            if any(dead) or any("error" in row for row in found):
                deadline = min(deadline, time.monotonic() + (0 if all(dead) else GRACE))
            time.sleep(0.05)
            found = self._read()
            if all(row.get("part") in ("graph", "done") for row in found) and not graph_began:
                graph_began, deadline = True, min(deadline, time.monotonic() + GRAPH_LIMIT)
            if not began and all(found):  # what is not limited here are imports
                began, deadline = True, time.monotonic() + max(limit, 1)
        failed_late = any("error" in row and not row.get("may_go_on") for row in found)
        if not self.in_layout or failed_late or not all(_is_over(row) for row in found):
            self._kill()
        row = {name: self.job[name] for name in ("set", "dtype", "contestant", "family")}
        row |= {name: self.job[name] for name in ("layout", "ranks") if name in self.job}
        row |= {"seconds": round(time.monotonic() - start, 1), "caches": "kept" if self.had_caches else "empty"}
        endings = [
            "stopped after its time"
            if process.returncode in (None, -signal.SIGKILL) and timed_out
            else f"ended with code {process.returncode}"
            for process in self.processes
        ]
        row |= merge_ranks([_told_ending(one, ending) for one, ending in zip(found, endings, strict=True)])
        if "error" in row and row.get("part") in LATE_PARTS and "step_ms" in row:
            row["graph_error" if row["part"] == "graph" else "parts_error"] = row.pop("error")
        if {"error", "graph_error", "parts_error"} & row.keys() or row.get("syncs", "none") != "none":
            row["log"] = "\n".join(self._log(rank) for rank in range(min(2, len(self.logs))))
        if not self.alive:
            self.folder.cleanup()
        return row

    def stop(self) -> None:
        """End it, if it has not ended."""
        if self.alive:
            self._kill()
            self.folder.cleanup()

    def _result(self, rank: int) -> Path:
        return Path(self.folder.name, f"row-{self.jobs_begun}-{rank}.json")

    def _read(self) -> list[dict[str, Any]]:
        """Return the rows of the ranks so far."""
        paths = [self._result(rank) for rank in range(len(self.processes))]
        return [json.loads(path.read_text(encoding="utf-8")) if path.exists() else {} for path in paths]

    def _log(self, rank: int) -> str:
        text = self.logs[rank].read_text(encoding="utf-8", errors="replace")[-4000:]
        return text.replace(f"{REPOSITORY}/", "")

    def _kill(self) -> None:
        """End the processes and what they started (compilers' workers), which share their groups."""
        self.alive = False
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()


def _is_over(row: dict[str, Any]) -> bool:
    return row.get("part") == "done" or bool(row.get("over"))


def _told_ending(row: dict[str, Any], ending: str) -> dict[str, Any]:
    """Return a rank's row; the ending of its process becomes the error if it reported none."""
    if row.get("part") == "done" or "error" in row:
        return row
    return {**row, "error": f"{ending}, in the part: {row.get('part', 'imports')}"}


def next_of_another_kind(jobs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first job that the processes of the first of these cannot measure."""
    if jobs and "layout" not in jobs[0]:
        return jobs[1] if len(jobs) > 1 else None
    return next((job for job in jobs if team_key(job) != team_key(jobs[0])), None)
