"""The step of one bucket of a plan: its parameters, the update of its matrices, and the measurements of it.

`LocalStep` has a bucket that this rank has alone, `shared_step.py` those shared with others. Whoever has the matrices,
`BucketStep.updated` makes updates of their directions: orthogonalisation, then factors of neurons. Before and after it
come the passes over gradients, momentum and weights, in plain PyTorch or as kernels.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from quintic.optim.comms.collectives import ProcessGroup
from quintic.optim.comms.communicators import Communicators
from quintic.optim.groups.options import Group
from quintic.optim.groups.ties import Tie
from quintic.optim.plan.bucket import Bucket, Local, ParameterUnit
from quintic.optim.plan.members import Member
from quintic.optim.plan.schedule import Schedule, one_ahead
from quintic.optim.polar.forms import Form
from quintic.optim.polar.orthogonalize import apply_form, apply_function
from quintic.optim.rules.device_memory import DeviceHyperparameters, is_capturing
from quintic.optim.rules.update import neuron_factors_
from quintic.optim.state.parts import Part
from quintic.optim.step.agreements import Agreements
from quintic.optim.step.averaging import EarlyAverages
from quintic.optim.step.device_passes import DevicePasses, step_adamw_on_device
from quintic.optim.step.offload.offload import Offload, OffloadedPart
from quintic.optim.step.operands import BucketMemory, Operands, State
from quintic.optim.step.plain_passes import Passes, PlainPasses, step_adamw
from quintic.optim.step.ranges import NO_RANGES, Ranges, ranges_of
from quintic.optim.step.telemetry import Counts, Measured, measure

__all__ = ["NO_OPERANDS", "BucketStep", "LocalStep", "PlanWide", "orthogonalized", "run_overlapping"]

NO_OPERANDS = Operands((), [], [], [], 0)
"""The operands of a bucket that is not being stepped: gradients are let go of."""


@dataclass(slots=True)
class PlanWide:
    """The objects that all buckets of a plan are stepped with."""

    groups: Sequence[Group]
    """As they are now."""
    state: State
    communicators: Communicators
    agreements: Agreements
    early: EarlyAverages
    """Averages of gradients, made before the step."""
    offload: Offload | None = None
    is_alone: bool = False
    """Whether a step needs no other rank's agreement or gradients; not before ranks have agreed."""
    num_steps: int = 0
    """Made before this one."""
    is_profiled: bool = False
    """Whether a profiler runs in this step, and shows what each bucket does."""
    skips_nonfinite: bool = False
    """Whether gradients that are not finite stop this step of all groups, whatever their options."""
    measured: dict[int, dict[int, Measured]] = field(default_factory=dict)
    """Telemetry of the last sampled step of each bucket, by kind of matrix."""
    hyperparameters: dict[tuple[int, torch.device], DeviceHyperparameters] = field(default_factory=dict)

    def hyperparameters_of(self, number: int, device: torch.device) -> DeviceHyperparameters:
        """Return a group's hyperparameters on a device, up to date."""
        on_device = self.hyperparameters.get((number, device))
        if on_device is None:
            on_device = self.hyperparameters[number, device] = DeviceHyperparameters(device)
        group = self.groups[number]
        # Most steps ask once for each bucket, and a group is another object when it has changed.
        if on_device.is_of is not group:
            on_device.update(group.hyperparameters, group.lr_ratio)
            on_device.is_of = None if on_device.is_live else group
        return on_device


