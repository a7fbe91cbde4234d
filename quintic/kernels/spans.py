"""Runs of memory found by address: many copied by one launch, and the mean of what several ranks sent.

Gradients and weights of many tensors travel as one message; these are the passes before and after it. The twins are in
`optim/layout/packing.py`. Import this module only where Triton is installed (see `dispatch.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintic.kernels.launch import launch
from quintic.kernels.programs import TRITON_DTYPE, TilePrograms, divide_tiles, pointers_at, tile_of

__all__ = ["copy_spans_", "mean_of_ranks_", "span_programs"]

# Entries per program of each.
_COPY_BLOCK = 4096
_MEAN_BLOCK = 2048


def span_programs(numels: list[int]) -> TilePrograms:
    """Divide the programs of `copy_spans_` among spans with these numbers of entries; tables are on the CPU."""
    return divide_tiles(numels, _COPY_BLOCK)


@triton.jit
def _copy_kernel(
    addresses,
    places,
    numels,
    buffer,
    tensor_of_program,
    tile_of_program,
    only_span,
    ALONE: tl.constexpr,
    DTYPE: tl.constexpr,
    PACKS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    span, tile = tile_of(tensor_of_program, tile_of_program, only_span, ALONE)
    numel = tl.load(numels + span)
    element = tile * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(addresses + span)
    outside = pointers_at(address, element, DTYPE, ALIGNED)
    packed = buffer + (tl.load(places + span) + element)
    if ALIGNED:
        packed = tl.max_contiguous(tl.multiple_of(packed, 16), 16)
    if ((tile + 1) * BLOCK <= numel) & (address != 0):
        # Without masks, which would be asked entry by entry.
        if PACKS:
            tl.store(packed, tl.load(outside).to(buffer.dtype.element_ty))
        else:
            tl.store(outside, tl.load(packed).to(DTYPE))
    else:
        inside = element < numel
        if PACKS:
            # A missing span has address zero and consists of zeros.
            values = tl.load(outside, mask=element < numel * (address != 0).to(tl.int64), other=0.0)
            tl.store(packed, values.to(buffer.dtype.element_ty), mask=inside)
        else:
            tl.store(outside, tl.load(packed, mask=inside, other=0.0).to(DTYPE), mask=inside)


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
    """Copy spans of the memory of many tensors into a buffer or back, converting entries.

    Args:
        addresses: (r,) int64 on the device: where each span is; zero, if they are packed, for one of zeros.
        places: (r,) int64 on the device: the entry of the buffer where each span begins.
        numels: (r,) int64 on the device: entries of each span.
        programs: from `span_programs`, on the device.
        buffer: contiguous, float32, bfloat16 or float16.
        dtype: of the spans, likewise.
        packs: from the spans into the buffer; else from the buffer into the spans, which must not overlap.
        aligned: whether all addresses, and the spans' places in the buffer, are multiples of 16 bytes.
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
            ALONE=span >= 0,
            DTYPE=TRITON_DTYPE[dtype],
            PACKS=packs,
            ALIGNED=aligned,
            BLOCK=_COPY_BLOCK,
            num_warps=4,
        )


@triton.jit
def _mean_kernel(received, mean, numel, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < numel
    place = element
    total = tl.load(received + place, mask=inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, RANKS):
        place += numel  # 64 bits wide, which a rank times the entries of each need not be
        total += tl.load(received + place, mask=inside, other=0.0).to(tl.float32)
    # Rounded once, as a division rounds; times the reciprocal would round twice.
    average = tl.div_rn(total, tl.full(total.shape, RANKS, tl.float32))
    tl.store(mean + element, average.to(mean.dtype.element_ty), mask=inside)


def mean_of_ranks_(received: Tensor, mean: Tensor) -> Tensor:
    """Write the mean of the first dimension, summed in order in float32 and rounded once; return it.

    Args:
        received: (ranks, entries) contiguous, float32, bfloat16 or float16.
        mean: (entries,) contiguous, of the same dtype; changed.
    """
    num_ranks, numel = received.shape
    if numel:
        grid = (triton.cdiv(numel, _MEAN_BLOCK),)
        launch(_mean_kernel, grid, received, mean, numel, RANKS=num_ranks, BLOCK=_MEAN_BLOCK, num_warps=4)
    return mean
