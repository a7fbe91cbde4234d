"""The contestants of one family, measured in a process of their own.

    python -m benchmarks.orthogonalize.measure FOLDER

The process imports what is slow to import, waits for its jobs as a line of JSON on standard input, and appends what it
finds to FOLDER/rows.jsonl job by job, so that a process that is killed leaves what it knew.
"""

import contextlib
import gc
import importlib
import importlib.metadata
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import describe_error, device_name, percentiles, versions
from benchmarks.common.timing import synchronize, time_device, time_steps
from benchmarks.orthogonalize.contestants import of
from benchmarks.orthogonalize.shapes import CEILING, Polynomials, Shape

# Calls of one kind of timing: a median wants some, and more than this tell nothing new.
LEAST_CALLS, MOST_CALLS = 7, 200
WARMUP_CALLS = 3

CEILING_SIDE = 8192

# Packages whose versions belong to a result, beside those that every benchmark names.
PACKAGES = ("quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi")

Row = dict[str, Any]


def measure_jobs(folder: Path) -> int:
    """Import, wait for the word to begin, and measure one job after another."""
    for module in os.environ.get("BENCH_ORTHOGONALIZE_PRELOAD", "torch").split(","):
        with contextlib.suppress(Exception):  # a library that is missing or broken: its rows tell
            importlib.import_module(module)
    line = sys.stdin.readline()
    if not line:
        return 0
    jobs = json.loads(line)
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as file:

        def report(row: Row) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        cuda = jobs[0]["device"] == "cuda"
        if cuda:
            try:
                report(
                    {"contestant": CEILING, "shape": jobs[0]["family"], "device": "cuda", "tflops": measure_ceiling()}
                )
            except Exception as error:  # no device, say: the same for every job
                traceback.print_exc()
                for job in jobs:
                    report({**job, "error": describe(error)})
                return 1
        known = {"device_name": device_name(cuda), "versions": versions(*PACKAGES)}
        references = References()
        for job in jobs:
            try:
                report({**job, **measure(job, references), **known})
            except Exception as error:  # whatever a library may raise: it is the result
                traceback.print_exc()
                report({**job, "error": describe(error)})
                if cuda and is_lost(error):
                    return 1  # another process does the rest
            clean_up(cuda)
    return 0


def describe(error: Exception) -> str:
    """Return an error in a line."""
    if isinstance(error, ModuleNotFoundError):
        return f"not importable: {error}"[:300]
    return describe_error(error)


def is_lost(error: Exception) -> bool:
    """Return whether the CUDA context is gone with an error."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:  # the same error, again and again
        return True
    return "CUDA error" in str(error)


def clean_up(cuda: bool) -> None:
    """Give memory and compiled code back before the next job."""
    gc.collect()
    if not cuda:
        return
    import torch

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # else it gives up compiling after a few shapes
    torch.cuda.empty_cache()


def measure_ceiling() -> float:
    """Return the TFLOP/s of a large bf16 product of random matrices."""
    import torch

    a, b = (torch.randn(CEILING_SIDE, CEILING_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    times = []
    for index in range(6):  # ten products at a time; the first ten warm up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            torch.mm(a, b, out=out)
        end.record()
        torch.cuda.synchronize()
        if index:
            times.append(start.elapsed_time(end) / 10)
    return 2 * CEILING_SIDE**3 / statistics.median(times) / 1e9


class References:
    """Polynomials of the first and last matrices of a shape's first input, in float64."""

    def __init__(self) -> None:
        self.shape: Shape | None = None
        self.known: dict[Polynomials, Any] = {}

    def error(self, out: Any, x: Any, shape: Shape, polynomials: Polynomials) -> float:
        """Return the larger relative Frobenius error of the two matrices of `out`.

        Args:
            out: (batch, m, n), a contestant's result for `x`.
            x: (batch, m, n), untouched.
            shape: theirs.
            polynomials: those that the contestant means to compute.
        """
        import torch

        if self.shape != shape:  # one shape's at a time: they are large
            self.shape, self.known = shape, {}
        chosen = sorted({0, shape.batch - 1})
        if polynomials not in self.known:
            self.known[polynomials] = polynomials.apply(x[chosen].double())
        exact = self.known[polynomials]
        difference = torch.linalg.vector_norm(out[chosen].double() - exact, dim=(-2, -1))
        return float((difference / torch.linalg.vector_norm(exact, dim=(-2, -1))).max())


def measure(job: Row, references: References) -> Row:
    """Return error and times of one contestant and shape."""
    import torch

    cuda = job["device"] == "cuda"
    contestant, shape = of(job["contestant"]), Shape.parse(job["shape"])
    inputs = make_inputs(shape, job["device"])
    start = time.perf_counter()
    with torch.no_grad():
        function = contestant.make(shape, inputs[0])
        first = function(inputs[0]).clone()  # a replayed graph writes its next result over it
        synchronize(cuda)
        row: Row = {"first_s": time.perf_counter() - start}
        if first.shape != inputs[0].shape:
            raise ValueError(f"the result has shape {tuple(first.shape)}")
        row["finite"] = bool(first.isfinite().all())
        error = references.error(first, make_inputs(shape, job["device"], 1)[0], shape, contestant.polynomials())
        row["error_frobenius"] = error if math.isfinite(error) else None
        row |= time_calls(function, inputs, job["seconds"], cuda)
        row["repeatable"] = bool(torch.equal(function(inputs[0]), first))
    return row


def make_inputs(shape: Shape, device: str, sets: int | None = None) -> list[Any]:
    """Return random normal bf16 batches, the same for everyone; by default more than a cache holds, or four."""
    import torch

    if sets is None:
        sets = min(4, max(2, math.ceil(2**28 / (2 * shape.batch * shape.m * shape.n))))
    generator = torch.Generator(device=device).manual_seed(0)
    size = (shape.batch, shape.m, shape.n)
    return [torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(sets)]


def time_calls(function: Callable[[Any], Any], inputs: Sequence[Any], seconds: float, cuda: bool) -> Row:
    """Return the times of calls on a busy and on an idle device (on a CPU: of calls)."""
    current = inputs[0]

    def before(index: int) -> None:
        nonlocal current
        current = inputs[index % len(inputs)]

    def step() -> None:
        function(current)

    for index in range(WARMUP_CALLS):
        before(index)
        step()
    idle_ms, host_ms = time_steps(step, before, WARMUP_CALLS, cuda)

    def calls(milliseconds: float) -> int:
        return max(LEAST_CALLS, min(MOST_CALLS, int(1000 * seconds / milliseconds)))

    host = statistics.median(host_ms)
    row: Row = {}
    if cuda:
        # The device sleeps half as long again as the host needs, and is waited for.
        number = calls(1.5 * host + 1 + statistics.median(idle_ms))
        row["device_ms"] = percentiles(time_device(step, before, number, max(host_ms)))
    idle_ms, host_ms = time_steps(step, before, calls(statistics.median(idle_ms)), cuda)
    row |= {"idle_ms": percentiles(idle_ms), "host_ms": percentiles(host_ms)}
    return row


if __name__ == "__main__":
    sys.exit(measure_jobs(Path(sys.argv[1])))
