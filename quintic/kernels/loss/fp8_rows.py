"""The Triton kernel that writes gradients of logits in 8 bits, in both orientations. chunks.py has the formulas."""

import torch
from torch import Tensor

from quintic.kernels.dispatch import triton_is_interpreted
from quintic.kernels.jit import jit, tl, triton
from quintic.kernels.launch import launch
from quintic.kernels.linear.fp8_quantize import LARGEST, quantized_value, store_quantized
from quintic.kernels.loss.problem import Problem
from quintic.kernels.loss.rows import approximate, capped, derivative, in_ln2

__all__ = ["launch_fp8"]


# fmt: off
@jit
def _fp8_gradient_kernel(logits, targets, weights, upstream, lse, quantum, by_rows, by_columns, num_rows,
                         written_rows, vocab, columns, logits_row, by_columns_row, num_targets, weights_row,
                         weights_column, cap, span, steepness, offset, slope, ignore_index, LARGEST: tl.constexpr,
                         WEIGHTED: tl.constexpr, CAPPED: tl.constexpr, UPSTREAM: tl.constexpr,
                         APPROXIMATE: tl.constexpr, NATIVE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                         BLOCK_COLUMNS: tl.constexpr):
    # fmt: on
    """Gradients of a tile of logits in 8 bits, in both orientations; zeros in rows of padding."""
    column_tiles = tl.cdiv(columns, BLOCK_COLUMNS)
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_ROWS
    column = (tl.program_id(0) % column_tiles).to(tl.int64) * BLOCK_COLUMNS
    i = row + tl.arange(0, BLOCK_ROWS)
    j = column + tl.arange(0, BLOCK_COLUMNS)
    is_row = i < num_rows
    inside = is_row[:, None] & (j[None, :] < vocab)
    logit = tl.load(logits + i[:, None] * logits_row + j[None, :], mask=inside, other=0.0).to(tl.float32)
    z, r = capped(logit, cap, span, steepness, offset, CAPPED, APPROXIMATE)
    probability = tl.exp2(z - tl.load(lse + i, mask=is_row, other=0.0)[:, None])
    total_weight = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    pull = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for k in range(num_targets):
        target = tl.load(targets + i * num_targets + k, mask=is_row, other=ignore_index)
        counted = target != ignore_index
        if WEIGHTED:
            weight = tl.load(weights + i * weights_row + k * weights_column, mask=counted, other=0.0).to(tl.float32)
        else:
            weight = counted.to(tl.float32)
        weight = tl.where(counted & ((target < 0) | (target >= vocab)), float("nan"), weight)
        total_weight += weight
        pull += tl.where(j[None, :] == target[:, None], weight[:, None], 0.0)
    grad = (probability * total_weight[:, None] - pull) * derivative(r, slope, CAPPED)
    if UPSTREAM:
        grad = grad * tl.load(upstream + i, mask=is_row, other=0.0)[:, None]
    grad = tl.where(inside, grad, 0.0)
    # fmt: off
    store_quantized(quantized_value(grad, tl.load(quantum), LARGEST), by_rows, by_columns, row, column, num_rows,
                    columns, written_rows, columns, by_columns_row, True, True, NATIVE, True, BLOCK_ROWS,
                    BLOCK_COLUMNS)
    # fmt: on


# Rows and columns of a tile, and warps: so that registers suffice.
_FP8_BLOCK, _FP8_WARPS = (64, 64), 8


def launch_fp8(
    problem: Problem,
    rows: slice,
    logits: Tensor,
    columns: int,
    lse: Tensor,
    upstream: Tensor | None,
    quantum: Tensor,
    grad: Tensor,
    grad_turned: Tensor,
    within: slice,
) -> None:
    """Write the gradients of some tokens' logits into both tensors of a chunk, and the padding behind the last."""
    targets, weights, cap = problem.targets, problem.target_weights, problem.softcap
    block_rows, block_columns = _FP8_BLOCK
    stop = grad_turned.shape[1] if within.stop == grad.shape[0] else within.stop
    written = stop - within.start
    # fmt: off
    launch(_fp8_gradient_kernel, (triton.cdiv(written, block_rows) * triton.cdiv(columns, block_columns),), logits,
           targets[rows], lse if weights is None else weights[rows], lse if upstream is None else upstream, lse,
           quantum, grad[within], grad_turned[:, within.start :], logits.shape[0], written, problem.vocab_size,
           columns, logits.stride(0), grad_turned.shape[1], targets.shape[1],
           0 if weights is None else weights.stride(0), 0 if weights is None else weights.stride(1), *in_ln2(cap),
           problem.ignore_index, LARGEST=LARGEST[torch.float8_e5m2], WEIGHTED=weights is not None,
           CAPPED=cap is not None, UPSTREAM=upstream is not None, APPROXIMATE=approximate(logits),
           NATIVE=not triton_is_interpreted(), BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns,
           num_warps=_FP8_WARPS)
    # fmt: on
