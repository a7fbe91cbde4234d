"""Support for `torch.amp.GradScaler` where ranks have different gradients: unscale them, and skip a step on all ranks.

The scaler looks at the gradients of its own rank and does not call `step` if they overflowed. Where the step averages
gradients, the other ranks would wait for this one for ever. There `_step_supports_amp_scaling` makes the scaler call
`step` in any case, as with PyTorch's fused AdamW. One rank's overflow makes the averages of all ranks non-finite, so
that all of them skip the step.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quintic.optim.comms.sharing import AVERAGING
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import local_tensor
from quintic.optim.rules.batches import scale_

__all__ = ["leaves_overflow_to_step", "unscale_"]


def leaves_overflow_to_step(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a scaler must call `step` also after an overflow; with `step_every`, so that it can be refused."""
    return any(group["comms"] in AVERAGING or group["step_every"] > 1 for group in groups)


def unscale_(groups: Iterable[Group], scale: Tensor | None) -> None:
    """Divide all gradients by a () float32 scale, in place; None if that was done (`scaler.unscale_`).

    Raises:
        ValueError: a group has `step_every`, or weights whose gradients are float16; nothing was changed.
    """
    gradients: list[Tensor] = []
    for group in groups:
        if group.step_every > 1:
            raise ValueError(
                f"param group {group.number} has step_every={group.step_every}, and GradScaler would unscale gradients "
                f"that wait more than once: leave step_every at 1, or train in bfloat16, which needs no GradScaler"
            )
        for name, param in zip(group.param_names, group.params, strict=True):
            if param.dtype == torch.float16 and scale is not None:
                raise ValueError(
                    f"{name}: GradScaler cannot unscale float16 gradients; keep weights in float32 and compute in "
                    f"float16 with torch.autocast"
                )
            if param.grad is not None and not param.grad.is_sparse:
                gradients.append(local_tensor(param.grad))
    if scale is not None:
        # The reciprocal is made in float64 and rounded once, as the scaler makes it, so that the bits are the same.
        scale_(gradients, scale.double().reciprocal().float())
