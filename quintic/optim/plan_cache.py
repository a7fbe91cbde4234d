"""Holds the plan that follows from an optimizer's groups, and keeps plan and state up to date with them.

Users change options of groups, and libraries move, convert or exchange parameters. The optimizer is not told, so every
use of the cache begins with `refresh`:

1. Compare parameters with the last ones: were tensors replaced, or has their memory changed?
2. Compare options with their last values. Check every group that has changed, and make a new `Group` of it.
3. If the plan depends on a change (`options_affecting("plan")`), drop the plan and mark the state stale.

Nothing is made ahead of time: the first use that needs a plan, connected ranks or state (`state/sync.py`) makes them.
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
from quintic.optim.groups.options import SCHEDULED_OPTIONS, options_affecting
from quintic.optim.layout.layouts import gradient_dtype, is_dtensor
from quintic.optim.layout.wrappers import OPENED, close, is_opened, open_for_step
from quintic.optim.linked_options import LinkedOptions
from quintic.optim.plan.order import Orders
from quintic.optim.qk_clip.step import QKStep
from quintic.optim.state.parameters import Parameter, connected_parameters
from quintic.optim.state.sync import Change, ParamFingerprint, StateSync
from quintic.optim.step.reduction import Reduction
from quintic.optim.step.runner import Runner
from quintic.optim.step.sparse_rows import AnnouncedRows
from quintic.optim.validate import CHECKED_OPTIONS, check_group, check_scheduled

__all__ = ["PlanCache", "States"]

_PLANNED_OPTIONS = options_affecting("plan")
_SCHEDULED = frozenset(SCHEDULED_OPTIONS)

States: TypeAlias = dict[Tensor, dict[str, Any]]

_PARAMS, _QK_CLIP = itemgetter("params"), attrgetter("qk_clip")


def _is_freed(param: Tensor) -> bool:
    """Return whether a step that frees a parameter's gradient makes room for as many bytes as the parameter has."""
    # Wrappers keep gradients until they are written back, and FSDP2 has those of a module in one buffer.
    return not is_opened(param) and not is_dtensor(param) and gradient_dtype(param) == param.dtype


