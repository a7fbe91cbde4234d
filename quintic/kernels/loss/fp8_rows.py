"""A Gluon kernel over rows of logits: it computes the losses, and the gradients of the logits in 8 bits (e5m2).

One program takes one token. It keeps the row's exponentials in shared memory until the sum of the softmax is known, so
that logits are read once; a row that does not fit there is read and computed again. Every gradient is written once,
with its final factor: unlike the 16-bit gradients of rows.py it could not be rescaled later without a second rounding.

Import this module only where Triton is installed, and call it on CUDA devices that have 8-bit floats. chunks.py has the
formulas, and the plain twin.
"""

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quintic.kernels.launch import launch
from quintic.kernels.loss.problem import Problem
from quintic.kernels.loss.rows import LOG2_E, cap_constants, takes_one_pass
from quintic.kernels.products.hopper_tiles import group_barrier

__all__ = ["launch_rows_fp8"]


@gluon.jit
def _entry(logit, peak, height, steepness, offset, CAPPED: gl.constexpr):
    """Return a capped logit minus `peak`, in units of ln 2, and its derivative up to the factor `slope`."""
    z = logit.to(gl.float32) * steepness + offset
    if CAPPED:
        # One instruction with a relative error of 2^-11; bfloat16 logits have one of 2^-9.
        tanh = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=gl.float32, is_pure=True, pack=1)
        z = height * tanh
        derivative = 1.0 - tanh * tanh
    else:
        derivative = gl.full_like(z, 1.0)
    return z - peak, derivative


@gluon.jit
def _e5m2(value):
    """Return float32 values as bytes of e5m2, rounded to nearest, ties to even; values beyond the range saturate."""
    # Four values at a time (pack=4) become the four bytes of one register.
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f",
        [value],
        dtype=gl.uint8,
        is_pure=True,
        pack=4,
    )


# fmt: off
@gluon.jit
def _targets(targets, weights, row, k, num_targets, weights_row, weights_column, vocab, ignore_index,
             WEIGHTED: gl.constexpr):
    # fmt: on
    """Return a token's targets, a mask of targets within the vocabulary, and their weights; one entry per `k`."""
    target = gl.load(targets + row * num_targets + k, mask=k < num_targets, other=ignore_index)
    counted = target != ignore_index
    exists = counted & (target >= 0) & (target < vocab)
    if WEIGHTED:
        weight = gl.load(weights + row * weights_row + k * weights_column, mask=counted, other=0.0).to(gl.float32)
    else:
        weight = counted.to(gl.float32)
    # A kernel cannot raise an error: a target outside of the vocabulary makes the token's loss NaN.
    return target, exists, gl.where(counted == exists, weight, float("nan"))


