"""Computes the loss and its gradients chunk by chunk: `loss_twin` in plain PyTorch, `loss_on_device` with kernels.

The operators in loss.py choose one of the two; both take a `Problem` and return losses and gradients. Per token, with
weights w_k of its targets y_k (ignored targets left out), W their sum, p the softmax of the capped logits z, and
s = dz / dlogit:

    loss = W logsumexp(z) - sum_k w_k z[y_k]        d loss / d logit_j = (W p_j - sum_k w_k [j = y_k]) s_j

On a device a chunk of tokens goes through three phases:

1. A product writes the chunk's logits into a buffer (chunk, vocabulary).
2. A kernel of rows.py computes the losses and overwrites the logits with their gradient.
3. Two products read the buffer and give the gradients of x and of the weight.

If the cap bounds the logits, phase 2 reads a row only once and writes its gradient before the sum of the softmax is
known, with exp(z - cap) in place of p. Each row then lacks one factor, which phase 3 applies to its small matrices: to
the rows of grad_x, and to the rows of x in the product for the weight's gradient.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from quintic.kernels.linear.fp8 import scaled_product
from quintic.kernels.linear.fp8_quantize import empty_quantized, quantized_layouts, quantized_twin
from quintic.kernels.linear.transpose import transpose_copy_
from quintic.kernels.loss.problem import Fp8Scales, Problem, Wanted
from quintic.kernels.loss.rows import cap_constants, launch_rows, scale_rows, takes_one_pass

__all__ = ["loss_on_device", "loss_twin"]


def loss_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of losses, and of gradients before they are rounded: float32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


def empty_gradients(x: Tensor, weight: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """Return tensors for the gradients; a gradient that is not wanted has size 0."""
    dtype = loss_dtype(x)
    grad_x = x.new_empty(x.shape if wanted.for_x else (0,), dtype=dtype)
    return grad_x, weight.new_empty(weight.shape if wanted.for_weight else (0,), dtype=dtype)


# --------------------------------------------------------------------------------------------------------------- twin


def loss_twin(problem: Problem, wanted: Wanted | None, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses (tokens,), the gradient of x and the gradient of the weight, in plain PyTorch.

    Args:
        problem: the inputs.
        wanted: the gradients to compute; None for losses only, with empty gradients.
        chunk: number of tokens at a time.
    """
    x, fp8, dtype = problem.x, problem.fp8, loss_dtype(problem.x)
    num_tokens, vocab = x.shape[0], problem.vocab_size
    head = (problem.weight.mT if problem.transposed else problem.weight)[:vocab]
    # Products with gradients of logits. In float16 most of these, scaled by 1 / tokens, would be zero: use float32.
    product_dtype = dtype if fp8 is not None or x.dtype == torch.float16 else x.dtype
    if fp8 is None:
        head = head.to(x.dtype)
        back_x, back_head = x.to(product_dtype), head.to(product_dtype)
    else:
        # Emulate products in 8 bits: quantise, then multiply in float32.
        back_x = quantized_twin(x.float(), fp8.x, torch.float8_e4m3fn).float() * fp8.x
        back_head = quantized_twin(head.float(), fp8.weight, torch.float8_e4m3fn).float() * fp8.weight
    if problem.softcap is not None:
        # c tanh(z / c) = 2c sigmoid(2z / c) - c, and a softmax ignores the constant. On CPUs tanh takes six times as
        # long as a sigmoid.
        cap = problem.softcap[0]
        height, shift, width = problem.softcap if len(problem.softcap) == 3 else (2 * cap, 0.0, cap / 2)
    targets, target_weights, total_weights = _counted(problem, dtype)
    losses = x.new_empty(num_tokens, dtype=dtype)
    if wanted is not None:
        grad_x, grad_weight = empty_gradients(x, problem.weight, wanted)
        grad_weight.zero_()
        grad_head = (grad_weight.mT if problem.transposed else grad_weight)[:vocab]
        # Emulating 8 bits, one scale of all tokens is applied after the gradient of the logits was quantised.
        within = wanted.scale.expand(num_tokens) if fp8 is None or wanted.scale.ndim else None
    for start in range(0, num_tokens, chunk):
        rows = slice(start, start + chunk)
        if fp8 is None:
            # (chunk, vocabulary).
            logits = F.linear(x[rows], head).to(dtype)
        else:
            logits = F.linear(back_x[rows], back_head).to(x.dtype).to(dtype)
        if problem.softcap is not None:
            squashed = (logits.add_(shift) if shift else logits).div_(width).sigmoid_()
            logits = squashed * height
        log_probs = F.log_softmax(logits, dim=-1)
        picked = log_probs.gather(1, targets[rows])
        losses[rows] = -(picked * target_weights[rows]).sum(1)
        if wanted is None:
            continue
        total_weight, target_weight = total_weights[rows], target_weights[rows]
        if within is not None:
            total_weight, target_weight = total_weight * within[rows], target_weight * within[rows, None]
        if problem.softcap is not None:
            total_weight, target_weight = total_weight * (height / width), target_weight * (height / width)
        # The gradient of the logits: W p - the weights at the targets, times the derivative of the cap.
        grad = log_probs.exp_().mul_(total_weight[:, None])
        grad.scatter_add_(1, targets[rows], -target_weight)
        if problem.softcap is not None:
            grad.mul_(torch.addcmul(squashed, squashed, squashed, value=-1))
        if fp8 is not None:
            grad = quantized_twin(grad, fp8.grad, torch.float8_e5m2).float() * fp8.grad
            grad = grad if within is not None else grad * wanted.scale
        low_grad = grad.to(product_dtype)
        if wanted.for_x:
            grad_x[rows] = low_grad @ back_head
        if wanted.for_weight:
            grad_head += low_grad.mT @ back_x[rows]
    return (losses, losses.new_empty(0), losses.new_empty(0)) if wanted is None else (losses, grad_x, grad_weight)


