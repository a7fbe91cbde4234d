"""The base class of `Muon`: parameter groups and state as PyTorch keeps them, checked, saved and loaded.

Groups and state belong to PyTorch, and users and libraries change both. What follows from them (`plan_cache.py`) is
brought up to date whenever it is asked for.
"""

from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from quintic.optim.checkpoint.loading import check_is_state_dict, load_state
from quintic.optim.checkpoint.saving import saved_state, with_mantissas
from quintic.optim.deprecated import renamed_method
from quintic.optim.first_gradients import FirstGradients
from quintic.optim.grad_scaler import leaves_overflow_to_step
from quintic.optim.group_keys import check_keys, check_loaded, check_supported, with_algorithm
from quintic.optim.groups.names import made_up, without_wrappers
from quintic.optim.groups.options import Group, adopt_old_names, found_parameter, with_new_names
from quintic.optim.plan.order import Orders
from quintic.optim.plan_cache import CycledMomentum, PlanCache, SharedRates, States, StepHistory
from quintic.optim.rules.dynamo import disable_dynamo
from quintic.optim.rules.numbers import to_python_scalar
from quintic.optim.rules.rates import fill_adamw_rates
from quintic.optim.rules.table import orthogonalizes
from quintic.optim.state.parameters import copy_state, whole_states
from quintic.optim.step.runner import Runner
from quintic.optim.undecided import Undecided
from quintic.optim.validate import check_apart, check_is_group, check_members, check_params

__all__ = ["OptimizerBase"]


def _set_by_scaler(name: str) -> property:
    """Return an attribute that `GradScaler` sets for one step, perhaps on a wrapper that borrows the class."""
    return property(
        lambda self: self._own(name),
        lambda self, value: self._home.update({name: value}),
        lambda self: self._home.pop(name),
    )


