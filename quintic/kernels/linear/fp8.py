"""`fp8_linear`, a linear layer as a function, multiplied in 8-bit floats with one scale per tensor.

A tensor is represented as `quantised * scale`: e4m3 (4 bits of exponent, 3 of mantissa) for activations and weights,
e5m2, with a wider range, for gradients. Tensor cores multiply the quantised values and add in float32; the scales are
applied to the sums. With x (m, in), weight (in, out) and grad (m, out) the products are

    forward    x @ weight            e4m3 by e4m3
    backward   grad @ weight^T       e5m2 by e4m3
               x^T @ grad            e4m3 by e5m2

8-bit tensor cores read the left operand by rows and the right one by columns, and every matrix appears in two products
in different roles. So the pass that quantises a matrix writes both orientations at once.

On CPUs, and on GPUs without 8-bit tensor cores, the twin quantises in the same way and multiplies in float32.

Source: P. Micikevicius et al., FP8 Formats for Deep Learning (2022), https://arxiv.org/abs/2209.05433, sections 3, 4.
Read next: fp8_quantize.py.
"""

import math
from typing import Any

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels, KernelsOption
from quintic.kernels.linear.fp8_quantize import (
    MULTIPLE,
    check_float,
    check_scalar,
    choose_fp8_kernels,
    empty_quantized,
    next_multiple,
    quantized_layouts,
    unit_of,
)

__all__ = ["fp8_linear"]


def scaled_product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, *, fast: bool, chosen: Kernels
) -> Tensor:
    """Return a @ b.mT * a_scale * b_scale, (m, n). Call it inside operators only: it is not differentiable.

    Args:
        a: (m, k) 8-bit, contiguous.
        b: (n, k) 8-bit, contiguous; n and k are multiples of 16. At most one of a and b is e5m2.
        a_scale: () float32.
        b_scale: () float32.
        dtype: dtype of the result; sums are float32.
        fast: let Hopper's tensor cores add with fewer bits (about 14).
        chosen: `"triton"` for tensor cores, `"torch"` for the twin.
    """
    # A product without terms is zero; tensor cores do not take empty matrices.
    if 0 in (*a.shape, b.shape[0]):
        return a.new_zeros((a.shape[0], b.shape[0]), dtype=dtype)
    if chosen == "triton" and a.is_cuda:
        out: Tensor = torch._scaled_mm(a, b.mT, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)
        return out
    return (a.float() @ b.float().mT * (a_scale * b_scale)).to(dtype)


def check_multiples(name: str, shape: torch.Size) -> None:
    """Raise ValueError if a size of a weight is no multiple of 16, which 8-bit tensor cores need."""
    if any(size % MULTIPLE for size in shape):
        padded = tuple(next_multiple(size) for size in shape)
        raise ValueError(
            f"{name} has shape {tuple(shape)}; 8-bit products need multiples of {MULTIPLE}: pad it to {padded}"
        )


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    *,
    x_scale: Tensor,
    weight_scale: Tensor,
    grad_scale: Tensor | None,
    kernels: KernelsOption = "auto",
) -> Tensor:
    """Return x @ weight, multiplied in 8 bits: e4m3 by e4m3 forward, e5m2 gradients by e4m3 backward.

    The weight is stored (in, out), the transpose of `nn.Linear`. Its gradient, x^T @ grad, then has the weight's own
    memory order, and accumulating it is a pass over contiguous memory even if `out` is a vocabulary. Every call
    quantises the weight again. Products of the backward pass are summed in full float32.

    Args:
        x: (..., in) float32, bfloat16 or float16, any strides.
        weight: (in, out), one of these dtypes, any strides; in and out are multiples of 16.
        x_scale: () float32 on the device of `x`, > 0: value of one unit of the quantised `x`.
        weight_scale: () float32, > 0: value of one unit of the quantised `weight`.
        grad_scale: () float32, > 0: value of one unit of the quantised gradient of the result; None to derive it from
            the largest magnitude of that gradient.
        kernels: `"auto"` takes Triton and tensor cores on CUDA devices of compute capability 8.9 or more.

    Returns:
        (..., out) in the dtype of `x`. Gradients have the dtypes of `x` and `weight`, rounded once from float32.

    Raises:
        TypeError: a dtype cannot be quantised.
        ValueError: shapes, devices or scales do not fit, or `kernels="triton"` cannot be honoured.
    """
    check_float("x", x)
    check_float("weight", weight)
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: need (..., in) and (in, out)")
    if x.device != weight.device:
        raise ValueError(f"x is on {str(x.device)!r} and weight on {str(weight.device)!r}; move one of them")
    check_multiples("weight", weight.shape)
    for name, scale in (("x_scale", x_scale), ("weight_scale", weight_scale), ("grad_scale", grad_scale)):
        if scale is not None:
            check_scalar(name, scale, x)
    learns = torch.is_grad_enabled()
    # The two other results are the quantised operands that the backward pass uses.
    out, _, _ = torch.ops.quintic.fp8_linear(
        x.reshape(math.prod(x.shape[:-1]), x.shape[-1]),
        weight,
        x_scale,
        weight_scale,
        grad_scale,
        learns and weight.requires_grad,
        learns and x.requires_grad,
        kernels,
    )
    result: Tensor = out.view(*x.shape[:-1], weight.shape[1])
    return result