class PlanCache:
    """The plan, groups and communicators of one optimizer, and the upkeep of its state.

    If a change of a group made a step impossible, methods raise a ValueError or TypeError that names the parameter or
    the option.
    """

    def __init__(
        self, home: Mapping[str, Any], links: LinkedOptions, orders: Orders, *, release_gradients: bool
    ) -> None:
        """Begin without a plan.

        Args:
            home: a dictionary with the optimizer's `"param_groups"` and `"state"`. They are looked up at each use,
                because PyTorch may replace them.
            links: options that follow other options; `refresh` brings them up to date.
            orders: names of the parameters whose buckets come first.
            release_gradients: whether steps free gradients as soon as they have read them.
        """
        self._home, self._links = home, links
        self.orders, self.release_gradients = orders, release_gradients
        self.groups: list[Group] = []
        """The groups at the last refresh. Empty while there is neither plan nor state, to keep no parameter alive."""
        self.communicators = Communicators()
        self.rows = AnnouncedRows(self.communicators)
        self.reduction = Reduction(self.communicators)
        self.runner: Runner | None = None
        """The plan, with the objects that step it; None if there is no plan now."""
        self._state_sync = StateSync()
        self._fingerprint: ParamFingerprint | None = None
        """The parameters for which a plan or state was made; None before that."""
        self._idle: list[Tensor] = []
        """Frozen parameters. They are in no bucket until they require gradients or are given one."""
        # Belongs to the plan, and is dropped with it.
        self._qk_step: QKStep | None = None
        self._num_planned_hosts = 0
        """For how many sets of ranks hosts were known when the plan was made; it may change when more are."""

    def add(self, number: int, dictionary: dict[str, Any]) -> None:
        """Check a new group and connect its ranks, all of which must call this; an error changes nothing."""
        check_group(number, dictionary)
        group = Group.of(number, dictionary)
        # Process groups are made by all of their ranks together, here and not in the middle of a step.
        self.communicators.connect([group], [layouts_of(group)])
        self.invalidate()

    def invalidate(self) -> None:
        """Drop the plan, and mark the state stale: its next use compares all of it with the parameters."""
        self.drop_plan()
        self._state_sync.is_stale = True

    def drop_plan(self) -> None:
        """Drop the plan; it is built again when it is needed next."""
        # Transfers to host memory may be under way.
        if self.runner is not None:
            self.runner.finish()
        self.runner = None
        self.reduction.use_plan((), (), ())
        self._qk_step = None

    def frees_all_gradients(self) -> bool:
        """Return whether every step frees each gradient that it is given, so that the plan may count on the memory."""
        if not self.release_gradients:
            return False
        # Groups that wait for their step keep their gradients.
        groups = self.current_groups()
        return all(group.step_every == 1 and all(map(_is_freed, group.params)) for group in groups)

    def current_groups(self) -> Sequence[Group]:
        """Return the groups as a step would see them now: checked, frozen and typed."""
        self.refresh()
        return self.groups

    def planned(self) -> Runner:
        """Return the runner for the present groups, planning if needed; makes no state and sends no messages."""
        self.refresh()
        if self.runner is None:
            self.runner = Runner(
                self.groups, self._home["state"], self.communicators, self.orders, self.rows, self.reduction
            )
            self._num_planned_hosts = len(self.communicators.hosts)
            self._take_fingerprint()
        return self.runner

    def connected(self) -> Runner:
        """Return the runner, with ranks connected. All ranks with common parameters must call it.

        Before the first step these ranks tell each other their hosts, after which the plan is made anew: it may depend
        on them.
        """
        self.refresh()
        # The usual case: once plans are compared, hosts are known, too.
        if self.runner is not None and self.runner.consensus.plans_validated:
            return self.runner
        runner = self.planned()
        if not runner.consensus.plans_validated:
            self.communicators.connect(self.groups, [layouts_of(group) for group in self.groups])
            # The plan was made before these hosts were known.
            if self._num_planned_hosts != len(self.communicators.hosts):
                self.drop_plan()
                runner = self.planned()
        return runner

    def steps_waited(self) -> list[int]:
        """Return for each group 0 if the next step steps it, else how many steps it will have waited after that step.

        With `step_every=4` a group has 1, 2, 3, 0, 1, ...
        """
        return [
            # Tied copies are never stepped on their own, so they wait in every step.
            (dictionary["pending_steps"] + 1) % group.step_every or (group.step_every if group.tied_to else 0)
            for dictionary, group in zip(self._home["param_groups"], self.groups, strict=True)
        ]

    def end_step(self, steps_waited: Sequence[int]) -> None:
        """Write stepped copies of wrapped weights back, and update each group's count of pending steps."""
        if OPENED:
            self._close_wrappers(steps_waited)
        self.advance(steps_waited)

    def advance(self, steps_waited: Sequence[int]) -> None:
        """Update each group's count of pending steps, after a step that was made or rejected."""
        # Only tied copies and averages of clipping have something to forget.
        if self.runner is not None and (self.runner.ties or self.reduction.cached):
            self.runner.end_step(steps_waited)
        for dictionary, pending in zip(self._home["param_groups"], steps_waited, strict=True):
            dictionary["pending_steps"] = pending % dictionary["step_every"]

    def use_state(self) -> None:
        """Make or adapt state for a step, which changes it, and open weights in wrappers of other libraries."""
        # Such weights are stepped as plain copies, which `end_step` writes back.
        if OPENED:
            for group in self.groups:
                for param in group.params:
                    open_for_step(param)
        if not self._state_sync.is_current(self.groups, self._home["state"]):
            self._make_state()
        self._state_sync.use()

    def needed_state(self) -> States:
        """Return the state of all parameters: complete, and with no copies to or from the host under way."""
        self.refresh()
        self._make_state()
        if self.runner is not None:
            self.runner.finish()
        states: States = self._home["state"]
        return states

    def give_state(self) -> None:
        """Make state complete for a caller that may replace its tensors; cheaper than `needed_state` if unchanged."""
        self.refresh()
        if self._state_sync.is_stale:
            self._make_state()
        if self.runner is not None:
            self.runner.finish()
        self._state_sync.may_be_edited = True

    def end_load(self, without: Container[Tensor], names: Mapping[str, str]) -> None:
        """Record that state was loaded, and drop state at its defaults.

        Args:
            without: parameters for which no state was loaded. Frozen ones have no state from now on.
            names: {made-up name: loaded name} of parameters that had no names of their own.
        """
        self._state_sync.use()
        self._state_sync.drop_unused(self._home["state"])
        for number, group in enumerate(self.groups):
            frozen = {i for i, param in enumerate(group.params) if param in without and not param.requires_grad}
            # A parameter that becomes idle leaves its bucket.
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
        """Return the parameters that lie on this rank, whole or in pieces. All ranks with common ones must call it."""
        self.planned()
        return connected_parameters(self.groups, self.communicators)

    def start_qk_step(self, runner: Runner, logits: Mapping[Any, Tensor]) -> QKStep | None:
        """Begin QK-clip in a step; None if no group has `qk_clip`. All ranks with common parameters must call it."""
        qk_clip = next(filter(None, map(_QK_CLIP, self.groups)), None)
        if qk_clip is None:
            if not isinstance(logits, Mapping) or logits:
                raise ValueError(
                    "step got qk_logits, but no QK-clip was asked for: quintic.Muon(..., qk_clip=QKClip(...))"
                )
            return None
        # Ranks with different groups raise here, and do not wait forever for each other's logits.
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
        # Other keys may have been set, too: old names of options, and options of other libraries (`settle_keys`).
        for number, dictionary in enumerate(dictionaries):
            if not dictionary.keys().isdisjoint(WATCHED_KEYS):
                settle_keys(number, dictionary)
        # A frozen parameter was unfrozen, or was given a gradient.
        if any(map(needs_state, self._idle)):
            self.invalidate()
        # 2. Options. The usual case ends here: no option has changed since the last refresh.
        are_known = len(self.groups) == len(dictionaries) and not self._state_sync.is_stale
        if are_known and all(map(Group.has_options_of, self.groups, dictionaries)):
            return
        self._links.follow()
        must_plan = False
        if are_known and self._only_schedules_changed(dictionaries):
            # Schedules do this in every step, so no parameter is looked at.
            groups = [group.rescheduled(one) for group, one in zip(self.groups, dictionaries, strict=True)]
            for number, dictionary in enumerate(dictionaries):
                check_scheduled(number, dictionary)
        else:
            groups, must_plan = self._checked_groups(dictionaries)
        # 3. The plan and the state. Other options reach the buckets as new groups, without a new plan.
        self.groups = groups
        self._idle = [group.params[index] for group in groups for index in group.idle]
        if must_plan:
            self.invalidate()  # these options also decide which state there is, and where
        elif self.runner is not None:
            self.runner.context.groups = groups

    def _only_schedules_changed(self, dictionaries: Sequence[dict[str, Any]]) -> bool:
        """Return whether the groups differ from their dictionaries in nothing but options that schedules change."""
        return all(
            group.changed_options(dictionary) <= _SCHEDULED
            for group, dictionary in zip(self.groups, dictionaries, strict=True)
        )

    def _checked_groups(self, dictionaries: Sequence[dict[str, Any]]) -> tuple[list[Group], bool]:
        """Return the groups of some dictionaries, checked where they changed, and whether the plan depends on it."""
        groups, must_plan = [], False
        # Parameters with state stay in the plan when they are frozen, since they may be given a gradient.
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
            # A new group changes the plan, too.
            must_plan |= before is None or not group.agrees(before, _PLANNED_OPTIONS)
            groups.append(group)
        return groups, must_plan

    def _close_wrappers(self, steps_waited: Sequence[int]) -> None:
        """Write the stepped copies of weights into the wrappers that they came from."""
        for group, pending in zip(self.groups, steps_waited, strict=True):
            for param in group.params if not pending else ():
                # Skip weights that were not stepped, because rounding them once more may change them.
                if param.grad is not None:
                    close(param)
                    # The step has left this gradient here to tell that the wrapper was stepped.
                    if self.release_gradients:
                        param.grad = None

    def _make_state(self) -> None:
        """Make or adapt state if it is stale."""
        if self._state_sync.is_current(self.groups, self._home["state"]):
            return
        # State may move: end copies to the host, and let buckets look it up again.
        if self.runner is not None:
            self.runner.finish()
            self.runner.invalidate_views()
        # A ValueError here leaves the state as it was, and stale.
        self._state_sync.bring_up_to_date(self.groups, self._home["state"])
        self._take_fingerprint()

    def _take_fingerprint(self) -> None:
        # Later changes are found by `check`, which brings the fingerprint up to date itself.
        if self._fingerprint is None:
            self._fingerprint = ParamFingerprint([group.params for group in self.groups])
