"""relu(x W^T)^2 in one kernel, forward and backward, and the MLP made of it.

The pre-activation is never written: the backward pass needs relu(pre) only, which is the square root of the activation
that the next layer keeps anyway. What is left of element-wise work hides behind products where it can:

    forward                  s = relu(x W^T)^2          in the epilogue of the product
    backward                 dpre = 2 sqrt(s) ds        one pass, where ds comes from somebody else
    backward of `mlp_relu2`  dpre = 2 sqrt(s) (dy V)    in the epilogue of the product that makes ds

The other products are cuBLAS's. In 8 bits (`fp8=`) the pass of the backward writes dpre quantised, both ways round.

Rounding the activation costs dpre half a unit in its last place at most: no more than rounding the pre-activation does.
Read next: relu2.py for the kernels, fp8.py.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from quintic.kernels.dispatch import Kernels, KernelsOption, decide, obstacle_to_triton
from quintic.kernels.linear.fp8 import Fp8LinearScales, check_multiples, raise_, scaled_product
from quintic.kernels.linear.fp8_quantize import check_float, choose_fp8_kernels, empty_quantized, quantized_layouts
from quintic.kernels.linear.relu2 import product_relu2, relu2_backward, relu2_backward_fp8

__all__ = ["linear_relu2", "mlp_relu2", "obstacle_to_linear_relu2"]

_DTYPES = (torch.bfloat16, torch.float16)


def _choose(option: str, x: Tensor) -> Kernels:
    return decide(cast(KernelsOption, option), x.device, lambda: obstacle_to_linear_relu2(x))[0]


def obstacle_to_linear_relu2(x: Tensor) -> str | None:
    """Return what keeps Triton from computing `linear_relu2` of these inputs, or None."""
    if x.dtype not in _DTYPES:
        return f"products of {x.dtype} are left to PyTorch, which has a setting for their precision"
    return obstacle_to_triton(x.device, "x")


def _relu2_product(x: Tensor, weight: Tensor, chosen: Kernels) -> Tensor:
    if chosen == "triton":
        return product_relu2(x, weight, dtype=x.dtype)
    return F.linear(x, weight).relu().square()


# -------------------------------------------------------------------------------------------------------- linear_relu2


def linear_relu2(
    x: Tensor, weight: Tensor, *, fp8: Fp8LinearScales | None = None, kernels: KernelsOption = "auto"
) -> Tensor:
    """Return relu(x @ weight.T)^2; of the intermediate results only this one is kept for the backward pass.

    Args:
        x: (..., d) bfloat16 or float16; float32 and float64 are computed by the twin. Any strides.
        weight: (h, d), same dtype; with `fp8` any of float32, bfloat16, float16.
        fp8: None, or the scales for products in 8 bits: e4m3 forward, e5m2 for the gradient before the activation
            (that is the gradient that `grad_scale` and `grad_amax` speak of), backward sums in full float32. d and h
            must be multiples of 16 then. See fp8_scaling.py.
        kernels: `"auto"` takes Triton on CUDA devices where the dtype allows, see `dispatch.py`.

    Returns:
        (..., h) in the dtype of `x`, contiguous. Gradients have the dtypes of `x` and `weight`. float16 overflows
        beyond 65504, where PyTorch's does.

    Raises:
        TypeError: dtypes differ, or one has no such product.
        ValueError: shapes, devices or scales do not fit, or `kernels="triton"` cannot be honoured.
    """
    _check("x", x, "weight", weight, same_dtype=fp8 is None)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out: Tensor
    if fp8 is None:
        out = torch.ops.quintic.linear_relu2(rows, weight, kernels)
    else:
        check_multiples("weight", weight.shape)
        fp8.check(x)
        learns = torch.is_grad_enabled()
        out, _, _, x_amax, weight_amax = torch.ops.quintic.fp8_linear_relu2(
            rows,
            weight,
            fp8.x_scale,
            fp8.weight_scale,
            fp8.grad_scale,
            fp8.grad_amax,
            learns and weight.requires_grad,
            learns and x.requires_grad,
            kernels,
        )
        raise_(fp8.x_amax, x_amax)
        raise_(fp8.weight_amax, weight_amax)
    return out.view(*x.shape[:-1], weight.shape[0])


def _check(x_name: str, x: Tensor, name: str, weight: Tensor, same_dtype: bool = True) -> None:
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"{x_name} {tuple(x.shape)} and {name} {tuple(weight.shape)}: need (..., d) and (h, d)")
    if x.device != weight.device:
        raise ValueError(f"{x_name} is on {str(x.device)!r} and {name} on {str(weight.device)!r}; move one of them")
    if not same_dtype:
        check_float(x_name, x)
        check_float(name, weight)
    elif x.dtype != weight.dtype:
        raise TypeError(f"{x_name} is {x.dtype} and {name} {weight.dtype}; cast one of them")
    elif not x.dtype.is_floating_point or x.dtype.itemsize == 1:
        raise TypeError(f"{x_name} is {x.dtype}; need bfloat16, float16, float32 or float64")


@torch.library.custom_op("quintic::linear_relu2", mutates_args=())
def _linear_relu2(x: Tensor, weight: Tensor, kernels: str) -> Tensor:
    return _relu2_product(x, weight, _choose(kernels, x))


@_linear_relu2.register_fake
def _linear_relu2_fake(x: Tensor, weight: Tensor, kernels: str) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op("quintic::linear_relu2_backward", mutates_args=())
def _linear_relu2_backward(
    grad: Tensor, activation: Tensor, x: Tensor, weight: Tensor, for_x: bool, for_weight: bool, kernels: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients that are asked for, empty ones for the others."""
    grad_pre = relu2_backward(grad, activation, _choose(kernels, x))
    return (
        grad_pre @ weight if for_x else grad.new_empty(0),
        grad_pre.mT @ x if for_weight else grad.new_empty(0),
    )


