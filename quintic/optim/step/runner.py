"""Runs the steps of one plan: first the decisions that ranks make together, then the buckets, in the plan's order.

The phases of a step:

    copies      gradients of tied copies (`Muon.tie`) are added to the gradients of their originals
    presence    ranks start to count which gradients each of them has (`consensus.py`)
    averages    `comms="replicated"`: whole gradients become averages (`reduction.py`)
    cut state   averages of 8 bits whose groups lie on several ranks are float32 from here on (`cut_state.py`)
    tensors     every bucket finds its gradients, weights and state
    policy      on_nonfinite="skip" or "raise": connected ranks find out whether all of their gradients are finite
    release     with `release_gradients` only buckets refer to gradients from here on, each until it has read its own
    buckets     each is a generator (`bucket_step.py`): buckets with messages take turns by the plan's schedule, and the
                others run while the first message is under way
    ties        new weights of originals are written to their tied copies

Ranks are connected if they have parameters in common, directly or through other ranks. Connected ranks agree on whether
a step happens at all (`comms/connected.py`).

Invariant: every error that can be foreseen is raised before the first bucket runs; until then weights and state keep
their bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.optim.comms.collectives import this_rank
from quintic.optim.comms.communicators import Communicators
from quintic.optim.comms.sharing import gather_layouts, layouts_of, sharding_ranks
from quintic.optim.groups.group import Group
from quintic.optim.groups.ties import Tie, ties_of
from quintic.optim.layout.wrappers import is_opened
from quintic.optim.numeric.non_finite import all_finite, first_non_finite
from quintic.optim.plan.bucket import Bucket, Gathered, Sharded
from quintic.optim.plan.log import log_plan
from quintic.optim.plan.order import Orders
from quintic.optim.plan.planning import build_plan
from quintic.optim.plan.replicas import choose_replica_strategies, layouts_for_work
from quintic.optim.plan.schedule import Schedule, filter_schedule
from quintic.optim.rules.device import is_capturing
from quintic.optim.state.cut_state import cut_state_of
from quintic.optim.step.bucket_step import NO_OPERANDS, BucketStep, StepContext, run_overlapping
from quintic.optim.step.consensus import RankConsensus
from quintic.optim.step.offload.offload import Offload
from quintic.optim.step.operands import BucketCache, State
from quintic.optim.step.ranges import is_profiled
from quintic.optim.step.reduction import Reduction
from quintic.optim.step.sparse_rows import AnnouncedRows
from quintic.optim.step.telemetry import Counts
from quintic.optim.step.transports import Gather, Shard, Transport

__all__ = ["Runner", "StepOutcome"]

_COUNTS, _WORKSPACE_BYTES = attrgetter("counts"), attrgetter("bucket.workspace_bytes")


class StepOutcome(NamedTuple):
    """The outcome of a step."""

    # The counts of each bucket that was stepped.
    counts: list[Counts]
    # () int32 on a device: 0 if non-finite gradients stopped the step; the same on all connected ranks. None if no
    # group on these ranks acts on such gradients.
    apply_mask: Tensor | None
    # Whether non-finite gradients would stop a group that was due on this rank.
    guards_nonfinite: bool


class Runner:
    """Steps the buckets of one plan.

    Args:
        groups: the parameter groups with their present options.
        state: the state of their parameters; it may be empty until the first step.
        communicators: the optimizer's process groups.
        orders: the names of parameters whose buckets the user wants first.
        rows: the optimizer's tables that send only touched rows; they outlive the plan.
        reduction: averages gradients over ranks; it outlives the plan, with averages that clipping made before a step.

    Raises:
        ValueError: an order names a parameter that no group has.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        state: State,
        communicators: Communicators,
        orders: Orders,
        rows: AnnouncedRows,
        reduction: Reduction,
    ) -> None:
        # Which parameters need messages, and between which ranks.
        orders = orders.resolved(groups)
        # For each group and parameter its layout; in `gathered` only if its matrices come to an owner, else None.
        layouts = [layouts_of(group) for group in groups]
        gathered = [gather_layouts(group, of_group) for group, of_group in zip(groups, layouts, strict=True)]
        choices = choose_replica_strategies(groups, gathered, communicators.hosts)
        gathered = layouts_for_work(groups, gathered, choices, communicators.hosts, this_rank())
        self.consensus = RankConsensus(groups, layouts, gathered, choices, communicators, orders)
        sharded = [sharding_ranks(group, of_group) for group, of_group in zip(groups, layouts, strict=True)]
        sharded_groups = {number: ranks for number, ranks in enumerate(sharded) if ranks}
        choices_to_report = [choice for choice in choices.values() if this_rank() in choice.ranks]
        self.plan = build_plan(groups, gathered, this_rank(), sharded_groups, orders, choices_to_report)
        # Make the objects that step the plan's buckets.
        self._rows = rows
        rows.sync_tables(self.plan, groups)
        self._cut_state = cut_state_of(groups, state, communicators)
        stepped = state if self._cut_state is None else self._cut_state
        self.context = StepContext(groups, stepped, communicators, self.consensus)
        if any(group.offload for group in groups):
            self.context.offload = Offload(self.plan, groups, state)
            self.plan = self.context.offload.plan
        self._steps = [self._new_step(number, bucket) for number, bucket in enumerate(self.plan)]
        shards = [step.transport for step in self._steps if isinstance(step.transport, Shard)]
        # Tied copies of parameters.
        self.ties = ties_of(groups)
        # Copies whose original is stepped by more than one bucket: they are written after all buckets.
        self.late_ties: list[Tie] = []
        # Any other copy is written by the only bucket with its original, while other buckets are still under way.
        for tie in self.ties:
            of_head = [s for s in self._steps if s.bucket.group == tie.head_group and tie.head_name in s.bucket.names]
            (of_head[0].copies if len(of_head) == 1 else self.late_ties).append(tie)
        self._reduction = reduction
        reduction.use_plan(groups, layouts, shards)
        cut_state_bytes = 0 if self._cut_state is None else self._cut_state.workspace_bytes
        self.plan = replace(self.plan, averaging_bytes=reduction.workspace_bytes, cut_state_bytes=cut_state_bytes)
        # Indices of the buckets with messages in a step -> the plan's schedule without all other buckets.
        self._schedules: dict[tuple[int, ...], Schedule] = {}
        log_plan(self.plan, groups, this_rank())

    def upload_hyperparameters(self) -> None:
        """Copy changed hyperparameters to the devices, before a CUDA graph is replayed that reads them there."""
        for key in self.context.hyperparameters:
            self.context.hyperparameters_of(*key)

    def finish(self) -> None:
        """Wait on the host until all state that belongs in host memory has arrived there."""
        if self.context.offload is not None:
            self.context.offload.finish()

    def invalidate_views(self) -> None:
        """Make the next step look up weights and state again, because their memory may have changed."""
        for step in self._steps:
            step.cache.invalidate_views()
            if isinstance(step.transport, Shard):
                step.transport.invalidate_views()

    def reachable_state(self) -> AbstractContextManager[None]:
        """Return a context in which the current streams may copy state in host memory with `non_blocking=True`."""
        return nullcontext() if self.context.offload is None else self.context.offload.reachable()

    def step(
        self,
        steps_waited: Sequence[int],
        num_steps: int,
        *,
        skips_nonfinite: bool = False,
        release_gradients: bool = False,
    ) -> StepOutcome:
        """Step every bucket whose group is due. All ranks with common parameters must call it.

        Args:
            steps_waited: for each group 0 if it is stepped now, and otherwise the number of steps since it was
                (`PlanCache.steps_waited`).
            num_steps: the number of steps made before; it decides whether telemetry is sampled.
            skips_nonfinite: whether gradients that are not finite stop the step of all groups, also of those with
                `on_nonfinite="propagate"`; the same on all ranks.
            release_gradients: whether to free each gradient as soon as it has been read; `p.grad` is then None.

        Raises:
            ValueError: a gradient is sparse.
            FloatingPointError: a gradient is not finite and a group has `on_nonfinite="raise"`; nothing was changed.
            RuntimeError: the step before found rows that had not been announced; nothing was changed.
        """
        self.context.num_steps, self.context.skips_nonfinite = num_steps, skips_nonfinite
        for tie in self.ties:
            if steps_waited[tie.head_group] == 0:
                tie.add_gradient()
        # A step on one rank has nothing to count or average with others.
        if self.context.is_single_rank:
            return self._step(steps_waited, release_gradients)
        reduction, cut = self._reduction, self._cut_state
        averaged = reduction.of_step(steps_waited) if reduction.whole or reduction.cached else nullcontext()
        wide = nullcontext() if cut is None else cut.of_step(steps_waited)
        with self.consensus.of_step(steps_waited), averaged, wide:
            # The first step learns this, when ranks have compared their plans.
            self.context.is_single_rank = self.consensus.is_single_rank and not reduction.ranks
            return self._step(steps_waited, release_gradients)

    def end_step(self, steps_waited: Sequence[int]) -> None:
        """Forget averages and added gradients of the groups that were stepped; also after a CUDA graph's replay."""
        for tie in self.ties:
            if steps_waited[tie.head_group] == 0:
                tie.end_step()
        self._reduction.forget(number for number, pending in enumerate(steps_waited) if pending == 0)

    def _step(self, steps_waited: Sequence[int], release_gradients: bool) -> StepOutcome:
        """Step the groups that are due; the phases from `tensors` on."""
        steps = [step for step in self._steps if steps_waited[step.bucket.group] == 0]
        self.context.is_profiled = is_profiled()
        policies = self._nonfinite_policies(steps_waited)
        try:
            # tensors
            for step in steps:
                step.begin()
            if self._rows.tables:
                self._rows.begin_step(steps_waited)
            # policy
            apply_mask = self._nonfinite_mask(steps, policies)
            # release. All foreseeable errors have been raised, so no gradient is needed for another try.
            if release_gradients:
                self._release_gradients(steps_waited)
            # buckets. Weights change from here on.
            self._run(steps, apply_mask, release_gradients)
            for tie in self.late_ties:
                if steps_waited[tie.head_group] == 0:
                    tie.write()
        finally:
            # Let go of the gradients, after an error too.
            for step in steps:
                step.active = NO_OPERANDS
            if self._rows.tables:
                self._rows.end_step()
        return StepOutcome(list(map(_COUNTS, steps)), apply_mask, bool(policies))

    def _release_gradients(self, steps_waited: Sequence[int]) -> None:
        """Drop all references to gradients of groups that are due, except those in `BucketStep.active`."""
        due = [number for number, pending in enumerate(steps_waited) if pending == 0]
        for number in due:
            for param in self.context.groups[number].params:
                # Only wrappers with a gradient are written back after the step (`PlanCache.end_step`).
                if not is_opened(param):
                    param.grad = None
        # Gradients of tied copies were added to the gradients of their originals.
        for tie in self.ties:
            if steps_waited[tie.head_group] == 0:
                tie.copy.grad = None
        # Averages that clipping made, and addends of Partial gradients; buckets have the results.
        self._reduction.forget(due)
        self.consensus.partial.forget_replaced()

    def _run(self, steps: Sequence[BucketStep], apply_mask: Tensor | None, release_gradients: bool) -> None:
        """Run buckets with messages by the plan's schedule, and all others while the first message is under way."""
        # Plain PyTorch reads the mask on the host, once for all buckets; kernels read it on the device.
        host_mask = True
        if apply_mask is not None and any(step.bucket.kernels == "torch" for step in steps):
            host_mask = bool(apply_mask)
        numbers: tuple[int, ...] = ()
        with_comm, local, generators, local_generators = [], [], [], []
        for step in steps:
            if step.bucket.needs_comm:  # these come first in the plan
                numbers += (step.number,)
                with_comm.append(step)
                generators.append(step.run(apply_mask))
            elif step.has_local_work and (host_mask or not step.is_guarded):
                local.append(step)
                local_generators.append(step.run(apply_mask))
            elif release_gradients:
                step.active = step.active._replace(gradients=[])  # nothing reads them
        if release_gradients:
            # Buckets that need much memory run when gradients of the others are freed.
            local.sort(key=_WORKSPACE_BYTES)
            local_generators = [step.run(apply_mask) for step in local]
        # If only some groups are due, their buckets keep the order that they have in the plan.
        if numbers not in self._schedules:
            self._schedules[numbers] = filter_schedule(self.plan.schedule, numbers)
        schedule = self._schedules[numbers]
        if self.context.offload is not None:
            operands = {step.number: step.active for step in steps}
            self.context.offload.begin(_order_of_phases(local, with_comm, schedule), operands)
        run_overlapping(generators, schedule, local_generators)

    def _new_step(self, number: int, bucket: Bucket) -> BucketStep:
        """Return the object that steps a bucket, with its cache and its transport."""
        # Another rank may have a gradient that this one lacks. A `Gathered` bucket then works on zeros, and the mask of
        # the step decides whether the result is used.
        context, cache = self.context, BucketCache(fills_missing=isinstance(bucket, Gathered))
        transport: Transport | None = None
        if isinstance(bucket, Gathered):
            transport = Gather(bucket, context.communicators)
        elif isinstance(bucket, Sharded):
            params = context.groups[bucket.group].params
            # None unless the bucket is a table that sends only touched rows.
            table = self._rows.tables.get(params[bucket.shards[0].index])
            transport = Shard(bucket, params, table, context.communicators)
        return BucketStep(number, bucket, transport, cache, context)

    def _nonfinite_policies(self, steps_waited: Sequence[int]) -> list[str]:
        """Return the option `on_nonfinite` of each group that is due and acts on gradients that are not finite."""
        if self.context.skips_nonfinite:
            return ["skip"]
        # Read the groups, which are equal on all ranks, and not the buckets, which a rank may lack.
        policies: list[str] = []
        for group, pending in zip(self.context.groups, steps_waited, strict=True):
            if pending == 0 and group.on_nonfinite != "propagate" and group.params:
                policies.append(group.on_nonfinite)
        return policies

    def _nonfinite_mask(self, steps: Sequence[BucketStep], policies: Sequence[str]) -> Tensor | None:
        """Return () int32 that is 0 if the step must not happen; None if no group of the connected ranks can stop it.

        Raises:
            FloatingPointError: a gradient is not finite, and a group that is due has `on_nonfinite="raise"`. All
                connected ranks raise, if the gradient or the group is on another rank, too.
            RuntimeError: a CUDA graph is being captured, and a group of another rank has `on_nonfinite="raise"`.
        """
        connected = self.consensus.connected
        if not (policies if connected.is_single_rank else connected.guards_nonfinite or policies):
            return None
        watched = [step.active for step in steps if step.is_guarded]
        gradients = [gradient for active in watched for gradient in active.gradients]
        if connected.is_single_rank and not gradients:
            return None
        # A non-finite entry in any shard must stop the step on every connected rank.
        device = gradients[0].device if connected.is_single_rank else connected.device
        # () int32; all connected ranks take the smallest.
        apply_mask = all_finite(gradients, device)
        if not connected.may_raise:
            connected.all_agree_(apply_mask)
            return apply_mask
        if is_capturing(device):
            raise RuntimeError("on_nonfinite='raise' of another rank waits for the device: capture no CUDA graph")
        # (2,) int32: 1 if all gradients are finite, and 1 if this rank does not want to raise. The smallest over the
        # connected ranks holds for all of them.
        none_raises = torch.full_like(apply_mask, "raise" not in policies)
        flags = torch.stack([apply_mask, none_raises])
        connected.all_agree_(flags)
        if flags.tolist() == [0, 0]:
            # Flags are the same on all connected ranks, so all come here. Each names its first such gradient, if any.
            name = first_non_finite([member.name for active in watched for member in active.members], gradients)
            messages = (f"on rank {rank}: {theirs}" for rank, theirs in connected.all_gather(name).items() if theirs)
            where = name or next(messages, "on another rank")
            raise FloatingPointError(f"{where}: the gradient has an infinite or undefined entry; nothing was updated")
        return flags[0]


def _order_of_phases(
    local: Sequence[BucketStep], with_comm: Sequence[BucketStep], schedule: Schedule
) -> Iterator[tuple[int, int | None]]:
    """Yield (index of a bucket, phase that it enters) in the order of a step, by which offload loads state ahead."""
    # A bucket with messages appears three times in the schedule: started, computed, finished.
    phases = [iter(range(3)) for _ in with_comm]
    for number in schedule:
        if number is None:
            yield from ((step.number, None) for step in local)
        else:
            yield with_comm[number].number, next(phases[number])
