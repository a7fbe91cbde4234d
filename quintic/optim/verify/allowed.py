"""The differences between a step and the reference's that rounding explains, entry by entry."""

import torch
from torch import Tensor

from quintic.optim.groups.group import Group
from quintic.optim.verify.matrix_step import largest

__all__ = ["allowed_change", "allowed_state"]

# The allowed effect of another order of element-wise arithmetic, in units of the eps of its dtype.
_EPS = 8

# A value of 24 bits (`master="8bit"`) has neighbours at this distance, relative to it.
_EPS_OF_24_BITS = 2.0**-15


def allowed_change(
    group: Group, old: Tensor, right: Tensor, slack: float, master: Tensor | None, scale: float = 1.0
) -> Tensor:
    """Return the difference that rounding explains for each weight, in the shape of `right`.

    Args:
        group: the group of the weights.
        old: the weights before the reference step, in full precision.
        right: the weights after it.
        slack: the explained difference of an update.
        master: the master of the weights, if they have one; it tells how stored values are rounded.
        scale: the factor on weight decay.
    """
    # Rounding of the arithmetic, and of stored values, which with 16 and with 24 bits may end at neighbouring numbers.
    relative = _EPS * torch.finfo(torch.float64 if right.dtype == torch.float64 else torch.float32).eps
    if right.itemsize < 4:
        relative += torch.finfo(right.dtype).eps
    elif master is not None and master.dtype == torch.uint8:
        relative += _EPS_OF_24_BITS
    wide = torch.promote_types(right.dtype, torch.float32)
    old, right = old.to(wide), right.to(wide)
    allowed = right.abs().mul(relative).add(slack)
    lr = group.effective_lr
    rate = lr * float(group.weight_decay) * scale
    if group.cautious and rate:
        # Cautious decay depends on the update's sign, which rounding decides if the update is tiny: allow the decay.
        decay = old.abs() * (rate * lr if group.decay_coupling == "lr_squared" else rate)
        allowed += decay * ((right - old).abs() <= decay + allowed)
    return allowed


def allowed_state(right: Tensor, old: Tensor) -> Tensor:
    """Return the difference that rounding explains for each entry of a state, in the shape of `right`."""
    wide = torch.promote_types(right.dtype, torch.float32)
    # 16-bit state may end at neighbouring numbers; sums are as exact as their largest terms.
    allowed = right.abs().to(wide) * (torch.finfo(right.dtype).eps if right.itemsize < 4 else 0.0)
    return allowed + _EPS * torch.finfo(wide).eps * (largest(right) + largest(old))
