"""One contestant on one device, measured in a process of its own."""

import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.results import describe_error, device_name, spread, versions
from benchmarks.common.timing import MIB, Memory, find_sync, synchronize, time_device, time_steps
from benchmarks.optimizer_step.contestants import CONTESTANTS, SETS, Weights, WeightSet

# Tolerance on `max_workspace_bytes`: the allocator rounds every block up.
WORKSPACE_TOLERANCE = 0.05

WARMUP_STEPS = 5
LEAST_STEPS = 10

# On the learning rate with which a replay has to move weights.
_LARGE_LR_FACTOR = 1000


@dataclass
class Row:
    """A contestant's results so far; written to a file after each part, so that a killed process leaves them."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)

    def set(self, **values: Any) -> None:
        """Add values and write everything."""
        self.values.update(values)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.values), encoding="utf-8")
        part.replace(self.path)  # a reader sees all of the old or of the new one


def measure(job: dict[str, Any], row: Row) -> None:
    """Measure one contestant; every part adds to the row."""
    import torch

    cuda = job["device"] == "cuda"
    contestant = next(one for one in CONTESTANTS if one.name == job["contestant"])
    device = torch.device(job["device"])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[job["dtype"]]
    if cuda:
        torch.cuda.mem_get_info()  # makes the context
        # Any training process has the workspace of cuBLAS: its size is not the optimizer's.
        square = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
        torch.cuda.synchronize(square.mm(square).device)
    row.set(part="weights", versions=versions(), device=device_name(cuda))
    weights = make_weights(SETS[job["set"]], device, dtype)
    size = sum(param.numel() * param.element_size() for param in weights.all)
    row.set(part="construction", weights_mib=size / MIB, gradients_mib=size / MIB, parameters=len(weights.all))

    memory = Memory(cuda)
    start = time.perf_counter()
    optimizers = contestant.build(weights, cuda)
    row.set(part="first step", construction_s=time.perf_counter() - start)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    start = time.perf_counter()
    step()
    synchronize(cuda)
    row.set(part="warm-up", first_step_s=time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(WARMUP_STEPS):
        step()
        synchronize(cuda)
    estimate = (time.perf_counter() - start) / WARMUP_STEPS
    row.set(part="memory")
    gc.collect()
    first_peak = memory.peak()
    step()
    synchronize(cuda)
    row.set(part="step", **memory_values(memory, first_peak, optimizers))

    # Quintic is timed with a learning rate that changes at every step, as under a scheduler; the others are left alone,
    # because some compile again when it changes.
    before = scheduler(optimizers) if contestant.family == "quintic" else lambda index: None
    number = max(LEAST_STEPS, min(job["steps"], int(job["seconds"] / max(estimate, 1e-6))))
    step_ms, host_ms = time_steps(step, before, number, cuda)
    row.set(part="device", step_ms=spread(step_ms), host_ms=spread(host_ms), finite=are_finite(weights))
    if hasattr(optimizers[0], "plan"):
        row.set(plan=str(optimizers[0].plan()))
    if not cuda:
        return
    device_ms = time_device(step, before, max(LEAST_STEPS, number * 2 // 3), statistics.median(host_ms))
    row.set(part="syncs", device_ms=spread(device_ms))
    row.set(part="graph", syncs=find_sync(step, before))
    found = time_graph(step, before, optimizers, weights, number)
    row.set(**{kind: spread(times) for kind, times in found.pop("times", {}).items()}, **found)


def make_weights(shapes: WeightSet, device: Any, dtype: Any) -> Weights:
    """Return parameters with gradients, all normal and of the size they have in training; always the same ones."""
    import torch

    generator = torch.Generator(device=device).manual_seed(0)

    def parameters(count: int, *shape: int) -> list[Any]:
        made = []
        for _ in range(count):
            param = torch.nn.Parameter(
                torch.empty(shape, device=device, dtype=dtype).normal_(0, 0.02, generator=generator)
            )
            param.grad = torch.empty_like(param).normal_(0, 0.001, generator=generator)
            made.append(param)
        return made

    matrices = [param for count, *shape in shapes.matrices for param in parameters(count, *shape)]
    others = [param for count, *shape in shapes.others for param in parameters(count, *shape)]
    return Weights(matrices, others)


def are_finite(weights: Weights) -> bool:
    """Return whether the weights are still numbers: a step that breaks them is not worth timing."""
    return all(bool(param.isfinite().all()) for param in weights.all)


def memory_values(memory: Memory, first_peak: int, optimizers: list[Any]) -> dict[str, Any]:
    """Return state, peaks and the bound that was promised, in MiB; no peaks on a CPU."""
    state = sum(state_bytes(optimizer.state) for optimizer in optimizers)
    values: dict[str, Any] = {"state_mib": state / MIB}
    if not memory.cuda:
        return values
    import torch

    peak = memory.peak()
    whole = max(peak, first_peak)
    free, total = torch.cuda.mem_get_info()
    values |= {
        "held_mib": (torch.cuda.memory_allocated() - memory.base) / MIB,
        "peak_mib": peak / MIB,
        "whole_peak_mib": whole / MIB,
        "workspace_mib": (whole - state) / MIB,
        "process_peak_mib": (memory.base + whole) / MIB,
        "reserved_mib": torch.cuda.max_memory_reserved() / MIB,
        "driver_used_mib": (total - free) / MIB,
    }
    bound = getattr(optimizers[0], "defaults", {}).get("max_workspace_bytes")
    if bound is not None:
        values["workspace_bound_mib"] = bound / MIB
        values["within_bound"] = whole - state <= bound * (1 + WORKSPACE_TOLERANCE)
    return values


def local(tensor: Any) -> Any:
    """Return the local part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def state_bytes(state: Any) -> int:
    """Return the bytes of all tensors in nested state, each storage once, those on the host only if nothing else is."""
    import torch

    storages: dict[tuple[str, int], int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = local(value)
            storage = value.untyped_storage()
            storages[value.device.type, storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for inner in value.values():
                visit(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                visit(inner)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            visit(vars(value))  # a record of tensors, as a library of 8-bit state keeps them

    visit(dict(state))
    devices = {device for device, _ in storages}
    wanted = devices - {"cpu"} or devices
    return sum(size for (device, _), size in storages.items() if device in wanted)


def scheduler(optimizers: list[Any]) -> Callable[[int], None]:
    """Return a function that sets the learning rates of a step, as a training loop does."""
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]

    def before(index: int) -> None:
        for group, lr in groups:
            group["lr"] = lr * (1 - 1e-4 * (index + 1))

    return before


def time_graph(
    step: Callable[[], None],
    before: Callable[[int], None],
    optimizers: list[Any],
    weights: Weights,
    number: int,
    all_captured: Callable[[bool], bool] = bool,
) -> dict[str, Any]:
    """Capture a step and time its replays; a step that cannot be captured is told by `graph_error`.

    Args:
        step: what is captured.
        before: is called before each replay.
        optimizers: those that the step steps.
        weights: of which some are watched.
        number: of timed replays.
        all_captured: is told whether this rank has captured; returns whether all have. Nobody replays before.
    """
    import torch

    uploads = [one.upload_hyperparameters for one in optimizers if hasattr(one, "upload_hyperparameters")]
    reserved = torch.cuda.memory_reserved()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        start = time.perf_counter()
        captured = False
        try:
            # NCCL's watchdog asks for events from its own thread, which "global" forbids.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
            captured = True
        finally:
            others = all_captured(captured)
        if not others:
            raise RuntimeError("another rank could not capture")
        values: dict[str, Any] = {"capture_s": time.perf_counter() - start}

        def replay() -> None:
            for upload in uploads:
                upload()
            graph.replay()

        for index in range(WARMUP_STEPS):
            before(index)
            replay()
        replay_ms, replay_host_ms = time_steps(replay, before, number, cuda=True)
        values["times"] = {"replay_ms": replay_ms, "replay_host_ms": replay_host_ms}
        values["graph_mib"] = (torch.cuda.memory_reserved() - reserved) / MIB
        if uploads:
            values["replay_follows_lr"] = follows_lr(replay, optimizers, weights)
        return values
    except Exception as error:  # the libraries' own, and CUDA's
        traceback.print_exc()
        return {"graph_error": describe_error(error)}


def follows_lr(replay: Callable[[], None], optimizers: list[Any], weights: Weights) -> bool:
    """Return whether a replay reads the learning rate of now: a large one moves weights further than 0 does.

    At 0 most rules let weights stand still; one that steps to a look-ahead over averages does not. The weights are of
    no use afterwards.
    """
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    watched = [local(param.detach()) for param in (weights.matrices[0], weights.others[0])]

    def moves(factor: float) -> list[float]:
        for group, lr in groups:
            group["lr"] = factor * lr
        kept = [param.clone() for param in watched]
        replay()
        return [float((param - old).abs().max()) for old, param in zip(kept, watched, strict=True)]

    still = moves(0.0)
    # After hundreds of steps with the same gradients the usual steps are less than half a unit in the last place of
    # bfloat16 weights: they stand still then, whatever the replay reads.
    return all(far > 10 * near for far, near in zip(moves(_LARGE_LR_FACTOR), still, strict=True))
