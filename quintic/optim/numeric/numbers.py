"""Checks and conversions of options that must be numbers."""

import math
from collections.abc import Callable
from numbers import Integral, Real
from operator import index
from typing import Any

from torch import Tensor

__all__ = ["cpu_scalar_or_none", "is_count", "is_number", "settle_integer", "settle_integers", "to_python_scalar"]


def is_number(value: object, least: float = -math.inf, below: float = math.inf) -> bool:
    """Return whether a value is a single number in [least, below)."""
    # A tensor on a device is not read, which would wait for it.
    if isinstance(value, Tensor):
        return value.numel() == 1 and (value.device.type != "cpu" or least <= float(value) < below)
    number = to_python_scalar(value)
    if not isinstance(number, Real):
        return False
    try:
        return math.isfinite(number) and least <= float(number) < below
    except OverflowError:  # an integer larger than all floating-point numbers
        return False


def is_count(value: object, least: int = 1) -> bool:
    """Return whether a value is an integer of at least `least`; True and False do not count."""
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= least


def to_python_scalar(value: Any) -> Any:
    """Return a Python number for a NumPy number or an array without dimensions; other values unchanged."""
    if isinstance(value, Tensor) or getattr(value, "shape", None) != ():
        return value
    return value.item() if hasattr(value, "item") else value


def cpu_scalar_or_none(value: Any) -> float | None:
    """Return the number in a CPU tensor or an array, whose value may be changed in place; None for other values."""
    if isinstance(value, Tensor):
        is_readable = value.device.type == "cpu" and value.numel() == 1 and not value.is_complex()
        return float(value) if is_readable else None
    return float(value) if hasattr(value, "__setitem__") and is_number(value) else None


def settle_integer(frozen: object, name: str) -> None:
    """Make a field of a frozen dataclass a Python integer; a TypeError names the field."""
    _settle(frozen, name, index, "an integer")


def settle_integers(frozen: object, name: str) -> None:
    """Make a field of a frozen dataclass a tuple of Python integers; a TypeError names the field."""
    _settle(frozen, name, lambda given: tuple(map(index, given)), "integers, such as (64, 64)")


def _settle(frozen: object, name: str, convert: Callable[[Any], object], need: str) -> None:
    given = getattr(frozen, name)
    try:
        object.__setattr__(frozen, name, convert(given))
    except TypeError:
        what = f"{type(frozen).__name__}: {name}={given!r}"
        raise TypeError(f"{what} must be {need}; divide sizes with // and not with /") from None
