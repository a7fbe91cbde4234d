"""Processes that train one run after another, each on a device of its own choice.

A worker reads jobs from its standard input and writes results to its standard output, one JSON object per line. It
lives as long as its input, so that PyTorch, the device and compiled kernels are made ready once for many runs. What a
job does is the function `train` of a module: the one here is a run of the harness, `finetune.py` has another.
"""

import contextlib
import functools
import gc
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.results import REPOSITORY, describe_error, read_rows
from quintic.train.config import Config
from quintic.train.saved_config import from_dict, to_dict

# A worker that is this late after the deadline of its job hangs.
_GRACE_SECONDS = 20.0
_LONGEST_SECONDS = 7 * 86_400.0

_HARNESS = "benchmarks.training.workers"

# ----------------------------------------------------------------------------------------------------- configurations


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with other values of fields of any section, checked as a file's are."""
    stored = to_dict(config)
    for name, value in values.items():
        section = next((section for section, fields in stored.items() if name in fields), None)
        if section is None:
            raise SystemExit(f"--set {name}: no such option of quintic train")
        stored[section][name] = value
    return from_dict(stored, origin="--set")


def given_values(words: Iterable[str]) -> dict[str, Any]:
    """Return the options of `--set OPTION=VALUE ...`; what is not JSON is a string."""
    return {name: _read(text) for name, _, text in (word.partition("=") for word in words)}


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# --------------------------------------------------------------------------------------------------------------- a run


