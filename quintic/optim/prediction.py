"""How long a rehearsed step takes on a machine: a model with few numbers, described with its limits in docs/plan.md."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.optim.machine import Machine
from quintic.optim.plan import direction_dtype, update_dtype
from quintic.optim.rehearsal import Load, Rehearsal
from quintic.optim.traffic import Cargo, traffic_of

__all__ = ["BucketTimes", "StepTimes", "predict", "step_times"]


class BucketTimes(NamedTuple):
    """Seconds of the parts of a bucket that travels, on the rank that needs longest for each."""

    directions: float
    gather: float
    compute: float
    scatter: float
    apply: float


class StepTimes(NamedTuple):
    """Seconds of one step."""

    total: float
    compute: float
    """Of computing alone."""
    collectives: float
    """Of sending alone, were nothing computed meanwhile."""

    @property
    def waiting(self) -> float:
        """Return the seconds in which a rank only waits for what is sent."""
        return self.total - self.compute


def step_times(buckets: Sequence[BucketTimes], meanwhile: float) -> StepTimes:
    """Return the time of a step that runs as `run_travelling` does: one bucket ahead, one behind.

    The device computes one thing at a time, collectives run one at a time beside it, both in the order of their start.

    Args:
        buckets: that travel, in the order of the plan.
        meanwhile: seconds of everything else, computed while the first bucket is gathered.
    """
    device = links = 0.0  # when each of them is free
    gathered, scattered = [0.0] * len(buckets), [0.0] * len(buckets)

    def begin(number: int) -> None:
        nonlocal device, links
        device += buckets[number].directions
        links = gathered[number] = max(links, device) + buckets[number].gather

    def end(number: int) -> None:
        nonlocal device
        device = max(device, scattered[number]) + buckets[number].apply

    if buckets:
        begin(0)
    device += meanwhile
    for number, bucket in enumerate(buckets):
        if number + 1 < len(buckets):
            begin(number + 1)
        device = max(device, gathered[number]) + bucket.compute
        links = scattered[number] = max(links, device) + bucket.scatter
        if number:
            end(number - 1)
    if buckets:
        end(len(buckets) - 1)
    compute = meanwhile + sum(bucket.directions + bucket.compute + bucket.apply for bucket in buckets)
    return StepTimes(device, compute, sum(bucket.gather + bucket.scatter for bucket in buckets))


def predict(rehearsal: Rehearsal, machine: Machine) -> StepTimes:
    """Return how long a rehearsed step takes on a machine."""
    meanwhile = torch.zeros(rehearsal.num_ranks, dtype=torch.float64)
    buckets = []
    for load in rehearsal.loads:
        device_times = _device_times(load, machine)
        if load.cargo is None:
            meanwhile += torch.stack(device_times).sum(0)
            continue
        directions, compute, apply = (float(seconds.max()) for seconds in device_times)
        gather, scatter = _link_times(load.cargo, machine)
        buckets.append(BucketTimes(directions, gather, compute, scatter, apply))
    return step_times(buckets, float(meanwhile.max()))


def _device_times(load: Load, machine: Machine) -> tuple[Tensor, Tensor, Tensor]:
    """Return the seconds of directions, of orthogonalisation and of the weights' update; (ranks,) float64."""
    memory = machine.memory_gb_s * 1e9
    weight = load.dtype.itemsize
    master = {"fp32": 4, "mantissa": 2}.get(load.master or "", 0) if weight < 4 else 0
    # Per entry: state, and weights with what completes them, are read and written, gradients are read.
    state, weights = 2 * max(4, weight), 2 * (weight + master)
    entries, owned = load.entries.double(), load.owned_entries.double()
    if not load.shapes:
        update_times = entries * (weight + 2 * state + weights) / memory
        return torch.zeros_like(update_times), torch.zeros_like(update_times), update_times
    direction, update = direction_dtype(load.form, load.dtype), update_dtype(load.form, load.dtype)
    peak = machine.tflops if update.itemsize == 2 else machine.tflops_fp32
    # Normalised before the products; besides put together before that, and taken apart behind them.
    copied = (1 if load.cargo is None else 3) * (direction.itemsize + update.itemsize)
    products = load.flops.double() / (peak * machine.efficiency * 1e12)
    return (
        entries * (weight + state + direction.itemsize) / memory,
        products + owned * copied / memory,
        entries * (update.itemsize + weights) / memory,
    )


def _link_times(cargo: Cargo, machine: Machine) -> tuple[float, float]:
    """Return the seconds of a gather and a scatter: those of the rank that sends or receives most."""
    exchange = cargo.exchange
    inside = traffic_of(cargo, torch.tensor(exchange.ranks) // machine.ranks_per_node)
    everything = traffic_of(cargo)

    def seconds(*numbers: int) -> float:
        longest = 0.0
        for number in numbers:
            near = inside[number].double()
            far = everything[number].double() - near
            if exchange.is_replicated:
                # An all-gather passes a byte from node to node once, over the links of all ranks of a node.
                near, far = near + far, far / min(machine.ranks_per_node, len(exchange.ranks))
            times = torch.maximum(near / (machine.node_gb_s * 1e9), far / (machine.network_gb_s * 1e9))
            longest = max(longest, float(times.max()))
        return longest

    latency = machine.latency_us * 1e-6
    gather = 0.0 if exchange.is_replicated else seconds(0, 1) + latency
    return gather, seconds(2, 3) + latency * (2 if cargo.factors else 1)
