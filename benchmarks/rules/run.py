"""The jobs of the workers: to train with a rule, and to time its steps."""

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.training.workers import train as train_run
from benchmarks.training.workers import with_values

WARM_UP_STEPS = 8


def train(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a run, see `benchmarks.training.workers.train`, or the times of a few steps.

    A job has beside what that module needs: `candidate` and `setting`, which name the rule, and `timed_steps`, 0 to
    train.
    """
    return time_steps(job) if job["timed_steps"] else train_run(job, prepare=lambda trainer: _set_rule(trainer, job))


def _set_rule(trainer: Any, job: Mapping[str, Any]) -> None:
    """Give the matrices the rule of a job, before the first step."""
    from benchmarks.rules.candidates import candidate
    from quintic.optim.rules.table import orthogonalizes

    rule = candidate(job["candidate"]).settings[job["setting"]].rule
    for group in trainer.optimizer.param_groups:
        if orthogonalizes(group["algorithm"]):
            group["update_rule"] = rule
            group["cautious"] = group["cautious"] and rule.constrain is None


def time_steps(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return milliseconds of the optimizer's step and of the whole, medians, and bytes of state of a weight."""
    import torch

    from quintic.data.dataset import Dataset
    from quintic.train.hardware import choose_hardware, machine_facts
    from quintic.train.saved_config import from_dict
    from quintic.train.source import package_versions
    from quintic.train.trainer import Trainer

    if time.time() > job["deadline"]:
        return {"cut": "the time was over"}
    begin = time.perf_counter()
    config = with_values(from_dict(job["config"], origin="job"), {"steps": WARM_UP_STEPS + job["timed_steps"]})
    hardware = choose_hardware(config.run)
    trainer = Trainer(config, Dataset.open(job["data"]), Path("."), hardware)
    _set_rule(trainer, job)
    records = []
    with trainer.loader:
        for _ in range(WARM_UP_STEPS + job["timed_steps"]):
            records.append(trainer.train_step()["times_ms"])
    timed = records[WARM_UP_STEPS:]
    matrices = [p for group in trainer.optimizer.param_groups if group["name"] == "matrices" for p in group["params"]]
    state = [x for p in matrices for x in trainer.optimizer.state[p].values() if isinstance(x, torch.Tensor)]
    return {
        "loss": None,
        "optimizer_ms": statistics.median(times["optimizer"] for times in timed),
        "step_ms": statistics.median(sum(times.values()) for times in timed),
        "state_bytes": sum(x.numel() * x.element_size() for x in state) / sum(p.numel() for p in matrices),
        "seconds": time.perf_counter() - begin,
        "machine": machine_facts(hardware),
        "versions": package_versions(),
    }
