"""Reads and stores averages of 8 bits; compiled into the update kernels.

The plain twin, and the form of the bytes, are in optim/numeric/int8_state.py. A tile has whole groups: entries that are
neighbours in it are neighbours in a row of the parameter, and the number of entries is a multiple of 8.

Import this module only where Triton is installed (see `dispatch.py`).
"""

import triton
import triton.language as tl

__all__ = ["load_average", "store_average"]


@triton.jit
def load_average(pointers, mask, BLOCK: tl.constexpr):
    """Return float32 values, (BLOCK,), of averages in float32, bfloat16, int8, or uint8 for squares."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    stored = tl.load(pointers, mask=mask, other=0)
    if dtype == tl.int8 or dtype == tl.uint8:
        whole = stored.to(tl.int32)
        bits = tl.reshape(whole & 1, (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :]
        exponent = _of_each(tl.sum(bits, axis=1), BLOCK)
        value = (whole >> 1).to(tl.float32) * _power(exponent, 6 if dtype == tl.uint8 else 5)
        if dtype == tl.uint8:
            value = value * value
        value = tl.where(exponent == 255, float("nan"), value)
    else:
        value = stored.to(tl.float32)
    return value


@triton.jit
def store_average(pointers, value, mask, step, BLOCK: tl.constexpr):
    """Store float32 values, (BLOCK,), in the dtype of the pointers, see `load_average`.

    `step`, float32, counts steps; squares alone need it.
    """
    dtype: tl.constexpr = pointers.dtype.element_ty
    if dtype == tl.int8 or dtype == tl.uint8:
        if dtype == tl.uint8:
            value = tl.sqrt_rn(value)
        bits = value.to(tl.uint32, bitcast=True)
        top = tl.max(tl.reshape((bits & 0x7FFFFFFF).to(tl.int32), (BLOCK // 8, 8)), axis=1)
        exponent = _of_each(top >> 23, BLOCK)
        # Exact, as the division of the twin is: by a power of two.
        inverse = _power(exponent, 6 if dtype == tl.uint8 else 5, INVERSE=True)
        scaled = tl.where(exponent == 255, 0.0, value * inverse)
        if dtype == tl.uint8:
            salt = step.to(tl.uint32) * 0x85EBCA77
            chance = (((bits ^ salt) * 0x9E3779B1) >> 16).to(tl.float32) * 0.0000152587890625  # 2^-16
            # The conversion drops the digits behind the point.
            whole = tl.maximum((scaled + chance).to(tl.int32), (scaled > 0).to(tl.int32))
            whole = tl.minimum(whole, 127)
        else:
            # To the nearest whole number, ties to even: float32 has no digits behind the point from 2^23 on.
            whole = ((scaled + 12582912.0) - 12582912.0).to(tl.int32)
            whole = tl.minimum(tl.maximum(whole, -63), 63)
        element = tl.arange(0, BLOCK)
        stored = (whole << 1) | ((exponent >> (element % 8)) & 1)
        tl.store(pointers, stored.to(dtype), mask=mask)
    else:
        tl.store(pointers, value.to(dtype), mask=mask)


@triton.jit
def _of_each(numbers, BLOCK: tl.constexpr):
    """Return numbers of groups, (BLOCK // 8,), for each entry, (BLOCK,)."""
    return tl.reshape(tl.broadcast_to(numbers[:, None], (BLOCK // 8, 8)), (BLOCK,))


@triton.jit
def _power(exponent, SHIFT: tl.constexpr, INVERSE: tl.constexpr = False):
    """Return 2^(exponent - 127 - SHIFT) in float32, not below the least normal number, or its inverse."""
    field = tl.minimum(tl.maximum(exponent, SHIFT + 1), 254) - SHIFT
    if INVERSE:
        field = 254 - field
    return (field << 23).to(tl.float32, bitcast=True)
