"""The plan and the state that follow from an optimizer's groups, current whenever they are asked for.

Users change options of groups, others move, convert or exchange parameters. So everything looks first: at the
parameters, then at the options, which are checked again; then the plan is made anew if it depends on what has changed,
and state is made, moved along or left as it is (`sync.py`). `StepHistory` counts the steps, and reports the last one.
`CycledMomentum` and `SharedRates` carry what schedulers and callbacks write in some groups over to others.
"""

from collections.abc import Container, Mapping, Sequence
from copy import copy
from dataclasses import replace
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quintic.optim.comms.communicators import Communicators
from quintic.optim.comms.comparing import PLANNED_OPTIONS
from quintic.optim.comms.sharing import layouts_of
from quintic.optim.first_gradients import FirstGradients
from quintic.optim.group_keys import WATCHED_KEYS, settle_keys
from quintic.optim.groups.options import CHECKED_OPTIONS, Group, needs_state
from quintic.optim.layout.wrappers import OPENED, close, open_for_step
from quintic.optim.plan.order import Orders
from quintic.optim.qk_clip.step import QKStep
from quintic.optim.rules.table import orthogonalizes
from quintic.optim.state.parameters import Parameter, connected_parameters
from quintic.optim.state.sync import Change, ParamFingerprint, StateSync
from quintic.optim.step.averaging import PrecomputedAverages
from quintic.optim.step.runner import Runner, StepOutcome
from quintic.optim.step.sparse_rows import AnnouncedRows
from quintic.optim.step.telemetry import StepReport, report_of
from quintic.optim.validate import check_group, check_scheduled

__all__ = ["ADDED_WITH", "CycledMomentum", "PlanCache", "SharedRates", "States", "StepHistory"]

ADDED_WITH = "added_with"
"""The key of groups that one group was divided into: the number of the first of them."""

# What schedulers leave in groups whose momentum they cycle.
_CYCLED_KEY = "max_momentum"

States: TypeAlias = dict[Tensor, dict[str, Any]]

_PARAMS = itemgetter("params")

_Dictionaries: TypeAlias = Sequence[dict[str, Any]]
"""Parameter groups as PyTorch keeps them."""


