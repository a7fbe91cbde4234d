"""Triton kernels over rows of logits: they compute the losses and overwrite the logits with their gradient.

One program of `_row_kernel` takes one token. It makes one pass over the row if a cap bounds the logits tightly enough
(`takes_one_pass`), else two: one for the sum of the softmax, one for the gradient. `_scale_rows_kernel` applies the
factors that one pass leaves open. Exponentials are powers of two, so capped logits z are kept in units of ln 2.

chunks.py has the formulas, the plain twin and the products around these kernels.
"""

import math

import torch
from torch import Tensor

from quintic.kernels.dispatch import triton_is_interpreted
from quintic.kernels.jit import jit, tl, triton
from quintic.kernels.launch import launch
from quintic.kernels.loss.problem import Problem, Wanted

__all__ = ["LOG2_E", "cap_constants", "launch_rows", "scale_rows", "takes_one_pass"]

# ------------------------------------------------------------------------------------------------------------ kernels


@jit
def _reciprocal(x, APPROXIMATE: tl.constexpr):
    if APPROXIMATE:
        # One instruction with an error of one unit in the last place. A division takes several instructions, and the
        # kernel is bound by their number.
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = 1.0 / x
    return result


@jit
def _capped(logit, cap, span, steepness, offset, CAPPED: tl.constexpr, APPROXIMATE: tl.constexpr):
    """Return the capped logit z in units of ln 2, and r in (0, 1) with the derivative slope (r - r^2)."""
    if CAPPED:
        # z = cap - span r: tanh u = 1 - 2 r with r = 1 / (1 + exp 2u), sigmoid u = 1 - r with r = 1 / (1 + exp u). If
        # the exponential overflows, r = 0, which is its limit.
        r = _reciprocal(1.0 + tl.exp2(logit * steepness + offset), APPROXIMATE)
        z = cap - span * r
    else:
        r = logit
        z = logit * steepness
    return z, r


@jit
def _derivative(r, slope, CAPPED: tl.constexpr):
    """Return the derivative of a capped logit from the r of `_capped`."""
    if CAPPED:
        result = slope * (r - r * r)
    else:
        result = tl.full(r.shape, 1.0, tl.float32)
    return result


# fmt: off
@jit
def _one_pass_block(place, sums, column, vocab, columns, span, steepness, offset, ratio, GRADIENT: tl.constexpr,
                    APPROXIMATE: tl.constexpr, MASKED: tl.constexpr):
    # fmt: on
    """Add exp(z - cap) of a block of logits to the sums; with GRADIENT replace them by exp(z - cap) ratio (r - r^2).

    `column` are the columns of the block (BLOCK,), `sums` is (BLOCK,) float32, `place` points to the row. MASKED blocks
    reach beyond the vocabulary, up to `columns`, where the gradient is zero.
    """
    if MASKED:
        logit = tl.load(place + column, mask=column < vocab, other=0.0).to(tl.float32)
    else:
        logit = tl.load(place + column).to(tl.float32)
    r = _reciprocal(1.0 + tl.exp2(logit * steepness + offset), APPROXIMATE)
    # z - cap = -span r.
    value = tl.exp2(-span * r)
    if MASKED:
        value = tl.where(column < vocab, value, 0.0)
    if GRADIENT:
        grad = (value * (ratio * (r - r * r))).to(place.dtype.element_ty)
        if MASKED:
            tl.store(place + column, grad, mask=column < columns)
        else:
            tl.store(place + column, grad)
    return sums + value


