"""Support for `torch.amp.GradScaler` with several ranks: gradients are unscaled, and all ranks skip the same steps.

The scaler examines only this rank's gradients, and does not call `step` if they overflowed. If the step averages
gradients over ranks, the other ranks would then wait for this one forever. `_step_supports_amp_scaling` makes the
scaler call `step` in any case, as with PyTorch's fused AdamW. One rank's overflow makes the averages non-finite on all
ranks, so that all of them skip the step.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quintic.optim.comms.sharing import AVERAGING
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import local_tensor
from quintic.optim.numeric.batches import scale_

__all__ = ["leaves_overflow_to_step", "unscale_"]


def leaves_overflow_to_step(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a scaler must call `step` even after an overflow, because ranks average gradients in it."""
    # With `step_every` it must, too, so that `unscale_` can raise its error.
    return any(group["comms"] in AVERAGING or group["step_every"] > 1 for group in groups)


def unscale_(groups: Iterable[Group], scale: Tensor | None) -> None:
    """Divide all gradients in place by `scale`, a () float32 tensor; None if `scaler.unscale_` has divided them.

    Raises:
        ValueError: a group has `step_every` > 1, or float16 weights; nothing was changed.
    """
    # Collect this rank's pieces, and check all groups before any gradient is changed.
    gradients: list[Tensor] = []
    for group in groups:
        if group.step_every > 1:
            raise ValueError(
                f"param group {group.number} has step_every={group.step_every}, and GradScaler would unscale gradients "
                f"that add up over several steps more than once: leave step_every at 1, or train in bfloat16, which "
                f"needs no GradScaler"
            )
        for name, param in zip(group.param_names, group.params, strict=True):
            if param.dtype == torch.float16 and scale is not None:
                raise ValueError(
                    f"{name}: GradScaler cannot unscale float16 gradients; keep weights in float32 and compute in "
                    f"float16 with torch.autocast"
                )
            # The step refuses sparse gradients with an error that names the parameter.
            if param.grad is not None and not param.grad.is_sparse:
                gradients.append(local_tensor(param.grad))
    if scale is not None:
        # The reciprocal is made in float64 and rounded once, as the scaler makes it, so that the bits are the same.
        scale_(gradients, scale.double().reciprocal().float())
