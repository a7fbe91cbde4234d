"""Caches the plan that follows from an optimizer's groups, and keeps it and the state current.

Users change options of groups; libraries move, convert or exchange parameters. None of them tells the optimizer, so
every use of the cache begins with `refresh`:

1. Compare parameters with those of the plan: were tensors replaced, or has their memory changed?
2. Compare options with their last values. Check the groups with a change, and make a new `Group` of each.
3. If the plan depends on a change (`options_affecting("plan")`), drop it and mark the state stale.

The plan is built, ranks are connected and state is made (`state/sync.py`) by the first use that needs them.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

from torch import Tensor

from quintic.optim.comms.communicators import Communicators
from quintic.optim.comms.sharing import layouts_of
from quintic.optim.group_keys import WATCHED_KEYS, settle_keys
from quintic.optim.groups.group import Group, needs_state
from quintic.optim.groups.options import options_affecting
from quintic.optim.layout.wrappers import OPENED, close, open_for_step
from quintic.optim.linked_options import LinkedOptions
from quintic.optim.plan.order import Orders
from quintic.optim.qk_clip.step import QKStep
from quintic.optim.state.parameters import Parameter, connected_parameters
from quintic.optim.state.sync import Change, ParamFingerprint, StateSync
from quintic.optim.step.averaging import PrecomputedAverages
from quintic.optim.step.runner import Runner
from quintic.optim.step.sparse_rows import AnnouncedRows
from quintic.optim.validate import CHECKED_OPTIONS, check_group, check_scheduled

__all__ = ["PlanCache", "States"]

_PLANNED_OPTIONS = options_affecting("plan")

States: TypeAlias = dict[Tensor, dict[str, Any]]

_PARAMS, _QK_CLIP = itemgetter("params"), attrgetter("qk_clip")


class PlanCache:
    """The plan of one optimizer, its ranks' communicators, and the groups and state that they belong to.

    Methods raise a ValueError or TypeError that names the parameter or the option where a group was changed and cannot
    be stepped any more.
    """

    def __init__(self, home: Mapping[str, Any], links: LinkedOptions, orders: Orders) -> None:
        """Begin without a plan.

        Args:
            home: the optimizer's `"param_groups"` and `"state"`, which belong to PyTorch and may be replaced.
            links: options that follow others, brought up to date by every `refresh`.
            orders: names of the parameters whose buckets come first.
        """
        self._home, self._links = home, links
        self.orders = orders
        self.groups: list[Group] = []
        """The groups at the last refresh; none while nothing was made for them, so that no parameter is kept alive."""
        self.communicators = Communicators()
        self.rows = AnnouncedRows(self.communicators)
        self.precomputed = PrecomputedAverages()
        self.runner: Runner | None = None
        """The runner of the plan, if there is one."""
        self._state_sync = StateSync()
        self._fingerprint: ParamFingerprint | None = None
        """The parameters for which a plan or state was made, if any was."""
        self._idle: list[Tensor] = []
        """Frozen parameters. They are in no bucket until they require gradients or are given one."""
        self._qk_step: QKStep | None = None
        self._num_planned_hosts = 0
        """The number of sets of ranks that had told each other their hosts when the plan was made."""

    def add(self, number: int, dictionary: dict[str, Any]) -> None:
        """Check a new group and connect its ranks, which must all call it; an error changes nothing."""
        check_group(number, dictionary)
        group = Group.of(number, dictionary)
        self.communicators.connect([group], [layouts_of(group)])
        self.invalidate()

    def invalidate(self) -> None:
        """Drop the plan, and compare all state with its parameters when it is needed next."""
        self.drop_plan()
        self._state_sync.is_stale = True

    def drop_plan(self) -> None:
        """Drop the plan; it is built again when it is needed next."""
        # Transfers to host memory may be under way.
        if self.runner is not None:
            self.runner.finish()
        self.runner = None
        self._qk_step = None

    def current_groups(self) -> Sequence[Group]:
        """Return the groups as a step would see them now: checked, frozen and typed."""
        self.refresh()
        return self.groups

    def planned(self) -> Runner:
        """Return the runner of the plan for the groups as they are now; makes no state and communicates nothing."""
        self.refresh()
        if self.runner is None:
            self.runner = Runner(
                self.groups, self._home["state"], self.communicators, self.orders, self.rows, self.precomputed
            )
            self._num_planned_hosts = len(self.communicators.hosts)
            self._take_fingerprint()
        return self.runner

    def connected(self) -> Runner:
        """Return the runner, with ranks connected. All ranks that share parameters must call it.

        Before the first step they tell each other on which hosts they are, and the plan may depend on it.
        """
        self.refresh()
        # Until plans are validated, ranks may not have told each other of their hosts.
        if self.runner is not None and self.runner.consensus.plans_validated:
            return self.runner
        runner = self.planned()
        if not runner.consensus.plans_validated:
            self.communicators.connect(self.groups, [layouts_of(group) for group in self.groups])
            if self._num_planned_hosts != len(self.communicators.hosts):
                self.drop_plan()
                runner = self.planned()
        return runner

    def steps_until_due(self) -> list[int]:
        """Return for each planned group how many steps it waits for after the next one; 0 if that steps it."""
        return [
            # Tied copies are never stepped on their own, so they wait in every step.
            (dictionary["pending_steps"] + 1) % group.step_every or (group.step_every if group.tied_to else 0)
            for dictionary, group in zip(self._home["param_groups"], self.groups, strict=True)
        ]

    def end_step(self, steps_until_due: Sequence[int]) -> None:
        """Write opened weights back, and let each group wait for the steps that it still has to."""
        if OPENED:
            self._close_wrappers(steps_until_due)
        self.advance(steps_until_due)

    def advance(self, steps_until_due: Sequence[int]) -> None:
        """Set each group's count of steps, after a step that was made or rejected."""
        if self.runner is not None and (self.runner.ties or self.precomputed.groups):
            self.runner.end_step(steps_until_due)
        for dictionary, pending in zip(self._home["param_groups"], steps_until_due, strict=True):
            dictionary["pending_steps"] = pending % dictionary["step_every"]

    def use_state(self) -> None:
        """Make the state that is missing, for a step that is planned and changes it."""
        # Weights inside other libraries' wrappers are stepped as plain copies, and written back by `end_step`.
        if OPENED:
            for group in self.groups:
                for param in group.params:
                    open_for_step(param)
        if not self._state_sync.is_current(self.groups, self._home["state"]):
            self._make_state()
        self._state_sync.use()

    def needed_state(self) -> States:
        """Return the state of all parameters: all of it made, and none on its way between devices."""
        self.refresh()
        self._make_state()
        if self.runner is not None:
            self.runner.finish()
        states: States = self._home["state"]
        return states

    def give_state(self) -> None:
        """Like `needed_state`, for callers that may replace tensors; cheap if nothing changed."""
        self.refresh()
        if self._state_sync.is_stale:
            self._make_state()
        if self.runner is not None:
            self.runner.finish()
        self._state_sync.is_given = True

    def end_load(self, without: Container[Tensor], names: Mapping[str, str]) -> None:
        """Record that state was loaded, and drop entries at their defaults.

        Args:
            without: parameters without loaded state. The frozen ones among them have none from now on.
            names: {made-up name: loaded name} of parameters that had no names of their own.
        """
        self._state_sync.use()
        self._state_sync.drop_unused(self._home["state"])
        for number, group in enumerate(self.groups):
            frozen = {i for i, param in enumerate(group.params) if param in without and not param.requires_grad}
            if not frozen <= group.idle:
                self.groups[number] = replace(group, idle=group.idle | frozen)
                self.invalidate()
        if names:
            self.orders = self.orders.renamed(names)
            self.invalidate()
        # Without state and plan nothing needs the groups, and references to them would keep parameters alive.
        if not self._home["state"] and self.runner is None:
            self._fingerprint, self.groups, self._idle = None, [], []

    def parameters(self) -> list[Parameter]:
        """Return the parameters that this rank holds a piece of. All ranks that share parameters must call it."""
        self.planned()
        return connected_parameters(self.groups, self.communicators)

    def start_qk_step(self, runner: Runner, logits: Mapping[Any, Tensor]) -> QKStep | None:
        """Begin QK-clip in a step, if a group asks for it. All ranks that share parameters must call it."""
        qk_clip = next(filter(None, map(_QK_CLIP, self.groups)), None)
        if qk_clip is None:
            if not isinstance(logits, Mapping) or logits:
                raise ValueError(
                    "step got qk_logits, but no QK-clip was asked for: quintic.Muon(..., qk_clip=QKClip(...))"
                )
            return None
        # All ranks find out here whether their groups differ, before any waits for logits of another one.
        runner.consensus.validate_plans()
        if self._qk_step is None or self._qk_step.clip != qk_clip:
            self._qk_step = QKStep(qk_clip, self.groups, self._home["state"], self.communicators)
        self._qk_step.start(logits)
        return self._qk_step

    def refresh(self) -> None:
        """Bring `groups` up to date, checking all changes, and drop a plan that depends on one.

        Cheap if nothing changed: it runs several times in every step.
        """
        dictionaries: Sequence[dict[str, Any]] = self._home["param_groups"]
        # 1. Parameters.
        if self._fingerprint is not None:
            change = self._fingerprint.check(list(map(_PARAMS, dictionaries)))
            if change is Change.PARAMETERS:
                self.invalidate()
            elif change is Change.MEMORY and self.runner is not None:
                self.runner.invalidate_views()
        # Keys that are no options may have been set, too, to values that would change the update.
        for number, dictionary in enumerate(dictionaries):
            if not dictionary.keys().isdisjoint(WATCHED_KEYS):
                settle_keys(number, dictionary)
        if any(map(needs_state, self._idle)):
            self.invalidate()
        # 2. Options. The common case ends here: each group is the one of the last refresh.
        same_number = len(self.groups) == len(dictionaries)
        if same_number and not self._state_sync.is_stale and all(map(Group.is_as_in, self.groups, dictionaries)):
            return
        self._links.follow()
        groups, must_plan = [], False
        # Freezing a parameter that has state changes nothing: it may get a gradient, and is stepped again then.
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
            must_plan |= before is None or not group.agrees(before, _PLANNED_OPTIONS)
            groups.append(group)
        # 3. What depends on them.
        self.groups = groups
        self._idle = [group.params[index] for group in groups for index in group.idle]
        if must_plan:
            self.invalidate()  # these options also decide which state there is, and where
        elif self.runner is not None:
            self.runner.context.groups = groups

    def _close_wrappers(self, steps_until_due: Sequence[int]) -> None:
        """Write the stepped copies of opened weights back."""
        for group, pending in zip(self.groups, steps_until_due, strict=True):
            for param in group.params if not pending else ():
                # Weights that were not stepped are left alone: rounding them once more may change them.
                if param.grad is not None:
                    close(param)

    def _make_state(self) -> None:
        if self._state_sync.is_current(self.groups, self._home["state"]):
            return
        if self.runner is not None:
            self.runner.finish()
            self.runner.invalidate_views()
        self._state_sync.bring_up_to_date(self.groups, self._home["state"])
        self._take_fingerprint()

    def _take_fingerprint(self) -> None:
        if self._fingerprint is None:
            self._fingerprint = ParamFingerprint([group.params for group in self.groups])
