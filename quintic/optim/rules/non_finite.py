"""Whether all gradients are finite, without asking the device."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["all_finite", "first_non_finite"]


def all_finite(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return () int32 on `device`: 1 if every entry of every gradient is finite, else 0. No host synchronisation.

    Gradients may be on any devices.
    """
    flags = []
    for norms in _largest_entries(gradients):
        flags.append(torch.isfinite(torch.stack(norms)).all().to(device, non_blocking=True))
    if not flags:
        return torch.ones((), dtype=torch.int32, device=device)
    return torch.stack(flags).all().int()


def first_non_finite(names: Sequence[str], gradients: Sequence[Tensor]) -> str | None:
    """Return the name of the first gradient with an infinite or undefined entry. Waits for the device."""
    if not gradients or bool(all_finite(gradients, gradients[0].device)):
        return None
    return next(name for name, g in zip(names, gradients, strict=True) if not bool(torch.isfinite(g).all()))


def _largest_entries(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the largest absolute entry of each gradient (NaN if there is one), grouped by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return [list(torch._foreach_norm(found, math.inf)) for found in groups.values()]
