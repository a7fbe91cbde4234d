"""Reads, steps and stores a weight, possibly of low precision with a master; compiled into the update kernels.

`matrix_update.py` and `adamw.py` share these device functions. Import this module only where Triton is installed (see
`dispatch.py`).
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

MASTER = {None: 0, torch.float32: 1, torch.uint16: 2, torch.uint8: 3}
"""Dtype of masters -> the kernels' constant MASTER; see optim/numeric/precision.py.

0: no masters. 1: the master is the whole float32 value, the weight its rounding. 2: the master holds the lower 16 bits
of the float32 value, the bfloat16 weight the upper 16 bits. 3: the master holds the upper 8 of these lower bits, and
the others are zero."""


def flags_of(apply_mask: Tensor | None, unread: Tensor) -> tuple[Tensor, int]:
    """Return a kernel's arguments for `apply_mask`, () or (tensors,): the tensor and the stride of its entries.

    Without flags the kernel still needs a tensor, which it does not read: `unread`.
    """
    return (unread, 0) if apply_mask is None else (apply_mask, 0 if apply_mask.ndim == 0 else apply_mask.stride(0))


@triton.jit
def load_full_precision(weight, masters, mask, MASTER: tl.constexpr):
    """Return the float32 value that a weight and its master stand for; see optim/numeric/precision.py."""
    if MASTER >= 2:
        # A bfloat16 is the upper half of a float32.
        low = tl.load(masters, mask=mask, other=0).to(tl.uint32)
        if MASTER == 3:
            low = low << 8
        high = weight.to(tl.uint16, bitcast=True).to(tl.uint32)
        value = ((high << 16) | low).to(tl.float32, bitcast=True)
    else:
        value = weight.to(tl.float32)
    if MASTER == 1:
        master = tl.load(masters, mask=mask, other=0.0)
        # A weight that is not its rounded master was written outside the optimizer, and takes precedence.
        value = tl.where(_rounded(master, weight.dtype).to(tl.float32) == value, master, value)
    return value


@triton.jit
def _rounded(value, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        # Towards zero: the upper half of the bits, so that weight and lower half together are the float32 value.
        rounded = (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = value.to(dtype)
    return rounded


@triton.jit
def store_weight(weights, masters, value, mask, MASTER: tl.constexpr):
    """Store a float32 value in a weight and its master; see optim/numeric/precision.py."""
    dtype: tl.constexpr = weights.dtype.element_ty
    if MASTER == 3:
        # Rounded to 24 bits, ties to even. A carry would make some NaNs numbers.
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7F + ((bits >> 8) & 1)) & 0xFFFFFF00
        rounded = tl.where(value != value, 0x7FC00000, rounded)
        tl.store(masters, ((rounded >> 8) & 0xFF).to(tl.uint8), mask=mask)
        value = rounded.to(tl.float32, bitcast=True)
    if MASTER == 0:
        # Without a master: rounded to nearest.
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
    """Return value - lr (update factor + decay), as `decay_and_step_` in optim/rules/update.py.

    The decay is value * weight_decay * decay_factor, times lr once more if SQUARED. CAUTIOUS drops it where update and
    value differ in sign ("strict": also where one of them is zero).
    """
    decay_rate = weight_decay
    if SQUARED:
        decay_rate = weight_decay * lr
    # Hyperparameters are float64; the factor of a weight is rounded to float32 first, as in the twin.
    decay = value * (decay_rate.to(tl.float32) * decay_factor)
    if CAUTIOUS == "strict":
        decay = tl.where(update * value > 0, decay, 0.0)
    elif CAUTIOUS:
        decay = tl.where(update * value >= 0, decay, 0.0)
    return value - lr.to(tl.float32) * (update * factor + decay)
