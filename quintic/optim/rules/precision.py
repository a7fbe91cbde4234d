"""Low-precision weights with a float32 value behind them, in the two ways to keep it.

`master="fp32"` keeps the float32 value, `master="mantissa"` only those 16 bits of it that the bfloat16 weight lacks:

    float32   s eeeeeeee mmmmmmm | mmmmmmmmmmmmmmmm
              bfloat16 weight    | uint16 mantissa

Either way a bfloat16 weight is the upper half of its float32 value (rounded towards zero), so that both give the same
weights, the same gradients and the same trajectory, to the last bit, and "mantissa" needs 2 bytes less per weight.
The bit layout follows the modded-nanogpt speedrun.
"""

import torch
from torch import Tensor

__all__ = ["full_precision", "store_"]

_LOW_BITS = 0xFFFF


def full_precision(weight: Tensor, master: Tensor | None) -> Tensor:
    """Return the value behind a weight: itself without a master, else a new float32 tensor.

    Where a float32 master is not the value behind the weight, as after loading a model, the weight counts.
    """
    if master is None:
        return weight
    if master.dtype == torch.uint16:
        low = master.view(torch.int16).to(torch.int32) & _LOW_BITS
        return ((weight.view(torch.int16).to(torch.int32) << 16) | low).view(torch.float32)
    return torch.where(_rounded(master, weight.dtype) == weight, master, weight.float())


def store_(weight: Tensor, master: Tensor, value: Tensor) -> None:
    """Write a float32 value into a bfloat16 weight, or a float16 one with a float32 master, and its master."""
    weight.copy_(_rounded(value, weight.dtype))
    if master.dtype == torch.uint16:
        master.view(torch.int16).copy_(value.view(torch.int32))  # the cast keeps the low 16 bits
    else:
        master.copy_(value)


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float32 value rounded to `dtype`; truncated for bfloat16."""
    if dtype != torch.bfloat16:
        return value.to(dtype)
    return (value.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
