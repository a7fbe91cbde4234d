"""Triton kernels over rows of logits: the losses, and the gradients in place of the logits.

chunks.py has the formulas, the plain twin and the products around these kernels.
"""

import math

import torch
from torch import Tensor

from quintic.kernels.dispatch import triton_is_interpreted
from quintic.kernels.jit import jit, tl, triton
from quintic.kernels.launch import launch
from quintic.kernels.loss.problem import Problem, Wanted

__all__ = ["LOG2_E", "in_ln2", "launch_rows", "scale_rows", "takes_one_pass"]

# ------------------------------------------------------------------------------------------------------------ kernels


@jit
def _reciprocal(x, APPROXIMATE: tl.constexpr):
    if APPROXIMATE:
        # One instruction, right to a unit in the last place; a division takes several, and this kernel counts them.
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = 1.0 / x
    return result


@jit
def _capped(logit, cap, span, steepness, offset, CAPPED: tl.constexpr, APPROXIMATE: tl.constexpr):
    """Return a capped logit z in units of ln 2, and r in (0, 1), from which its derivative is slope (r - r^2)."""
    if CAPPED:
        # tanh u = 1 - 2 r with r = 1 / (1 + exp 2u), sigmoid u = 1 - r with r = 1 / (1 + exp u). An overflow of the
        # exponential makes r = 0, as it should.
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
def _one_pass_block(place, sums, column, vocab, columns, span, steepness, offset, share, GRADIENT: tl.constexpr,
                    APPROXIMATE: tl.constexpr, MASKED: tl.constexpr):
    # fmt: on
    """Add exp(z - cap) of a block to the sums and replace the logits by that times share (r - r^2)."""
    if MASKED:
        logit = tl.load(place + column, mask=column < vocab, other=0.0).to(tl.float32)
    else:
        logit = tl.load(place + column).to(tl.float32)
    r = _reciprocal(1.0 + tl.exp2(logit * steepness + offset), APPROXIMATE)
    value = tl.exp2(-span * r)
    if MASKED:
        value = tl.where(column < vocab, value, 0.0)
    if GRADIENT:
        grad = (value * (share * (r - r * r))).to(place.dtype.element_ty)
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
    """The loss of one token and, with GRADIENT, its row of logits overwritten by the gradient.

    With ONE_PASS gradient = row * factor; `factors` is written in that case alone.
    """
    row = tl.program_id(0).to(tl.int64)
    place = logits + row * logits_row
    k = tl.arange(0, TARGETS)
    target = tl.load(targets + row * num_targets + k, mask=k < num_targets, other=ignore_index)
    counted = target != ignore_index
    missing = counted & ((target < 0) | (target >= vocab))
    exists = counted & (target >= 0) & (target < vocab)
    if WEIGHTED:
        weight = tl.load(weights + row * weights_row + k * weights_column, mask=counted, other=0.0).to(tl.float32)
    else:
        weight = counted.to(tl.float32)
    # Nothing can be raised from here: the loss of a token with a target that does not exist is not a number.
    weight = tl.where(missing, float("nan"), weight)
    total_weight = tl.sum(weight, axis=0)
    magnitude = tl.sum(tl.abs(weight), axis=0)
    if ONE_PASS:
        # Rows are kept relative to the sum of absolute weights: the sum of weights, which may cancel, divides nothing.
        relative = 1.0 / tl.where(magnitude == 0.0, 1.0, magnitude)
    else:
        relative = tl.load(scale + row * scale_row)
    share = total_weight * relative
    logit = tl.load(place + target, mask=exists, other=0.0).to(tl.float32)
    z, r = _capped(logit, cap, span, steepness, offset, CAPPED, APPROXIMATE)
    # No warp may overwrite the row before all have read the logits of the targets.
    tl.debug_barrier()

    block = tl.arange(0, BLOCK)
    whole = vocab // BLOCK * BLOCK
    if ONE_PASS:
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, whole, BLOCK):
            sums = _one_pass_block(
                place, sums, start + block, vocab, columns, span, steepness, offset, share, GRADIENT, APPROXIMATE, False
            )
        for start in range(whole, columns, BLOCK):
            sums = _one_pass_block(
                place, sums, start + block, vocab, columns, span, steepness, offset, share, GRADIENT, APPROXIMATE, True
            )
        total = tl.sum(sums, axis=0)
        lse = tl.log2(total) + cap
    else:
        peak = float("-inf")
        total = 0.0
        for start in range(0, vocab, BLOCK):
            inside = start + block < vocab
            part = tl.load(place + start + block, mask=inside, other=0.0).to(tl.float32)
            part, _ = _capped(part, cap, span, steepness, offset, CAPPED, APPROXIMATE)
            part = tl.where(inside, part, float("-inf"))
            higher = tl.maximum(peak, tl.max(part, axis=0))
            total = total * tl.exp2(peak - higher) + tl.sum(tl.exp2(part - higher), axis=0)
            peak = higher
        lse = tl.log2(total) + peak
        if GRADIENT:
            for start in range(0, columns, BLOCK):
                inside = start + block < vocab
                part = tl.load(place + start + block, mask=inside, other=0.0).to(tl.float32)
                part, part_r = _capped(part, cap, span, steepness, offset, CAPPED, APPROXIMATE)
                grad = tl.exp2(part - lse) * share * _derivative(part_r, slope, CAPPED)
                grad = tl.where(inside, grad, 0.0).to(logits.dtype.element_ty)
                tl.store(place + start + block, grad, mask=start + block < columns)

    # From units of ln 2 to nats.
    loss = (total_weight * lse - tl.sum(weight * z, axis=0)) * 0.6931471805599453
    tl.store(losses + row, tl.where(magnitude == 0.0, 0.0, loss))
    if GRADIENT:
        # The entries of targets once more, whole: one target may stand there several times.
        same = (target[:, None] == target[None, :]) & exists[None, :]
        pull = tl.sum(tl.where(same, weight[None, :], 0.0), axis=1) * relative
        if ONE_PASS:
            value = (tl.exp2(z - cap) * share - total * pull) * (r - r * r)
            tl.store(factors + row, slope * magnitude * tl.load(scale + row * scale_row) / total)
        else:
            value = (tl.exp2(z - lse) * share - pull) * _derivative(r, slope, CAPPED)
        # All warps have written their blocks before these entries are written again.
        tl.debug_barrier()
        tl.store(place + target, value.to(logits.dtype.element_ty), mask=exists)


