"""relu(x U^T)^2 V^T, an MLP, with its element-wise work inside the products, forward and backward.

The pre-activation is never written: the backward pass needs relu(pre) only, which is the square root of the activation
that the second layer keeps anyway. What is left of element-wise work hides behind products:

    forward    s = relu(x U^T)^2          in the epilogue of the product
    backward   dpre = 2 sqrt(s) (dy V)    in the epilogue of the product that makes the activation's gradient

The other products are cuBLAS's. Rounding the activation costs dpre half a unit in its last place at most: no more than
rounding the pre-activation does.

With `fp8=True` the two forward products multiply e4m3 floats; the first writes the activation in 8 and in 16 bits.
Scales come from bounds and from the weights, not from earlier steps, so there is no state to save. The backward pass is
the same: it has the 16-bit activation, x and weights.

Sources: P. Micikevicius et al., FP8 Formats for Deep Learning (2022), https://arxiv.org/abs/2209.05433; modded-nanogpt,
which multiplies the forward MLP of its race in 8 bits. Read next: relu2.py for the kernel.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from quintic.kernels.dispatch import Kernels, KernelsOption, decide, obstacle_to_triton
from quintic.kernels.linear.fp8 import check_multiples, scaled_product
from quintic.kernels.linear.fp8_quantize import (
    LARGEST,
    SMALLEST_SCALE,
    check_float,
    obstacle_to_fp8,
    quantized_layouts,
    quantized_twin,
    unit_of,
)
from quintic.kernels.linear.relu2 import QuantizedActivation, product_relu2, relu2_backward_twin

__all__ = ["mlp_relu2", "obstacle_to_mlp_relu2"]

_DTYPES = (torch.bfloat16, torch.float16)
_E4M3 = torch.float8_e4m3fn


def _choose(option: str, x: Tensor) -> Kernels:
    return decide(cast(KernelsOption, option), x.device, lambda: obstacle_to_mlp_relu2(x))[0]


def obstacle_to_mlp_relu2(x: Tensor) -> str | None:
    """Return why Triton cannot compute `mlp_relu2` of these inputs, or None."""
    if x.dtype not in _DTYPES:
        return f"products of {x.dtype} are left to PyTorch, which has a setting for their precision"
    return obstacle_to_triton(x.device, "x")


def mlp_relu2(x: Tensor, up: Tensor, down: Tensor, *, fp8: bool = False, kernels: KernelsOption = "auto") -> Tensor:
    """Return relu(x @ up.T)^2 @ down.T, with all of the element-wise work inside products.

    Of the intermediate results only the activation is kept for the backward pass, which never writes its gradient: the
    product that makes it turns it into the gradient of the pre-activation.

    With `fp8` one unit of the e4m3 floats, whose largest is 448, is
        sqrt(d) / 448 in `x`: no entry of a row with a root mean square of 1 is larger than sqrt(d);
        max |up| / 448 and max |down| / 448 in the weights;
        d max_j ||up_j||^2 / 448 in the activation, up_j being the rows: (x . up_j)^2 <= ||x||^2 ||up_j||^2.
    Nothing overflows. A typical activation, ||up_j||^2, is 448 / d units, 0.58 for d = 768, where these floats are as
    precise as near 448. They are less so below 2^-6, that is for rows whose norm is under a sixth of the largest.

    Args:
        x: (..., d) bfloat16 or float16; float32 and float64 are computed by the twin. Any strides.
        up: (h, d), same dtype.
        down: (o, h), same dtype.
        fp8: multiply in 8 bits forward, not backward. Rows of `x` should have a root mean square of at most 1, as
            `rms_norm` makes them: entries saturate at sqrt(d), activations at the bound above. d, h and o are multiples
            of 16, and there is no float64. Where tensor cores cannot do it the twin multiplies the same 8-bit floats in
            float32, which is slow.
        kernels: `"auto"` takes Triton on CUDA devices where the dtype allows, see `dispatch.py`; with `fp8` on those of
            compute capability 8.9 or more.

    Returns:
        (..., o) in that dtype. float16 overflows beyond 65504, where PyTorch's does.

    Raises:
        TypeError: dtypes differ, or there is no such product.
        ValueError: shapes or devices do not fit, or `kernels="triton"` cannot be honoured.
    """
    _check(x, up, down)
    scales: tuple[Tensor, ...] = ()
    if fp8:
        check_float("x", x)
        check_multiples("up", up.shape)
        check_multiples("down", down.shape)
        if up.numel() and down.numel():  # the product of nothing is exact
            scales = _scales(x, up, down)
    out, _ = torch.ops.quintic.mlp_relu2(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), up, down, kernels, *scales)
    result: Tensor = out.view(*x.shape[:-1], down.shape[0])
    return result


def _scales(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """Return the units of x, up, the activation and down, () float32 each; NaN where the weights have one."""
    size = x.shape[-1]
    longest = up.detach().float().square().sum(dim=1).amax()
    of_activation = (longest * (size / LARGEST[_E4M3])).clamp_min(SMALLEST_SCALE)
    of_x = x.new_full((), size**0.5 / LARGEST[_E4M3], dtype=torch.float32)
    return of_x, unit_of(up, _E4M3), of_activation, unit_of(down, _E4M3)


def _check(x: Tensor, up: Tensor, down: Tensor) -> None:
    if up.ndim != 2 or x.ndim < 1 or x.shape[-1] != up.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and up {tuple(up.shape)}: need (..., d) and (h, d)")
    if down.ndim != 2 or down.shape[1] != up.shape[0]:
        raise ValueError(f"up {tuple(up.shape)} and down {tuple(down.shape)}: need (h, d) and (o, h)")
    for name, weight in (("up", up), ("down", down)):
        if weight.device != x.device:
            raise ValueError(f"x is on {str(x.device)!r} and {name} on {str(weight.device)!r}; move one of them")
        if weight.dtype != x.dtype:
            raise TypeError(f"x is {x.dtype} and {name} {weight.dtype}; cast one of them")
    if not x.dtype.is_floating_point or x.dtype.itemsize == 1:
        raise TypeError(f"x is {x.dtype}; need bfloat16, float16, float32 or float64")


@torch.library.custom_op("quintic::mlp_relu2", mutates_args=())
def _mlp_relu2(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    kernels: str,
    x_scale: Tensor | None = None,
    up_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the activation; computed in 8 bits if there are scales."""
    if x_scale is not None and up_scale is not None and activation_scale is not None and down_scale is not None:
        return _in_8_bits(x, up, down, kernels, x_scale, up_scale, activation_scale, down_scale)
    if _choose(kernels, x) == "triton":
        activation = product_relu2(x, up)
    else:
        activation = F.linear(x, up).relu().square()
    return F.linear(activation, down), activation


