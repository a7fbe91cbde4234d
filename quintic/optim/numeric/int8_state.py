"""Momentum and moments of 8 bits (`state_dtype="int8"`): groups of 8 neighbours with one power of two as scale.

A group is 8 consecutive entries of a row. Each has one byte: 7 bits of a whole number q, and in the lowest bit one of
the 8 bits of E, the float32 exponent of the largest entry of the group (bit i in entry i). So the bytes of a group hold
all that is needed to read it, and state has the shape and layout of its parameter, one byte for each weight:

    int8    momentum, first moments     x = q 2^(E - 132)        -63 <= q <= 63, to the nearest
    uint8   second moments              x = (q 2^(E - 133))^2      0 <= q <= 127, up or down by chance

Second moments divide updates, so none but zero becomes zero. Nor may they stay at what one large gradient made them,
as they would if each small decay were rounded away: sqrt(x) goes to the next q above with the probability of its
distance from the one below. The chance is a hash of the value's bits and of the parameter's count of steps, so it is
the same on every layout and device. Momentum is rounded to the nearest, which costs nothing that was measured.

A value that is read and stored again has the same bytes, so groups whose entries did not change keep theirs; but for
groups below 2^-121, or 2^-135 of second moments, whose smallest steps underflow. NaN or infinity makes all of its group
NaN. Groups must lie whole in a matrix, see `placement.has_packed_state`. Where a layout cuts them between ranks, these
read and store them together (`state/cut_state.py`), so that every layout has the same bytes.

Blockwise 8-bit state follows Dettmers et al., arXiv 2110.02861; the MX formats of the Open Compute Project have small
blocks with shared powers of two.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["GROUP", "PACKED", "PIECE", "PIECE_BYTES", "is_packed", "read_packed", "rounding_of", "store_packed_"]

GROUP = 8
"""Entries that share a scale."""

PIECE = 2**17
"""Reading and storing work on at most this many entries at a time, a multiple of `GROUP`, in temporary tensors."""

PIECE_BYTES = 36
"""The most bytes of these tensors for each entry of a piece."""

# q is below 2^6, or 2^7 for second moments. The exponent of a float32 has a bias of 127, so entries in [1, 2) have
# E = 127, and steps of 2^(E - 127 - 5).
_SHIFT = {torch.int8: 5, torch.uint8: 6}
_LARGEST = {torch.int8: 63, torch.uint8: 127}

PACKED = frozenset(_SHIFT)
"""The dtypes of averages of 8 bits."""


def is_packed(state: Tensor) -> bool:
    """Return whether a momentum or moment is of 8 bits."""
    return state.dtype in PACKED


def read_packed(state: Tensor) -> Tensor:
    """Return 8-bit state (..., a multiple of 8) in float32, in its memory order."""
    values = torch.empty_like(state, dtype=torch.float32)
    for stored, piece in _in_pieces(state, values):
        piece.copy_(_read(stored))
    return values


def store_packed_(state: Tensor, values: Tensor, step: Tensor | None = None) -> None:
    """Store float32 values in 8-bit state of their shape.

    `step`, 0-d, counts steps: without it what equal values become is always the same, and some would never decay.
    """
    for stored, piece in _in_pieces(state, values):
        _store_(stored, piece, step)


def _in_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield pieces of two tensors of one shape, of at most `PIECE` entries and whole groups."""
    first = tensors[0]
    if first.numel() <= PIECE:
        yield tensors
    elif len(first) == 1 and first.ndim > 1:
        yield from _in_pieces(*(tensor[0] for tensor in tensors))
    else:
        length = max(1, PIECE // (first.numel() // len(first)))
        for pieces in zip(*(tensor.split(length) for tensor in tensors), strict=True):
            yield from _in_pieces(*pieces)


def _read(state: Tensor) -> Tensor:
    groups = state.unflatten(-1, (-1, GROUP)).to(torch.int32)
    places = torch.arange(GROUP, dtype=torch.int32, device=state.device)
    # (..., groups, 1)
    exponent = ((groups & 1) << places).sum(-1, keepdim=True, dtype=torch.int32)
    values = (groups >> 1) * _power(exponent, _SHIFT[state.dtype])
    if state.dtype == torch.uint8:
        values = values.square()
    return torch.where(exponent == 255, torch.nan, values).flatten(-2)


def _store_(state: Tensor, values: Tensor, step: Tensor | None) -> None:
    shift, largest = _SHIFT[state.dtype], _LARGEST[state.dtype]
    groups = values.unflatten(-1, (-1, GROUP))
    if state.dtype == torch.uint8:
        # Rounded to the nearest, as in kernels: on CPUs some of PyTorch's roots of float32 are off in the last bit.
        groups = groups.double().sqrt().float()
    # As integers, the bits of magnitudes have the order of these, with NaN above all.
    top = (groups.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)
    exponent = top >> 23
    # Powers of two and their inverses are exact, so no order of operations changes a bit.
    scaled = groups / _power(exponent, shift)
    if state.dtype == torch.uint8:
        whole = torch.maximum((scaled + _chance(groups, step)).floor(), (groups > 0).float())
    else:
        whole = scaled.round()
    whole = torch.where(exponent == 255, 0.0, whole).clamp(-largest, largest).to(torch.int32)
    places = torch.arange(GROUP, dtype=torch.int32, device=state.device)
    # The cast keeps the low 8 bits.
    state.copy_(((whole << 1) | ((exponent >> places) & 1)).flatten(-2))


def rounding_of(state: Tensor) -> Tensor:
    """Return how far the last bit of a value may move its stored form, in float32, for each entry."""
    # The value of q = 1: the step, or its square.
    step = read_packed((state & 1) | 2)
    # Where the largest entry crosses a power of two the steps of its group double.
    if state.dtype == torch.int8:
        return 2 * step
    # Roots may go up in one case and down in the other: (root + 3 steps)^2 - root^2.
    return 6 * (step * read_packed(state)).sqrt() + 9 * step


def _chance(values: Tensor, step: Tensor | None) -> Tensor:
    """Return for each float32 value a number in [0, 1), multiples of 2^-16, from its bits and the count of steps."""
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    if step is not None:
        bits = bits ^ (step.to(torch.int64) * 0x85EBCA77 & 0xFFFFFFFF)
    # Multiplication by 2^32 / golden ratio, whose upper bits depend on all bits below them (Knuth).
    return (bits * 0x9E3779B1 >> 16 & 0xFFFF).float() * 2.0**-16


def _power(exponent: Tensor, shift: int) -> Tensor:
    """Return 2^(exponent - 127 - shift) in float32, not below the least normal number."""
    return (exponent.clamp(shift + 1, 254) - shift << 23).view(torch.float32)
