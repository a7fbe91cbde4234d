"""NorMuon's neuron factors in two launches that read the update once, in Triton.

    _sum_kernel      update -> sums of squares, one per neuron and segment of its entries
    _factor_kernel   sums, second moments, scale -> second moments, factors

A neuron is a row of a matrix, or a column if the matrix is wide (m < n). The plain twin is `neuron_factors_` in
optim/rules/update.py, which has the formulas.

A matrix has the same bits in every batch, stored by rows or by columns, with and without a mask, because the order of
every sum depends on (m, n) only. The entries of a neuron are divided into segments. Within a segment, entry j belongs
to lane j mod 64; a lane adds its entries one after the other, then the upper half of the lanes is added to the lower
half until one lane is left. Segments are added eight at a time in the same way. `tl.sum` over a whole tile would be
shorter, but adds in the order in which the compiler has laid out the registers, which depends on alignment, strides and
mask.

Import this module only where Triton is installed (see `dispatch.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintic.kernels.launch import launch
from quintic.kernels.programs import pointers_at
from quintic.kernels.update.weights import flags_of

__all__ = ["advance_neuron_factors_"]

# The following numbers decide the order of sums, and with it the last bits of the results.
#
# Logarithms of the number of lanes of a segment, and of the segments added at a time.
_LOG_LANES = 6
_LOG_SEGMENTS = 3
# Entries of a neuron in one segment. Shorter segments give more programs per matrix, longer ones fewer sums to add up.
# Powers of two and multiples of the number of lanes.
_MIN_SEGMENT = 128
_MAX_SEGMENT = 1024
# Programs of one matrix that fill a large GPU; segments grow until there are no more than these.
_PROGRAMS = 512
# Neurons per program of the first launch; `_segment` counts programs with it.
_SUM_BLOCK = 64
# Neurons that a program of the second launch takes at a time; powers of two.
_MIN_FACTOR_BLOCK = 256
_MAX_FACTOR_BLOCK = 2048

# No bit depends on the numbers of warps.
_SUM_WARPS = 4
_NEURONS_PER_WARP = 256

# As in optim/rules/update.py.
_EPS = 1e-10


@triton.jit
def _sum_of_lanes(x, LOG: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sums over the first dimension of (2^LOG, WIDTH), in a fixed order, as (WIDTH,).

    Each step adds the upper half of the rows to the lower half. `tl.sum` over two numbers has only one order.
    """
    for step in tl.static_range(LOG):
        x = tl.sum(tl.reshape(x, (2, 1 << (LOG - 1 - step), WIDTH)), axis=0)
    return tl.reshape(x, (WIDTH,))


