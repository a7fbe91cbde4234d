"""Notices parameters that were moved, converted or exchanged after something was made for them.

Models are moved, converted and sharded after the optimizer was made, and training libraries put other tensors into
`group["params"]`. Nobody tells the optimizer, so every step looks. It costs some ten microseconds for a hundred
parameters: whether they are the same objects, with the same memory and dtype. The rest is compared where these differ.
"""

from collections.abc import Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

from torch import Tensor

from quintic.optim.layout.layouts import is_dtensor, local_tensor

__all__ = ["Change", "WatchedParameters"]

_dtype_of, _local_of = attrgetter("dtype"), attrgetter("_local_tensor")


class Change(Enum):
    """A change of parameters."""

    NONE = 0
    MEMORY = 1
    """They have other memory of the same device, dtype, shape and strides."""
    PARAMETERS = 2
    """There are other parameters, or their device, dtype, shape, strides or layout changed."""


class WatchedParameters:
    """Parameters of groups as they are now. Keeps references to them."""

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._remember(groups)

    def look(self, groups: Sequence[Sequence[Tensor]]) -> Change:
        """Return the kind of change since the last look."""
        same = _identities(groups) == self._identities
        if same and self._memory() == self._seen:
            return Change.NONE
        facts = self._facts
        self._remember(groups)
        return Change.MEMORY if same and facts == self._facts else Change.PARAMETERS

    def _remember(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._params = [param for group in groups for param in group]
        self._identities = _identities(groups)
        self._locals = list(map(local_tensor, self._params))
        self._dtensors: list[Any] = list(filter(is_dtensor, self._params))
        self._facts = list(map(_facts_of, self._params, self._locals))
        self._seen = self._memory()

    def _memory(self) -> tuple[list[int], list[int], list[Any]]:
        pieces = list(map(id, map(_local_of, self._dtensors)))
        return pieces, list(map(Tensor.data_ptr, self._locals)), list(map(_dtype_of, self._locals))


def _identities(groups: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    return [list(map(id, group)) for group in groups]


def _facts_of(param: Tensor, local: Tensor) -> tuple[Any, ...]:
    """Return the facts about a parameter that plans, state and kernels depend on."""
    placed = (param.device_mesh, param.placements) if is_dtensor(param) else None
    return placed, param.shape, local.dtype, local.device, local.shape, local.stride()
