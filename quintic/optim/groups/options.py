"""A parameter group as a step sees it: its parameters and options, frozen and typed.

PyTorch keeps groups as dictionaries, which users, schedulers and other libraries change at any time. `Muon` checks them
and makes a `Group` of each; where something has changed, another one takes its place. Nothing below `Muon` reads the
dictionaries.
"""

import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from operator import is_, itemgetter
from typing import Any, Literal

import torch
from torch import Tensor

from quintic.kernels.dispatch import KernelsOption
from quintic.optim.groups.names import resolve_name
from quintic.optim.layout.views import View
from quintic.optim.polar.forms import Method, Polynomials
from quintic.optim.rules.numbers import cpu_scalar_or_none
from quintic.optim.rules.rule import Algorithm, UpdateRule
from quintic.optim.rules.table import rule_of
from quintic.optim.rules.update import AdjustLr, Cautious, DecayCoupling

__all__ = [
    "CHECKED_OPTIONS",
    "OLD_NAMES",
    "OPTIONS",
    "Group",
    "Number",
    "Orthogonalizer",
    "adopt_old_names",
    "found_parameter",
    "is_old_option",
    "needs_state",
    "with_new_names",
]

OLD_NAMES = {"lr_scale": "adjust_lr"}
"""Old name of an option -> its name now."""

Number = float | Tensor
"""A number, or a tensor of one entry, which may be on a device."""

Orthogonalizer = Method | Callable[[Tensor], Tensor]


def needs_state(param: Tensor) -> bool:
    """Return whether a parameter may be stepped: a frozen one is, too, if it is given a gradient."""
    return param.requires_grad or param.grad is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """One parameter group; the options are keywords of `quintic.Muon`, and documented there."""

    number: int
    """Position in `optimizer.param_groups`."""
    params: tuple[Tensor, ...]
    param_names: tuple[str, ...]
    algorithm: Algorithm
    view: View
    # What schedules change at every step.
    lr: Number
    weight_decay: Number
    momentum: Number
    betas: tuple[Number, Number]
    eps: Number
    # What stays, mostly.
    nesterov: bool
    decay_coupling: DecayCoupling
    scale_decay: bool
    cautious: Cautious
    orthogonalizer: Orthogonalizer
    orthogonalizer_steps: int
    coefficients: Polynomials | None
    compute_dtype: torch.dtype | None
    normalize: Literal["neuron", "element"] | None
    normalize_beta: float
    adjust_lr: AdjustLr
    lr_multipliers: Sequence[float] | None
    adamw_lr_ratio: float | None
    step_every: int
    comms: Literal["none", "averaged", "replicated", "sharded", "sharded_sparse"]
    process_group: Any
    """A `ProcessGroup`, where there are any."""
    replicas: Literal["auto", "divide", "repeat"]
    master: Literal["fp32", "mantissa"] | None
    state_dtype: Literal["bf16"] | None
    qk_clip: Any
    """A `QKClip`, or None."""
    offload: bool
    on_nonfinite: Literal["propagate", "skip", "raise"]
    max_workspace_bytes: int | None
    kernels: KernelsOption
    telemetry_every: int | None
    tied_to: tuple[str, bool] | None
    """Name of the parameter that this group's is a copy of, and whether it is stored transposed; see `Muon.tie`."""

    idle: frozenset[int]
    """Positions of parameters that need no state and are in no bucket: they do not require gradients, and have none."""

    rule: UpdateRule
    """The update rule of its parameters, which follows from the options."""
    values: tuple[Any, ...]
    """All options, as the dictionary had them."""
    host_values: tuple[tuple[Any, float], ...]
    """Hyperparameters that can be changed in place without waiting for a device to see it, with the numbers in them."""

    @classmethod
    def of(cls, number: int, group: Mapping[str, Any], awake: Container[Tensor] = ()) -> "Group":
        """Return the group of a validated dictionary with every option, at this position, as it is now.

        Parameters that are `awake` are stepped if a gradient comes, although they may have been frozen since.
        """
        values = _values_of(group)
        params, names = tuple(group["params"]), tuple(group["param_names"])
        options = dict(zip(_OPTIONS, values, strict=True))
        scheduled = chain.from_iterable(v if isinstance(v, tuple | list) else (v,) for v in map(group.get, _SCHEDULED))
        numbers = [(value, cpu_scalar_or_none(value)) for value in scheduled]
        host_values = tuple((value, number) for value, number in numbers if number is not None)
        idle = frozenset(i for i, param in enumerate(params) if not needs_state(param) and param not in awake)
        return cls(
            number=number,
            params=params,
            param_names=names,
            idle=idle,
            rule=rule_of(options["algorithm"], options["normalize"]),
            values=values,
            host_values=host_values,
            **options,
        )

    def is_as_in(self, group: Mapping[str, Any]) -> bool:
        """Return whether a dictionary has the very same options still, and these their values.

        Parameters, and tensors on a device, are not compared.
        """
        if not all(map(is_, _values_of(group), self.values)):
            return False
        return not self.host_values or all(float(value) == number for value, number in self.host_values)

    def agrees(self, other: "Group", options: Iterable[str]) -> bool:
        """Return whether another group has the same values of some options."""
        return all(getattr(self, option) == getattr(other, option) for option in options)

    @property
    def hyperparameters(self) -> tuple[Number, ...]:
        """Return the hyperparameters that schedules change, in the order of `device.HYPERPARAMETERS`."""
        return (self.lr, self.weight_decay, self.momentum, *self.betas, self.eps)

    @property
    def lr_ratio(self) -> float:
        """Return the factor between `lr` and the learning rate of the group's steps."""
        return 1.0 if self.adamw_lr_ratio is None or self.rule.orthogonalizes else float(self.adamw_lr_ratio)

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the group's steps; waits for the device if `lr` is a tensor there."""
        return float(self.lr) * self.lr_ratio