class BucketStep:
    """Steps one bucket of a plan, with what it keeps between steps (memory) and what all buckets share (common)."""

    def __init__(self, number: int, bucket: Bucket, memory: BucketMemory, common: PlanWide) -> None:
        self.number, self.bucket, self.memory, self._common = number, bucket, memory, common
        self.group = common.groups[bucket.group]
        """As it is now."""
        self.active = NO_OPERANDS
        """The members that have a gradient, within a step."""
        self.counts = Counts(bucket, 0, 0, ())
        """The numbers of matrices and parameters that the step steps."""
        self.written: list[Tie] = []
        """Copies of its parameters, which are written when they have been stepped."""
        self.ranges: Ranges = NO_RANGES
        """The contexts in which its stages run, within a step."""
        self.is_guarded = False
        """Whether gradients that are not finite stop this step of the bucket."""
        self._is_sampled = False
        """Whether updates of this step are measured."""

    def run(self, go: Tensor | None) -> Iterator[None]:
        """Step the bucket; yields twice, while a message is under way, or not at all.

        Where `go`, () int32 on a device, is zero nothing changes; None for always.
        """
        raise NotImplementedError

    @cached_property
    def process_group(self) -> ProcessGroup:
        """The process group of the bucket's ranks, which are connected before the first step and stay so."""
        return self._common.communicators[self.bucket.ranks]

    def begin(self) -> None:
        """Find the tensors of a step."""
        self.group = self._common.groups[self.bucket.group]
        self.active = active = self.memory.operands(self.bucket, self.group, self._common.state)
        self.counts = Counts(self.bucket, len(active.members), active.num_matrices, active.missing)
        self.ranges = ranges_of(self.number, self.bucket) if self._common.is_profiled else NO_RANGES
        self.is_guarded = self._common.skips_nonfinite or self.group.on_nonfinite != "propagate"
        every = self.group.telemetry_every
        is_due = every is not None and self._common.num_steps % every == 0
        self._is_sampled = is_due and not is_capturing(self.bucket.device)
        if self._is_sampled:
            # Also without anything to step now: what was measured before is of another step.
            self._common.measured[self.number] = {}

    def runs_alone(self, host_go: bool) -> bool:
        """Return whether this rank has something to do that needs no messages.

        `host_go` is False if the host knows that a gradient is not finite.
        """
        return not self.bucket.travels and (host_go or not self.is_guarded)

    def stepped(self, go: Tensor | None, parts: Sequence[Member | Part | ParameterUnit]) -> Tensor | None:
        """Return () or (parts,) int32 on the device, 0 for what must stay as it is; None if nothing must.

        `go` is of the whole step; the parts, which are stepped together, are the bucket's.
        """
        if not self.is_guarded:
            go = None
        elif go is not None:
            go = go.to(self.bucket.device, non_blocking=True)
        if self._common.is_alone:
            return go
        stepped = self._common.agreements.stepped(self.number, self.bucket, parts, self.indices_of)
        return go if stepped is None else stepped if go is None else stepped * go

    def indices_of(self, parts: Sequence[Member | Part | ParameterUnit]) -> list[int]:
        """Return the position in the group of the parameter that each flag of `stepped` is for."""
        return [part.index for part in parts]

    def passes(self, active: Operands, stepped: Tensor | None) -> Passes:
        """Return the passes over some operands; `stepped` is () or (matrices,) int32, see `stepped`."""
        offload = self._common.offload
        if offload is not None and offload.is_offloaded(self.number):
            return offload.passes(self.number, active, self.group, stepped, self.passes_over)
        return self.passes_over(active, self.group, self.memory, stepped)

    def passes_over(self, active: Operands, group: Group, memory: BucketMemory, stepped: Tensor | None) -> Passes:
        """Return the same for operands with the state on the device, of another view perhaps, with their memory."""
        bucket = self.bucket
        if bucket.kernels == "torch":
            present = None if stepped is None or stepped.ndim == 0 else _present(active, stepped)
            return PlainPasses(bucket, group, active, present, memory.places)
        hyperparameters = self._common.hyperparameters_of(bucket.group, bucket.device)
        return DevicePasses(bucket, group, active, memory, hyperparameters, stepped)

    def step_vectors(self, active: Operands, stepped: Tensor | None) -> None:
        """Step AdamW parameters; `stepped` is () or (members,) int32, see `stepped`."""
        bucket, group, offload = self.bucket, self.group, self._common.offload
        parts: Iterable[OffloadedPart] = [OffloadedPart(active, self.memory, slice(None))]
        if offload is not None and offload.is_offloaded(self.number):
            parts = offload.parts(self.number, active)
        for part in parts:
            of_part = stepped if stepped is None or stepped.ndim == 0 else stepped[part.members]
            if bucket.kernels == "torch":
                operands = part.active
                if of_part is not None and of_part.ndim:
                    operands = _those_stepped(operands, of_part)
                step_adamw(bucket, group, operands)
            else:
                hyperparameters = self._common.hyperparameters_of(bucket.group, bucket.device)
                step_adamw_on_device(bucket, group, part.active, part.memory, hyperparameters, of_part)

    def updated(
        self,
        members: Sequence[Member],
        directions: Tensor,
        form: Form | None,
        scales: Tensor,
        moments: Sequence[Tensor] | None,
        go: Tensor | None,
        kind: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Return updates (b, m, n) in `update_dtype`, and what multiplies them besides the rate, (b, m or 1, n or 1).

        Directions are (b, m, n), of members of one kind; without a form the group's function orthogonalises them.
        Scales, (b, 1, 1), are the learning-rate scale times the own multiplier. With `normalize="neuron"` second
        moments, (matrices, m, 1) or (matrices, 1, n) tensors that are together those of the batch, are advanced. Where
        `go`, () or (b,) int32 on the device, is zero they stay; None for nowhere. A sampled step is measured.
        """
        with self.ranges["orthogonalize"]:
            update, factors = orthogonalized(directions, form, self.bucket, self.group), scales
        if moments is not None:
            table = self.memory.neuron_table(self.bucket, moments, (member.name for member in members), kind)
            with self.ranges["normalize neurons"]:
                factors = _neuron_factors(update, scales, moments, table, float(self.group.normalize_beta), go)
        if self._is_sampled:
            values = measure(directions, update, factors)
            self._common.measured[self.number][kind] = Measured(list(members), values, go)
        return update, factors


class LocalStep(BucketStep):
    """Steps a bucket that this rank has whole: momentum, orthogonalisation, neuron factors, weights; or AdamW."""

    bucket: Local

    def runs_alone(self, host_go: bool) -> bool:
        """See `BucketStep`; without gradients there is nothing to do."""
        # AdamW counts steps also of parameters of which this rank holds no entry.
        has_work = bool(self.active.params) and (self.bucket.numel > 0 or not self.bucket.rule.orthogonalizes)
        return has_work and (host_go or not self.is_guarded)

    def run(self, go: Tensor | None) -> Iterator[None]:
        """Step the bucket; nothing travels."""
        members = self.active.members
        stepped = self.stepped(go, members)
        if self.bucket.rule.orthogonalizes:
            self._step_matrices(stepped)
        else:
            with self.ranges["update"]:
                self.step_vectors(self.active, stepped)
        return iter(())

    def indices_of(self, parts: Sequence[Member | Part | ParameterUnit]) -> list[int]:
        """See `BucketStep`: there is a flag for each matrix."""
        if not self.bucket.rule.orthogonalizes:
            return super().indices_of(parts)
        return [member.index for member in self.active.members for _ in range(member.num_matrices)]

    def _step_matrices(self, go: Tensor | None) -> None:
        bucket, group, active, memory = self.bucket, self.group, self.active, self.memory
        assert bucket.shape is not None
        passes = self.passes(active, go)
        with self.ranges["momentum"]:
            directions = passes.directions()
        scales = memory.scales(bucket, group, active.members, [bucket.shape], _numbers_of).view(-1, 1, 1)
        moments = None if group.normalize is None else memory.moments(group.view, active)
        update, factors = self.updated(active.members, directions, bucket.form, scales, moments, go)
        del directions
        if group.scale_decay:
            factors = torch.cat([factors, scales.expand_as(factors)])
        with self.ranges["update weights"]:
            passes.apply(update, factors)


def orthogonalized(directions: Tensor, form: Form | None, bucket: Bucket, group: Group) -> Tensor:
    """Return the updates (b, m, n) of a bucket's directions: a new tensor, in `update_dtype`."""
    if form is not None:
        return apply_form(directions, form, bucket.kernels)
    assert callable(group.orthogonalizer)
    return apply_function(directions, group.orthogonalizer, bucket.name)


def _neuron_factors(
    update: Tensor, scales: Tensor, moments: Sequence[Tensor], table: Tensor | None, beta: float, go: Tensor | None
) -> Tensor:
    """Return scales times the factors of neurons; advance the second moments, by a kernel if there is a table."""
    if table is not None:
        from quintic.kernels.update.neuron import advance_neuron_factors_

        return advance_neuron_factors_(update, table, scales, beta=beta, go=go)
    before = torch.cat(list(moments))
    after = before.clone()
    factors = neuron_factors_(update, after, beta=beta)
    if go is not None:
        after = torch.where(go.view(-1, 1, 1) != 0, after, before)
    torch._foreach_copy_(list(moments), list(after.split([moment.shape[0] for moment in moments])))
    return scales * factors


def _numbers_of(members: Sequence[Member]) -> list[tuple[int]]:
    return [(member.first_matrix + i,) for member in members for i in range(member.num_matrices)]


def _present(active: Operands, stepped: Tensor) -> list[bool]:
    """Return for each member whether it is stepped; waits for the device."""
    # All of a member's matrices are taken, whatever they are, so that the next one finds its own.
    of_matrices = iter(stepped.bool().tolist())
    return [all([*islice(of_matrices, member.num_matrices)]) for member in active.members]


def _those_stepped(active: Operands, stepped: Tensor) -> Operands:
    """Return the members that are stepped; waits for the device."""
    if bool(stepped.all()):
        return active
    rows = zip(active.gradients, stepped.tolist(), strict=True)
    return active.present([gradient if flag else None for gradient, flag in rows])


def run_overlapping(
    steps: Sequence[Iterator[None]], schedule: Schedule | None = None, meanwhile: Callable[[], None] | None = None
) -> None:
    """Run steps of three parts, divided by two yields, such that collectives are under way while others compute.

    Every rank of a process group must run the same steps in the same order. Without a schedule each starts before the
    work on the one before it, and is finished after the work on the next; `meanwhile` is work without collectives.
    """
    for number in one_ahead(len(steps)) if schedule is None else schedule:
        if number is not None:
            next(steps[number], None)
        elif meanwhile is not None:
            meanwhile()
