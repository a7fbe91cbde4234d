"""Products of 8-bit floats with per-tensor scales, and a linear layer as a function.

A tensor is kept as `quantised * scale`: e4m3 (4 bits of exponent, 3 of mantissa) for activations and weights, e5m2 for
gradients, whose range is wider. Tensor cores multiply both and add in float32; the scales come in at the end. They take
the left operand row by row and the right one column by column, so what a backward pass needs in the other orientation
is written transposed by the same pass that quantises.

On CPUs, and on GPUs that have no such tensor cores, the twin quantises in the same way and multiplies in float32.

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
    """Return a @ b.mT * a_scale * b_scale: inside operators only.

    Args:
        a: (m, k) 8-bit, contiguous.
        b: (n, k) 8-bit, contiguous; not both e5m2. n and k are multiples of 16.
        a_scale: () float32.
        b_scale: () float32.
        dtype: of the result; sums are float32.
        fast: let Hopper's tensor cores add with fewer bits (about 14): for forward products only.
        chosen: `"triton"` for tensor cores.
    """
    if 0 in (*a.shape, b.shape[0]):
        return a.new_zeros((a.shape[0], b.shape[0]), dtype=dtype)
    if chosen == "triton" and a.is_cuda:
        out: Tensor = torch._scaled_mm(a, b.mT, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)
        return out
    return (a.float() @ b.float().mT * (a_scale * b_scale)).to(dtype)


def check_multiples(name: str, shape: torch.Size) -> None:
    """Raise ValueError for a weight that tensor cores do not take."""
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

    The weight is stored (in, out), the transpose of `nn.Linear`: its gradient, x^T @ grad, comes out row by row in the
    weight's own layout, and adding it to the last one is a pass over contiguous memory also where the output is a
    vocabulary. The weight is quantised by every call. Gradients are added in full float32.

    Args:
        x: (..., in) float32, bfloat16 or float16, any strides.
        weight: (in, out), one of these dtypes, any strides; in and out are multiples of 16.
        x_scale: () float32 on that device, > 0: one unit of the quantised `x`.
        weight_scale: the same for `weight`.
        grad_scale: the same for the gradient of the result; None for one from the largest magnitude of that gradient.
        kernels: `"auto"` takes Triton and tensor cores on CUDA devices of compute capability 8.9 or more.

    Returns:
        (..., out) in the dtype of `x`. Gradients have the dtypes of `x` and `weight`, rounded once from float32.

    Raises:
        TypeError: a dtype has no quantisation.
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
    """Return the product, and x (transposed) and weight quantised for its backward pass."""
    chosen = choose_fp8_kernels(kernels, x)
    e4m3 = torch.float8_e4m3fn
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
    """Return the gradients of x and weight; one that is not wanted has size 0."""
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
    # Saved: a scale updated between forward and backward is an error, which autograd finds by the tensor's version.
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