class PlanCache:
    """The plan, the communicators and what else one optimizer has for its groups.

    Methods are given the optimizer's groups and state, which PyTorch keeps, and others may replace. They raise a
    ValueError or TypeError that names the parameter or the option where a group that was changed cannot be stepped.
    """

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.groups: list[Group] = []
        """The groups at the last look; none, to keep no parameters alive, while nothing was made for them."""
        self.communicators = Communicators()
        self.rows = AnnouncedRows(self.communicators)
        self.precomputed = PrecomputedAverages()
        self.runner: Runner | None = None
        """The runner of the plan, if there is one."""
        self._state_sync = StateSync()
        self._fingerprint: ParamFingerprint | None = None
        """The parameters that something was made for, if anything was."""
        self._idle: list[Tensor] = []
        """Frozen parameters. They are in no bucket until they require gradients or are given one."""
        self._qk_step: QKStep | None = None
        self._num_planned_hosts = 0
        """The number of sets of ranks that had told each other of their hosts when the plan was made."""

    def add(self, number: int, dictionary: dict[str, Any]) -> None:
        """Check a new group and connect its ranks, which must all call it; an error changes nothing."""
        check_group(number, dictionary)
        group = Group.of(number, dictionary)
        self.communicators.connect([group], [layouts_of(group)])
        self.invalidate()

    def invalidate(self) -> None:
        """Forget the plan, and have state looked at closely when it is needed next."""
        self.drop_plan()
        self._state_sync.is_stale = True

    def drop_plan(self) -> None:
        """Forget the plan; the next one to ask makes another."""
        if self.runner is not None:
            self.runner.finish()
        self.runner = None
        self._qk_step = None

    def planned(self, dictionaries: _Dictionaries, states: States) -> Runner:
        """Return the runner of the plan. No state is made, and nothing is communicated."""
        self.refresh(dictionaries)
        if self.runner is None:
            self.runner = Runner(self.groups, states, self.communicators, self.orders, self.rows, self.precomputed)
            self._num_planned_hosts = len(self.communicators.hosts)
            self._take_fingerprint()
        return self.runner

    def connected(self, dictionaries: _Dictionaries, states: States) -> Runner:
        """Like `planned`, and connects ranks before the first step. All that share parameters must call it.

        They tell each other then on which hosts they are, which the plan may depend on.
        """
        self.refresh(dictionaries)
        if self.runner is not None and self.runner.consensus.plans_validated:
            return self.runner
        runner = self.planned(dictionaries, states)
        if not runner.consensus.plans_validated:
            self.communicators.connect(self.groups, [layouts_of(group) for group in self.groups])
            if self._num_planned_hosts != len(self.communicators.hosts):
                self.drop_plan()
                runner = self.planned(dictionaries, states)
        return runner

    def use_state(self, states: States) -> None:
        """Let all parameters have the state that they need, in a step that is `planned` and changes it."""
        if OPENED:
            for group in self.groups:
                for param in group.params:
                    open_for_step(param)
        if not self._state_sync.is_current(self.groups, states):
            self._make_state(states)
        self._state_sync.use()

    def close_wrappers(self, steps_until_due: Sequence[int]) -> None:
        """Write the stepped copies of opened weights back.

        Weights that were not stepped are left alone: rounding them once more may change them.
        """
        for group, pending in zip(self.groups, steps_until_due, strict=True):
            for param in group.params if not pending else ():
                if param.grad is not None:
                    close(param)

    def needed_state(self, dictionaries: _Dictionaries, states: States) -> States:
        """Return the state, all of it made and nothing under way."""
        self.refresh(dictionaries)
        self._make_state(states)
        if self.runner is not None:
            self.runner.finish()
        return states

    def give_state(self, dictionaries: _Dictionaries, states: States) -> None:
        """Like `needed_state`, for callers that may replace tensors; cheap if nothing changed."""
        self.refresh(dictionaries)
        if self._state_sync.is_stale:
            self._make_state(states)
        if self.runner is not None:
            self.runner.finish()
        self._state_sync.is_given = True

    def end_load(self, states: States, without: Container[Tensor], names: Mapping[str, str]) -> None:
        """Record that state was loaded for all parameters except `without`; drop entries at their defaults.

        Frozen parameters without loaded state have none from now on. `names` has the new names of parameters that had
        made-up ones.
        """
        self._state_sync.use()
        self._state_sync.drop_unused(states)
        for number, group in enumerate(self.groups):
            frozen = {i for i, param in enumerate(group.params) if param in without and not param.requires_grad}
            if not frozen <= group.idle:
                self.groups[number] = replace(group, idle=group.idle | frozen)
                self.invalidate()
        if names:
            self.orders = self.orders.renamed(names)
            self.invalidate()
        if not states and self.runner is None:
            self._fingerprint, self.groups, self._idle = None, [], []

    def parameters(self) -> list[Parameter]:
        """Return the parameters that this rank has a part in. All ranks that share parameters must call it."""
        return connected_parameters(self.groups, self.communicators)

    def start_qk_step(self, runner: Runner, states: States, logits: Mapping[Any, Tensor]) -> QKStep | None:
        """Begin QK-clip in a `planned` step, if it was asked for. All ranks that share parameters must call it."""
        qk_clip = next((group.qk_clip for group in self.groups if group.qk_clip is not None), None)
        if qk_clip is None:
            if not isinstance(logits, Mapping) or logits:
                raise ValueError(
                    "step got qk_logits, but no QK-clip was asked for: quintic.Muon(..., qk_clip=QKClip(...))"
                )
            return None
        runner.consensus.validate_plans()
        if self._qk_step is None or self._qk_step.clip != qk_clip:
            self._qk_step = QKStep(qk_clip, self.groups, states, self.communicators)
        self._qk_step.start(logits)
        return self._qk_step

    def refresh(self, dictionaries: _Dictionaries) -> None:
        """Notice parameters that were moved or exchanged; bring `groups` up to date, and check those that changed."""
        if self._fingerprint is not None:
            change = self._fingerprint.check(list(map(_PARAMS, dictionaries)))
            if change is Change.PARAMETERS:
                self.invalidate()
            elif change is Change.MEMORY and self.runner is not None:
                self.runner.invalidate_views()
        for number, dictionary in enumerate(dictionaries):
            if not dictionary.keys().isdisjoint(WATCHED_KEYS):
                settle_keys(number, dictionary)
        if any(map(needs_state, self._idle)):
            self.invalidate()
        same_number = len(self.groups) == len(dictionaries)
        if same_number and not self._state_sync.is_stale and all(map(Group.is_as_in, self.groups, dictionaries)):
            return
        groups, must_plan = [], False
        # Freezing a parameter that has state changes nothing: a frozen one that was stepped may be stepped again.
        awake = {param for group in self.groups for i, param in enumerate(group.params) if i not in group.idle}
        for number, dictionary in enumerate(dictionaries):
            before = self.groups[number] if number < len(self.groups) else None
            group = Group.of(number, dictionary, awake)
            if self._state_sync.is_stale or before is None or not group.agrees(before, CHECKED_OPTIONS):
                # FSDP1 did not flatten a group that only switched to algorithm="muon": its vectors are vectors.
                was_checked = before is not None and before.algorithm == group.algorithm
                check_group(number, dictionary, was_checked=was_checked)
            else:
                check_scheduled(number, dictionary)
            must_plan |= before is None or not group.agrees(before, PLANNED_OPTIONS)
            groups.append(group)
        self.groups = groups
        self._idle = [group.params[index] for group in groups for index in group.idle]
        if must_plan:
            self.invalidate()  # which state there is, and where, follows from these options, too
        elif self.runner is not None:
            self.runner.context.groups = groups

    def _make_state(self, states: States) -> None:
        if self._state_sync.is_current(self.groups, states):
            return
        if self.runner is not None:
            self.runner.finish()
            self.runner.invalidate_views()
        self._state_sync.bring_up_to_date(self.groups, states)
        self._take_fingerprint()

    def _take_fingerprint(self) -> None:
        if self._fingerprint is None:
            self._fingerprint = ParamFingerprint([group.params for group in self.groups])