@_linear_relu2_backward.register_fake
def _linear_relu2_backward_fake(
    grad: Tensor, activation: Tensor, x: Tensor, weight: Tensor, for_x: bool, for_weight: bool, kernels: str
) -> tuple[Tensor, Tensor]:
    return grad.new_empty(x.shape if for_x else (0,)), grad.new_empty(weight.shape if for_weight else (0,))


def _setup_linear_relu2(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, kernels = inputs
    ctx.save_for_backward(output, x, weight)
    ctx.kernels = kernels


def _backward_linear_relu2(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    for_x, for_weight = ctx.needs_input_grad[:2]
    grad_x, grad_weight = torch.ops.quintic.linear_relu2_backward(
        grad, *ctx.saved_tensors, for_x, for_weight, ctx.kernels
    )
    return grad_x if for_x else None, grad_weight if for_weight else None, None


_linear_relu2.register_autograd(_backward_linear_relu2, setup_context=_setup_linear_relu2)


# ----------------------------------------------------------------------------------------------------------- mlp_relu2


def mlp_relu2(x: Tensor, up: Tensor, down: Tensor, *, kernels: KernelsOption = "auto") -> Tensor:
    """Return relu(x @ up.T)^2 @ down.T, with all of the element-wise work inside products.

    The same as `linear_relu2` followed by a linear layer, but the gradient of the activation is never written either:
    the product that makes it turns it into the gradient of the pre-activation.

    Args:
        x: (..., d) bfloat16 or float16; float32 and float64 are computed by the twin. Any strides.
        up: (h, d), same dtype.
        down: (o, h), same dtype.
        kernels: as in `linear_relu2`.

    Returns:
        (..., o) in that dtype.

    Raises:
        TypeError: dtypes differ, or there is no such product.
        ValueError: shapes or devices do not fit, or `kernels="triton"` cannot be honoured.
    """
    _check("x", x, "up", up)
    if down.ndim != 2 or down.shape[1] != up.shape[0]:
        raise ValueError(f"up {tuple(up.shape)} and down {tuple(down.shape)}: need (h, d) and (o, h)")
    if down.device != x.device or down.dtype != x.dtype:
        kind = ValueError if down.device != x.device else TypeError
        raise kind(
            f"down is {down.dtype} on {str(down.device)!r} and x {x.dtype} on {str(x.device)!r}; make them equal"
        )
    out, _ = torch.ops.quintic.mlp_relu2(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), up, down, kernels)
    result: Tensor = out.view(*x.shape[:-1], down.shape[0])
    return result


@torch.library.custom_op("quintic::mlp_relu2", mutates_args=())
def _mlp_relu2(x: Tensor, up: Tensor, down: Tensor, kernels: str) -> tuple[Tensor, Tensor]:
    """Return the output and the activation."""
    activation = _relu2_product(x, up, _choose(kernels, x))
    return F.linear(activation, down), activation


@_mlp_relu2.register_fake
def _mlp_relu2_fake(x: Tensor, up: Tensor, down: Tensor, kernels: str) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[0], down.shape[0])), x.new_empty((x.shape[0], up.shape[0]))


