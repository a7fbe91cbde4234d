"""Checks of options that must be numbers."""

import math
from numbers import Integral, Real

from torch import Tensor

__all__ = ["is_count", "is_number"]


def is_number(value: object, least: float = -math.inf, below: float = math.inf) -> bool:
    """Whether a value is one number in [least, below). A tensor on a device is not read: that would wait for it."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and (value.device.type != "cpu" or least <= float(value) < below)
    return isinstance(value, Real) and math.isfinite(value) and least <= float(value) < below


def is_count(value: object, least: int = 1) -> bool:
    """Whether a value is an integer of at least `least`; True and False are none."""
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= least