@jit
def _scale_rows_kernel(
    x, factors, out, num_rows, width, x_row, x_column, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    column_tiles = tl.cdiv(width, BLOCK_COLUMNS)
    i = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    j = tl.program_id(0) % column_tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (i[:, None] < num_rows) & (j[None, :] < width)
    value = tl.load(x + i[:, None] * x_row + j[None, :].to(tl.int64) * x_column, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(factors + i, mask=i < num_rows, other=0.0)[:, None]
    tl.store(out + i[:, None] * width + j[None, :], value.to(out.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------------ launches

# Columns of a row at a time, and warps.
_ROW_BLOCK, _ROW_WARPS = 4096, 8
_SCALE_BLOCK = (16, 128)

LOG2_E = math.log2(math.e)

# Up to this distance between the bounds of logits, exp(-span) is far from the smallest float32 and bfloat16, and a row
# needs one pass.
_ONE_PASS_SPAN = 60.0


def _approximate(x: Tensor) -> bool:
    """Return whether kernels on the device of `x` have the instruction of NVIDIA that approximates a reciprocal."""
    return x.is_cuda and torch.version.hip is None and not triton_is_interpreted()


def in_ln2(softcap: tuple[float, ...] | None) -> tuple[float, float, float, float, float]:
    """Return cap, span, steepness, offset and slope for `_capped` and `_derivative`, in units of ln 2 but for slope."""
    if softcap is None:
        return 0.0, 0.0, LOG2_E, 0.0, 1.0
    if len(softcap) == 1:
        return softcap[0] * LOG2_E, 2 * softcap[0] * LOG2_E, 2 * LOG2_E / softcap[0], 0.0, 4.0
    height, shift, width = softcap
    # Lower by the cap of zero, which no softmax sees: small differences between losses are more exact.
    top = height / (1 + math.exp(min(shift / width, 700.0)))
    return top * LOG2_E, height * LOG2_E, LOG2_E / width, shift * LOG2_E / width, height / width


def takes_one_pass(softcap: tuple[float, ...] | None, dtype: torch.dtype, *, gradient: bool) -> bool:
    """Return whether the sum of a softmax can be made without its largest logit, and gradients be written before it."""
    # float16 has no exp(-span).
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
    """Compute the losses of some tokens from their logits, and overwrite these where gradients are wanted.

    `factors` (tokens,) gets the factors of gradients made in one pass; None for others and for losses alone.
    """
    targets, weights, cap = problem.targets, problem.target_weights, problem.softcap
    scale = losses if wanted is None else wanted.scale
    # fmt: off
    launch(_row_kernel, (logits.shape[0],), logits, targets[rows], losses if weights is None else weights[rows],
           scale[rows] if scale.ndim else scale, losses[rows], losses if factors is None else factors,
           problem.vocab_size, columns, logits.stride(0), targets.shape[1], 0 if weights is None else weights.stride(0),
           0 if weights is None else weights.stride(1), scale.stride(0) if scale.ndim else 0, *in_ln2(cap),
           problem.ignore_index, WEIGHTED=weights is not None, CAPPED=cap is not None,
           ONE_PASS=takes_one_pass(cap, logits.dtype, gradient=wanted is not None), GRADIENT=wanted is not None,
           APPROXIMATE=_approximate(logits), TARGETS=triton.next_power_of_2(targets.shape[1]), BLOCK=_ROW_BLOCK,
           num_warps=_ROW_WARPS)
    # fmt: on


def scale_rows(x: Tensor, factors: Tensor, out: Tensor) -> None:
    """Write x (m, n) times one factor per row into a contiguous tensor."""
    (m, n), (block_rows, block_columns) = x.shape, _SCALE_BLOCK
    # fmt: off
    launch(_scale_rows_kernel, (triton.cdiv(m, block_rows) * triton.cdiv(n, block_columns),), x, factors, out, m, n,
           x.stride(0), x.stride(1), BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns)
    # fmt: on
