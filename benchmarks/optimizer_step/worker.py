"""A process that measures: it imports what is slow to import, then measures the jobs that it is told.

A job is a line of JSON on standard input. What was found is written to a file after each part, so that a process that
is killed leaves what it knew. The process ends with its input.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.common.results import describe_error
from benchmarks.optimizer_step.measure import Row, measure

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Import while others are measured, then measure."""
    with contextlib.suppress(AttributeError, OSError):  # Linux: measuring ends with the parent
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for module in os.environ.get("OPTIMIZER_STEP_PRELOAD", "torch").split(","):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    for line in sys.stdin:
        if not work(json.loads(line)):
            return 1
    return 0


def work(job: dict[str, Any]) -> bool:
    """Measure one job; return whether the process can measure another."""
    row = Row(Path(job["result"]))
    row.set(part="start")
    sys.path[:0] = [folder for folder in job["peers"] if folder not in sys.path]
    try:
        if "layout" in job:
            from benchmarks.optimizer_step.layouts.measure import measure_in_layout

            if not measure_in_layout(job, row):
                row.set(over=True)  # an error that all ranks know of
                return True
        else:
            measure(job, row)
    except Exception as error:  # whatever a library may raise: it is the result
        traceback.print_exc()
        row.set(error=describe_error(error), when=time.time(), over=True)
        return False
    row.set(part="done")
    return True


if __name__ == "__main__":
    sys.exit(main())
