"""Runs the steps of one plan: in which order buckets are stepped, which parameters, and what ranks agree on before.

A step counts gradients over ranks, averages those that the optimizer has to, asks whether all are finite, and then runs
the buckets: those that need collectives overtaking each other (`travel_step.py`, `sharded_step.py`), the others while
the first of these is under way.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.optim.comms.collectives import this_rank
from quintic.optim.comms.communicators import Communicators
from quintic.optim.comms.sharing import dividing_ranks, layouts_of, travelling
from quintic.optim.groups.options import Group
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.members import Member
from quintic.optim.plan.order import Orders
from quintic.optim.plan.planning import build_plan
from quintic.optim.plan.replica_choices import choose_ways, divided_layouts
from quintic.optim.plan.schedule import restricted, run_overlapping
from quintic.optim.rules.device_memory import DeviceHyperparameters, is_capturing
from quintic.optim.rules.non_finite import all_finite, first_non_finite
from quintic.optim.step.agreements import Agreements
from quintic.optim.step.averages.early_averages import EarlyAverages, OfGroup
from quintic.optim.step.averages.gradient_averages import GradientAverages
from quintic.optim.step.device_passes import DeviceMemory, DevicePasses, step_adamw_on_device
from quintic.optim.step.offload.offload import Offload, OffloadedPart
from quintic.optim.step.operands import Operands, State
from quintic.optim.step.pipeline import Observer, Passes, PlainPasses, step_adamw, step_matrices
from quintic.optim.step.sharded_step import ShardedMemory, step_sharded
from quintic.optim.step.sparse_rows import AnnouncedRows
from quintic.optim.step.telemetry import Measured, StepReport, measure
from quintic.optim.step.travel_step import TravelMemory, step_travelling
from quintic.optim.step.work import Work, report, visits

__all__ = ["Done", "Runner"]


class Done(NamedTuple):
    """What became of a step."""

    report: StepReport
    go: Tensor | None
    """() int32 on a device: 0 if non-finite gradients stopped it; the same on all ranks that are connected
    (`connected.py`). None if no rank of these asks."""
    asks: bool
    """Whether this rank has a group that was stopped, or would have been."""


class Runner:
    """The plan of some parameter groups, and what its buckets keep on their devices between steps.

    Args:
        groups: validated parameter groups.
        state: of their parameters.
        communicators: connected.
        orders: in which buckets start and are worked on, where the user wants another than the plan's.
        rows: the tables whose touched rows travel.
        early: averages of gradients made before the step.

    Raises:
        ValueError: an order names a parameter that there is none of.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        state: State,
        communicators: Communicators,
        orders: Orders,
        rows: AnnouncedRows,
        early: EarlyAverages,
    ) -> None:
        self.groups, self._state, self._communicators = groups, state, communicators
        orders = orders.resolved(groups)
        layouts = [layouts_of(group) for group in groups]
        travels = [travelling(group, found) for group, found in zip(groups, layouts, strict=True)]
        choices = choose_ways(groups, travels, communicators.hosts)
        travels = divided_layouts(groups, travels, choices, communicators.hosts, this_rank())
        self.agreements = Agreements(groups, layouts, travels, choices, communicators, orders)
        divided = [dividing_ranks(group, found) for group, found in zip(groups, layouts, strict=True)]
        dividing = {number: ranks for number, ranks in enumerate(divided) if ranks}
        told = [choice for choice in choices.values() if this_rank() in choice.ranks]
        self.plan = build_plan(groups, travels, this_rank(), dividing, orders, told)
        self._rows = rows
        rows.adopt(self.plan, groups)
        self._memories = [self._new_memory(bucket) for bucket in self.plan]
        self._averages = GradientAverages(self.plan, self._memories, groups, layouts, communicators, early)
        self.plan = replace(self.plan, averaging_bytes=self._averages.workspace_bytes)
        self._offload: Offload | None = None
        if any(group.offload for group in groups):
            self._offload = Offload(self.plan, groups, state)
            self.plan = self._offload.plan
        self.measured: dict[int, dict[int, Measured]] = {}
        """Telemetry of the last sampled step of each bucket, by kind of matrix."""
        self._hyperparameters: dict[tuple[int, torch.device], DeviceHyperparameters] = {}
        self._num_steps = 0

    def upload_hyperparameters(self) -> None:
        """Bring changed hyperparameters to the devices."""
        for (number, _), values in self._hyperparameters.items():
            _update(values, self.groups[number])

    def finish(self) -> None:
        """Let the host wait until all state that is kept in host memory is there."""
        if self._offload is not None:
            self._offload.finish()

    def renew(self) -> None:
        """Find weights and state anew at the next step: they may have other memory now."""
        for memory in self._memories:
            memory.renew()

    def reachable_state(self) -> AbstractContextManager[None]:
        """Let what is computed within read and write state in host memory, copied with `non_blocking`."""
        return nullcontext() if self._offload is None else self._offload.reachable()

    def step(self, pending_steps: Sequence[int], num_steps: int) -> Done:
        """Step every bucket whose group does not wait. All ranks that share parameters must call it.

        Args:
            pending_steps: for each group how many steps it waits for after this one; 0 if it is stepped now.
            num_steps: steps made before, by which telemetry is sampled.

        Raises:
            ValueError: a gradient is sparse.
            FloatingPointError: a gradient is not finite and a group has `on_nonfinite="raise"`; nothing was changed.
            RuntimeError: the step before found rows that had not been announced, or the ranks have no memory for
                `transport="copy_engines"`; nothing was changed.
        """
        self._num_steps = num_steps
        for group in self.groups:
            if group.step_every > 1 and any(is_capturing(param.device) for param in group.params):
                raise RuntimeError("step_every counts on the host: a step with it cannot be captured in a CUDA graph")
        messages = self._communicators.messages
        with self.agreements.of_step(pending_steps), messages(), self._averages.of_step(pending_steps):
            return self._step(pending_steps)

    def average_early(self, numbers: Iterable[int]) -> Mapping[int, OfGroup]:
        """Average gradients before the next step, which then does not. All ranks that share parameters must call it.

        Args:
            numbers: of the groups whose next step it is for. Those that were averaged already, and not touched since,
                are not averaged again; those whose gradients need no average are left out.

        Returns:
            The averages of these groups.

        Raises:
            ValueError: a gradient is sparse.
        """
        self.agreements.agree()
        with self._communicators.messages():
            return self._averages.make_early(numbers)

    def _step(self, pending_steps: Sequence[int]) -> Done:
        """Step, given gradients that are averaged where they have to be."""
        try:
            due = [number for number, bucket in enumerate(self.plan) if pending_steps[bucket.group] == 0]
            works = [self._work(number) for number in due]
            self._rows.begin_step(pending_steps)
            go = self._guard(works, pending_steps)
            # From here on nothing raises that could have been known.
            host_go = True
            if go is not None and any(work.bucket.kernels == "torch" for work in works):
                host_go = bool(go)

            # Also of buckets that have nothing to step now: what they measured before is of another step.
            self.measured |= {work.number: {} for work in works if self._is_sampled(work)}
            local = [work for work in works if work.is_local(host_go)]

            def run_local() -> None:
                for work in local:
                    if work.bucket.travel is not None:
                        for _ in self._travel(work, go):
                            pass  # nothing travels in this one
                    else:
                        self._run(work, go)

            with_collectives = [work for work in works if work.bucket.travels]
            # They come first in the plan.
            schedule = restricted(self.plan.schedule, [work.number for work in with_collectives])
            if self._offload is not None:
                self._offload.begin(visits(local, with_collectives, schedule))
            run_overlapping([self._travel(work, go) for work in with_collectives], schedule, run_local)
        finally:
            self._rows.end_step()
        return Done(report(works), go, bool(self._asking(pending_steps)))

    def _work(self, number: int) -> Work:
        bucket = self.plan.buckets[number]
        group = self.groups[bucket.group]
        return Work(number, bucket, group, self._memories[number].operands(bucket, group, self._state))

    def _new_memory(self, bucket: Bucket) -> DeviceMemory:
        if bucket.sharding is not None:
            params = self.groups[bucket.group].params
            return ShardedMemory(bucket, params, self._rows.table_of(params[bucket.sharding.parts[0].index]))
        return DeviceMemory() if bucket.travel is None else TravelMemory()

    def _stepped(self, work: Work, parts: object, indices: Iterable[int], go: Tensor | None) -> Tensor | None:
        """Return () or (parameters,) int32 on the device, 0 for what must stay as it is; None if nothing must.

        Args:
            work: what is stepped.
            parts: what of it; `indices` are looked at only where this is not what it was in the last step.
            indices: positions of the parameters in their group.
            go: of the whole step.
        """
        if work.group.on_nonfinite == "propagate":
            go = None
        elif go is not None:
            go = go.to(work.bucket.device, non_blocking=True)
        stepped = self.agreements.stepped(work.number, work.bucket, parts, indices)
        return go if stepped is None else stepped if go is None else stepped * go

    def _asking(self, pending_steps: Sequence[int]) -> list[str]:
        """Return `on_nonfinite` of the groups that are stepped now and act on gradients that are not finite."""
        # Of the groups, which all ranks have in one order: a rank may have nothing of their buckets.
        due = [group for group, pending in zip(self.groups, pending_steps, strict=True) if pending == 0]
        return [group.on_nonfinite for group in due if group.on_nonfinite != "propagate" and group.params]

    def _guard(self, works: Sequence[Work], pending_steps: Sequence[int]) -> Tensor | None:
        """Return () int32 that is 0 if a step must not happen, None if no group of the connected ranks asks.

        Raises:
            FloatingPointError: it must not happen, and a group that is stepped now has `on_nonfinite="raise"`, be it
                on another rank: all connected ranks raise.
        """
        asking, connected = self._asking(pending_steps), self.agreements.connected
        watched = [work.active for work in works if work.group.on_nonfinite != "propagate"]
        gradients = [gradient for active in watched for gradient in active.gradients]
        if connected.is_alone and not gradients:
            return None
        if not connected.is_alone and not connected.asks:
            return None
        # One rank's bad gradient is everybody's; a shard may be all that a rank sees.
        device = gradients[0].device if connected.is_alone else connected.device
        go = all_finite(gradients, device)
        if not connected.may_raise:
            connected.all_agree_(go)
            return go
        if is_capturing(device):
            raise RuntimeError("on_nonfinite='raise' of another rank waits for the device: capture no CUDA graph")
        nobody_raises = torch.full_like(go, "raise" not in asking)
        flags = torch.stack([go, nobody_raises])
        connected.all_agree_(flags)
        if flags.tolist() == [0, 0]:
            name = first_non_finite([member.name for active in watched for member in active.members], gradients)
            raise FloatingPointError(
                f"{name or 'on another rank'}: the gradient has an infinite or undefined entry; nothing was updated"
            )
        return flags[0]

    def _run(self, work: Work, go: Tensor | None) -> None:
        number, bucket, group, active = work
        memory = self._memories[number]
        if bucket.algorithm == "muon":
            of_matrices = (member.index for member in active.members for _ in range(member.num_matrices))
            stepped = self._stepped(work, active.members, of_matrices, go)
            passes = self._passes(work, stepped)
            step_matrices(bucket, group, active, memory, passes, stepped, self._observer(work))
            return
        indices = (member.index for member in active.members)
        self._step_vectors(work, self._stepped(work, active.members, indices, go))

    def _step_vectors(self, work: Work, stepped: Tensor | None) -> None:
        """Step AdamW parameters; `stepped` is () or (members,) int32, see `_stepped`."""
        number, bucket, group, active = work
        parts: Iterable[OffloadedPart] = [OffloadedPart(active, self._memories[number], slice(None))]
        if self._offload is not None and self._offload.is_offloaded(number):
            parts = self._offload.parts(number, active)
        for part in parts:
            of_part = stepped if stepped is None or stepped.ndim == 0 else stepped[part.members]
            if bucket.kernels == "torch":
                step_adamw(bucket, group, _present(part.active, of_part))
            else:
                hyperparameters = self._hyperparameters_of(work)
                step_adamw_on_device(bucket, group, part.active, part.memory, hyperparameters, of_part)

    def _travel(self, work: Work, go: Tensor | None) -> Iterator[None]:
        """Step a bucket that needs collectives, see `step_travelling` and `step_sharded`."""
        number, bucket, group, active = work
        if bucket.sharding is not None:
            yield from self._step_sharded(work, go)
            return
        assert bucket.travel is not None
        memory = self._memories[number]
        assert isinstance(memory, TravelMemory)
        units = bucket.travel.units
        stepped = self._stepped(work, units, (unit.index for unit in units), go)
        yield from step_travelling(
            bucket,
            group,
            memory,
            self._passes(work, stepped) if active.params else None,
            self._state,
            self._communicators.channel(bucket.travel.exchange.ranks, group.transport, bucket.device),
            stepped,
            self._observer(work),
        )

    def _step_sharded(self, work: Work, go: Tensor | None) -> Iterator[None]:
        number, bucket, group, local = work
        memory = self._memories[number]
        assert isinstance(memory, ShardedMemory)
        sharding = memory.sharding
        memory.early_mean = self._averages.of_bucket(bucket)

        def stepped() -> Tensor:
            found = self._stepped(work, sharding.parts, (part.index for part in sharding.parts), go)
            assert found is not None
            return found

        def make_passes(active: Operands, owned: Tensor) -> Passes:
            return self._passes(work._replace(active=active), owned)

        def step_vectors(active: Operands, owned: Tensor) -> None:
            self._step_vectors(work._replace(active=active), owned)

        observer = self._observer(work)
        channel = self._communicators.channel(sharding.ranks, group.transport, bucket.device)
        yield from step_sharded(
            bucket, group, memory, self._state, channel, local, stepped, make_passes, step_vectors, observer
        )

    def _passes(self, work: Work, stepped: Tensor | None) -> Passes:
        """Return the passes over a bucket; `stepped` is () or (matrices,) int32, see `_stepped`."""
        number, bucket, group, active = work

        def make(active: Operands, group: Group, memory: DeviceMemory) -> Passes:
            if bucket.kernels == "torch":
                present = None
                if stepped is not None and stepped.ndim:
                    # All of a member's are taken, whatever they are, so that the next one finds its own.
                    of_matrices = iter(stepped.bool().tolist())
                    present = [all([*islice(of_matrices, member.num_matrices)]) for member in active.members]
                return PlainPasses(bucket, group, active, present)
            return DevicePasses(bucket, group, active, memory, self._hyperparameters_of(work), stepped)

        if self._offload is not None and self._offload.is_offloaded(number):
            return self._offload.passes(number, active, group, make)
        return make(active, group, self._memories[number])

    def _hyperparameters_of(self, work: Work) -> DeviceHyperparameters:
        key = (work.bucket.group, work.bucket.device)
        if key not in self._hyperparameters:
            self._hyperparameters[key] = DeviceHyperparameters(work.bucket.device)
        _update(self._hyperparameters[key], work.group)
        return self._hyperparameters[key]

    def _is_sampled(self, work: Work) -> bool:
        every = work.group.telemetry_every
        return every is not None and self._num_steps % every == 0 and not is_capturing(work.bucket.device)

    def _observer(self, work: Work) -> Observer | None:
        if not self._is_sampled(work):
            return None
        measured = self.measured[work.number]

        def observe(
            members: Sequence[Member], directions: Tensor, updates: Tensor, factors: Tensor, go: Tensor | None
        ) -> None:
            # A unit that travels may hold matrices of several kinds, measured one kind after the other.
            kind = members[0].first_matrix if members and members[0].piece is None else 0
            measured[kind] = Measured(list(members), measure(directions, updates, factors), go)

        return observe


def _update(values: DeviceHyperparameters, group: Group) -> None:
    values.update((group.lr, group.weight_decay, group.momentum, *group.betas, group.eps), group.lr_ratio)


def _present(active: Operands, stepped: Tensor | None) -> Operands:
    """Return the members that are stepped; waits for the device."""
    if stepped is None or stepped.ndim == 0 or bool(stepped.all()):
        return active
    keep = [number for number, flag in enumerate(stepped.tolist()) if flag]
    return Operands(
        tuple(active.members[number] for number in keep),
        [active.params[number] for number in keep],
        [active.gradients[number] for number in keep],
        [active.states[number] for number in keep],
        active.num_matrices,
    )