@triton.jit
def _sum_kernel(
    # (b, neurons, entries) with the three strides below.
    update,
    # (b, segments, neurons) float32, contiguous; written.
    sums,
    neurons,
    entries,
    # Entries per segment.
    segment,
    matrix_stride,
    neuron_stride,
    entry_stride,
    # Whether the entries of a neuron lie side by side in memory.
    ENTRIES_FIRST: tl.constexpr,
    LOG_LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LANES: tl.constexpr = 1 << LOG_LANES
    segments = tl.cdiv(entries, segment)
    blocks = tl.cdiv(neurons, BLOCK)
    matrix = (tl.program_id(0) // (segments * blocks)).to(tl.int64)
    place = tl.program_id(0) % (segments * blocks)
    # Consecutive programs run at the same time: number them so that they read adjacent memory.
    if ENTRIES_FIRST:
        block, number = place // segments, place % segments
    else:
        block, number = place % blocks, place // blocks
    neuron = block * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)
    known = neuron < neurons
    starts = update + matrix * matrix_stride + neuron.to(tl.int64) * neuron_stride
    # Lane l of column c adds the squares of entries l, l + 64, ... of neuron c; masked entries add zeros.
    total = tl.zeros((LANES, BLOCK), tl.float32)
    for first in range(number * segment, tl.minimum((number + 1) * segment, entries), LANES):
        entry = first + lane
        pointers = starts[None, :] + (entry.to(tl.int64) * entry_stride)[:, None]
        value = tl.load(pointers, mask=known[None, :] & (entry < entries)[:, None], other=0.0).to(tl.float32)
        # An explicit fma: whether the compiler fuses a product and a sum would be its own choice.
        total = tl.fma(value, value, total)
    target = sums + (matrix * segments + number) * neurons + neuron
    tl.store(target, _sum_of_lanes(total, LOG_LANES, BLOCK), mask=known)


@triton.jit
def _lerp(start, end, weight):
    """Return start + weight (end - start), computed from the nearer end as `torch.lerp` does.

    The fused multiply-adds are explicit, so that the compiler has no choice that could change bits.
    """
    difference = end - start
    return tl.where(weight < 0.5, tl.fma(difference, weight, start), tl.fma(difference, weight - 1.0, end))


@triton.jit
def _factor_kernel(
    # (b, segments, neurons) float32, from `_sum_kernel`.
    sums,
    # (b,) int64: address of the (neurons,) float32 second moments of each matrix; changed.
    moments,
    # (b,) float32, `scale_stride` apart: factor of all factors of a matrix.
    scale,
    # (b, neurons) float32, contiguous; written.
    factors,
    # int32, one flag or one per matrix (stride 0 or not): with HAS_MASK, a flag of 0 leaves the moments as they are.
    apply_mask,
    scale_stride,
    mask_stride,
    # `rest` is 1 - beta.
    neurons,
    segments,
    entries,
    rest,
    eps,
    HAS_MASK: tl.constexpr,
    LOG_SEGMENTS: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
):
    TOGETHER: tl.constexpr = 1 << LOG_SEGMENTS
    BLOCK: tl.constexpr = 1 << LOG_BLOCK
    # One program per matrix, since the norms need all of its neurons.
    matrix = tl.program_id(0).to(tl.int64)
    base = tl.load(moments + matrix)
    sums += matrix * segments * neurons
    factors += matrix * neurons
    lane = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.float32)
    after = tl.zeros((BLOCK,), tl.float32)
    # First pass: second moments, and 1 / sqrt(second moment), stored in `factors` for the time being.
    for start in range(0, neurons, BLOCK):
        neuron = start + lane
        known = neuron < neurons
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, segments, TOGETHER):
            number = first + tl.arange(0, TOGETHER)
            pointers = sums + (number.to(tl.int64) * neurons)[:, None] + neuron[None, :]
            squares = tl.load(pointers, mask=(number < segments)[:, None] & known[None, :], other=0.0)
            total += _sum_of_lanes(squares, LOG_SEGMENTS, BLOCK)
        mean_square = tl.div_rn(total, entries)
        places = pointers_at(base, neuron, tl.float32, False)
        moment = _lerp(tl.load(places, mask=known, other=0.0), mean_square, rest)
        keep = known
        if HAS_MASK:
            # A flag of 0 makes the bound 0: nothing is stored.
            keep = neuron < neurons * tl.load(apply_mask + matrix * mask_stride)
        tl.store(places, moment, mask=keep)
        # The maximum must keep a NaN, as the twin does.
        inverse_root = tl.div_rn(1.0, tl.sqrt_rn(tl.maximum(moment, eps, propagate_nan=tl.PropagateNan.ALL)))
        tl.store(factors + neuron, inverse_root, mask=known)
        # Lanes beyond the last neuron have a mean square of zero and add nothing.
        before += mean_square
        after = tl.fma(mean_square, inverse_root * inverse_root, after)
    # Norms, up to a common factor, of the update and of the update times `inverse_root`. Their ratio restores the norm
    # of the update.
    norm_before = tl.sqrt_rn(_sum_of_lanes(tl.reshape(before, (BLOCK, 1)), LOG_BLOCK, 1))
    norm_after = tl.sqrt_rn(_sum_of_lanes(tl.reshape(after, (BLOCK, 1)), LOG_BLOCK, 1))
    ratio = tl.div_rn(norm_before, tl.maximum(norm_after, eps, propagate_nan=tl.PropagateNan.ALL))
    own_scale = tl.load(scale + matrix * scale_stride)
    # Second pass: scale the factors. The barrier is needed because a thread may read entries that another one wrote.
    tl.debug_barrier()
    for start in range(0, neurons, BLOCK):
        neuron = start + lane
        known = neuron < neurons
        inverse_root = tl.load(factors + neuron, mask=known, other=0.0)
        tl.store(factors + neuron, inverse_root * ratio * own_scale, mask=known)


