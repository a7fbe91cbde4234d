"""Tests whether all gradients are finite, without waiting for the device."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quintic.optim.numeric.batches import group_by_device_dtype

__all__ = ["all_finite", "first_non_finite"]


def all_finite(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return () int32 on `device`: 1 if every entry of every gradient is finite, else 0. No host synchronisation.

    Gradients may be on any devices.
    """
    # The largest absolute entry is finite if all are; one fused call per device and dtype, (gradients,).
    flags = []
    for positions in group_by_device_dtype(gradients).values():
        largest = torch.stack(torch._foreach_norm([gradients[position] for position in positions], math.inf))
        flags.append(torch.isfinite(largest).all().to(device, non_blocking=True))
    return torch.stack(flags).all().int() if flags else torch.ones((), dtype=torch.int32, device=device)


def first_non_finite(names: Sequence[str], gradients: Sequence[Tensor]) -> str | None:
    """Return the name of the first gradient with an infinite or undefined entry; None if there is no such gradient.

    Waits for the device.
    """
    if not gradients or bool(all_finite(gradients, gradients[0].device)):
        return None
    return next(name for name, g in zip(names, gradients, strict=True) if not bool(torch.isfinite(g).all()))