class OptimizerBase(Optimizer):
    """Groups with names and checked options, and the state of their parameters."""

    grad_scale = _set_by_scaler("grad_scale")
    found_inf = _set_by_scaler("found_inf")

    _home: dict[str, Any]
    """State and groups, which wrappers share that borrow the class or copy attributes. It is not the `__dict__`, which
    would then hold itself, and keep the state in memory until Python collects its garbage."""
    _plan_cache: PlanCache
    _cycled: CycledMomentum
    _shared_rates: SharedRates
    _undecided: Undecided
    _step_history: StepHistory

    def __init__(self, params: Any, defaults: dict[str, Any], orders: Orders) -> None:
        self._forget_steps(orders)
        check_params(params)
        super().__init__(self._undecided.begin(params), defaults)
        self._undecided.end(stacklevel=4)
        names = iter(without_wrappers(name for group in self.param_groups for name in group["param_names"]))
        for group in self.param_groups:
            group["param_names"] = [next(names) for _ in group["param_names"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a validated group; one without an `algorithm` is decided about, and may become several.

        Raises:
            ValueError, TypeError: as the constructor.
        """
        number = len(self.param_groups)
        check_is_group(number, param_group)
        group = with_new_names(dict(param_group), f"parameter group {number}", stacklevel=2)
        check_keys(number, group, self.defaults)
        parts = self._undecided.divided(number, with_algorithm(number, group), self.defaults)
        try:
            for part in parts:
                self._add_decided(part)
        except (TypeError, ValueError):
            del self.param_groups[number:]
            self._undecided.forget_guesses()
            self._cycled.watch(self.param_groups)
            self._plan_cache.invalidate()
            raise
        self._shared_rates.watch(self.param_groups)
        self._undecided.warn(stacklevel=2)

    def _add_decided(self, group: dict[str, Any]) -> None:
        number = len(self.param_groups)
        _add_names(number, group)
        if isinstance(group.get("params"), list):
            check_apart(number, group, self.param_groups)
        if not orthogonalizes(group.get("algorithm", "muon")):
            fill_adamw_rates(number, group, self.defaults)
        super().add_param_group(group)
        added = self.param_groups[-1]
        # Options or groups may share one array: a schedule that writes to it would change all of them.
        added.update({key: to_python_scalar(value) for key, value in added.items()})
        try:
            check_supported(number, added)
            self._plan_cache.add(number, added)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._cycled.watch(self.param_groups)

    def _own(self, name: str) -> Any:
        """A property's value. Before there is one, an AttributeError that names it, as for any other attribute."""
        try:
            return self._home[name]
        except (AttributeError, KeyError):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups; where a scheduler cycles `betas`, `momentum` of Muon groups follows."""
        groups: list[dict[str, Any]] = self._own("param_groups")
        self._cycled.follow()
        if self._shared_rates.sets:
            self._shared_rates.follow()
        return groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = self._home["param_groups"] = value
        self._cycled.watch(value)
        self._shared_rates.watch(value)

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """State by parameter; missing state is made first.

        Frozen parameters have none. Waits for state on its way to host memory (`offload`): ask again after every step.
        Other keys than parameters are the user's, and saved with the rest.
        """
        state: defaultdict[Tensor, Any] = self._own("state")
        self._plan_cache.give_state(self.param_groups, state)
        return state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self.__dict__["state"] = self._home["state"] = value
        self._plan_cache.invalidate()

    @property
    def typed_groups(self) -> Sequence[Group]:
        """The parameter groups as a step sees them now: checked, frozen and typed."""
        self._plan_cache.refresh(self._home["param_groups"])
        return self._plan_cache.groups

    @property
    def plan_cache(self) -> PlanCache:
        """Typed groups, the plan and the ranks' communicators, as they follow from the groups now.

        For the other files of the library, as `runner` and `connected`; use the methods instead.
        """
        self._plan_cache.planned(self.param_groups, self._home["state"])
        return self._plan_cache

    @property
    def runner(self) -> Runner:
        """The runner of the current plan; changed groups are checked first. No state is made."""
        return self._plan_cache.planned(self.param_groups, self._home["state"])

    def connected(self) -> Runner:
        """Return the runner with ranks connected; the plan may depend on their hosts.

        All ranks that share parameters must call it.
        """
        return self._plan_cache.connected(self.param_groups, self._home["state"])

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return whether `GradScaler` calls `step` also after an overflow, and sets `grad_scale` and `found_inf`."""
        return leaves_overflow_to_step(self._home["param_groups"])

    @property
    def step_history(self) -> StepHistory:
        """The record of the steps made. For the other files of the library; use `last_step` instead."""
        return self._step_history

    def next_steps_until_due(self) -> list[int]:
        """Return for each group how many steps it will wait for after the next one; 0 if that steps it."""
        self._plan_cache.planned(self.param_groups, self._home["state"])
        return self._steps_until_due()

    next_pending_steps = renamed_method("next_pending_steps", next_steps_until_due)

    def state_dict(self) -> dict[str, Any]:
        """Return state and hyperparameters as PyTorch does, with views and callables as text (they are not loaded).

        All ranks must call it if a `DTensor` has `normalize="neuron"`, and where `comms` shards state, which
        it returns whole; see `state/parameters.py` and `docs/how-to/checkpoints.md`.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self._plan_cache.rows.check(wait=True)
        state = self._needed_state()
        whole = whole_states(self._plan_cache.groups, self._plan_cache.communicators, state)
        saved = saved_state(self.param_groups, {**state, **whole})
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, saved)
            if replaced is not None:
                saved = replaced
        return saved

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load what `state_dict` returned, matching parameters by name; nothing changes unless everything fits.

        Where one side has no names, positions count. Nothing is communicated: of whole tensors each rank takes its
        piece. See `docs/how-to/checkpoints.md`.

        Args:
            state_dict: saved state and hyperparameters.
            strict: whether both sides must have the same parameters. If not, as after adding layers to a model, those
                without saved state begin anew, and saved ones that are no parameters here are left out.

        Raises:
            ValueError: the saved state belongs to other parameters, shapes, algorithms, views or an unfit layout.
            TypeError: it is no state dict at all.
        """
        check_is_state_dict(state_dict)
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        check_is_state_dict(state_dict)
        state = self._needed_state()
        groups, typed = self.param_groups, self._plan_cache.groups
        loaded = load_state(groups, state, typed, state_dict, check_loaded, strict=strict)
        self._cycled.watch(self._home["param_groups"])
        self._shared_rates.watch(self._home["param_groups"])
        self._plan_cache.end_load(state, loaded.without, loaded.names)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @disable_dynamo
    @torch.no_grad()
    def copy_state(self, source: Tensor | str, target: Tensor | str, *, transposed: bool = False) -> None:
        """Give a parameter the state of another: moments, counts of steps, masters; in place, to the last bit.

        For a copy of a weight that goes its own way, such as an embedding that was tied to the output head. Both may be
        sharded among ranks in different ways (`comms`, `DTensor`s), or have their state in host memory; the source
        keeps what it has. Weights are not copied: a mantissa completes weights whose values are the source's. All ranks
        that share the parameters must call it. Temporary memory: one state of the parameter, whole, on every rank,
        twice.

        Args:
            source: the parameter, or its name.
            target: another one, or its name, of the same shape.
            transposed: whether the target is stored as the transpose, (n, m) for a source of (m, n).

        Raises:
            ValueError: the shapes, algorithms, dtypes of state or ranks of the two do not fit; nothing was changed.
        """
        states = self._needed_state()
        self.connected()
        groups, communicators = self._plan_cache.groups, self._plan_cache.communicators
        copy_state(groups, communicators, states, source, target, transposed=transposed)
        self._plan_cache.use_state(states)

    carry_state = renamed_method("carry_state", copy_state)

    @disable_dynamo
    @torch.no_grad()
    def tie(self, head: Tensor | str, embedding: Tensor | str, *, transposed: bool = False) -> None:
        """Let one parameter be the copy of another, from now on and until `untie`.

        The embedding takes the head's weights at once. From then on each step in which the head is due moves the
        embedding's gradient to the head's (`p.grad` of both changes), steps the head alone, and writes its new weights
        to the embedding as soon as they are there. The embedding is not averaged, counted or stepped, and keeps its
        state. The tie is an option of its group, `tied_to`, and saved with it. All ranks that share the parameters must
        call it.

        Args:
            head: the parameter that is stepped, or its name.
            embedding: its copy, alone in its group, with the head's `comms`, `process_group` and `step_every`; or its
                name.
            transposed: whether the copy is stored as the transpose, (n, m) for a head of (m, n).

        Raises:
            ValueError: they cannot be tied, as `DTensor`s cannot; the message says why, and nothing was changed.
        """
        (head_group, index), (group, _) = (
            found_parameter(self.typed_groups, param, "tie was given") for param in (head, embedding)
        )
        dictionary, before = self.param_groups[group.number], group.tied_to
        dictionary["tied_to"] = (head_group.param_names[index], transposed)
        try:
            ties = self.runner.ties
        except ValueError:
            dictionary["tied_to"] = before
            raise
        for tie in ties:
            if tie.copy is group.params[0]:
                tie.write()

    def untie(self, embedding: Tensor | str) -> None:
        """Let a tied parameter go its own way, with the state of the one that it was a copy of (`copy_state`).

        All ranks that share the parameters must call it.

        Args:
            embedding: the copy, or its name.

        Raises:
            ValueError: it is not tied, or cannot have the state; nothing was changed.
        """
        group, index = found_parameter(self.typed_groups, embedding, "untie was given")
        if group.tied_to is None:
            raise ValueError(f"{group.param_names[index]} is not tied to another parameter")
        head, transposed = group.tied_to
        self.copy_state(head, embedding, transposed=transposed)
        self.param_groups[group.number]["tied_to"] = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with the same process groups, which cannot be copied."""
        for group in (self.defaults, *self.param_groups):
            memo[id(group["process_group"])] = group["process_group"]
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(deepcopy(self.__getstate__(), memo))
        twin._step_history = self._step_history.copy()
        twin._step_history.first_gradients = FirstGradients()  # its parameters are others
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle an optimizer with a process group, which other processes cannot use: a TypeError."""
        if any(group.get("process_group") is not None for group in (self.defaults, *self.param_groups)):
            raise TypeError(
                f"a {type(self).__name__} with a process_group cannot be pickled: save optimizer.state_dict(), or set "
                f"process_group to None in optimizer.defaults and all optimizer.param_groups before"
            )
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that pickle and deepcopy keep."""
        state = self._home["state"]
        return {
            "defaults": self.defaults,
            "state": with_mantissas(self._needed_state(), torch.int16) if state else state,
            "param_groups": self.param_groups,
            "_orders": self._plan_cache.orders,
            "_decided_by": self._undecided.decided_by,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from pickle or deepcopy; the plan is rebuilt on demand."""
        for options in (state["defaults"], *state["param_groups"]):
            adopt_old_names(options)  # of a file that an older version wrote
        super().__setstate__({**state, "state": with_mantissas(state["state"], torch.uint16)})
        self._forget_steps(self.__dict__.pop("_orders"))
        self._undecided.decided_by = self.__dict__.pop("_decided_by", "nobody")
        self._cycled.watch(self._home["param_groups"])
        self._shared_rates.watch(self._home["param_groups"])

    def _needed_state(self) -> States:
        """Return the state of all parameters; missing state is made, and transfers have ended."""
        return self._plan_cache.needed_state(self.param_groups, self._home["state"])

    def _steps_until_due(self) -> list[int]:
        """Return for each group how many steps it waits for after this one; 0 if it is stepped now."""
        return [
            # Tied copies are never stepped on their own.
            (dictionary["pending_steps"] + 1) % group.step_every or (group.step_every if group.tied_to else 0)
            for dictionary, group in zip(self._home["param_groups"], self._plan_cache.groups, strict=True)
        ]

    def _forget_steps(self, orders: Orders) -> None:
        """Forget the steps made, and all that follows from the groups."""
        self._home = {key: value for key, value in vars(self).items() if key in ("param_groups", "state")}
        self._plan_cache = PlanCache(orders)
        self._cycled = CycledMomentum()
        self._shared_rates, self._undecided = SharedRates(), Undecided()
        self._step_history = StepHistory()


def _add_names(number: int, group: dict[str, Any]) -> None:
    """Name parameters that come without names: messages, plans and checkpoints need some, PyTorch makes none."""
    params = group.get("params")
    if isinstance(params, Tensor):
        group["params"] = params = [params]
    if params is None or isinstance(params, set):
        return  # PyTorch's own message is right
    group["params"] = params = list(params)
    check_members(number, params)
    if not any(isinstance(param, tuple) for param in params):
        group.setdefault("param_names", [made_up(number, index) for index in range(len(params))])