def _in_8_bits(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    kernels: str,
    x_scale: Tensor,
    up_scale: Tensor,
    activation_scale: Tensor,
    down_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    chosen, _ = decide(
        cast(KernelsOption, kernels), x.device, lambda: obstacle_to_mlp_relu2(x) or obstacle_to_fp8(x.device)
    )
    x_rows, up_rows, down_rows = (
        _quantized_rows(*each, chosen) for each in ((x, x_scale), (up, up_scale), (down, down_scale))
    )
    if chosen == "triton":
        values = x.new_empty((x.shape[0], up.shape[0]), dtype=_E4M3)
        quantized = QuantizedActivation(x_scale, up_scale, activation_scale, values)
        activation = product_relu2(x_rows, up_rows, dtype=x.dtype, quantized=quantized)
    else:
        pre = scaled_product(x_rows, up_rows, x_scale, up_scale, torch.float32, fast=True, chosen=chosen)
        wide = pre.relu().square()
        values, activation = quantized_twin(wide, activation_scale, _E4M3), wide.to(x.dtype)
    out = scaled_product(values, down_rows, activation_scale, down_scale, x.dtype, fast=True, chosen=chosen)
    return out, activation


def _quantized_rows(x: Tensor, scale: Tensor, chosen: Kernels) -> Tensor:
    """Return a matrix in 8 bits, row by row, read in the order in which it lies in memory."""
    if x.stride(1) != 1 and x.stride(0) == 1:  # a view of what is stored the other way round
        return quantized_layouts(x.mT, scale, _E4M3, False, True, chosen)[1]
    return quantized_layouts(x, scale, _E4M3, True, False, chosen)[0]


@_mlp_relu2.register_fake
def _mlp_relu2_fake(x: Tensor, up: Tensor, down: Tensor, kernels: str, *scales: Tensor | None) -> tuple[Tensor, Tensor]:
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
        if _choose(kernels, x) == "triton":
            grad_pre = product_relu2(grad, down, transposed=True, activation=activation)
        else:
            grad_pre = relu2_backward_twin(grad @ down, activation).to(grad.dtype)
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
    x, up, down, kernels = inputs[:4]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], x, up, down)
    ctx.kernels = kernels


def _backward_mlp_relu2(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:3])
    if grad is None or not any(needed):
        return (None,) * 8
    grads = torch.ops.quintic.mlp_relu2_backward(grad, *ctx.saved_tensors, needed, ctx.kernels)
    return (*(found if need else None for found, need in zip(grads, needed, strict=True)), *(None,) * 5)


_mlp_relu2.register_autograd(_backward_mlp_relu2, setup_context=_setup_mlp_relu2)