class StepHistory:
    """Counts of steps, and the report of the last one."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.first_gradients: FirstGradients | None = FirstGradients()
        """None when there is nothing to find out any more."""
        self.rejected_steps: Sequence[int] | None = None
        """Pending steps of a step that gradients that are not finite made raise, until they are mended or reset."""
        self._last = StepOutcome([], None, False)
        self._waiting = self._qk_layers = 0
        self._skipped: Tensor | None = None
        """() int64 on a device: steps stopped."""

    def count(self, outcome: StepOutcome, *, waiting: int, qk_layers: int, is_replayed: bool = False) -> None:
        """Note a step; the host waits for nothing. A CUDA graph that is replayed has captured `count_skips`."""
        self.num_steps += 1
        self._last, self._waiting, self._qk_layers = outcome, waiting, qk_layers
        if outcome.guards_nonfinite and not is_replayed:
            self.count_skips(outcome)

    def count_skips(self, outcome: StepOutcome) -> None:
        """Count on the device whether non-finite gradients stopped a step."""
        if outcome.apply_mask is None or not outcome.guards_nonfinite:
            return
        if self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.int64, device=outcome.apply_mask.device)
        self._skipped += 1 - outcome.apply_mask

    def report(self) -> StepReport:
        """Return the report of the last step; waits for the device."""
        counts, apply_mask, guards_nonfinite = self._last
        return replace(
            report_of(counts),
            waiting=self._waiting,
            qk_layers=self._qk_layers,
            skipped=guards_nonfinite and apply_mask is not None and not bool(apply_mask),
            skipped_steps=0 if self._skipped is None else int(self._skipped),
        )

    def copy(self) -> "StepHistory":
        """Return a copy that later steps do not change."""
        twin = copy(self)
        twin._skipped = None if self._skipped is None else self._skipped.clone()
        return twin

    def restore(self, kept: "StepHistory") -> None:
        """Take back what was known when `copy` was called."""
        skipped = self._skipped
        vars(self).update(vars(kept))
        if skipped is not None and kept._skipped is not None:
            self._skipped = skipped.copy_(kept._skipped)  # a CUDA graph may count there


class CycledMomentum:
    """Copies the momentum that schedulers write into `betas` to the `momentum` of Muon groups."""

    def __init__(self) -> None:
        self._seen: list[tuple[dict[str, Any], object]] = []
        """Muon groups, with the `betas` they had when they were last looked at."""

    def watch(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take the groups as they are: only what is written from now on counts."""
        self._seen = [(group, group["betas"]) for group in groups if orthogonalizes(group["algorithm"])]

    def follow(self) -> None:
        """Set the momentum of groups whose `betas` a scheduler has written since."""
        for place, (group, seen) in enumerate(self._seen):
            if group["betas"] is not seen:
                if _CYCLED_KEY in group:
                    group["momentum"] = group["betas"][0]
                self._seen[place] = group, group["betas"]


class SharedRates:
    """Gives the groups that one group was divided into one learning rate when a callback sets that of the last one."""

    def __init__(self) -> None:
        self.sets: list[list[tuple[dict[str, Any], Any]]] = []
        """Groups that were added together, the last one last, each with the rate that it had."""

    def watch(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take the groups as they are: only what is written from now on counts."""
        together: dict[Any, list[tuple[dict[str, Any], Any]]] = {}
        for group in groups:
            if group.get(ADDED_WITH) is not None:
                together.setdefault(group[ADDED_WITH], []).append((group, group["lr"]))
        self.sets = [alike for alike in together.values() if len(alike) > 1]

    def follow(self) -> None:
        """Copy the rate of the last group to the others, if only that one was written."""
        for place, alike in enumerate(self.sets):
            *others, (last, before) = alike
            if last["lr"] is before:
                continue
            for group, rate in others:
                # A group whose rate a scheduler or the user has set keeps it.
                if group["lr"] is rate and (rate is before or float(rate) == float(before)):
                    group["lr"] = last["lr"]
            self.sets[place] = [(group, group["lr"]) for group, _ in alike]
