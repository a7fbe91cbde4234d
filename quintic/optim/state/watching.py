"""Notices parameters that were moved, converted or exchanged after something was made for them.

Models are moved, converted and sharded after the optimizer was made, and training libraries put other tensors into
`group["params"]`. Nobody tells the optimizer, so every step looks. It costs some ten microseconds for a hundred
parameters: whether they are the same objects, with the same memory and dtype. The rest is compared where these differ.
"""

from collections.abc import Sequence
from enum import Enum
from operator import attrgetter, is_
from typing import Any

from torch import Tensor

from quintic.optim.layout.layouts import is_dtensor, local_tensor

__all__ = ["Change", "WatchedParameters"]

_dtype_of, _local_of = attrgetter("dtype"), attrgetter("_local_tensor")


class Change(Enum):
    """What has become of parameters."""

    NONE = 0
    MEMORY = 1
    """They have other memory of the same device, dtype, shape and strides."""
    PARAMETERS = 2
    """There are other parameters, or their device, dtype, shape, strides or layout changed."""


class WatchedParameters:
    """Parameters of groups as they are now. Keeps references to them."""

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._params: list[list[Tensor]] = []
        self._facts: list[Any] = []
        self._remember(groups)

    def look(self, groups: Sequence[Sequence[Tensor]]) -> Change:
        """Return what has changed since the last look."""
        if self._is_same(groups):
            return Change.NONE
        params, facts = self._params, self._facts
        self._remember(groups)
        same = len(params) == len(self._params) and all(map(_are_same, params, self._params))
        return Change.MEMORY if same and facts == self._facts else Change.PARAMETERS

    def _is_same(self, groups: Sequence[Sequence[Tensor]]) -> bool:
        if len(groups) != len(self._params):
            return False
        for group, params in zip(groups, self._params, strict=True):
            if not _are_same(group, params):
                return False
        if not _are_same(list(map(_local_of, self._dtensors)), self._pieces):
            return False
        return (
            list(map(_address, self._locals)) == self._addresses and list(map(_dtype_of, self._locals)) == self._dtypes
        )

    def _remember(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._params = [list(group) for group in groups]
        params = [param for of_group in self._params for param in of_group]
        self._locals = list(map(local_tensor, params))
        self._dtensors: list[Any] = list(filter(is_dtensor, params))
        self._pieces = list(map(_local_of, self._dtensors))
        self._addresses = list(map(_address, self._locals))
        self._dtypes = list(map(_dtype_of, self._locals))
        self._facts = list(map(_facts_of, params, self._locals))


def _are_same(params: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(params) == len(others) and all(map(is_, params, others))


_address = Tensor.data_ptr


def _facts_of(param: Tensor, local: Tensor) -> tuple[Any, ...]:
    """Return what plans, state and kernels follow from."""
    placed = (param.device_mesh, param.placements) if is_dtensor(param) else None
    return placed, param.shape, local.dtype, local.device, local.shape, local.stride()
