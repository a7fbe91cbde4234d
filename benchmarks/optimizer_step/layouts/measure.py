"""One contestant in a layout, measured by one process of several.

Every process keeps its own times; who started them takes the slowest of each step. A failure before the first step is
agreed on, so that the processes can measure the next contestant; after one later they end.
"""

import gc
import os
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.results import describe_error, device_name, versions
from benchmarks.common.timing import MIB, Memory, synchronize, time_steps
from benchmarks.optimizer_step import measure
from benchmarks.optimizer_step.contestants import SETS, Weights
from benchmarks.optimizer_step.layouts import invariance
from benchmarks.optimizer_step.layouts.contestants import (
    AVERAGING,
    COMPARED_STEPS,
    LayoutContestant,
    Place,
    contestant_of,
)
from benchmarks.optimizer_step.layouts.group import Ranks, join
from benchmarks.optimizer_step.layouts.parts import Times, time_orthogonalization, time_parts
from benchmarks.optimizer_step.measure import Row

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Reference:
    """The result of one device for a set of weights; kept for the layouts that are compared with it.

    Attributes:
        of: the contestant, set and dtype.
        weights: after the compared steps.
        moved: part of their entries that changed in these.
        orthogonalization_ms: of all matrices, on this rank alone.
    """

    of: tuple[str, ...]
    weights: list[Tensor]
    moved: float
    orthogonalization_ms: list[float]


