"""Processes that train one run after another, each on a device of its own choice, for `baseline.py`.

A worker reads jobs from its standard input and writes results to its standard output, one JSON object per line. It
lives as long as its input, so that PyTorch, the device and compiled kernels are made ready once for many runs.
"""

import contextlib
import gc
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.results import REPOSITORY, describe_error

# A worker that is this late after the deadline of its job hangs.
_GRACE_SECONDS = 20.0
_LONGEST_SECONDS = 7 * 86_400.0


def train(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train a run with the harness' own `Trainer` and return its curve of bits per byte.

    Samples, reference scores, checkpoints and the report are left out: they change no weight. A run whose loss is not
    finite ends there, and its bits per byte are None. One that is late by its deadline is cut: it has no result.
    """
    import torch

    from quintic.data.dataset import Dataset
    from quintic.train.hardware import choose_hardware, machine_facts, package_versions
    from quintic.train.saved_config import from_dict
    from quintic.train.schedule import is_due
    from quintic.train.trainer import Trainer

    begin = time.perf_counter()
    config = from_dict(job["config"], origin="job")
    hardware = choose_hardware(config.run)
    trainer = Trainer(config, Dataset.open(job["data"]), Path("."), hardware)
    curve: list[list[float]] = []
    finite = True
    with trainer.loader:
        while trainer.step < trainer.total and finite:
            if time.time() > job["deadline"]:
                return {"cut": f"at step {trainer.step} of {trainer.total}, when the time was over"}
            finite = math.isfinite(trainer.train_step()["loss"])
            if finite and (trainer.step == trainer.total or is_due(trainer.step, config.run.eval_every)):
                bpb = trainer.evaluate()["bpb"]
                finite = math.isfinite(bpb)
                if finite:
                    curve.append([trainer.step, bpb])
    if hardware.device.type == "cuda":
        torch.cuda.synchronize()
    return {
        "bpb": curve[-1][1] if finite else None,
        "curve": curve,
        "steps": trainer.total,
        "seconds": time.perf_counter() - begin,
        "training_seconds": trainer.seconds,
        "machine": machine_facts(hardware),
        "versions": package_versions(),
    }


class Worker:
    """One process; started with its first job, and again after it died.

    Args:
        device: as PyTorch names it, `cpu` or `cuda:1`.
        threads: of the CPU.
    """

    def __init__(self, device: str, threads: int) -> None:
        self.device, self.threads = device, threads
        self.process: subprocess.Popen[str] | None = None
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # closed by `close`

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `train` does, or `failed`: why there is no result."""
        if time.time() > job["start_by"]:
            return {"cut": "not started: the time was over"}
        if self.process is None:
            self.process = self._start()
        process = self.process
        left = min(max(0.0, job["deadline"] - time.time()), _LONGEST_SECONDS)
        late = threading.Timer(left + _GRACE_SECONDS, process.kill)
        late.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            late.cancel()
        if answer:
            result: dict[str, Any] = json.loads(answer)
            return result
        self.process = None
        code = _end(process)
        self.errors.seek(0)
        last = (self.errors.read().strip().splitlines() or ["it said nothing"])[-1]
        return {"failed": f"the worker on {self.device} died with exit code {code}: {last}"}

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            _end(self.process)
        self.errors.close()

    def _start(self) -> "subprocess.Popen[str]":
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads)}
        environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), environment.get("PYTHONPATH", "")]).rstrip(":")
        if self.device.startswith("cuda"):
            visible = environment.get("CUDA_VISIBLE_DEVICES")
            number = int(self.device.partition(":")[2] or 0)
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)
        else:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "benchmarks.training.baseline_worker"]
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=self.errors, text=True)


def _end(process: "subprocess.Popen[str]") -> int:
    """Close a worker's input, after which it ends; return its exit code."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):  # it is gone
        process.stdin.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
    process.stdout.close()
    return process.wait()


class Pool:
    """Workers side by side; jobs go to the next one that is free, in the order in which they came."""

    def __init__(self, devices: list[str], at_once: int, threads: int) -> None:
        self.size = len(devices) * at_once
        self._workers = [Worker(device, threads) for _ in range(at_once) for device in devices]
        self._free: queue.Queue[Worker] = queue.Queue()
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(self.size)

    def submit(self, job: Callable[[], Mapping[str, Any]]) -> "Future[dict[str, Any]]":
        """Train a run that is described when it begins; the future never raises for what goes wrong in training."""
        return self._threads.submit(self._run, job)

    def _run(self, job: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        worker = self._free.get()
        try:
            return worker.run(job())
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """End all processes."""
        self._threads.shutdown()
        with ThreadPoolExecutor(self.size) as closing:
            list(closing.map(Worker.close, self._workers))


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else prints is no answer
    for line in sys.stdin:
        try:
            answer = train(json.loads(line))
        except Exception as error:
            answer = {"failed": describe_error(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        gc.collect()  # a model's memory, before the next one takes as much
    return 0


if __name__ == "__main__":
    sys.exit(main())
