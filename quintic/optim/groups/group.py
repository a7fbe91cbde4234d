"""A parameter group as a step sees it: its parameters and options, frozen and typed.

PyTorch keeps groups as dictionaries, which users, schedulers and other libraries change at any time. `Muon` checks them
and makes a `Group` of each, and another one when an option or a parameter has changed. All rooms below `Muon` read
groups from here, and none reads a dictionary.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor

from quintic.optim.groups.names import resolve_name
from quintic.optim.groups.options import SCHEDULED_OPTIONS, STEP_OPTIONS, Number, Options
from quintic.optim.numeric.numbers import cpu_scalar_or_none
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.stages import StageOptions
from quintic.optim.rules.table import rule_of

__all__ = ["Group", "find_parameter", "needs_state"]

_values_of: Callable[[Mapping[str, Any]], tuple[Any, ...]] = itemgetter(*STEP_OPTIONS)


def needs_state(param: Tensor) -> bool:
    """Return whether a parameter may be stepped: a frozen one is, too, if it is given a gradient."""
    return param.requires_grad or param.grad is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group(Options):
    """One parameter group, with the options of the table in `options.py`."""

    number: int
    """Position in `optimizer.param_groups`."""
    params: tuple[Tensor, ...]
    param_names: tuple[str, ...]
    idle: frozenset[int]
    """Positions of frozen parameters without a gradient: they need no state and are in no bucket."""
    values: tuple[Any, ...]
    """The options in the order of `STEP_OPTIONS`, as the dictionary had them."""
    host_values: tuple[tuple[Any, float], ...]
    """Options that may be changed in place and are on the host (CPU tensors, arrays), with the numbers in them."""

    @classmethod
    def of(cls, number: int, group: Mapping[str, Any], awake: Container[Tensor] = ()) -> "Group":
        """Return the group at position `number` with the present values of a validated, complete dictionary.

        Args:
            number: position in `optimizer.param_groups`.
            group: the dictionary.
            awake: parameters that are stepped if a gradient comes, although they may have been frozen since.
        """
        params, names = tuple(group["params"]), tuple(group["param_names"])
        idle = frozenset(i for i, param in enumerate(params) if not needs_state(param) and param not in awake)
        return cls(number=number, params=params, param_names=names, idle=idle, **_option_fields(group))

    def rescheduled(self, group: Mapping[str, Any]) -> "Group":
        """Return the group with the present options of its dictionary, and with the parameters that it has."""
        return Group(
            number=self.number,
            params=self.params,
            param_names=self.param_names,
            idle=self.idle,
            **_option_fields(group),
        )

    def changed_options(self, group: Mapping[str, Any]) -> set[str]:
        """Return the names of the options for which a dictionary has another object, even if it is equal."""
        pairs = zip(STEP_OPTIONS, _values_of(group), self.values, strict=True)
        return {name for name, value, before in pairs if value is not before}

    def has_options_of(self, group: Mapping[str, Any]) -> bool:
        """Return whether a dictionary has the same option objects, and numbers on the host still have the same values.

        Parameters, and values of tensors on a device, are not compared.
        """
        # Identity, and not equality: this runs for every group in every step, and values may be tensors on a device.
        if not all(map(is_, _values_of(group), self.values)):
            return False
        return not self.host_values or all(float(value) == number for value, number in self.host_values)

    def agrees(self, other: "Group", options: Iterable[str]) -> bool:
        """Return whether another group has the same values of some options."""
        return all(getattr(self, option) == getattr(other, option) for option in options)

    @property
    def rule(self) -> UpdateRule:
        """The update rule of its parameters."""
        return rule_of(self.algorithm, self.normalize, self.update_rule)

    @property
    def stage_options(self) -> StageOptions:
        """Return the options that stages may read, with numbers of the host; waits for the device if one is there."""
        return StageOptions(
            lr=float(self.lr),
            weight_decay=float(self.weight_decay),
            momentum=float(self.momentum),
            nesterov=self.nesterov,
            normalize_beta=float(self.normalize_beta),
        )

    @property
    def hyperparameters(self) -> tuple[Number, ...]:
        """Return the numbers that schedules change, in the order of `device.HYPERPARAMETERS`."""
        return (self.lr, self.weight_decay, self.momentum, *self.betas, self.eps)

    @property
    def lr_ratio(self) -> float:
        """Return the factor from `lr` to the learning rate of the group's steps: 1, or an AdamW group's ratio."""
        return 1.0 if self.adamw_lr_ratio is None or self.rule.orthogonalizes else float(self.adamw_lr_ratio)

    @property
    def effective_lr(self) -> float:
        """Return the learning rate of the group's steps, `lr * lr_ratio`; waits for the device if `lr` is there."""
        return float(self.lr) * self.lr_ratio


def _option_fields(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Group` that follow from the options in a dictionary."""
    values = _values_of(group)
    # betas are two values.
    scheduled = chain.from_iterable(
        value if isinstance(value, tuple | list) else (value,) for value in map(group.get, SCHEDULED_OPTIONS)
    )
    numbers = [(value, cpu_scalar_or_none(value)) for value in scheduled]
    host_values = tuple((value, number) for value, number in numbers if number is not None)
    return {**dict(zip(STEP_OPTIONS, values, strict=True)), "values": values, "host_values": host_values}


def find_parameter(groups: Iterable[Group], param: Tensor | str, what: str) -> tuple[Group, int]:
    """Return a parameter's group and its position in it.

    Raises:
        ValueError: no group has it; the message begins with `what`.
    """
    places = [(group, index) for group in groups for index in range(len(group.params))]
    if isinstance(param, str):
        meant = resolve_name(param, {group.param_names[index] for group, index in places})
        match = next((place for place in places if place[0].param_names[place[1]] == meant), None)
    else:
        match = next((place for place in places if place[0].params[place[1]] is param), None)
    if match is None:
        which = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
        raise ValueError(f"{what} {which}, which is no parameter of the optimizer")
    return match