def _counted(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the targets with 0 for ignored ones, their weights with 0 for ignored ones, and the sums of weights."""
    counted = problem.targets != problem.ignore_index
    if problem.target_weights is None:
        weights = counted.to(dtype)
    else:
        weights = problem.target_weights.to(dtype).masked_fill(~counted, 0)
    return problem.targets.masked_fill(~counted, 0), weights, weights.sum(1)


# ------------------------------------------------------------------------------------------------------- on the device

# Bytes of a chunk of logits with gradients, and for losses only: large enough for products at full speed. H200,
# 2026-11, 16,384 tokens, width 768, vocabulary 50,304: three chunks take 6.59 ms, four 6.82, a single one 6.41
# (docs/development/LOG.md).
_CHUNK_BYTES = 532 * 2**20
_LOSS_BYTES = 256 * 2**20
# Within a chunk, phases 1 and 2 take this number of tokens at a time.
_SUBCHUNK_TOKENS = 8192

# Largest gradient of a logit in float16: half of the dtype's range.
_FLOAT16_LARGEST = 2.0**15

# Products are slow with odd sizes. Rows of logits begin at multiples of 64 entries (128 bytes in 16 bits), columns are
# padded to multiples of 16 if the weight has these rows, and chunks have multiples of 128 tokens, a product's tile.
_ROW_MULTIPLE = 64
_COLUMN_MULTIPLE = 16
_TOKEN_MULTIPLE = 128


def loss_on_device(problem: Problem, wanted: Wanted | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses and gradients of `loss_twin`, computed by kernels on the device."""
    x, vocab = problem.x, problem.vocab_size
    # Columns of logits to compute: the vocabulary, or somewhat more if the stored weight is padded.
    stored = problem.weight.shape[1 if problem.transposed else 0]
    padded = -(-vocab // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE
    columns = padded if padded <= stored else vocab
    losses = x.new_empty(x.shape[0], dtype=torch.float32)
    empty = losses.new_empty(0)
    if problem.fp8 is not None:
        return losses, *_compute_in_8_bits(problem, problem.fp8, wanted, columns, losses)
    if wanted is not None:
        return losses, *_compute_with_gradients(problem, wanted, columns, losses)
    head = _low_head(problem, columns)
    for rows in _slices(x.shape[0], columns * x.element_size(), _LOSS_BYTES):
        launch_rows(problem, rows, F.linear(x[rows], head), columns, losses, None)
    return losses, empty, empty


def _slices(tokens: int, row_bytes: int, most_bytes: int) -> list[slice]:
    """Return chunks of tokens of equal size, with at most `most_bytes` of logits if the rounding allows it."""
    count = max(1, -(-tokens * row_bytes // most_bytes))
    size = -(-tokens // (count * _TOKEN_MULTIPLE)) * _TOKEN_MULTIPLE
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, max(1, size))]


def _subchunks(rows: slice, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size)]


def _low_head(problem: Problem, columns: int) -> Tensor:
    """Return the weight as (columns, d) in the dtype of x, with strides that cuBLAS takes without a copy."""
    weight = problem.weight[:, :columns] if problem.transposed else problem.weight[:columns]
    weight = weight.to(problem.x.dtype)
    weight = weight if 1 in weight.stride() else weight.contiguous()
    return weight.mT if problem.transposed else weight


def _compute_with_gradients(problem: Problem, wanted: Wanted, columns: int, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Write the losses (tokens,), and return the gradients of x (tokens, d) and of the stored weight, by chunks."""
    x, transposed = problem.x, problem.transposed
    head = _low_head(problem, columns)
    grad_x, grad_weight = empty_gradients(x, problem.weight, wanted)
    used = _used_gradient(grad_weight, problem, columns)
    if x.shape[0] == 0:
        return grad_x, grad_weight
    # `unit` is the common scale of all gradients of logits, applied to both results at the end.
    unit = None
    if x.dtype == torch.float16:
        # Gradients of the loss are too small for float16, so gradients of logits are made as large as the range allows.
        largest = _largest_gradients(problem, wanted.scale).amax().clamp_min(torch.finfo(torch.float32).tiny)
        # The derivative of a cap is at most a quarter of its slope.
        largest *= max(1.0, cap_constants(problem.softcap)[-1] / 4)
        unit = largest / _FLOAT16_LARGEST
        wanted = wanted._replace(scale=wanted.scale / unit)
    one_pass = takes_one_pass(problem.softcap, x.dtype, gradient=True)
    chunks = _slices(x.shape[0], columns * x.element_size(), _CHUNK_BYTES)
    stride = -(-columns // _ROW_MULTIPLE) * _ROW_MULTIPLE
    # One buffer for all chunks: (tokens of a chunk, stride).
    buffer = x.new_empty((chunks[0].stop, stride))
    for rows in chunks:
        tokens = rows.stop - rows.start
        # (tokens,) float32: the missing factor of each row, with one pass.
        factors = losses.new_empty(tokens) if one_pass else None
        for sub in _subchunks(rows, _SUBCHUNK_TOKENS):
            within = slice(sub.start - rows.start, sub.stop - rows.start)
            logits = buffer[within, :columns]
            # Phases 1 and 2 in turns: (tokens, d) by (d, columns).
            torch.mm(x[sub], head.mT, out=logits)
            launch_rows(problem, sub, logits, columns, losses, wanted, None if factors is None else factors[within])
        # Phase 3: (tokens, columns) by (columns, d), and (columns, tokens) by (tokens, d) or transposed.
        grad = buffer[:tokens, :columns]
        if wanted.for_x:
            product = _product(grad, head, grad_x.dtype)
            if factors is None:
                grad_x[rows] = product
            else:
                scale_rows(product, factors, grad_x[rows])
        if wanted.for_weight:
            right = x[rows]
            if factors is not None:
                right = x.new_empty((tokens, x.shape[1]))
                scale_rows(x[rows], factors, right)
            a, b = (right.mT, grad) if transposed else (grad.mT, right)
            _add_product(used, a, b, first=rows.start == 0)
    if unit is not None:
        grad_x.mul_(unit)
        used.mul_(unit)
    return grad_x, grad_weight


def _largest_gradients(problem: Problem, scale: Tensor) -> Tensor:
    """Return an upper bound, () or (tokens,), of the gradients of each token's logits without a cap."""
    weights = problem.target_weights
    if weights is None:
        return scale.abs() * problem.targets.shape[1]
    counted = problem.targets != problem.ignore_index
    return scale.abs() * weights.float().abs().masked_fill(~counted, 0).sum(1)


def _used_gradient(grad_weight: Tensor, problem: Problem, columns: int) -> Tensor:
    """Return the rows of the weight's gradient that products write, and set the rest to zero.

    They are the first `columns` rows of the vocabulary. Without tokens no product runs, and all rows are set to zero.
    """
    if grad_weight.ndim < 2:
        return grad_weight
    used, rest = grad_weight.tensor_split([columns], dim=1 if problem.transposed else 0)
    (rest if problem.x.shape[0] else grad_weight).zero_()
    return used


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in `dtype`, float32, also for 16-bit operands."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        out: Tensor = torch.mm(a, b, out_dtype=dtype)
        return out
    # Triton's interpreter on a CPU, which has no products with another result dtype.
    return a.to(dtype) @ b.to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Add a @ b, (m, n), to a float32 total in place; `first` overwrites the total instead."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=0.0 if first else 1.0, out=total)
    elif not a.is_cuda:
        total.copy_(_product(a, b, total.dtype) + (0.0 if first else total))
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    elif _adds_in_float32(a.dtype, a.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(a, b, out_dtype=total.dtype)


@functools.cache
def _adds_in_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `torch.addmm` adds a 16-bit product to a float32 matrix; some versions of PyTorch refuse."""
    total = torch.zeros((16, 16), device=device)
    factor = torch.zeros((16, 16), dtype=dtype, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _compute_in_8_bits(
    problem: Problem, scales: Fp8Scales, wanted: Wanted | None, columns: int, losses: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the losses and return the gradients, by products in 8 bits; empty gradients if `wanted` is None."""
    # Imported here because the module needs Triton, of which Gluon is a component.
    from quintic.kernels.loss.fp8_rows import launch_rows_fp8

    x, transposed = problem.x, problem.transposed
    e4m3 = torch.float8_e4m3fn
    weight = problem.weight[:, :columns] if transposed else problem.weight[:columns]
    for_x, for_weight = (wanted.for_x, wanted.for_weight) if wanted is not None else (False, False)
    # Tensor cores take the right operand column by column in 8 bits. The products for the logits and for grad_x use the
    # weight as the right operand in its two orientations: (columns, d) and (d, columns).
    layouts = (for_x, True) if transposed else (True, for_x)
    by_rows, by_columns = quantized_layouts(weight, scales.weight, e4m3, *layouts, "triton")
    head, head_transposed = (by_columns, by_rows) if transposed else (by_rows, by_columns)
    grad_x, grad_weight = losses.new_empty(0), losses.new_empty(0)
    if wanted is not None:
        grad_x, grad_weight = empty_gradients(x, problem.weight, wanted)
        used = _used_gradient(grad_weight, problem, columns)
        # A scale common to all tokens is applied by the products, so that it does not change the quantised gradient.
        per_token = wanted.scale.ndim > 0
        units = (wanted.scale if per_token else losses.new_ones(())) / scales.grad
        grad_scale = scales.grad if per_token else scales.grad * wanted.scale
    most_bytes = _LOSS_BYTES if wanted is None else _chunk_bytes_in_8_bits(x.device)
    for rows in _slices(x.shape[0], columns * x.element_size(), most_bytes):
        x_low, x_transposed = quantized_layouts(x[rows], scales.x, e4m3, True, for_weight, "triton")
        logits = scaled_product(x_low, head, scales.x, scales.weight, x.dtype, fast=True, chosen="triton")
        if wanted is None:
            launch_rows(problem, rows, logits, columns, losses, None)
            continue
        grad = launch_rows_fp8(problem, rows, logits, losses, units)
        if for_x:
            grad_x[rows] = scaled_product(
                grad, head_transposed, grad_scale, scales.weight, grad_x.dtype, fast=False, chosen="triton"
            )
        # The weight's gradient sums over tokens, so both operands are needed with tokens along their rows.
        if for_weight:
            grad_transposed = _transposed_copy(grad)
            a, b = (x_transposed, grad_transposed) if transposed else (grad_transposed, x_transposed)
            a_scale, b_scale = (scales.x, grad_scale) if transposed else (grad_scale, scales.x)
            product = scaled_product(a, b, a_scale, b_scale, used.dtype, fast=False, chosen="triton")
            if rows.start == 0:
                used.copy_(product)
            else:
                used += product
    return grad_x, grad_weight


@functools.cache
def _chunk_bytes_in_8_bits(device: torch.device) -> int:
    """Return the bytes of a chunk of 16-bit logits; their 8-bit gradients, in both orientations, take as much again.

    No 8-bit product adds to a matrix, so every chunk costs a pass over the weight's gradient. Chunks are therefore
    larger on devices with more memory.
    """
    return max(_CHUNK_BYTES, torch.cuda.get_device_properties(device).total_memory // 64)


def _transposed_copy(grad: Tensor) -> Tensor:
    """Return the contiguous transpose of a matrix of 8-bit floats, its rows padded with zeros to a multiple of 16."""
    tokens = grad.shape[0]
    _, copy = empty_quantized(grad, grad.dtype, False, True)
    copy[:, tokens:].view(torch.uint8).zero_()
    transpose_copy_(copy[:, :tokens], grad, kernels="triton")
    return copy
