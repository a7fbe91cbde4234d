"""The loss chunk by chunk: in plain PyTorch, and as products around the Triton kernels of rows.py.

The operators in loss.py choose one of the two; both take a `Problem` and return losses and gradients. Per token, with
weights w_k of its targets y_k that count, W their sum, p the softmax of the capped logits z, and s = dz / dlogit:

    loss = W logsumexp(z) - sum_k w_k z[y_k]        d loss / d logit_j = (W p_j - sum_k w_k [j = y_k]) s_j

On a device, a chunk of logits is written by a product, overwritten by its gradient in place, and read by the products
for the gradients of x and weight. Where the cap bounds the logits, the gradient is written in the only pass over a row,
before the sum of the softmax is known: with exp(z - cap) instead of p. What is missing is one factor per token, and
both products take that on their small side: on the rows of grad_x, and on those of x for the gradient of the weight.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from quintic.kernels.linear.fp8 import scaled_product
from quintic.kernels.linear.fp8_quantize import empty_quantized, quantized_layouts, quantized_twin
from quintic.kernels.linear.transpose import transpose_copy_
from quintic.kernels.loss.problem import Fp8Scales, Problem, Wanted
from quintic.kernels.loss.rows import in_ln2, launch_rows, scale_rows, takes_one_pass

__all__ = ["loss_on_device", "loss_twin"]


def loss_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of losses and of gradients before they are rounded."""
    return torch.promote_types(x.dtype, torch.float32)


