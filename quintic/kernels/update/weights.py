"""Flags, low-precision weights and decay, for the kernels of the update.

These are functions for kernels (`matrix_update.py`, `adamw.py`), compiled into them. Import this module only where
Triton is installed (see `dispatch.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "MASTER",
    "flags_of",
    "load_full_precision",
    "stepped_weight",
    "store_weight",
]

MASTER = {None: 0, torch.float32: 1, torch.uint16: 2}
"""Dtype of masters -> value of a kernel's constant MASTER; see optim/rules/precision.py."""


def flags_of(apply_mask: Tensor | None, unread: Tensor) -> tuple[Tensor, int]:
    """Return a kernel's argument for `apply_mask`, () or one entry for each tensor, and the stride of its entries.

    None becomes `unread`, any tensor at hand: the kernel does not read it.
    """
    return (unread, 0) if apply_mask is None else (apply_mask, 0 if apply_mask.ndim == 0 else apply_mask.stride(0))


@triton.jit
def load_full_precision(weight, masters, mask, MASTER: tl.constexpr):
    """Return the float32 value behind a weight; see optim/rules/precision.py."""
    if MASTER == 2:
        low = tl.load(masters, mask=mask, other=0).to(tl.uint32)
        high = weight.to(tl.uint16, bitcast=True).to(tl.uint32)
        value = ((high << 16) | low).to(tl.float32, bitcast=True)
    else:
        value = weight.to(tl.float32)
    if MASTER == 1:
        master = tl.load(masters, mask=mask, other=0.0)
        # A weight that is not its rounded master was written from outside the optimizer: then the weight counts.
        value = tl.where(_rounded(master, weight.dtype).to(tl.float32) == value, master, value)
    return value


@triton.jit
def _rounded(value, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        rounded = (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = value.to(dtype)
    return rounded


@triton.jit
def store_weight(weights, masters, value, mask, MASTER: tl.constexpr):
    """Write a float32 value into a weight and its master; see optim/rules/precision.py."""
    dtype: tl.constexpr = weights.dtype.element_ty
    if MASTER == 0:
        tl.store(weights, value.to(dtype), mask=mask)
    else:
        tl.store(weights, _rounded(value, dtype), mask=mask)
    if MASTER == 1:
        tl.store(masters, value, mask=mask)
    if MASTER == 2:
        tl.store(masters, (value.to(tl.uint32, bitcast=True) & 0xFFFF).to(tl.uint16), mask=mask)


@triton.jit
def stepped_weight(
    value, update, factor, decay_factor, lr, weight_decay, CAUTIOUS: tl.constexpr, SQUARED: tl.constexpr
):
    """Return the weight after decay and update; see optim/rules/update.py apply_."""
    decay_rate = weight_decay
    if SQUARED:
        decay_rate = weight_decay * lr
    decay = value * (decay_rate.to(tl.float32) * decay_factor)
    if CAUTIOUS == "strict":
        decay = tl.where(update * value > 0, decay, 0.0)
    elif CAUTIOUS:
        decay = tl.where(update * value >= 0, decay, 0.0)
    return value - lr.to(tl.float32) * (update * factor + decay)