def train(job: Mapping[str, Any], prepare: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """Train a run with the harness' own `Trainer` and return its curves of bits per byte and loss, and its seconds.

    Samples, reference scores, checkpoints and the report are left out: they change no weight. A run whose loss is not
    finite ends there, and its bits per byte are None. One that is late by its deadline is cut: it has no result.

    Args:
        job: `config`, `data`, `deadline`, and perhaps `eval_from`, the first step that may be evaluated.
        prepare: changes the trainer before the first step.
    """
    import torch

    from quintic.data.dataset import Dataset
    from quintic.train.hardware import choose_hardware, machine_facts
    from quintic.train.schedule import is_due
    from quintic.train.source import package_versions
    from quintic.train.trainer import Trainer

    begin = time.perf_counter()
    config = from_dict(job["config"], origin="job")
    hardware = choose_hardware(config.run)
    trainer = Trainer(config, Dataset.open(job["data"]), Path("."), hardware)
    if prepare is not None:
        prepare(trainer)
    curve: list[list[float]] = []
    losses: list[list[float]] = []
    curve_seconds: list[float] = []
    loss = math.inf
    finite = True
    with trainer.loader:
        while trainer.step < trainer.total and finite:
            if time.time() > job["deadline"]:
                return {"cut": f"at step {trainer.step} of {trainer.total}, when the time was over"}
            finite = math.isfinite(trainer.train_step()["loss"])
            due = is_due(trainer.step, config.run.eval_every) and trainer.step >= job.get("eval_from", 0)
            if finite and (trainer.step == trainer.total or due):
                scored = trainer.evaluate()
                loss, bpb = scored["loss"], scored["bpb"]
                finite = math.isfinite(bpb)
                if finite:
                    curve.append([trainer.step, bpb])
                    losses.append([trainer.step, loss])
                    curve_seconds.append(trainer.seconds)
    if hardware.device.type == "cuda":
        torch.cuda.synchronize()
    return {
        "loss": loss if finite else None,
        "bpb": curve[-1][1] if finite else None,
        "curve": curve,
        "losses": losses,
        "curve_seconds": curve_seconds,
        "steps": trainer.total,
        "parameters": trainer.model.num_parameters(),
        "seconds": time.perf_counter() - begin,
        "training_seconds": trainer.seconds,
        "machine": machine_facts(hardware),
        "versions": package_versions(),
    }


# ----------------------------------------------------------------------------------------------------------- processes


class Worker:
    """One process; started with its first job, and again after it died.

    Args:
        device: as PyTorch names it, `cpu` or `cuda:1`.
        threads: of the CPU.
        module: whose function `train` does the jobs.
    """

    def __init__(self, device: str, threads: int, module: str = _HARNESS) -> None:
        self.device, self.threads, self.module = device, threads, module
        self.process: subprocess.Popen[str] | None = None
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # closed by `close`

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of `train`, or the reason for its failure as `failed`."""
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
        command = [sys.executable, "-m", _HARNESS, self.module]
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
    """Workers side by side; jobs go in the order in which they came to a free worker of the least busy device."""

    def __init__(self, devices: list[str], at_once: int, threads: int, module: str = _HARNESS) -> None:
        self.size = len(devices) * at_once
        self._workers = [Worker(device, threads, module) for _ in range(at_once) for device in devices]
        self._free = list(self._workers)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(self.size)  # a thread for each worker, so that one is free

    def submit(self, job: Callable[[], Mapping[str, Any]]) -> "Future[dict[str, Any]]":
        """Train a run that is described when it begins; the future never raises for what goes wrong in training."""
        return self._threads.submit(self._run, job)

    def _run(self, job: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        with self._lock:
            free = Counter(worker.device for worker in self._free)
            worker = max(self._free, key=lambda worker: free[worker.device])
            self._free.remove(worker)
        try:
            return worker.run(job())
        finally:
            with self._lock:
                self._free.append(worker)

    def close(self) -> None:
        """End all processes."""
        self._threads.shutdown()
        with ThreadPoolExecutor(self.size) as closing:
            list(closing.map(Worker.close, self._workers))


class Runs:
    """Runs that were made, each a line of a file, and the training of those that are missing there.

    Args:
        log: the .jsonl file.
        changed: options of all runs; lines with other ones stay in the file and are not these runs.
    """

    def __init__(self, log: Path, changed: Mapping[str, Any]) -> None:
        self.log, self.changed = log, dict(changed)
        self.rows = {key_of(row["cell"]): row for row in read_rows(log) if row["changed"] == self.changed}
        self.failures: list[str] = []
        self.computing: dict[str, Any] = next((row["computing"] for row in self.rows.values()), {})
        """Machine and versions."""
        self._lock = threading.Lock()

    def row(self, cell: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a run's result, None if it was not made."""
        return self.rows.get(key_of(cell))

    def train(self, pool: Pool, jobs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
        """Train what is missing, and wait.

        Args:
            pool: of workers.
            jobs: what tells a run from others, and its job.
        """
        futures = []
        for cell, job in jobs:
            if self.row(cell) is None:
                future = pool.submit(functools.partial(dict, job))
                future.add_done_callback(functools.partial(self._keep, cell))
                futures.append(future)
        print(f"{len(jobs)} runs, {len(jobs) - len(futures)} made before", flush=True)
        for future in futures:
            future.result()

    def _keep(self, cell: Mapping[str, Any], done: "Future[dict[str, Any]]") -> None:
        result = done.result()
        told = " ".join(f"{name}={value}" for name, value in cell.items())
        with self._lock:
            if "failed" in result:
                self.failures.append(f"{told}: {result['failed']}")
                print(f"FAILED {self.failures[-1]}", flush=True)
            if "cut" in result or "failed" in result:
                return
            self.computing = {name: result.pop(name) for name in ("machine", "versions")}
            row = {"cell": dict(cell), "changed": self.changed, **result, "computing": self.computing}
            self.rows[key_of(cell)] = row
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{told}: loss {result['loss']} after {result['seconds']:.0f} s", flush=True)


def key_of(cell: Mapping[str, Any]) -> str:
    """Return a text that is the same for equal options."""
    return json.dumps(cell, sort_keys=True)


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else prints is no answer
    do = importlib.import_module(sys.argv[1]).train
    for line in sys.stdin:
        try:
            answer = do(json.loads(line))
        except Exception as error:
            answer = {"failed": describe_error(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        gc.collect()  # a model's memory, before the next one takes as much
    return 0


if __name__ == "__main__":
    sys.exit(main())
