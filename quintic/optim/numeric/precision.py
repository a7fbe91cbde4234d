"""Masters: the value behind a low-precision weight, kept in one of three forms.

`master="fp32"` keeps the float32 value, `master="mantissa"` only the 16 bits of it that the bfloat16 weight lacks, and
`master="8bit"` the upper 8 of these:

    float32   s eeeeeeee mmmmmmm | mmmmmmmm mmmmmmmm
              bfloat16 weight    | uint16 mantissa
              bfloat16 weight    | uint8

In all forms a bfloat16 weight is the upper half of its value (rounded towards zero). The first two give the same
weights, gradients and trajectory to the last bit, and "mantissa" needs 2 bytes less per weight. The bit layout follows
the modded-nanogpt speedrun. "8bit" rounds each new value to the nearest one of 24 bits, ties to even: a step below
2^-17 of a weight leaves it as it is, and one above 2^-16 does not. Weights of 24 bits follow FlashOptim.
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
    if master.dtype in (torch.uint16, torch.uint8):
        is_byte = master.dtype == torch.uint8
        low = master.to(torch.int32) << 8 if is_byte else master.view(torch.int16).to(torch.int32) & _LOW_BITS
        return ((weight.view(torch.int16).to(torch.int32) << 16) | low).view(torch.float32)
    return torch.where(_rounded(master, weight.dtype) == weight, master, weight.float())


def store_(weight: Tensor, master: Tensor, value: Tensor) -> None:
    """Write a float32 value to a bfloat16 weight and its master, or to a float16 weight and its float32 master.

    With a master of 8 bits the value is rounded in place.
    """
    if master.dtype == torch.uint8:
        _round_to_24_bits_(value)
    weight.copy_(_rounded(value, weight.dtype))
    # The casts to integers keep the low bits.
    if master.dtype == torch.uint8:
        master.copy_(value.view(torch.int32) >> 8)
    elif master.dtype == torch.uint16:
        master.view(torch.int16).copy_(value.view(torch.int32))
    else:
        master.copy_(value)


def _round_to_24_bits_(value: Tensor) -> None:
    """Round float32 values to the nearest whose lowest 8 bits are zero, ties to even, in place."""
    is_nan, bits = value.isnan(), value.view(torch.int32)
    # A carry may reach the exponent, as it should; but it would make some NaNs numbers.
    odd = bits >> 8
    bits += odd.bitwise_and_(1).add_(0x7F)
    bits &= ~0xFF
    value.masked_fill_(is_nan, torch.nan)


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float32 value rounded to `dtype`; truncated for bfloat16."""
    if dtype != torch.bfloat16:
        return value.to(dtype)
    # The upper 16 bits.
    return (value.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
