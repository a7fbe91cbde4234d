"""Copies many spans of memory to or from one buffer in a single launch, and averages a buffer over ranks.

Gradients and weights of many tensors are sent as one message. `copy_spans_` packs them into the message's buffer and
unpacks it afterwards; `mean_of_ranks_` averages the received copies. The plain twins are in `optim/layout/packing.py`.

Import this module only where Triton is installed (see `dispatch.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintic.kernels.launch import launch
from quintic.kernels.programs import TRITON_DTYPE, TilePrograms, divide_tiles, pointers_at, tile_of

__all__ = ["copy_spans_", "mean_of_ranks_", "span_programs"]

# Entries per program.
_COPY_BLOCK = 4096
_MEAN_BLOCK = 2048


def span_programs(numels: list[int]) -> TilePrograms:
    """Return the programs of `copy_spans_` for spans with these numbers of entries; the tables are on the CPU."""
    return divide_tiles(numels, _COPY_BLOCK)


@triton.jit
def _copy_kernel(
    # (r,) int64: address of each span; 0 stands for a span of zeros, when packing.
    addresses,
    # (r,) int64: entry of the buffer at which each span begins.
    places,
    # (r,) int64: number of entries of each span.
    numels,
    # (n,) contiguous.
    buffer,
    # (p,) int32 each: span and tile of each program (see programs.py); not read with ONE_TENSOR.
    tensor_of_program,
    tile_of_program,
    # With ONE_TENSOR: the span that all programs copy.
    only_span,
    ONE_TENSOR: tl.constexpr,
    # Dtype of the spans; entries are converted from or to that of the buffer.
    DTYPE: tl.constexpr,
    # Whether to copy from the spans into the buffer, or back.
    PACKS: tl.constexpr,
    # Whether every span, and its place in the buffer, begins at a multiple of 16 bytes.
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    span, tile = tile_of(tensor_of_program, tile_of_program, only_span, ONE_TENSOR)
    numel = tl.load(numels + span)
    element = tile * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(addresses + span)
    unpacked = pointers_at(address, element, DTYPE, ALIGNED)
    packed = buffer + (tl.load(places + span) + element)
    if ALIGNED:
        packed = tl.max_contiguous(tl.multiple_of(packed, 16), 16)
    if ((tile + 1) * BLOCK <= numel) & (address != 0):
        # A whole tile of a span that exists needs no masks, which would be evaluated entry by entry.
        if PACKS:
            tl.store(packed, tl.load(unpacked).to(buffer.dtype.element_ty))
        else:
            tl.store(unpacked, tl.load(packed).to(DTYPE))
    else:
        inside = element < numel
        if PACKS:
            # Address 0 makes the mask false everywhere, so that zeros are written and nothing is read.
            values = tl.load(unpacked, mask=element < numel * (address != 0).to(tl.int64), other=0.0)
            tl.store(packed, values.to(buffer.dtype.element_ty), mask=inside)
        else:
            tl.store(unpacked, tl.load(packed, mask=inside, other=0.0).to(DTYPE), mask=inside)


def copy_spans_(
    addresses: Tensor,
    places: Tensor,
    numels: Tensor,
    programs: TilePrograms,
    buffer: Tensor,
    *,
    dtype: torch.dtype,
    packs: bool,
    aligned: bool,
) -> None:
    """Copy spans of memory of many tensors into a buffer or back, converting the dtype.

    Args:
        addresses: (r,) int64 on the device: address of each span. When packing, address 0 stands for a span of zeros.
        places: (r,) int64 on the device: entry of the buffer at which each span begins.
        numels: (r,) int64 on the device: number of entries of each span.
        programs: from `span_programs`, on the device.
        buffer: contiguous float32, bfloat16 or float16.
        dtype: dtype of the spans, one of the same three.
        packs: True copies the spans into the buffer, False copies the buffer into the spans, which must not overlap.
        aligned: whether all spans, and their places in the buffer, begin at multiples of 16 bytes.
    """
    for span, count in programs.launches():
        launch(
            _copy_kernel,
            (count,),
            addresses,
            places,
            numels,
            buffer,
            programs.tensor_of_program,
            programs.tile_of_program,
            span,
            ONE_TENSOR=span >= 0,
            DTYPE=TRITON_DTYPE[dtype],
            PACKS=packs,
            ALIGNED=aligned,
            BLOCK=_COPY_BLOCK,
            num_warps=4,
        )


@triton.jit
def _mean_kernel(received, mean, numel, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    # received (RANKS, numel) and mean (numel,), contiguous. int64 offsets: a buffer may have 2^31 entries or more.
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < numel
    place = element
    total = tl.load(received + place, mask=inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, RANKS):
        # Added up in 64 bits: the product rank * numel could overflow in 32 bits.
        place += numel
        total += tl.load(received + place, mask=inside, other=0.0).to(tl.float32)
    # A correctly rounded division, as in the twin; multiplying by the reciprocal would round twice.
    average = tl.div_rn(total, tl.full(total.shape, RANKS, tl.float32))
    tl.store(mean + element, average.to(mean.dtype.element_ty), mask=inside)


def mean_of_ranks_(received: Tensor, mean: Tensor) -> Tensor:
    """Write the mean over ranks, added in order of rank in float32 and rounded once, and return it.

    Args:
        received: (ranks, entries) contiguous float32, bfloat16 or float16.
        mean: (entries,) contiguous, same dtype; overwritten.
    """
    num_ranks, numel = received.shape
    if numel:
        grid = (triton.cdiv(numel, _MEAN_BLOCK),)
        launch(_mean_kernel, grid, received, mean, numel, RANKS=num_ranks, BLOCK=_MEAN_BLOCK, num_warps=4)
    return mean