def measure_in_layout(job: dict[str, Any], row: Row) -> bool:
    """Measure one contestant; every part adds to the row. All ranks must call it.

    Returns:
        Whether it was measured; else it could not be made, which all ranks know, and the row tells the error.
    """
    ranks = join(job["device"], job["store"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    contestant = contestant_of(job)
    clean()
    row.set(part="construction", versions=versions(nccl=ranks.cuda), device=device_name(ranks.cuda))
    subject: Subject | None = None
    error = ""
    try:
        subject = Subject(contestant, job, ranks)
    except Exception as found:  # whatever a library may raise: it is the result
        traceback.print_exc()
        error = describe_error(found)
        row.set(error=error, when=time.time(), may_go_on=True)
    if not ranks.all_true(subject is not None):
        row.set(may_go_on=True, **({} if error else {"error": "another rank failed", "when": time.time()}))
        return False
    assert subject is not None
    subject.measure(row)
    return True


def clean() -> None:
    """Forget what earlier contestants left: memory, and what was compiled for other shapes."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
        # Peers compile one function for many shapes; what other shapes taught must not make it slower.
        torch._dynamo.config.recompile_limit = 64
        if hasattr(torch._dynamo.config, "automatic_dynamic_local_pgo"):
            torch._dynamo.config.automatic_dynamic_local_pgo = False
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Subject:
    """The weights of a set in one layout, and an optimizer of them. All ranks must make it.

    Args:
        contestant: which optimizer.
        job: what is asked.
        ranks: of this process.
    """

    def __init__(self, contestant: LayoutContestant, job: dict[str, Any], ranks: Ranks) -> None:
        if contestant.needs_cuda and not ranks.cuda:
            raise RuntimeError("needs CUDA devices")
        self.contestant, self.job, self.ranks = contestant, job, ranks
        self.is_quintic = contestant.family == "quintic"
        is_compared = self.is_quintic and SETS[job["set"]].is_compared
        self.reference = self._reference() if is_compared else None
        self.place = Place(job["layout"], dist.get_world_size(), ranks.cuda, ranks.meshes)
        self.weights = contestant.place(self._whole_weights(), self.place)
        clean_memory()
        size = sum(measure.local(param).numel() * param.element_size() for param in self.weights.all)
        self.facts: dict[str, Any] = {"weights_mib": size / MIB}
        self.memory = Memory(ranks.cuda)
        self.optimizer = contestant.build(self.weights, self.place)
        self.gradients = [(param, param.grad) for param in self.weights.all]
        self._schedule = measure.scheduler([self.optimizer]) if self.is_quintic else lambda index: None
        self.times = Times(ranks, self.before)

    def _whole_weights(self) -> Weights:
        return measure.make_weights(SETS[self.job["set"]], self.ranks.device, DTYPES[self.job["dtype"]])

    def step(self) -> None:
        """Step once."""
        self.optimizer.step()

    def before(self, index: int) -> None:
        """Prepare a step: gradients, of which some optimizers let go, the learning rate, and all ranks together."""
        for param, gradient in self.gradients:
            if param.grad is None:
                param.grad = gradient
        self._schedule(index)
        self.ranks.align()

    def measure(self, row: Row) -> None:
        """Measure it; every part adds to the row. All ranks must call it."""
        row.set(part="first step", worst=self.facts)
        first_peak = self.first_steps(row)
        row.set(part="warm-up")
        number = self.warm_up(first_peak, row)
        cuda, times = self.ranks.cuda, self.times.kinds
        row.set(part="step")
        times["step_ms"], times["host_ms"] = time_steps(self.step, self.before, number, cuda)
        finite = all(bool(measure.local(param).isfinite().all()) for param in self.weights.all)
        row.set(part="device", times=times, finite=finite)
        # Some steps start on busy devices, so that the host is not counted: never fewer than ten, for their quartiles.
        fewer = max(measure.LEAST_STEPS, number // 2)
        self.times.add_busy("device_ms", self.step, fewer, times["host_ms"])
        row.set(part="syncs", times=times)
        if cuda:
            row.set(syncs=self.find_sync())
        if self.is_quintic:
            row.set(part="collectives")
            self.facts |= time_parts(self.step, self.times, self.weights.all, self.job["layout"], fewer)
            row.set(part="orthogonalization", times=times, worst=self.facts)
            times["orthogonalization_ms"] = time_orthogonalization(self.optimizer, self.ranks)
            row.set(times=times)
        row.set(part="graph")
        if cuda and self.contestant.graph and not self.job["no_graph"]:
            found = measure.time_graph(
                self.step, self.before, [self.optimizer], self.weights, number, self.ranks.all_true
            )
            times |= found.pop("times", {})
            row.set(times=times, **found)

    def first_steps(self, row: Row) -> int:
        """Make the first step, and for Quintic those that are compared with one device's; return the first's peak."""
        if self.reference is None:
            self.before(0)
            return self._time_first()
        averages = self.job["layout"] in AVERAGING
        self.gradients = []  # others take their memory's place
        groups = [(group, group["lr"]) for group in self.optimizer.param_groups]
        set_lr(self.optimizer)
        peak = 0
        for number in range(COMPARED_STEPS):
            rank = dist.get_rank() if averages else None
            invariance.set_gradients(self.weights, number, dist.get_world_size(), rank)
            if number == 0:
                peak = self._time_first()
            else:
                self.step()
        entries, tensors = invariance.differing(self.weights.all, self.reference.weights)
        row.set(moved=self.reference.moved)
        self.facts |= {"differing_entries": entries, "differing_tensors": tensors}
        self.times.kinds["orthogonalization_alone_ms"] = self.reference.orthogonalization_ms
        self.gradients = [(param, param.grad) for param in self.weights.all]
        for group, lr in groups:
            group["lr"] = lr
        return peak

    def _time_first(self) -> int:
        self.memory.peak()
        start = time.perf_counter()
        self.step()
        synchronize(self.ranks.cuda)
        self.facts["first_step_s"] = time.perf_counter() - start
        return self.memory.peak()

    def _reference(self) -> Reference:
        """Return the result of one device for these weights. All ranks must call it."""
        of = (self.contestant.name, self.job["set"], self.job["dtype"])
        if self.ranks.reference is None or self.ranks.reference.of != of:
            self.ranks.reference = None
            weights = self._whole_weights()
            start = [param.detach().clone() for param in weights.all]
            optimizer = self.contestant.build(weights, Place("single", 1, self.ranks.cuda))
            set_lr(optimizer)
            for number in range(COMPARED_STEPS):
                invariance.set_gradients(weights, number, dist.get_world_size(), None)
                optimizer.step()
            stepped = [param.detach() for param in weights.all]
            moved = invariance.differing(start, stepped)[0] / sum(param.numel() for param in start)
            for param in weights.all:
                param.grad = None
            alone = time_orthogonalization(optimizer, self.ranks)
            self.ranks.reference = Reference(of, stepped, moved, alone)
            del optimizer, weights, start
            clean_memory()
        return self.ranks.reference

    def warm_up(self, first_peak: int, row: Row) -> int:
        """Warm up and note what memory a step takes; return how many steps to time."""
        start = time.perf_counter()
        for index in range(measure.WARMUP_STEPS):
            self.before(index)
            self.step()
            synchronize(self.ranks.cuda)
        seconds = self.ranks.largest((time.perf_counter() - start) / measure.WARMUP_STEPS)
        gc.collect()
        self.before(0)
        self.memory.peak()
        kept = torch.cuda.memory_allocated() - self.memory.base if self.ranks.cuda else 0
        self.step()
        synchronize(self.ranks.cuda)
        self.facts["state_mib"] = measure.state_bytes(self.optimizer.state) / MIB
        of_ranks: dict[str, Any] = {}
        if self.ranks.cuda:
            peak = self.memory.peak()
            of_ranks["temporary_mib"] = (peak - kept) / MIB
            self.facts |= {
                "peak_mib": max(first_peak, peak) / MIB,
                "reserved_mib": torch.cuda.max_memory_reserved() / MIB,
            }
        if self.is_quintic:
            plan = self.optimizer.plan()
            of_ranks |= {"planned_mib": plan.peak_workspace_bytes / MIB, "flops": plan.flops}
            row.set(buckets=len(plan.buckets), plan=str(plan))
        row.set(worst=self.facts, of_ranks=of_ranks)
        return max(measure.LEAST_STEPS, min(self.job["steps"], int(self.job["seconds"] / max(seconds, 1e-6))))

    def find_sync(self) -> str:
        """Return "none", or what PyTorch says of the first wait of the host for the device. All ranks must call it."""
        self.before(0)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        told = [str(one.message).splitlines()[0] for one in found if "called a synchronizing" in str(one.message)]
        return told[0][:200] if told else "none"


def set_lr(optimizer: Any) -> None:
    """Set learning rates with which weights change in every step."""
    for group in optimizer.param_groups:
        group["lr"] = invariance.COMPARED_LR if group["algorithm"] == "muon" else invariance.COMPARED_ADAMW_LR


def clean_memory() -> None:
    """Give unused memory back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