@torch.library.custom_op("quintic::fp8_linear", mutates_args=())
def _fp8_linear(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    grad_scale: Tensor | None,
    keep_x: bool,
    keep_weight: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the product (m, out), and for the backward pass x^T (in, m') and the weight (in, out) in 8 bits."""
    chosen = choose_fp8_kernels(kernels, x)
    e4m3 = torch.float8_e4m3fn
    # Forward x by rows and the weight by columns; kept for the backward pass is the other orientation of each.
    x_rows, x_columns = quantized_layouts(x, x_scale, e4m3, True, keep_x, chosen)
    weight_rows, weight_columns = quantized_layouts(weight, weight_scale, e4m3, keep_weight, True, chosen)
    out = scaled_product(x_rows, weight_columns, x_scale, weight_scale, x.dtype, fast=True, chosen=chosen)
    return out, x_columns, weight_rows


@_fp8_linear.register_fake
def _fp8_linear_fake(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    grad_scale: Tensor | None,
    keep_x: bool,
    keep_weight: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    _, x_columns = empty_quantized(x, torch.float8_e4m3fn, False, keep_x)
    weight_rows, _ = empty_quantized(weight, torch.float8_e4m3fn, keep_weight, False)
    return x.new_empty((x.shape[0], weight.shape[1])), x_columns, weight_rows


@torch.library.custom_op("quintic::fp8_linear_backward", mutates_args=())
def _fp8_linear_backward(
    grad: Tensor,
    x_columns: Tensor,
    weight_rows: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    grad_scale: Tensor,
    weight_dtype: torch.dtype,
    for_x: bool,
    for_weight: bool,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (m, in) and of the weight (in, out); one that is not needed has size 0."""
    chosen = choose_fp8_kernels(kernels, grad)
    rows, columns = quantized_layouts(grad, grad_scale, torch.float8_e5m2, for_x, for_weight, chosen)
    grad_x, grad_weight = grad.new_empty(0), grad.new_empty(0, dtype=weight_dtype)
    if for_x:
        grad_x = scaled_product(rows, weight_rows, grad_scale, weight_scale, grad.dtype, fast=False, chosen=chosen)
    if for_weight:
        grad_weight = scaled_product(x_columns, columns, x_scale, grad_scale, weight_dtype, fast=False, chosen=chosen)
    return grad_x, grad_weight


@_fp8_linear_backward.register_fake
def _fp8_linear_backward_fake(
    grad: Tensor,
    x_columns: Tensor,
    weight_rows: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    grad_scale: Tensor,
    weight_dtype: torch.dtype,
    for_x: bool,
    for_weight: bool,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    grad_x = grad.new_empty((grad.shape[0], weight_rows.shape[0]) if for_x else (0,))
    grad_weight = grad.new_empty((x_columns.shape[0], grad.shape[1]) if for_weight else (0,), dtype=weight_dtype)
    return grad_x, grad_weight


def _setup_fp8_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, x_scale, weight_scale, grad_scale, _, _, kernels = inputs
    _, x_columns, weight_rows = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    # Scales are saved as tensors, so that autograd detects, by their version, an update between forward and backward.
    ctx.save_for_backward(x_columns, weight_rows, x_scale, weight_scale, grad_scale)
    ctx.weight_dtype, ctx.kernels = weight.dtype, kernels


def _backward_fp8_linear(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad = grads[0]
    for_x, for_weight = ctx.needs_input_grad[:2]
    if grad is None or not (for_x or for_weight):
        return (None,) * 8
    *saved, grad_scale = ctx.saved_tensors
    grad_scale = unit_of(grad, torch.float8_e5m2) if grad_scale is None else grad_scale
    grad_x, grad_weight = torch.ops.quintic.fp8_linear_backward(
        grad, *saved, grad_scale, ctx.weight_dtype, for_x, for_weight, ctx.kernels
    )
    return (grad_x if for_x else None, grad_weight if for_weight else None, *(None,) * 6)


_fp8_linear.register_autograd(_backward_fp8_linear, setup_context=_setup_fp8_linear)
