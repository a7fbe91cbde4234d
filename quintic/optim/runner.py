"""Runs the steps of one plan: in which order buckets are stepped, which parameters, and what ranks agree on before.

A step counts gradients over ranks, averages those that the optimizer has to, asks whether all are finite, and then runs
the buckets: those that need collectives overtaking each other (`travel_step.py`, `sharded_step.py`), the others while
the first of these is under way.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintic.kernels.dispatch import choose_kernels
from quintic.optim.agreements import Agreements
from quintic.optim.averaging import Averaging, averaging_bytes
from quintic.optim.comms import Communicators, all_agree_, this_rank
from quintic.optim.device_memory import DeviceHyperparameters, is_capturing
from quintic.optim.device_passes import DeviceMemory, DevicePasses, step_adamw_on_device
from quintic.optim.early_averages import EarlyAverages, OfGroup
from quintic.optim.non_finite import all_finite, first_non_finite
from quintic.optim.offload import Offload, Part, Visit
from quintic.optim.pipeline import (
    Observer,
    Operands,
    Passes,
    PlainPasses,
    State,
    dense_gradient,
    operands,
    step_adamw,
    step_matrices,
)
from quintic.optim.plan import Bucket, Member
from quintic.optim.schedule import Orders, Schedule, restricted, run_overlapping
from quintic.optim.sharded import CUT_KEYS
from quintic.optim.sharded_step import ShardedMemory, start_mean, step_sharded
from quintic.optim.sharing import AVERAGING, dividing_ranks, layouts_of, ranks_of, travelling
from quintic.optim.sparse_rows import AnnouncedRows
from quintic.optim.telemetry import StepReport, measure
from quintic.optim.travel import build_plan
from quintic.optim.travel_step import TravelMemory, step_travelling

__all__ = ["Done", "Runner"]


class Done(NamedTuple):
    """What became of a step."""

    report: StepReport
    go: Tensor | None
    """() int32 on a device: 0 if non-finite gradients stopped it; None if no group asks."""


class Work(NamedTuple):
    """A bucket, its number in the plan, and the members that have a gradient now."""

    number: int
    bucket: Bucket
    group: dict[str, Any]
    active: Operands


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
        groups: list[dict[str, Any]],
        state: State,
        communicators: Communicators,
        orders: Orders,
        rows: AnnouncedRows,
        early: EarlyAverages,
    ) -> None:
        self.groups, self._state, self._communicators, self._orders = groups, state, communicators, orders
        orders.check(name for group in groups for name in group["param_names"])
        self._layouts = [layouts_of(number, group) for number, group in enumerate(groups)]
        self.agreements = Agreements(groups, self._layouts, communicators, orders)
        layouts = [travelling(group, found) for group, found in zip(groups, self._layouts, strict=True)]
        divided = [dividing_ranks(group, found) for group, found in zip(groups, self._layouts, strict=True)]
        dividing = {number: ranks for number, ranks in enumerate(divided) if ranks}
        self.plan = build_plan(groups, layouts, this_rank(), dividing, orders)
        averaging = [
            averaging_bytes(group["params"], len(ranks_of(found)), group["max_workspace_bytes"])
            for group, found in zip(groups, self._layouts, strict=True)
            if group["comms"] == "replicated" and any(found)
        ]
        self.plan = replace(self.plan, averaging_bytes=max(averaging, default=0))
        self._rows, self._early = rows, early
        self._early_now: Mapping[int, OfGroup] = {}
        rows.adopt(self.plan, groups)
        self._offload: Offload | None = None
        if any(group["offload"] for group in groups):
            self._offload = Offload(self.plan, groups, state)
            self.plan = self._offload.plan
        self.measured: dict[tuple[int, int], tuple[list[Member], Tensor]] = {}
        """Telemetry of the last sampled step, by bucket and kind of matrix."""
        self._memory: dict[int, DeviceMemory] = {}
        self._hyperparameters: dict[tuple[int, torch.device], DeviceHyperparameters] = {}
        self._averagings: dict[object, Averaging] = {}
        self._num_steps = 0

    def upload_hyperparameters(self) -> None:
        """Bring changed hyperparameters to the devices."""
        for (number, _), values in self._hyperparameters.items():
            values.update(self.groups[number])

    def finish(self) -> None:
        """Let the host wait until all state that is kept in host memory is there."""
        if self._offload is not None:
            self._offload.finish()

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
            RuntimeError: the step before found rows that had not been announced; nothing was changed.
        """
        self._num_steps = num_steps
        self.agreements.start()
        self._early_now = self._early.fresh()
        lent = self._average_gradients(pending_steps)
        try:
            works = self._works(pending_steps)
            self._rows.begin_step(self.groups)
            go = self._guard(works)
            # From here on nothing raises that could have been known.
            host_go = True
            if go is not None and any(work.bucket.kernels == "torch" for work in works):
                host_go = bool(go)

            local = [work for work in works if _is_local(work, host_go)]

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
                self._offload.begin(_visits(local, with_collectives, schedule))
            run_overlapping([self._travel(work, go) for work in with_collectives], schedule, run_local)
        finally:
            self._rows.end_step()
            for param in lent:
                param.grad = None
        self._early.forget(number for number, pending in enumerate(pending_steps) if pending == 0)
        return Done(_report(works, self._memory), go)

    def _works(self, pending_steps: Sequence[int]) -> list[Work]:
        """Return what there is to do."""
        works = []
        for number, bucket in enumerate(self.plan):
            if pending_steps[bucket.group] == 0:
                group, memory = self.groups[bucket.group], self._memory_of(number)
                works.append(Work(number, bucket, group, operands(bucket, group, self._state, memory)))
        return works

    def _memory_of(self, number: int) -> DeviceMemory:
        if number not in self._memory:
            self._memory[number] = self._new_memory(self.plan.buckets[number])
        return self._memory[number]

    def _new_memory(self, bucket: Bucket) -> DeviceMemory:
        if bucket.sharding is not None:
            params = self.groups[bucket.group]["params"]
            return ShardedMemory(bucket, params, self._rows.table_of(params[bucket.sharding.parts[0].index]))
        return DeviceMemory() if bucket.travel is None else TravelMemory()

    def _average_gradients(self, pending_steps: Sequence[int]) -> list[Tensor]:
        """Average the gradients of groups with `comms="replicated"`, in place.

        Returns:
            The parameters that have a gradient only until the step is over, because other ranks have one.
        """
        lent: list[Tensor] = []
        for number, (group, pending, layouts) in enumerate(zip(self.groups, pending_steps, self._layouts, strict=True)):
            if group["comms"] != "replicated" or pending or not any(layouts):
                continue
            early = self._early_now.get(number)
            if early is None:
                lent += self._average_group(number)
                continue
            for param, average in early.lent.items():
                param.grad = average
                lent.append(param)
        return lent

    def _average_group(self, number: int) -> list[Tensor]:
        """Average the gradients of one group in place; arguments and result as above."""
        lent = []
        group, ranks = self.groups[number], ranks_of(self._layouts[number])
        together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, (param, name) in enumerate(zip(group["params"], group["param_names"], strict=True)):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
                lent.append(param)
            param.grad = dense_gradient(param, param.grad, name)
            together.setdefault((param.grad.dtype, param.device), []).append(index)
        for indices in together.values():
            gradients = [group["params"][index].grad for index in indices]
            key = number, tuple(indices), gradients[0].dtype
            if key not in self._averagings:
                kernels = choose_kernels(group["kernels"], gradients[0])
                bound = group["max_workspace_bytes"]
                position = ranks.index(this_rank())
                self._averagings[key] = Averaging(gradients, len(ranks), position, kernels, bound)
            self._averagings[key].average_(gradients, self._communicators[ranks])
        return lent

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
        found = self._early.fresh()
        due = [n for n in numbers if self.groups[n]["comms"] in AVERAGING and any(self._layouts[n])]
        for number in due:
            if number in found:
                continue
            params = self.groups[number]["params"]
            if self.groups[number]["comms"] == "replicated":
                lent = self._average_group(number)
                found[number] = OfGroup(params, {param: param.grad for param in lent if param.grad is not None})
                for param in lent:
                    param.grad = None
            else:
                found[number] = OfGroup(params, {}, {param: self._own_entries(param) for param in params})
                buckets = [(n, bucket) for n, bucket in enumerate(self.plan) if bucket.group == number]
                run_overlapping([self._average_bucket(n, bucket, found[number]) for n, bucket in buckets])
        self._early.keep(found)
        return {number: found[number] for number in due}

    def _own_entries(self, param: Tensor) -> Tensor:
        state = self._state[param]
        numel = next(state[key].numel() for key in CUT_KEYS if key in state)
        return param.new_zeros(numel)

    def _average_bucket(self, number: int, bucket: Bucket, averages: OfGroup) -> Iterator[None]:
        memory = self._memory_of(number)
        assert isinstance(memory, ShardedMemory)
        assert bucket.sharding is not None
        wait_for_mean = start_mean(bucket, memory, self._communicators[bucket.sharding.ranks])
        yield
        averages.keep_bucket(bucket, wait_for_mean())
        yield

    def _stepped(self, work: Work, parts: object, indices: Iterable[int], go: Tensor | None) -> Tensor | None:
        """Return () or (parameters,) int32 on the device, 0 for what must stay as it is; None if nothing must.

        Args:
            work: what is stepped.
            parts: what of it; `indices` are looked at only where this is not what it was in the last step.
            indices: positions of the parameters in their group.
            go: of the whole step.
        """
        if work.group["on_nonfinite"] == "propagate":
            go = None
        elif go is not None:
            go = go.to(work.bucket.device, non_blocking=True)
        stepped = self.agreements.stepped(work.number, work.bucket, parts, indices)
        return go if stepped is None else stepped if go is None else stepped * go

    def _guard(self, works: Sequence[Work]) -> Tensor | None:
        """Return () int32 that is 0 if a step must not happen, None if no group asks."""
        asking = [work for work in works if work.group["on_nonfinite"] != "propagate"]
        watched = [work.active for work in asking]
        gradients = [gradient for active in watched for gradient in active.gradients]
        travels = any(layout is not None for found in self._layouts for layout in found)
        if not gradients and not (travels and asking):
            return None
        go = all_finite(gradients, gradients[0].device if gradients else asking[0].bucket.device)
        if travels:
            # One rank's bad gradient is everybody's; a shard may be all that a rank sees.
            all_agree_(go, asking[0].group["process_group"])
        if any(work.group["on_nonfinite"] == "raise" for work in works) and not bool(go):
            name = first_non_finite([member.name for active in watched for member in active.members], gradients)
            raise FloatingPointError(
                f"{name or 'on another rank'}: the gradient has an infinite or undefined entry; nothing was updated"
            )
        return go

    def _run(self, work: Work, go: Tensor | None) -> None:
        number, bucket, group, active = work
        memory = self._memory[number]
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
        parts: Iterable[Part] = [Part(active, self._memory[number], slice(None))]
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
        memory = self._memory[number]
        assert isinstance(memory, TravelMemory)
        units = bucket.travel.units
        stepped = self._stepped(work, units, (unit.index for unit in units), go)
        yield from step_travelling(
            bucket,
            group,
            memory,
            self._passes(work, stepped) if active.params else None,
            self._state,
            self._communicators[bucket.travel.exchange.ranks],
            stepped,
            self._observer(work),
        )

    def _step_sharded(self, work: Work, go: Tensor | None) -> Iterator[None]:
        number, bucket, group, _ = work
        sharding, memory = bucket.sharding, self._memory[number]
        assert sharding is not None
        assert isinstance(memory, ShardedMemory)
        if bucket.group in self._early_now:
            memory.early_mean = self._early_now[bucket.group].of_bucket(bucket)
        stepped = self._stepped(work, sharding.parts, (part.index for part in sharding.parts), go)
        assert stepped is not None
        owned = stepped[sharding.of_owners[sharding.position]]

        def make_passes(active: Operands) -> Passes:
            return self._passes(work._replace(active=active), owned)

        def step_vectors(active: Operands, owned: Tensor) -> None:
            self._step_vectors(work._replace(active=active), owned)

        observer = self._observer(work)
        process_group = self._communicators[sharding.ranks]
        yield from step_sharded(
            bucket, group, memory, self._state, process_group, stepped, make_passes, step_vectors, observer
        )

    def _passes(self, work: Work, stepped: Tensor | None) -> Passes:
        """Return the passes over a bucket; `stepped` is () or (matrices,) int32, see `_stepped`."""
        number, bucket, group, active = work

        def make(active: Operands, group: Mapping[str, Any], memory: DeviceMemory) -> Passes:
            if bucket.kernels == "torch":
                present = None
                if stepped is not None and stepped.ndim:
                    of_matrices = iter(stepped.bool().tolist())
                    present = [all(islice(of_matrices, member.num_matrices)) for member in active.members]
                return PlainPasses(bucket, group, active, present)
            return DevicePasses(bucket, group, active, memory, self._hyperparameters_of(work), stepped)

        if self._offload is not None and self._offload.is_offloaded(number):
            return self._offload.passes(number, active, group, make)
        return make(active, group, self._memory[number])

    def _hyperparameters_of(self, work: Work) -> DeviceHyperparameters:
        key = (work.bucket.group, work.bucket.device)
        if key not in self._hyperparameters:
            self._hyperparameters[key] = DeviceHyperparameters(work.bucket.device)
        self._hyperparameters[key].update(work.group)
        return self._hyperparameters[key]

    def _observer(self, work: Work) -> Observer | None:
        every = work.group["telemetry_every"]
        if every is None or self._num_steps % every or is_capturing(work.bucket.device):
            return None

        def observe(members: Sequence[Member], directions: Tensor, updates: Tensor, factors: Tensor) -> None:
            # A unit that travels may hold matrices of several kinds, measured one kind after the other.
            key = (work.number, members[0].first_matrix if members and members[0].piece is None else 0)
            self.measured[key] = list(members), measure(directions, updates, factors)

        return observe


