"""The parts of Quintic's step alone: what it sends, what it computes, and the orthogonalisation in that."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.common.timing import MIB, time_device, time_steps
from benchmarks.optimizer_step.layouts.collectives import (
    Collective,
    recorded,
    reduce_scatter_and_all_gather,
    run_alone,
    without_sending,
)
from benchmarks.optimizer_step.layouts.contestants import AVERAGING
from benchmarks.optimizer_step.layouts.group import Ranks
from benchmarks.optimizer_step.measure import LEAST_STEPS


@dataclass
class Times:
    """Milliseconds of this rank by kind, to which measurements add.

    Attributes:
        ranks: of this process.
        before: called before each timed call.
        kinds: what was measured, step by step.
    """

    ranks: Ranks
    before: Callable[[int], None]
    kinds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, kind: str, call: Callable[[], None], number: int) -> None:
        """Time a call from idle devices, `KIND_ms`, and with busy ones, `KIND_device_ms`. All ranks must call it.

        CPUs have no queue: there the second is missing.
        """
        self.kinds[f"{kind}_ms"], host_ms = time_steps(call, self.before, number, self.ranks.cuda)
        self.add_busy(f"{kind}_device_ms", call, number, host_ms)

    def add_busy(self, kind: str, call: Callable[[], None], number: int, host_ms: list[float]) -> None:
        """Time a call with devices kept busy until the host is done. All ranks must call it."""
        if self.ranks.cuda:
            longest = self.ranks.largest(statistics.median(host_ms))
            self.kinds[kind] = time_device(call, self.before, number, longest)


def time_parts(step: Callable[[], None], times: Times, params: list[Any], layout: str, number: int) -> dict[str, Any]:
    """Time what a step sends, alone, and what it computes, alone. All ranks must call it.

    Args:
        step: makes one.
        times: to which is added.
        params: all parameters.
        layout: they are laid out so.
        number: of timed steps of each kind.

    Returns:
        What leaves this rank in a step.
    """
    times.before(0)
    sent = recorded(step)
    if sent:
        run = run_alone(sent)
        for _ in range(2):
            run()
        times.add("exchange", run, number)
        del run
    if layout in AVERAGING:
        numel = sum(param.numel() for param in params)
        bare = reduce_scatter_and_all_gather(numel, params[0].dtype, times.ranks.device)
        bare()
        times.add("bare_exchange", bare, number)
        del bare
    # Every rank is by itself here, with numbers that mean nothing: only times count from now on.
    compute = _without_sending(step)
    for _ in range(2):
        times.before(0)
        compute()
    times.add("compute", compute, number)
    collectives = [one for one in sent if isinstance(one, Collective)]
    if collectives:
        fill = _without_sending(run_alone(collectives))
        fill()
        times.add("fill", fill, number)
    return {"sent_mib": sum(one.sent_bytes for one in sent) / MIB, "collectives": len(sent)}


def _without_sending(call: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with without_sending():
            call()

    return run


def time_orthogonalization(optimizer: Any, ranks: Ranks) -> list[float]:
    """Return milliseconds of orthogonalising what this rank does in a step, on random numbers; nothing else is done.

    All ranks do so at the same time, as in a step. All ranks must call it.
    """
    from quintic.optim.plan.kinds import Kind, direction_dtype
    from quintic.optim.polar.orthogonalize import apply_form

    work = []
    for bucket in optimizer.plan():
        kinds = [Kind(bucket.shape, bucket.form)] if bucket.units is None else list(bucket.units.kinds)
        for kind in kinds if bucket.algorithm == "muon" else []:
            count = bucket.num_matrices // len(kinds)
            if count and kind.form is not None:
                dtype = direction_dtype(kind.form, bucket.dtype)
                work += kind.num_rounds * [(count, *kind.shape, kind.form, dtype, bucket.kernels)]
    sizes: dict[torch.dtype, int] = {}
    for count, m, n, _, dtype, _ in work:
        sizes[dtype] = max(sizes.get(dtype, 0), count * m * n)
    numbers = {dtype: torch.empty(size, dtype=dtype, device=ranks.device).normal_() for dtype, size in sizes.items()}

    def run() -> None:
        for count, m, n, form, dtype, kernels in work:
            apply_form(numbers[dtype][: count * m * n].view(count, m, n), form, kernels)

    for _ in range(3):
        run()

    def before(index: int) -> None:
        ranks.align()

    idle_ms, host_ms = time_steps(run, before, LEAST_STEPS, ranks.cuda)
    if not ranks.cuda:
        return idle_ms
    return time_device(run, before, LEAST_STEPS, ranks.largest(statistics.median(host_ms)))