def empty_gradients(x: Tensor, weight: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """Return tensors for the gradients; a gradient that is not wanted has size 0."""
    dtype = loss_dtype(x)
    grad_x = x.new_empty(x.shape if wanted.for_x else (0,), dtype=dtype)
    return grad_x, weight.new_empty(weight.shape if wanted.for_weight else (0,), dtype=dtype)


# --------------------------------------------------------------------------------------------------------------- twin


def loss_twin(problem: Problem, wanted: Wanted | None, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses (tokens,), gradient of x, and of weight, in plain PyTorch.

    Args:
        problem: the inputs.
        wanted: the gradients to compute; None for the losses alone.
        chunk: tokens at a time.
    """
    x, fp8, dtype = problem.x, problem.fp8, loss_dtype(problem.x)
    num_tokens, vocab = x.shape[0], problem.vocab_size
    head = (problem.weight.mT if problem.transposed else problem.weight)[:vocab]
    # Scaled by 1 / tokens, most gradients of logits would be too small for float16.
    product_dtype = dtype if fp8 is not None or x.dtype == torch.float16 else x.dtype
    if fp8 is None:
        head = head.to(x.dtype)
        back_x, back_head = x.to(product_dtype), head.to(product_dtype)
    else:
        back_x = quantized_twin(x.float(), fp8.x, torch.float8_e4m3fn).float() * fp8.x
        back_head = quantized_twin(head.float(), fp8.weight, torch.float8_e4m3fn).float() * fp8.weight
    if problem.softcap is not None:
        # c tanh(z / c) is 2c sigmoid(2z / c) - c, and softmax knows no constants. On CPUs tanh takes six times as long.
        cap = problem.softcap[0]
        height, shift, width = problem.softcap if len(problem.softcap) == 3 else (2 * cap, 0.0, cap / 2)
    targets, target_weights, total_weights = _counted(problem, dtype)
    losses = x.new_empty(num_tokens, dtype=dtype)
    if wanted is not None:
        grad_x, grad_weight = empty_gradients(x, problem.weight, wanted)
        grad_weight.zero_()
        grad_head = (grad_weight.mT if problem.transposed else grad_weight)[:vocab]
        within = wanted.scale.expand(num_tokens) if fp8 is None or wanted.scale.ndim else None
    for start in range(0, num_tokens, chunk):
        rows = slice(start, start + chunk)
        if fp8 is None:
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
    """Return targets that all exist, their weights (zero for the ignored ones), and these summed per token."""
    counted = problem.targets != problem.ignore_index
    if problem.target_weights is None:
        weights = counted.to(dtype)
    else:
        weights = problem.target_weights.to(dtype).masked_fill(~counted, 0)
    return problem.targets.masked_fill(~counted, 0), weights, weights.sum(1)


# ------------------------------------------------------------------------------------------------------- on the device

# Logits kept at a time with gradients, and without: large enough that products run at full speed. H200, 2026-11, 16,384
# tokens, width 768, vocabulary 50,304: three chunks 6.59 ms, four 6.82, all at once 6.41 (docs/development/LOG.md).
_CHUNK_BYTES = 532 * 2**20
_LOSS_BYTES = 256 * 2**20
# Tokens whose logits a product writes and a kernel turns into gradients at a time, within a chunk.
_PART_TOKENS = 8192

# Gradients of logits in float16 are at most this: half of the range.
_FLOAT16_LARGEST = 2.0**15

# Rows of logits begin at multiples of 128 bytes, columns are padded to 16 where the weight has them: products are slow
# over odd sizes.
_ROW_MULTIPLE = 64
_COLUMN_MULTIPLE = 16
_TOKEN_MULTIPLE = 128


def loss_on_device(problem: Problem, wanted: Wanted | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the results of `loss_twin` by the kernels."""
    x, vocab = problem.x, problem.vocab_size
    stored = problem.weight.shape[1 if problem.transposed else 0]
    padded = -(-vocab // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE
    columns = padded if padded <= stored else vocab
    losses = x.new_empty(x.shape[0], dtype=torch.float32)
    empty = losses.new_empty(0)
    if problem.fp8 is not None:
        return losses, *_chunk_in_8_bits(problem, problem.fp8, wanted, columns, losses)
    if wanted is not None:
        return losses, *_in_chunks(problem, wanted, columns, losses)
    head = _low_head(problem, columns)
    for rows in _slices(x.shape[0], columns * x.element_size(), _LOSS_BYTES):
        launch_rows(problem, rows, F.linear(x[rows], head), columns, losses, None)
    return losses, empty, empty


def _slices(tokens: int, row_bytes: int, most_bytes: int) -> list[slice]:
    """Return equal chunks of tokens, in multiples of a product's tile."""
    count = max(1, -(-tokens * row_bytes // most_bytes))
    size = -(-tokens // (count * _TOKEN_MULTIPLE)) * _TOKEN_MULTIPLE
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, max(1, size))]


def _parts(rows: slice, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size)]


def _low_head(problem: Problem, columns: int) -> Tensor:
    """Return the weight (columns, d) in the dtype of x, in strides that products take as they are."""
    weight = problem.weight[:, :columns] if problem.transposed else problem.weight[:columns]
    weight = weight.to(problem.x.dtype)
    weight = weight if 1 in weight.stride() else weight.contiguous()
    return weight.mT if problem.transposed else weight


def _in_chunks(problem: Problem, wanted: Wanted, columns: int, losses: Tensor) -> tuple[Tensor, Tensor]:
    x, transposed = problem.x, problem.transposed
    head = _low_head(problem, columns)
    grad_x, grad_weight = empty_gradients(x, problem.weight, wanted)
    used = _used_gradient(grad_weight, problem, columns)
    if x.shape[0] == 0:
        return grad_x, grad_weight
    unit = None
    if x.dtype == torch.float16:
        # The gradients of the loss are below what float16 resolves: those of logits are made as large as they may be.
        largest = _largest_gradients(problem, wanted.scale).amax().clamp_min(torch.finfo(torch.float32).tiny)
        largest *= max(1.0, in_ln2(problem.softcap)[-1] / 4)  # the steepest that a cap is
        unit = largest / _FLOAT16_LARGEST
        wanted = wanted._replace(scale=wanted.scale / unit)
    one_pass = takes_one_pass(problem.softcap, x.dtype, gradient=True)
    chunks = _slices(x.shape[0], columns * x.element_size(), _CHUNK_BYTES)
    stride = -(-columns // _ROW_MULTIPLE) * _ROW_MULTIPLE
    buffer = x.new_empty((chunks[0].stop, stride))
    for rows in chunks:
        tokens = rows.stop - rows.start
        factors = losses.new_empty(tokens) if one_pass else None
        for part in _parts(rows, _PART_TOKENS):
            within = slice(part.start - rows.start, part.stop - rows.start)
            logits = buffer[within, :columns]
            torch.mm(x[part], head.mT, out=logits)
            launch_rows(problem, part, logits, columns, losses, wanted, None if factors is None else factors[within])
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
    """Return an upper bound for the gradients of each token's logits."""
    weights = problem.target_weights
    if weights is None:
        return scale.abs() * problem.targets.shape[1]
    counted = problem.targets != problem.ignore_index
    return scale.abs() * weights.float().abs().masked_fill(~counted, 0).sum(1)


def _used_gradient(grad_weight: Tensor, problem: Problem, columns: int) -> Tensor:
    """Return the part of the gradient that products write; the rest is set to zero, all of it without tokens."""
    if grad_weight.ndim < 2:
        return grad_weight
    used, rest = grad_weight.tensor_split([columns], dim=1 if problem.transposed else 0)
    (rest if problem.x.shape[0] else grad_weight).zero_()
    return used


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in float32."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        out: Tensor = torch.mm(a, b, out_dtype=dtype)
        return out
    return a.to(dtype) @ b.to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Add a @ b to a float32 total in place, or set it to the first of the products."""
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
    """Return whether this PyTorch adds a product of 16 bits to a float32 matrix: some versions refuse."""
    total = torch.zeros((16, 16), device=device)
    factor = torch.zeros((16, 16), dtype=dtype, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _chunk_in_8_bits(
    problem: Problem, scales: Fp8Scales, wanted: Wanted | None, columns: int, losses: Tensor
) -> tuple[Tensor, Tensor]:
    # Only where there is Triton: it defines a kernel of Gluon, which is part of it.
    from quintic.kernels.loss.fp8_rows import launch_rows_fp8

    x, transposed = problem.x, problem.transposed
    e4m3 = torch.float8_e4m3fn
    weight = problem.weight[:, :columns] if transposed else problem.weight[:columns]
    for_x, for_weight = (wanted.for_x, wanted.for_weight) if wanted is not None else (False, False)
    # The products of the forward pass and of grad_x take the weight in its two orientations.
    layouts = (for_x, True) if transposed else (True, for_x)
    by_rows, by_columns = quantized_layouts(weight, scales.weight, e4m3, *layouts, "triton")
    head, head_turned = (by_columns, by_rows) if transposed else (by_rows, by_columns)
    grad_x, grad_weight = losses.new_empty(0), losses.new_empty(0)
    if wanted is not None:
        grad_x, grad_weight = empty_gradients(x, problem.weight, wanted)
        used = _used_gradient(grad_weight, problem, columns)
        # One factor of all tokens is left to the products, so that it costs no bits.
        per_token = wanted.scale.ndim > 0
        units = (wanted.scale if per_token else losses.new_ones(())) / scales.grad
        grad_scale = scales.grad if per_token else scales.grad * wanted.scale
    most_bytes = _LOSS_BYTES if wanted is None else _chunk_bytes_in_8_bits(x.device)
    for rows in _slices(x.shape[0], columns * x.element_size(), most_bytes):
        x_low, x_turned = quantized_layouts(x[rows], scales.x, e4m3, True, for_weight, "triton")
        logits = scaled_product(x_low, head, scales.x, scales.weight, x.dtype, fast=True, chosen="triton")
        if wanted is None:
            launch_rows(problem, rows, logits, columns, losses, None)
            continue
        grad = launch_rows_fp8(problem, rows, logits, losses, units)
        if for_x:
            grad_x[rows] = scaled_product(
                grad, head_turned, grad_scale, scales.weight, grad_x.dtype, fast=False, chosen="triton"
            )
        if for_weight:
            grad_turned = _turned(grad)
            a, b = (x_turned, grad_turned) if transposed else (grad_turned, x_turned)
            a_scale, b_scale = (scales.x, grad_scale) if transposed else (grad_scale, scales.x)
            product = scaled_product(a, b, a_scale, b_scale, used.dtype, fast=False, chosen="triton")
            if rows.start == 0:
                used.copy_(product)
            else:
                used += product
    return grad_x, grad_weight


@functools.cache
def _chunk_bytes_in_8_bits(device: torch.device) -> int:
    """Return the bytes of logits to keep at a time; their gradients take as much again.

    No product in 8 bits adds to a matrix. So each chunk costs a pass over the weight's gradient, and more is kept where
    there is more memory.
    """
    return max(_CHUNK_BYTES, torch.cuda.get_device_properties(device).total_memory // 64)


def _turned(grad: Tensor) -> Tensor:
    """Return the transpose of a matrix of 8-bit floats, its rows padded with zeros to what products want."""
    tokens = grad.shape[0]
    _, turned = empty_quantized(grad, grad.dtype, False, True)
    turned[:, tokens:].view(torch.uint8).zero_()
    transpose_copy_(turned[:, :tokens], grad, kernels="triton")
    return turned
