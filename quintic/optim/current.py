"""What follows from the groups of an optimizer, current whenever it is asked for: the plan of its steps, and its state.

Users change options of groups, others move, convert or exchange parameters. So everything looks first: at the
parameters (`watching.py`), then at the options, which are checked again; then the plan is made anew if it depends on
what has changed, and state is made, moved along or left as it is (`upkeep.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, TypeAlias

from torch import Tensor

from quintic.optim.comms.communicators import Communicators, check_transport
from quintic.optim.comms.sharing import layouts_of
from quintic.optim.groups.flattened import check_group_is_whole
from quintic.optim.plan.order import Orders
from quintic.optim.plan.plan import PLANNED_OPTIONS
from quintic.optim.qk_clip.clip import QKClip
from quintic.optim.qk_clip.step import QKStep
from quintic.optim.state.upkeep import Upkeep
from quintic.optim.state.watching import Change
from quintic.optim.step.averages.early_averages import EarlyAverages
from quintic.optim.step.runner import Runner
from quintic.optim.step.sparse_rows import AnnouncedRows
from quintic.optim.validate import CHECKED_OPTIONS, check_group, checked_options

__all__ = ["Current", "States"]

States: TypeAlias = dict[Tensor, dict[str, Any]]

_Groups: TypeAlias = list[dict[str, Any]]

_options_of_plan: Callable[[Mapping[str, Any]], tuple[Any, ...]] = itemgetter(*PLANNED_OPTIONS)

_ALGORITHM = CHECKED_OPTIONS.index("algorithm")


class Current:
    """The plan, the communicators and what else one optimizer has for its groups.

    Methods are given the optimizer's groups and state, which PyTorch keeps, and others may replace.

    Args:
        orders: which parameters the user wants to come first.
    """

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.communicators = Communicators()
        self.rows = AnnouncedRows(self.communicators)
        self.early = EarlyAverages()
        self.runner: Runner | None = None
        """Of the plan, if there is one."""
        self._upkeep = Upkeep()
        self._qk_step: QKStep | None = None
        self._planned_options: list[tuple[Any, ...]] = []
        self._checked_options: list[tuple[Any, ...]] = []

    def add(self, number: int, group: dict[str, Any]) -> None:
        """Check a new group and connect its ranks. All ranks that share its parameters must call it.

        Raises:
            ValueError, TypeError: names the parameter or the option; nothing was changed.
        """
        check_group(number, group)
        layouts = layouts_of(number, group)
        check_transport(number, group, layouts)
        self._checked_options.append(checked_options(group))
        self.communicators.connect([group], [layouts])
        self.outdate()

    def outdate(self) -> None:
        """Forget the plan, and have state looked at closely when it is needed next."""
        self.forget_plan()
        self._upkeep.outdate()

    def forget_plan(self) -> None:
        """Forget the plan; the next one to ask makes another."""
        if self.runner is not None:
            self.runner.finish()
        self.runner = None
        self._planned_options = []
        self._qk_step = None

    def planned(self, groups: _Groups, states: States) -> Runner:
        """Return the runner of the plan. No state is made, and nothing is communicated.

        Raises:
            ValueError, TypeError: of a group that was changed; the message names the parameter or the option.
        """
        self._look(groups)
        if self.runner is None:
            self.runner = Runner(groups, states, self.communicators, self.orders, self.rows, self.early)
            self._planned_options = list(map(_options_of_plan, groups))
            self._upkeep.watch(groups)
        return self.runner

    def use_state(self, groups: _Groups, states: States) -> None:
        """Let all parameters have the state that they need, in a step that is `planned` and changes it.

        Raises:
            ValueError: state that says something cannot move to the parameter that is there now; nothing was changed.
        """
        self._make_state(groups, states)
        self._upkeep.use()

    def needed_state(self, groups: _Groups, states: States) -> States:
        """Return the state, all of it made and nothing under way.

        Raises:
            ValueError, TypeError: as `planned` and `use_state`.
        """
        self._look(groups)
        self._make_state(groups, states)
        if self.runner is not None:
            self.runner.finish()
        return states

    def give_state(self, groups: _Groups, states: States) -> None:
        """Do the same for somebody who may then replace tensors, quickly where nothing has happened."""
        self._notice(groups)
        if self._upkeep.is_outdated:
            self.needed_state(groups, states)
        elif self.runner is not None:
            self.runner.finish()
        self._upkeep.give()

    def end_load(self, states: States) -> None:
        """Note that state was loaded; forget that of which nothing is said, as of what no step had used."""
        self._upkeep.use()
        self._upkeep.drop_unused(states, is_planned=self.runner is not None)

    def start_qk_step(self, qk_clip: QKClip, groups: _Groups, states: States, logits: Mapping[Any, Tensor]) -> QKStep:
        """Begin QK-clip in a step that is `planned`. All ranks that share parameters must call it.

        Raises:
            ValueError: the logits fit no attention layer.
        """
        if self._qk_step is None or self._qk_step.clip != qk_clip:
            self._qk_step = QKStep(qk_clip, groups, states, self.communicators)
        self._qk_step.start(logits)
        return self._qk_step

    def _make_state(self, groups: _Groups, states: States) -> None:
        if self._upkeep.is_current(groups, states):
            return
        if self.runner is not None:
            self.runner.finish()
            self.runner.renew()
        self._upkeep.bring_up_to_date(groups, states)

    def _look(self, groups: _Groups) -> None:
        """Notice what has changed; check groups of which options or parameters have."""
        self._notice(groups)
        options = list(map(checked_options, groups))
        if self._checked_options == options and not self._upkeep.is_outdated:
            return
        for number, (group, found) in enumerate(zip(groups, options, strict=True)):
            before = self._checked_options[number : number + 1]
            if self._upkeep.is_outdated or before != [found]:
                # Whoever makes a group of vectors Muon's has flattened nothing.
                was_checked = bool(before) and before[0][_ALGORITHM] == group["algorithm"]
                check_group_is_whole(number, group, was_checked=was_checked)
                check_group(number, group)
                check_transport(number, group, layouts_of(number, group))
        self._checked_options = options
        if self._planned_options != list(map(_options_of_plan, groups)):
            self.outdate()  # which state there is, and where, follows from these options, too

    def _notice(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Notice parameters that were moved, converted or exchanged."""
        change = self._upkeep.look(list(groups))
        if change is Change.PARAMETERS:
            self.forget_plan()
        elif change is Change.MEMORY and self.runner is not None:
            self.runner.renew()