@torch.library.custom_op("quintic::mlp_relu2_backward", mutates_args=())
def _mlp_relu2_backward(
    grad: Tensor, activation: Tensor, x: Tensor, up: Tensor, down: Tensor, needed: list[bool], kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, up and down that are needed, empty ones for the others."""
    for_x, for_up, for_down = needed
    grad_x, grad_up, grad_down = (grad.new_empty(0) for _ in range(3))
    if for_down:
        grad_down = grad.mT @ activation
    if for_x or for_up:
        chosen = _choose(kernels, x)
        if chosen == "triton":
            grad_pre = product_relu2(grad, down, dtype=grad.dtype, transposed=True, activation=activation)
        else:
            grad_pre = relu2_backward(grad @ down, activation, chosen)
        grad_x = grad_pre @ up if for_x else grad_x
        grad_up = grad_pre.mT @ x if for_up else grad_up
    return grad_x, grad_up, grad_down


@_mlp_relu2_backward.register_fake
def _mlp_relu2_backward_fake(
    grad: Tensor, activation: Tensor, x: Tensor, up: Tensor, down: Tensor, needed: list[bool], kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_up, grad_down = (
        grad.new_empty(tensor.shape if need else (0,)) for tensor, need in zip((x, up, down), needed, strict=True)
    )
    return grad_x, grad_up, grad_down


def _setup_mlp_relu2(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, up, down, kernels = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], x, up, down)
    ctx.kernels = kernels


def _backward_mlp_relu2(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:3])
    if grad is None or not any(needed):
        return (None,) * 4
    grads = torch.ops.quintic.mlp_relu2_backward(grad, *ctx.saved_tensors, needed, ctx.kernels)
    return (*(found if need else None for found, need in zip(grads, needed, strict=True)), None)


_mlp_relu2.register_autograd(_backward_mlp_relu2, setup_context=_setup_mlp_relu2)


# ------------------------------------------------------------------------------------------------ linear_relu2, 8 bits


@torch.library.custom_op("quintic::fp8_linear_relu2", mutates_args=())
def _fp8_linear_relu2(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    grad_scale: Tensor,
    grad_amax: Tensor | None,
    keep_x: bool,
    keep_weight: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the activation, x and weight transposed for the backward pass, and their largest magnitudes."""
    chosen = choose_fp8_kernels(kernels, x)
    e4m3 = torch.float8_e4m3fn
    x_rows, x_columns, x_amax = quantized_layouts(x, x_scale, e4m3, True, keep_x, True, chosen)
    weight_rows, weight_columns, weight_amax = quantized_layouts(
        weight, weight_scale, e4m3, True, keep_weight, True, chosen
    )
    if chosen == "triton":
        activation = product_relu2(x_rows, weight_rows, dtype=x.dtype, scales=(x_scale, weight_scale))
    else:
        pre = scaled_product(x_rows, weight_rows, x_scale, weight_scale, torch.float32, fast=True, chosen=chosen)
        activation = pre.relu().square().to(x.dtype)
    return activation, x_columns, weight_columns, x_amax, weight_amax


@_fp8_linear_relu2.register_fake
def _fp8_linear_relu2_fake(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    grad_scale: Tensor,
    grad_amax: Tensor | None,
    keep_x: bool,
    keep_weight: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, x_columns, x_amax = empty_quantized(x, torch.float8_e4m3fn, False, keep_x, True)
    _, weight_columns, weight_amax = empty_quantized(weight, torch.float8_e4m3fn, False, keep_weight, True)
    return x.new_empty((x.shape[0], weight.shape[0])), x_columns, weight_columns, x_amax, weight_amax


@torch.library.custom_op("quintic::fp8_linear_relu2_backward", mutates_args=())
def _fp8_linear_relu2_backward(
    grad: Tensor,
    activation: Tensor,
    x_columns: Tensor,
    weight_columns: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    grad_scale: Tensor,
    weight_dtype: torch.dtype,
    for_x: bool,
    for_weight: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients that are asked for, and the largest magnitude before the activation."""
    chosen = choose_fp8_kernels(kernels, grad)
    rows, columns, amax = relu2_backward_fp8(grad, activation, grad_scale, chosen)
    grad_x, grad_weight = grad.new_empty(0), grad.new_empty(0, dtype=weight_dtype)
    if for_x:
        grad_x = scaled_product(rows, weight_columns, grad_scale, weight_scale, grad.dtype, fast=False, chosen=chosen)
    if for_weight:
        grad_weight = scaled_product(columns, x_columns, grad_scale, x_scale, weight_dtype, fast=False, chosen=chosen)
    return grad_x, grad_weight, amax


@_fp8_linear_relu2_backward.register_fake
def _fp8_linear_relu2_backward_fake(
    grad: Tensor,
    activation: Tensor,
    x_columns: Tensor,
    weight_columns: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    grad_scale: Tensor,
    weight_dtype: torch.dtype,
    for_x: bool,
    for_weight: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = grad.new_empty((grad.shape[0], weight_columns.shape[0]) if for_x else (0,))
    grad_weight = grad.new_empty((grad.shape[1], x_columns.shape[0]) if for_weight else (0,), dtype=weight_dtype)
    return grad_x, grad_weight, grad.new_empty((), dtype=torch.float32)


def _setup_fp8_linear_relu2(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, x_scale, weight_scale, grad_scale, grad_amax, _, _, kernels = inputs
    activation, x_columns, weight_columns, x_amax, weight_amax = output
    ctx.mark_non_differentiable(x_columns, weight_columns, x_amax, weight_amax)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(activation, x_columns, weight_columns, x_scale, weight_scale, grad_scale)
    # Not saved: the backward passes of other microbatches write it.
    ctx.grad_amax = grad_amax
    ctx.weight_dtype, ctx.kernels = weight.dtype, kernels


def _backward_fp8_linear_relu2(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad = grads[0]
    for_x, for_weight = ctx.needs_input_grad[:2]
    if grad is None or not (for_x or for_weight):
        return (None,) * 9
    grad_x, grad_weight, found = torch.ops.quintic.fp8_linear_relu2_backward(
        grad, *ctx.saved_tensors, ctx.weight_dtype, for_x, for_weight, ctx.kernels
    )
    raise_(ctx.grad_amax, found)
    return (grad_x if for_x else None, grad_weight if for_weight else None, *(None,) * 7)


_fp8_linear_relu2.register_autograd(_backward_fp8_linear_relu2, setup_context=_setup_fp8_linear_relu2)