def is_old_option(key: str, value: object) -> bool:
    """Return whether a key and its value are an option under its old name.

    A number under `lr_scale` is not: it is the factor on a group's learning rate that timm, MAE and BEiT keep there,
    which their schedules multiply with.
    """
    return key in OLD_NAMES and (value is None or isinstance(value, str) or callable(value))


def with_new_names(options: dict[str, Any], what: str, *, stacklevel: int) -> dict[str, Any]:
    """Return options under their new names; warns of each old one, in a message that begins with `what`.

    A ValueError if one is given under both. `stacklevel` counts from the caller, as for `warnings.warn`.
    """
    for old in OLD_NAMES.keys() & options.keys():
        if not is_old_option(old, options[old]):
            continue
        new = OLD_NAMES[old]
        if new in options:
            raise ValueError(f"{what}: {old!r} is the old name of {new!r}, and both are given; leave {old!r} out")
        message = f"{what}: {old!r} is called {new!r} now: {new}={options[old]!r}; the old name will go"
        warnings.warn(message, FutureWarning, stacklevel=stacklevel + 1)
        options = {new if key == old else key: value for key, value in options.items()}
    return options


def adopt_old_names(options: dict[str, Any]) -> list[str]:
    """Give options that stand under an old name their new one, in place of its value; return the old names."""
    found = [key for key in OLD_NAMES if key in options and is_old_option(key, options[key])]
    for key in found:
        options[OLD_NAMES[key]] = options.pop(key)
    return found


def found_parameter(groups: Iterable[Group], param: Tensor | str, what: str) -> tuple[Group, int]:
    """Return a parameter's group and its position there; a ValueError beginning with `what` if there is none."""
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


_OPTIONS = tuple(
    field.name
    for field in fields(Group)
    if field.name not in ("number", "params", "param_names", "idle", "rule", "values", "host_values")
)

_SCHEDULED = frozenset({"lr", "weight_decay", "momentum", "betas", "eps", "normalize_beta"})

OPTIONS = frozenset((*_OPTIONS, "params", "param_names", "adamw_lr", "adamw_weight_decay", "pending_steps"))
"""Keys of groups that the optimizer reads; all others belong to other code."""

CHECKED_OPTIONS = tuple(option for option in _OPTIONS if option not in _SCHEDULED)
"""Options of a group that are checked again when they change. Not those that schedules change at every step."""

_values_of: Callable[[Mapping[str, Any]], tuple[Any, ...]] = itemgetter(*_OPTIONS)
