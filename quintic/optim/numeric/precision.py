"""Masters: the float32 value behind a low-precision weight, kept in one of two forms.

`master="fp32"` keeps the float32 value, `master="mantissa"` only the 16 bits of it that the bfloat16 weight lacks:

    float32   s eeeeeeee mmmmmmm | mmmmmmmmmmmmmmmm
              bfloat16 weight    | uint16 mantissa

In both forms a bfloat16 weight is the upper half of its float32 value (rounded towards zero). So both give the same
weights, gradients and trajectory to the last bit, and "mantissa" needs 2 bytes less per weight. The bit layout follows
the modded-nanogpt speedrun.
"""

import torch
from torch import Tensor

__all__ = ["full_precision", "store_"]

_LOW_BITS = 0xFFFF


def full_precision(weight: Tensor, master: Tensor | None) -> Tensor:
    """Return the value behind a weight: the weight itself without a master, else a new float32 tensor.

    If a float32 master does not round to the weight (for example because a model was loaded), the weight wins.
    """
    if master is None:
        return weight
    # Weight in the upper 16 bits, mantissa in the lower.
    if master.dtype == torch.uint16:
        low = master.view(torch.int16).to(torch.int32) & _LOW_BITS
        return ((weight.view(torch.int16).to(torch.int32) << 16) | low).view(torch.float32)
    return torch.where(_rounded(master, weight.dtype) == weight, master, weight.float())


def store_(weight: Tensor, master: Tensor, value: Tensor) -> None:
    """Write a float32 value to a bfloat16 weight and its master, or to a float16 weight and its float32 master."""
    weight.copy_(_rounded(value, weight.dtype))
    if master.dtype == torch.uint16:
        master.view(torch.int16).copy_(value.view(torch.int32))  # the cast keeps the low 16 bits
    else:
        master.copy_(value)


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float32 value rounded to `dtype`; truncated for bfloat16."""
    if dtype != torch.bfloat16:
        return value.to(dtype)
    # The upper 16 bits.
    return (value.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
