"""Parameters of simulated ranks: tensors on the meta device that report the ranks' device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["MetaTensors"]


class _MetaTensor(Tensor):
    """A tensor on the meta device that reports another device, which need not exist here."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # views are plain tensors
    claimed_device: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the device of the simulated ranks."""
        return self.claimed_device


class MetaTensors:
    """Makes tensors without memory that have a shape, a dtype and the ranks' device; equal ones are one object."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._made: dict[Any, _MetaTensor] = {}

    def of(self, param: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a stand-in for a box of a parameter: of this shape, with the parameter's dtype and memory format."""
        # Dimensions from the largest to the smallest stride: kernels are chosen by the memory format, too.
        strides = param.stride()
        order = sorted(range(param.ndim), key=lambda dim: (-strides[dim], dim))
        key = (tuple(shape), tuple(order), param.dtype)
        if key not in self._made:
            made = torch.empty_permuted(tuple(shape), order, dtype=param.dtype, device="meta").as_subclass(_MetaTensor)
            made.claimed_device = self._device
            self._made[key] = made
        return self._made[key]
