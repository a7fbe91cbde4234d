"""What one step has to do: a work for each bucket of the plan that is stepped, with the gradients that are there."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quintic.optim.groups.options import Group
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.schedule import Schedule, run_overlapping
from quintic.optim.step.offload.offload import Visit
from quintic.optim.step.operands import Operands
from quintic.optim.step.telemetry import StepReport

__all__ = ["Work", "report", "visits"]


class Work(NamedTuple):
    """A bucket, its number in the plan, and the members that have a gradient now."""

    number: int
    bucket: Bucket
    group: Group
    active: Operands

    def is_local(self, host_go: bool) -> bool:
        """Return whether this rank steps the bucket alone; `host_go` is False if the host knows that it must not."""
        if self.bucket.travels or (not host_go and self.group.on_nonfinite != "propagate"):
            return False
        if self.bucket.travel is not None:
            return True
        # AdamW counts steps also of parameters of which this rank holds no entry.
        return bool(self.active.params) and (self.bucket.numel > 0 or self.bucket.algorithm == "adamw")


def visits(local: Sequence[Work], with_collectives: Sequence[Work], schedule: Schedule) -> list[Visit]:
    """Return in which order a step turns to its buckets: that in which they would be run."""
    found: list[Visit] = []

    def visit(work: Work) -> Iterator[None]:
        for stage in range(3):
            found.append(Visit(work.number, work.active, stage))
            if stage < 2:
                yield

    def visit_local() -> None:
        found.extend(Visit(work.number, work.active, None) for work in local)

    run_overlapping([visit(work) for work in with_collectives], schedule, visit_local)
    return found


def report(works: Sequence[Work]) -> StepReport:
    """Return what a step does."""
    matrices: dict[str, int] = {}
    num_adamw = 0
    missing: set[tuple[int, int]] = set()
    for _, bucket, _, active in works:
        # A parameter can have members in several buckets.
        missing.update((bucket.group, index) for index in active.missing)
        if bucket.algorithm == "adamw":
            num_adamw += len(active.members)
        elif active.num_matrices:
            matrices[bucket.method] = matrices.get(bucket.method, 0) + active.num_matrices
    return StepReport(matrices=matrices, adamw_parameters=num_adamw, without_gradient=len(missing))