def advance_neuron_factors_(
    update: Tensor, moments: Tensor, scale: Tensor, *, beta: float, apply_mask: Tensor | None
) -> Tensor:
    """Advance NorMuon's second moments and return the factors that even out the neurons, times a scale per matrix.

    The formulas are those of `neuron_factors_` in optim/rules/update.py, here in float32. Nothing waits for the device,
    and a new `beta` compiles nothing; a captured CUDA graph keeps the `beta` of its capture.

    Args:
        update: (b, m, n) of 16, 32 or 64 bits floating point, any strides (fastest if rows or columns are contiguous);
            not modified.
        moments: (b,) int64 on the device: address of each matrix' max(m, n) second moments, contiguous float32, which
            are changed.
        scale: (b, 1, 1) float32, the learning-rate scale.
        beta: averaging coefficient in [0, 1).
        apply_mask: () or (b,) int32 on the device, 1 or 0: a matrix with 0 keeps its second moments. None for all 1.

    Returns:
        (b, m, 1), or (b, 1, n) if m < n, float32. A matrix' bits do not depend on b, on strides or on `apply_mask`.
    """
    count, m, n = update.shape
    is_tall = m >= n
    factors = torch.empty((count, m, 1) if is_tall else (count, 1, n), dtype=torch.float32, device=update.device)
    if factors.numel() == 0:
        return factors
    # Neurons first: (b, neurons, entries).
    by_neuron = update if is_tall else update.mT
    _, neurons, entries = by_neuron.shape
    segment = _segment(neurons, entries)
    segments = triton.cdiv(entries, segment)
    sums = torch.empty((count, segments, neurons), dtype=torch.float32, device=update.device)
    factor_block = min(max(triton.next_power_of_2(neurons), _MIN_FACTOR_BLOCK), _MAX_FACTOR_BLOCK)
    launch(
        _sum_kernel,
        (count * segments * triton.cdiv(neurons, _SUM_BLOCK),),
        by_neuron,
        sums,
        neurons,
        entries,
        segment,
        *by_neuron.stride(),
        ENTRIES_FIRST=by_neuron.stride(2) == 1,
        LOG_LANES=_LOG_LANES,
        BLOCK=_SUM_BLOCK,
        num_warps=_SUM_WARPS,
    )
    flags, flags_stride = flags_of(apply_mask, moments)
    launch(
        _factor_kernel,
        (count,),
        sums,
        moments,
        scale,
        factors,
        flags,
        scale.stride(0),
        flags_stride,
        neurons,
        segments,
        float(entries),
        1.0 - beta,
        _EPS,
        HAS_MASK=apply_mask is not None,
        LOG_SEGMENTS=_LOG_SEGMENTS,
        LOG_BLOCK=factor_block.bit_length() - 1,
        num_warps=factor_block // _NEURONS_PER_WARP,
    )
    return factors


def _segment(neurons: int, entries: int) -> int:
    """Return the number of entries of a segment; independent of the batch, as the order of sums must be."""
    segment = _MIN_SEGMENT
    while segment < _MAX_SEGMENT and triton.cdiv(neurons, _SUM_BLOCK) * triton.cdiv(entries, segment) > _PROGRAMS:
        segment *= 2
    return segment