def _is_local(work: Work, host_go: bool) -> bool:
    """Return whether this rank steps a bucket by itself; `host_go` is False where the host knows that it must not."""
    if work.bucket.travels or (not host_go and work.group["on_nonfinite"] != "propagate"):
        return False
    if work.bucket.travel is not None:
        return True
    # AdamW counts steps also of parameters of which this rank holds no entry.
    return bool(work.active.params) and (work.bucket.numel > 0 or work.bucket.algorithm == "adamw")


def _visits(local: Sequence[Work], with_collectives: Sequence[Work], schedule: Schedule) -> list[Visit]:
    """Return in which order a step turns to its buckets: that in which they would be run."""
    visits: list[Visit] = []

    def visit(work: Work) -> Iterator[None]:
        for stage in range(3):
            visits.append(Visit(work.number, work.active, stage))
            if stage < 2:
                yield

    def visit_local() -> None:
        visits.extend(Visit(work.number, work.active, None) for work in local)

    run_overlapping([visit(work) for work in with_collectives], schedule, visit_local)
    return visits


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


def _report(works: Sequence[Work], memories: Mapping[int, DeviceMemory]) -> StepReport:
    matrices: dict[str, int] = {}
    num_adamw = without = 0
    seen: set[tuple[int, int]] = set()
    for number, bucket, _, active in works:
        missing = len(bucket.members) - len(active.members)
        if bucket.sharding is not None:
            present = {member.index for member in active.members}
            absent = {part.index for part in bucket.sharding.parts} - present
            seen |= {(bucket.group, index) for index in absent}
            missing = 0
        elif bucket.travel is not None and active.members:
            rows = zip(active.members, memories[number].owners, strict=True)
            seen |= {(bucket.group, member.index) for member, owner in rows if owner.grad is None}
        if bucket.algorithm == "adamw":
            num_adamw += len(active.members)
            without += missing
            continue
        if active.num_matrices:
            matrices[bucket.method] = matrices.get(bucket.method, 0) + active.num_matrices
        if missing:
            # A parameter can have members in several buckets.
            absent = {member.index for member in bucket.members} - {member.index for member in active.members}
            seen |= {(bucket.group, index) for index in absent}
    return StepReport(matrices=matrices, adamw_parameters=num_adamw, without_gradient=without + len(seen))
