"""Workers that may crash or hang: each class has its time, and costs itself only."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import REPOSITORY

START_LIMIT = 300.0
"""Seconds for imports."""


class Worker:
    """A process of `worker.py`; `ask` restarts it where it died.

    Args:
        library: module that has `families()`, {class: family}, and `attempts(class)`.
        log: file for what the libraries print.
        limit: seconds for one class.
    """

    def __init__(self, library: str, log: Path, limit: float) -> None:
        self.library, self.log, self.limit = library, log, limit
        self.process: subprocess.Popen[str] | None = None
        self.has_ended = False

    def families(self) -> dict[str, str]:
        """Return {class: family} of the library."""
        return dict(self._start()["families"])

    def ask(self, name: str) -> dict[str, Any]:
        """Return what became of a class."""
        if self.process is None:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
        answer = self._answer(self.limit)
        if answer is None:
            # The end of its output comes a moment before its own.
            why = (
                f"the process ended with {self.process.wait()}"
                if self.has_ended
                else f"no answer within {self.limit:g} s"
            )
            self.close()
            return {"class": name, "errors": [{"attempt": "", "stage": "worker", "error": why}]}
        return answer

    def close(self) -> None:
        """End the process."""
        if self.process is None:
            return
        self.process.kill()
        self.reader.join()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()
        self.process = None

    def _start(self) -> dict[str, Any]:
        self.close()
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.roles.worker", self.library],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.lines: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self._read, args=(self.process, self.lines), daemon=True)
        self.reader.start()
        answer = self._answer(START_LIMIT)
        if answer is None:
            self.close()
            raise SystemExit(f"{self.library}: the worker did not start; see {self.log}")
        return answer

    @staticmethod
    def _read(process: "subprocess.Popen[str]", lines: "queue.Queue[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    def _answer(self, limit: float) -> dict[str, Any] | None:
        self.has_ended = False
        try:
            line = self.lines.get(timeout=limit)
        except queue.Empty:
            return None
        self.has_ended = not line
        return json.loads(line) if line else None


def sweep(worker: Worker, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what became of each class."""
    try:
        for name in names:
            yield worker.ask(name)
    finally:
        worker.close()