# fmt: off
@jit
def _row_kernel(logits, targets, weights, scale, losses, factors, vocab, columns, logits_row, num_targets,
                weights_row, weights_column, scale_row, cap, span, steepness, offset, slope, ignore_index,
                WEIGHTED: tl.constexpr, CAPPED: tl.constexpr, ONE_PASS: tl.constexpr, GRADIENT: tl.constexpr,
                APPROXIMATE: tl.constexpr, TARGETS: tl.constexpr, BLOCK: tl.constexpr):
    # fmt: on
    """Write the loss of one token and, with GRADIENT, overwrite its row of logits with the gradient.

    With ONE_PASS the gradient is the row times a factor, which is written to `factors`.

    Tensors: logits (tokens, columns) with rows `logits_row` apart; targets (tokens, num_targets) int64, contiguous;
    weights (tokens, num_targets) with two strides, read if WEIGHTED; scale () or (tokens,) with stride `scale_row`;
    losses and factors (tokens,) float32. Columns from `vocab` on are padding. TARGETS is num_targets rounded up to a
    power of two. cap, span, steepness, offset and slope are from `cap_constants`.
    """
    # int64: the offset of a row in a chunk of logits may exceed 2^31.
    row = tl.program_id(0).to(tl.int64)
    place = logits + row * logits_row
    k = tl.arange(0, TARGETS)
    # (TARGETS,): lanes beyond the last target are ignored targets.
    target = tl.load(targets + row * num_targets + k, mask=k < num_targets, other=ignore_index)
    counted = target != ignore_index
    missing = counted & ((target < 0) | (target >= vocab))
    exists = counted & (target >= 0) & (target < vocab)
    if WEIGHTED:
        weight = tl.load(weights + row * weights_row + k * weights_column, mask=counted, other=0.0).to(tl.float32)
    else:
        weight = counted.to(tl.float32)
    # A kernel cannot raise an error: a target outside of the vocabulary makes the token's loss NaN.
    weight = tl.where(missing, float("nan"), weight)
    total_weight = tl.sum(weight, axis=0)
    magnitude = tl.sum(tl.abs(weight), axis=0)
    if ONE_PASS:
        # Rows are scaled by 1 / sum of absolute weights. The sum of weights may cancel to zero and must not divide.
        relative = 1.0 / tl.where(magnitude == 0.0, 1.0, magnitude)
    else:
        relative = tl.load(scale + row * scale_row)
    ratio = total_weight * relative
    # The logits of the targets, before they are overwritten.
    logit = tl.load(place + target, mask=exists, other=0.0).to(tl.float32)
    z, r = _capped(logit, cap, span, steepness, offset, CAPPED, APPROXIMATE)
    # All warps must have read them before any warp overwrites the row.
    tl.debug_barrier()

    block = tl.arange(0, BLOCK)
    # Blocks before `whole` lie within the vocabulary and need no masks.
    whole = vocab // BLOCK * BLOCK
    if ONE_PASS:
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, whole, BLOCK):
            sums = _one_pass_block(
                place, sums, start + block, vocab, columns, span, steepness, offset, ratio, GRADIENT, APPROXIMATE, False
            )
        for start in range(whole, columns, BLOCK):
            sums = _one_pass_block(
                place, sums, start + block, vocab, columns, span, steepness, offset, ratio, GRADIENT, APPROXIMATE, True
            )
        total = tl.sum(sums, axis=0)
        lse = tl.log2(total) + cap
    else:
        # The sum relative to the largest logit so far, rescaled whenever a larger one is found (online softmax).
        peak = float("-inf")
        total = 0.0
        for start in range(0, vocab, BLOCK):
            inside = start + block < vocab
            z_block = tl.load(place + start + block, mask=inside, other=0.0).to(tl.float32)
            z_block, _ = _capped(z_block, cap, span, steepness, offset, CAPPED, APPROXIMATE)
            z_block = tl.where(inside, z_block, float("-inf"))
            higher = tl.maximum(peak, tl.max(z_block, axis=0))
            total = total * tl.exp2(peak - higher) + tl.sum(tl.exp2(z_block - higher), axis=0)
            peak = higher
        lse = tl.log2(total) + peak
        if GRADIENT:
            # Another pass, now that the sum is known.
            for start in range(0, columns, BLOCK):
                inside = start + block < vocab
                z_block = tl.load(place + start + block, mask=inside, other=0.0).to(tl.float32)
                z_block, r_block = _capped(z_block, cap, span, steepness, offset, CAPPED, APPROXIMATE)
                grad = tl.exp2(z_block - lse) * ratio * _derivative(r_block, slope, CAPPED)
                grad = tl.where(inside, grad, 0.0).to(logits.dtype.element_ty)
                tl.store(place + start + block, grad, mask=start + block < columns)

    # From units of ln 2 to nats.
    loss = (total_weight * lse - tl.sum(weight * z, axis=0)) * 0.6931471805599453
    tl.store(losses + row, tl.where(magnitude == 0.0, 0.0, loss))
    if GRADIENT:
        # Rewrite the gradients of the targets' logits, now with their weights. Equal targets must all write the same
        # value, so each adds the weights of all targets equal to it.
        same = (target[:, None] == target[None, :]) & exists[None, :]
        pull = tl.sum(tl.where(same, weight[None, :], 0.0), axis=1) * relative
        if ONE_PASS:
            value = (tl.exp2(z - cap) * ratio - total * pull) * (r - r * r)
            tl.store(factors + row, slope * magnitude * tl.load(scale + row * scale_row) / total)
        else:
            value = (tl.exp2(z - lse) * ratio - pull) * _derivative(r, slope, CAPPED)
        # The blocks that contain these entries must have been written before.
        tl.debug_barrier()
        tl.store(place + target, value.to(logits.dtype.element_ty), mask=exists)


