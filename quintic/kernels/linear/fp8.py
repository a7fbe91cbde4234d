"""Products of 8-bit floats with per-tensor scales, and a linear layer as a function.

A tensor is kept as `quantised * scale`: e4m3 (4 bits of exponent, 3 of mantissa) for activations and weights, e5m2 for
gradients, whose range is wider. Tensor cores multiply both and add in float32; the scales come in at the end. They take
the left operand row by row and the right one column by column, so what a backward pass needs in the other orientation
is written transposed by the same pass that quantises.

On CPUs, and on GPUs that have no such tensor cores, the twin quantises in the same way and multiplies in float32.

Source: P. Micikevicius et al., FP8 Formats for Deep Learning (2022), https://arxiv.org/abs/2209.05433, sections 3, 4.
Read next: fp8_quantize.py; fp8_scaling.py, where scales come from.
"""

import math
from typing import Any, NamedTuple

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

__all__ = ["Fp8LinearScales", "fp8_linear"]


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


class Fp8LinearScales(NamedTuple):
    """The scales of one linear layer, and the tensors that collect magnitudes for the next scales.

    Scales are () float32, > 0: the value of one unit of the quantised tensor. Magnitudes are () float32 or None; the
    layer raises them to the largest magnitude it sees, that of the gradient during the backward pass. All are on the
    device of the input.
    """

    x_scale: Tensor
    weight_scale: Tensor
    grad_scale: Tensor | None
    x_amax: Tensor | None = None
    weight_amax: Tensor | None = None
    grad_amax: Tensor | None = None

    def check(self, x: Tensor) -> None:
        """Raise ValueError, naming the field, where one does not fit an input."""
        for name, scalar in zip(self._fields, self, strict=True):
            if scalar is not None:
                check_scalar(name, scalar, x)


def raise_(amax: Tensor | None, found: Tensor) -> None:
    """Raise a collected magnitude to another one, in place; NaN wins."""
    if amax is not None:
        with torch.no_grad():
            amax.copy_(torch.maximum(amax, found))


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
    x_amax: Tensor | None = None,
    weight_amax: Tensor | None = None,
    grad_amax: Tensor | None = None,
    kernels: KernelsOption = "auto",
) -> Tensor:
    """Return x @ weight, multiplied in 8 bits: e4m3 by e4m3 forward, e5m2 gradients by e4m3 backward.

    The weight is stored (in, out), the transpose of `nn.Linear`: its gradient, x^T @ grad, comes out row by row in the
    weight's own layout, and adding it to the last one is a pass over contiguous memory also where the output is a
    vocabulary. The weight is quantised by every call. Gradients are added in full float32.

    Args:
        x: (..., in) float32, bfloat16 or float16, any strides.
        weight: (in, out), one of these dtypes, any strides; in and out are multiples of 16.
        x_scale: () float32 on that device, > 0: one unit of the quantised `x`. See fp8_scaling.py.
        weight_scale: the same for `weight`.
        grad_scale: the same for the gradient of the result; None for one from the largest magnitude of that gradient.
        x_amax: () float32 or None: raised in place to the largest magnitude of `x`.
        weight_amax: the same for `weight`.
        grad_amax: the same for the gradient of the result, raised by the backward pass. In a compiled function a second
            forward pass before that backward pass makes autograd complain of the change.
        kernels: `"auto"` takes Triton and tensor cores on CUDA devices of compute capability 8.9 or more.

    Returns:
        (..., out) in the dtype of `x`. Gradients have the dtypes of `x` and `weight`, rounded once from float32.

    Raises:
        TypeError: a dtype has no quantisation.
        ValueError: shapes, devices or scales do not fit, or `kernels="triton"` cannot be honoured.
    """
    scales = Fp8LinearScales(x_scale, weight_scale, grad_scale, x_amax, weight_amax, grad_amax)
    check_float("x", x)
    check_float("weight", weight)
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: need (..., in) and (in, out)")
    if x.device != weight.device:
        raise ValueError(f"x is on {str(x.device)!r} and weight on {str(weight.device)!r}; move one of them")
    check_multiples("weight", weight.shape)
    scales.check(x)
    learns = torch.is_grad_enabled()
    out, _, _, found_x, found_weight = torch.ops.quintic.fp8_linear(
        x.reshape(math.prod(x.shape[:-1]), x.shape[-1]),
        weight,
        x_scale,
        weight_scale,
        grad_scale,
        grad_amax,
        learns and weight.requires_grad,
        learns and x.requires_grad,
        kernels,
    )
    raise_(x_amax, found_x)
    raise_(weight_amax, found_weight)
    result: Tensor = out.view(*x.shape[:-1], weight.shape[1])
    return result


