"""NorMuon's neuron factors in two launches that read the update once, in Triton.

    square_sums      update -> sums of squares, one per neuron and segment of its entries (`square_sums.py`)
    _factor_kernel   sums, second moments, scale -> second moments, factors

A neuron is a row of a matrix, or a column if the matrix is wide (m < n). The plain twin is `neuron_factors_` in
optim/rules/update.py, which has the formulas.

A matrix has the same bits in every batch, stored by rows or by columns, with and without a mask, because the order of
every sum depends on (m, n) only: segments are added eight at a time, the upper half to the lower half.

Import this module only where Triton is installed (see `dispatch.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintic.kernels.launch import launch
from quintic.kernels.programs import pointers_at
from quintic.kernels.update.square_sums import square_sums, sum_of_lanes
from quintic.kernels.update.weights import flags_of

__all__ = ["advance_neuron_factors_"]

# The following numbers decide the order of sums, and with it the last bits of the results.
#
# Logarithm of the number of segments added at a time.
_LOG_SEGMENTS = 3
# Neurons that a program of the second launch takes at a time; powers of two.
_MIN_FACTOR_BLOCK = 256
_MAX_FACTOR_BLOCK = 2048

# No bit depends on the number of warps.
_NEURONS_PER_WARP = 256

# As in optim/rules/update.py.
_EPS = 1e-10


@triton.jit
def _lerp(start, end, weight):
    """Return start + weight (end - start), computed from the nearer end as `torch.lerp` does.

    The fused multiply-adds are explicit, so that the compiler has no choice that could change bits.
    """
    difference = end - start
    return tl.where(weight < 0.5, tl.fma(difference, weight, start), tl.fma(difference, weight - 1.0, end))


@triton.jit
def _factor_kernel(
    # (b, segments, neurons) float32, from `square_sums`.
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
            total += sum_of_lanes(squares, LOG_SEGMENTS, BLOCK)
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
    norm_before = tl.sqrt_rn(sum_of_lanes(tl.reshape(before, (BLOCK, 1)), LOG_BLOCK, 1))
    norm_after = tl.sqrt_rn(sum_of_lanes(tl.reshape(after, (BLOCK, 1)), LOG_BLOCK, 1))
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
    neurons, entries = (m, n) if is_tall else (n, m)
    sums = square_sums(update, -1 if is_tall else -2)  # (b, segments, neurons)
    factor_block = min(max(triton.next_power_of_2(neurons), _MIN_FACTOR_BLOCK), _MAX_FACTOR_BLOCK)
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
        sums.shape[1],
        float(entries),
        1.0 - beta,
        _EPS,
        HAS_MASK=apply_mask is not None,
        LOG_SEGMENTS=_LOG_SEGMENTS,
        LOG_BLOCK=factor_block.bit_length() - 1,
        num_warps=factor_block // _NEURONS_PER_WARP,
    )
    return factors