@jit
def _scale_rows_kernel(
    x, factors, out, num_rows, width, x_row, x_column, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    # x (num_rows, width) with two strides, factors (num_rows,) float32, out (num_rows, width) contiguous.
    column_tiles = tl.cdiv(width, BLOCK_COLUMNS)
    i = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    j = tl.program_id(0) % column_tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (i[:, None] < num_rows) & (j[None, :] < width)
    value = tl.load(x + i[:, None] * x_row + j[None, :].to(tl.int64) * x_column, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(factors + i, mask=i < num_rows, other=0.0)[:, None]
    tl.store(out + i[:, None] * width + j[None, :], value.to(out.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------------ launches

# Columns of a row that a program takes at a time, and its warps.
_ROW_BLOCK, _ROW_WARPS = 4096, 8
# Rows and columns per program of `_scale_rows_kernel`.
_SCALE_BLOCK = (16, 128)

LOG2_E = math.log2(math.e)

# Largest span, the distance between the bounds of capped logits, for one pass: exp(-span) is then far above the
# smallest normal float32 and bfloat16.
_ONE_PASS_SPAN = 60.0


def _approximate(x: Tensor) -> bool:
    """Return whether kernels on the device of `x` can use NVIDIA's instruction for an approximate reciprocal."""
    return x.is_cuda and torch.version.hip is None and not triton_is_interpreted()


def cap_constants(softcap: tuple[float, ...] | None) -> tuple[float, float, float, float, float]:
    """Return the constants (cap, span, steepness, offset, slope) of `_capped` and `_derivative`.

    All but the slope are in units of ln 2.
    """
    if softcap is None:
        return 0.0, 0.0, LOG2_E, 0.0, 1.0
    if len(softcap) == 1:
        return softcap[0] * LOG2_E, 2 * softcap[0] * LOG2_E, 2 * LOG2_E / softcap[0], 0.0, 4.0
    height, shift, width = softcap
    # z less its value at logit 0: a softmax ignores the constant, and smaller z make the loss more exact.
    top = height / (1 + math.exp(min(shift / width, 700.0)))
    return top * LOG2_E, height * LOG2_E, LOG2_E / width, shift * LOG2_E / width, height / width


def takes_one_pass(softcap: tuple[float, ...] | None, dtype: torch.dtype, *, gradient: bool) -> bool:
    """Return whether one pass over a row suffices: the cap bounds z - cap, so that no largest logit must be found."""
    # exp(-span) underflows in float16, in which gradients would be stored.
    span = math.inf if softcap is None else softcap[0] * (2 if len(softcap) == 1 else 1)
    return span <= _ONE_PASS_SPAN and not (gradient and dtype == torch.float16)


def launch_rows(
    problem: Problem,
    rows: slice,
    logits: Tensor,
    columns: int,
    losses: Tensor,
    wanted: Wanted | None,
    factors: Tensor | None = None,
) -> None:
    """Write the losses of tokens `rows` and, if gradients are wanted, overwrite their logits with the gradient.

    `factors` (tokens of these rows,) receives the factors that complete gradients of one pass; None for other gradients
    and for losses only.
    """
    targets, weights, cap = problem.targets, problem.target_weights, problem.softcap
    # Arguments that the kernel does not read still need a tensor: `losses`.
    scale = losses if wanted is None else wanted.scale
    # fmt: off
    launch(_row_kernel, (logits.shape[0],), logits, targets[rows], losses if weights is None else weights[rows],
           scale[rows] if scale.ndim else scale, losses[rows], losses if factors is None else factors,
           problem.vocab_size, columns, logits.stride(0), targets.shape[1], 0 if weights is None else weights.stride(0),
           0 if weights is None else weights.stride(1), scale.stride(0) if scale.ndim else 0, *cap_constants(cap),
           problem.ignore_index, WEIGHTED=weights is not None, CAPPED=cap is not None,
           ONE_PASS=takes_one_pass(cap, logits.dtype, gradient=wanted is not None), GRADIENT=wanted is not None,
           APPROXIMATE=_approximate(logits), TARGETS=triton.next_power_of_2(targets.shape[1]), BLOCK=_ROW_BLOCK,
           num_warps=_ROW_WARPS)
    # fmt: on


def scale_rows(x: Tensor, factors: Tensor, out: Tensor) -> None:
    """Write x (m, n) times one factor per row, (m,), into a contiguous tensor."""
    (m, n), (block_rows, block_columns) = x.shape, _SCALE_BLOCK
    # fmt: off
    launch(_scale_rows_kernel, (triton.cdiv(m, block_rows) * triton.cdiv(n, block_columns),), x, factors, out, m, n,
           x.stride(0), x.stride(1), BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns)
    # fmt: on