@torch.library.custom_op("quintic::fp8_linear", mutates_args=())
def _fp8_linear(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    grad_scale: Tensor | None,
    grad_amax: Tensor | None,
    keep_x: bool,
    keep_weight: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the product, x (transposed) and weight quantised for its backward pass, and their largest magnitudes."""
    chosen = choose_fp8_kernels(kernels, x)
    e4m3 = torch.float8_e4m3fn
    x_rows, x_columns, x_amax = quantized_layouts(x, x_scale, e4m3, True, keep_x, True, chosen)
    weight_rows, weight_columns, weight_amax = quantized_layouts(
        weight, weight_scale, e4m3, keep_weight, True, True, chosen
    )
    out = scaled_product(x_rows, weight_columns, x_scale, weight_scale, x.dtype, fast=True, chosen=chosen)
    return out, x_columns, weight_rows, x_amax, weight_amax


@_fp8_linear.register_fake
def _fp8_linear_fake(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    grad_scale: Tensor | None,
    grad_amax: Tensor | None,
    keep_x: bool,
    keep_weight: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, x_columns, x_amax = empty_quantized(x, torch.float8_e4m3fn, False, keep_x, True)
    weight_rows, _, weight_amax = empty_quantized(weight, torch.float8_e4m3fn, keep_weight, False, True)
    return x.new_empty((x.shape[0], weight.shape[1])), x_columns, weight_rows, x_amax, weight_amax


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and weight that are wanted, and the largest magnitude of the incoming one."""
    chosen = choose_fp8_kernels(kernels, grad)
    rows, columns, amax = quantized_layouts(grad, grad_scale, torch.float8_e5m2, for_x, for_weight, True, chosen)
    grad_x, grad_weight = grad.new_empty(0), grad.new_empty(0, dtype=weight_dtype)
    if for_x:
        grad_x = scaled_product(rows, weight_rows, grad_scale, weight_scale, grad.dtype, fast=False, chosen=chosen)
    if for_weight:
        grad_weight = scaled_product(x_columns, columns, x_scale, grad_scale, weight_dtype, fast=False, chosen=chosen)
    return grad_x, grad_weight, amax


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
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = grad.new_empty((grad.shape[0], weight_rows.shape[0]) if for_x else (0,))
    grad_weight = grad.new_empty((x_columns.shape[0], grad.shape[1]) if for_weight else (0,), dtype=weight_dtype)
    return grad_x, grad_weight, grad.new_empty((), dtype=torch.float32)


def _setup_fp8_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, x_scale, weight_scale, grad_scale, grad_amax, _, _, kernels = inputs
    _, x_columns, weight_rows, _, _ = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    # Saved: a scale updated between forward and backward is an error, which autograd finds by the tensor's version.
    ctx.save_for_backward(x_columns, weight_rows, x_scale, weight_scale, grad_scale)
    # Not saved: the backward passes of other microbatches write it.
    ctx.grad_amax = grad_amax
    ctx.weight_dtype, ctx.kernels = weight.dtype, kernels


def _backward_fp8_linear(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad = grads[0]
    for_x, for_weight = ctx.needs_input_grad[:2]
    if grad is None or not (for_x or for_weight):
        return (None,) * 9
    *saved, grad_scale = ctx.saved_tensors
    grad_scale = unit_of(grad, torch.float8_e5m2) if grad_scale is None else grad_scale
    grad_x, grad_weight, found = torch.ops.quintic.fp8_linear_backward(
        grad, *saved, grad_scale, ctx.weight_dtype, for_x, for_weight, ctx.kernels
    )
    raise_(ctx.grad_amax, found)
    return (grad_x if for_x else None, grad_weight if for_weight else None, *(None,) * 7)


_fp8_linear.register_autograd(_backward_fp8_linear, setup_context=_setup_fp8_linear)