# fmt: off
@gluon.jit
def _fp8_kernel(logits, targets, weights, scale, losses, out, vocab, columns, num_targets, weights_row, weights_column,
                scale_row, height, steepness, offset, slope, ignore_index, WEIGHTED: gl.constexpr, CAPPED: gl.constexpr,
                ONE_PASS: gl.constexpr, KEPT: gl.constexpr, TARGETS: gl.constexpr, VECTOR: gl.constexpr):
    # fmt: on
    """Write the loss of one token, and the gradient of its logits times `scale`, as e5m2.

    KEPT is the number of blocks that a row takes in shared memory, 0 for rows that do not fit. Tensors: logits and out
    (tokens, columns) contiguous, out as bytes; targets, weights, scale and losses as in rows.py.
    """
    # A block is VECTOR adjacent entries per thread. `pairs` lays out (target, target) comparisons.
    BLOCK: gl.constexpr = VECTOR * 32 * gl.num_warps()
    line: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [gl.num_warps()], [0])
    pairs: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    row = gl.program_id(0).to(gl.int64)
    place = logits + row * columns
    block = gl.arange(0, BLOCK, layout=line)
    whole = vocab // BLOCK * BLOCK
    if KEPT > 0:
        kept = gl.allocate_shared_memory(gl.bfloat16, [KEPT, BLOCK], gl.SwizzledSharedLayout(8, 1, 1, [0]))
    # The bound of the capped logits, or else the largest logit of this row, found in a pass of its own.
    peak = height
    if not ONE_PASS:
        peak = float("-inf")
        for start in range(0, vocab, BLOCK):
            logit = gl.load(place + start + block, mask=start + block < columns, other=0.0)
            z, _ = _entry(logit, 0.0, height, steepness, offset, CAPPED)
            peak = gl.maximum(peak, gl.max(gl.where(start + block < vocab, z, float("-inf")), axis=0))

    # Blocks within the vocabulary need no masks; a last block may reach beyond it.
    sums = gl.zeros([BLOCK], gl.float32, layout=line)
    for start in range(0, whole, BLOCK):
        z, derivative = _entry(gl.load(place + start + block), peak, height, steepness, offset, CAPPED)
        value = gl.exp2(z)
        sums += value
        if KEPT > 0:
            kept.index(start // BLOCK).store((value * derivative).to(gl.bfloat16))
    if whole < columns:
        logit = gl.load(place + whole + block, mask=whole + block < columns, other=0.0)
        z, derivative = _entry(logit, peak, height, steepness, offset, CAPPED)
        value = gl.where(whole + block < vocab, gl.exp2(z), 0.0)
        sums += value
        if KEPT > 0:
            kept.index(whole // BLOCK).store((value * derivative).to(gl.bfloat16))
    total = gl.sum(sums, axis=0)

    # Targets in two layouts: along the rows and along the columns of the comparison of all pairs.
    k = gl.arange(0, TARGETS, layout=gl.SliceLayout(1, pairs))
    target, exists, weight = _targets(
        targets, weights, row, k, num_targets, weights_row, weights_column, vocab, ignore_index, WEIGHTED
    )
    other_k = gl.arange(0, TARGETS, layout=gl.SliceLayout(0, pairs))
    other, other_exists, other_weight = _targets(
        targets, weights, row, other_k, num_targets, weights_row, weights_column, vocab, ignore_index, WEIGHTED
    )
    total_weight = gl.sum(weight, axis=0)
    logit = gl.load(place + target, mask=exists, other=0.0)
    z, derivative = _entry(logit, peak, height, steepness, offset, CAPPED)
    # From units of ln 2 to nats.
    loss = (total_weight * gl.log2(total) - gl.sum(weight * z, axis=0)) * 0.6931471805599453
    magnitude = gl.sum(gl.abs(weight), axis=0)
    gl.store(losses + row, gl.where(magnitude == 0.0, 0.0, loss))

    # The sum is known: write the gradients.
    scale_of_row = slope * gl.load(scale + row * scale_row)
    factor = total_weight * scale_of_row / total
    there = out + row * columns
    for start in range(0, columns, BLOCK):
        if KEPT > 0:
            grad = kept.index(start // BLOCK).load(line).to(gl.float32)
        else:
            again = gl.load(place + start + block, mask=start + block < columns, other=0.0)
            power, steep = _entry(again, peak, height, steepness, offset, CAPPED)
            grad = gl.where(start + block < vocab, gl.exp2(power) * steep, 0.0)
        gl.store(there + start + block, _e5m2(grad * factor), mask=start + block < columns)
    # Rewrite the gradients of the targets' logits, now with their weights. Equal targets must all write the same value,
    # so each adds the weights of all targets equal to it.
    same = (target[:, None] == other[None, :]) & other_exists[None, :]
    pull = gl.sum(gl.where(same, gl.expand_dims(other_weight, 0), 0.0), axis=1)
    grad = (gl.exp2(z) * factor - pull * scale_of_row) * derivative
    # The blocks that contain these entries must have been written before.
    group_barrier()
    gl.store(there + target, _e5m2(grad), mask=exists)


# Adjacent entries per thread, and warps; measured on an H200, 2026-11 (docs/development/LOG.md).
_VECTOR, _WARPS = 8, 16
# `_e5m2` converts four values at a time.
_FEWEST_TARGETS = 4


def launch_rows_fp8(problem: Problem, rows: slice, logits: Tensor, losses: Tensor, scale: Tensor) -> Tensor:
    """Write the losses of tokens `rows`, and return the gradients of their logits times `scale`.

    Args:
        problem: the inputs of all tokens.
        rows: which tokens.
        logits: (tokens of these rows, columns) contiguous; columns beyond the vocabulary are padding.
        losses: (tokens,) float32 of all tokens; the entries of these rows are written.
        scale: () or (tokens,) float32 of all tokens.

    Returns:
        (tokens of these rows, columns) float8_e5m2, zero in the padding.
    """
    targets, weights, cap = problem.targets, problem.target_weights, problem.softcap
    columns = logits.shape[1]
    height, steepness, offset, slope = _as_tanh(cap)
    block = _VECTOR * 32 * _WARPS
    blocks = triton.cdiv(columns, block)
    # Two bytes per entry, and 1 KiB to spare.
    fits = blocks * block * 2 + 1024 <= _shared_memory(logits.device)
    out = torch.empty(logits.shape, dtype=torch.float8_e5m2, device=logits.device)
    # fmt: off
    launch(_fp8_kernel, (logits.shape[0],), logits, targets[rows], losses if weights is None else weights[rows],
           scale[rows] if scale.ndim else scale, losses[rows], out.view(torch.uint8), problem.vocab_size, columns,
           targets.shape[1], 0 if weights is None else weights.stride(0),
           0 if weights is None else weights.stride(1), scale.stride(0) if scale.ndim else 0, height, steepness, offset,
           slope, problem.ignore_index, WEIGHTED=weights is not None, CAPPED=cap is not None,
           ONE_PASS=takes_one_pass(cap, logits.dtype, gradient=False), KEPT=blocks if fits else 0,
           TARGETS=max(_FEWEST_TARGETS, triton.next_power_of_2(targets.shape[1])), VECTOR=_VECTOR, num_warps=_WARPS)
    # fmt: on
    return out


def _as_tanh(cap: tuple[float, ...] | None) -> tuple[float, float, float, float]:
    """Return height, steepness, offset and slope of the cap z = height tanh(steepness logit + offset) + constant.

    z is in units of ln 2; its derivative, in nats, is slope (1 - tanh^2). Without a cap z = steepness logit and the
    derivative is slope = 1.
    """
    _, span, steepness, offset, slope = cap_constants(cap)
    if cap is None:
        return 0.0, steepness, offset, slope
    # rows.py has r = 1 / (1 + exp 2u) with tanh u = 1 - 2 r, and 2u in units of ln 2.
    return span / 2, steepness / (2 * LOG2_E), offset / (2 * LOG2_E), slope / 4


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use."""
    # Any: PyTorch's annotations lack some properties.
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
