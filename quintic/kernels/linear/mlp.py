"""An MLP relu(x U^T)^2 V^T, with all element-wise work fused into its products, forward and backward.

The pre-activation is never written: the backward pass needs only relu(pre), the square root of the activation, which is
kept for the second layer anyway. Two products have element-wise epilogues (relu2.py), the others are cuBLAS's:

    forward    s = relu(x U^T)^2           fused      (tokens, h)
               out = s V^T                            (tokens, o)
    backward   dV = dout^T s                          (o, h)
               dpre = 2 sqrt(s) (dout V)   fused      (tokens, h)
               dx = dpre U                            (tokens, d)
               dU = dpre^T x                          (h, d)

Rounding the activation changes dpre by at most half a unit in its last place, as rounding the pre-activation would.

With `fp8=True` both forward products multiply e4m3 floats, and the first writes the activation in 8 and in 16 bits. The
backward pass is unchanged: it uses the 16-bit activation, x and weights. With `fp8_backward=True` the products for dpre
and dx multiply e5m2 gradients by e4m3 weights, and dpre is written in 8 and in 16 bits; the gradients of the weights
are products in 16 bits. Scales follow from bounds and from the weights, not from earlier steps: there is no state.

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
from quintic.kernels.linear.relu2 import QuantizedProduct, product_relu2, relu2_backward_twin

__all__ = ["mlp_relu2", "obstacle_to_mlp_relu2"]

_DTYPES = (torch.bfloat16, torch.float16)
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _choose_mlp(option: str, x: Tensor, *, fp8: bool = False) -> Kernels:
    def obstacle() -> str | None:
        return obstacle_to_mlp_relu2(x) or (obstacle_to_fp8(x.device) if fp8 else None)

    return decide(cast(KernelsOption, option), x.device, obstacle)[0]


def obstacle_to_mlp_relu2(x: Tensor) -> str | None:
    """Return why Triton cannot compute `mlp_relu2` of these inputs, or None."""
    if x.dtype not in _DTYPES:
        return f"products of {x.dtype} are left to PyTorch, which has a setting for their precision"
    return obstacle_to_triton(x.device, "x")


def mlp_relu2(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    fp8: bool = False,
    fp8_backward: bool = False,
    kernels: KernelsOption = "auto",
) -> Tensor:
    """Return relu(x @ up.T)^2 @ down.T, with all element-wise work inside the products.

    The activation is the only intermediate result that is kept for the backward pass. Its gradient is never written:
    the product that computes it turns it into the gradient of the pre-activation.

    With `fp8` one unit of the e4m3 floats, whose largest is 448, is
        sqrt(d) / 448 in `x`: no entry of a row with a root mean square of 1 is larger than sqrt(d);
        max |up| / 448 and max |down| / 448 in the weights;
        d max_j ||up_j||^2 / 448 in the activation, up_j being the rows: (x . up_j)^2 <= ||x||^2 ||up_j||^2.
    Nothing overflows. A typical activation, ||up_j||^2, is 448 / d units (0.58 for d = 768), where e4m3 floats have
    the same relative precision as near 448. They lose precision below 2^-6 units, that is for rows whose norm is under
    a sixth of the largest.

    With `fp8_backward` one unit of the e5m2 floats, whose largest is 57344, is
        g / 57344 in the gradient of the result, g being its largest magnitude;
        2 sqrt(d) max_j ||up_j|| o max |down| g / 57344 in the gradient of the pre-activation: a bound of its entries.
    Typical entries are far below the bound. That costs no precision, since e5m2 has the same relative precision down to
    2^-29 of its largest value.

    Args:
        x: (..., d) bfloat16 or float16; float32 and float64 are computed by the twin. Any strides.
        up: (h, d), same dtype.
        down: (o, h), same dtype.
        fp8: multiply in 8 bits forward. Rows of `x` should have a root mean square of at most 1, as after `rms_norm`:
            entries saturate at sqrt(d), activations at the bound above. d, h and o must be multiples of 16; float64 is
            not supported. Without 8-bit tensor cores the twin multiplies the same 8-bit floats in float32, slowly.
        fp8_backward: with `fp8`, multiply in 8 bits backward as well, except for gradients of weights.
        kernels: `"auto"` takes Triton on CUDA devices for dtypes with a kernel (see `dispatch.py`); with `fp8` the
            device needs compute capability 8.9 or more.

    Returns:
        (..., o) in that dtype. float16 overflows beyond 65504, as in PyTorch.

    Raises:
        TypeError: dtypes differ, or there is no such product.
        ValueError: shapes or devices do not fit, `fp8_backward` is without `fp8`, or `kernels="triton"` cannot be
            honoured.
    """
    _check_mlp(x, up, down)
    if fp8_backward and not fp8:
        raise ValueError("fp8_backward=True without fp8=True: scales of the backward pass come from the forward pass's")
    scales: tuple[Tensor, ...] = ()
    if fp8:
        check_float("x", x)
        check_multiples("up", up.shape)
        check_multiples("down", down.shape)
        # Without scales the operator multiplies in 16 bits. Empty weights have no largest entry, and exact products.
        if up.numel() and down.numel():
            scales = _scales(x, up, down)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out, _ = torch.ops.quintic.mlp_relu2(rows, up, down, kernels, fp8_backward, *scales)
    result: Tensor = out.view(*x.shape[:-1], down.shape[0])
    return result


def _scales(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """Return the scales of x, up, the activation and down, each () float32; NaN if the weights have a NaN."""
    size = x.shape[-1]
    longest = up.detach().float().square().sum(dim=1).amax()
    of_activation = (longest * (size / LARGEST[_E4M3])).clamp_min(SMALLEST_SCALE)
    of_x = x.new_full((), size**0.5 / LARGEST[_E4M3], dtype=torch.float32)
    return of_x, unit_of(up, _E4M3), of_activation, unit_of(down, _E4M3)


def _check_mlp(x: Tensor, up: Tensor, down: Tensor) -> None:
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
    fp8_backward: bool = False,
    x_scale: Tensor | None = None,
    up_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output (tokens, o) and the activation (tokens, h); with scales the products are in 8 bits."""
    if x_scale is not None and up_scale is not None and activation_scale is not None and down_scale is not None:
        return _in_8_bits(x, up, down, kernels, (x_scale, up_scale, activation_scale, down_scale))
    if _choose_mlp(kernels, x) == "triton":
        activation = product_relu2(x, up)
    else:
        activation = F.linear(x, up).relu().square()
    return F.linear(activation, down), activation


def _in_8_bits(
    x: Tensor, up: Tensor, down: Tensor, kernels: str, scales: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    # x (tokens, d), up (h, d), down (o, h) -> the output (tokens, o) and the activation (tokens, h)
    x_scale, up_scale, activation_scale, down_scale = scales
    chosen = _choose_mlp(kernels, x, fp8=True)
    x_rows, up_rows, down_rows = (
        _quantized_rows(*each, _E4M3, chosen) for each in ((x, x_scale), (up, up_scale), (down, down_scale))
    )
    if chosen == "triton":
        values = x.new_empty((x.shape[0], up.shape[0]), dtype=_E4M3)
        quantized = QuantizedProduct(x_scale, up_scale, activation_scale, values)
        activation = product_relu2(x_rows, up_rows, dtype=x.dtype, quantized=quantized)
    else:
        pre = scaled_product(x_rows, up_rows, x_scale, up_scale, torch.float32, fast=True, chosen=chosen)
        wide = pre.relu().square()
        values, activation = quantized_twin(wide, activation_scale, _E4M3), wide.to(x.dtype)
    out = scaled_product(values, down_rows, activation_scale, down_scale, x.dtype, fast=True, chosen=chosen)
    return out, activation


def _quantized_rows(x: Tensor, scale: Tensor, dtype: torch.dtype, chosen: Kernels) -> Tensor:
    """Return a matrix in 8 bits as contiguous rows, reading it in its memory order."""
    # A transposed view: quantise the stored matrix, and take its transpose.
    if x.stride(1) != 1 and x.stride(0) == 1:
        return quantized_layouts(x.mT, scale, dtype, False, True, chosen)[1]
    return quantized_layouts(x, scale, dtype, True, False, chosen)[0]


@_mlp_relu2.register_fake
def _mlp_relu2_fake(
    x: Tensor, up: Tensor, down: Tensor, kernels: str, fp8_backward: bool = False, *scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[0], down.shape[0])), x.new_empty((x.shape[0], up.shape[0]))


@torch.library.custom_op("quintic::mlp_relu2_backward", mutates_args=())
def _mlp_relu2_backward(
    grad: Tensor,
    activation: Tensor,
    x: Tensor,
    up: Tensor,
    down: Tensor,
    needed: list[bool],
    kernels: str,
    up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    grad_scale: Tensor | None = None,
    pre_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, up and down, given `grad` (tokens, o); one that is not needed has size 0.

    With scales, dpre and dx are products in 8 bits: `grad_scale` is for the gradient of the output, `pre_scale` for
    that of the pre-activation.
    """
    for_x, for_up, for_down = needed
    grad_x, grad_up, grad_down = (grad.new_empty(0) for _ in range(3))
    if for_down:
        grad_down = grad.mT @ activation
    if for_x or for_up:
        if up_scale is not None and down_scale is not None and grad_scale is not None and pre_scale is not None:
            scales = up_scale, down_scale, grad_scale, pre_scale
            grad_pre, grad_x = _backward_in_8_bits(grad, activation, up, down, for_x, kernels, scales)
        elif _choose_mlp(kernels, x) == "triton":
            grad_pre = product_relu2(grad, down, transposed=True, activation=activation)
        else:
            grad_pre = relu2_backward_twin(grad @ down, activation).to(grad.dtype)
        if for_x and up_scale is None:
            grad_x = grad_pre @ up
        grad_up = grad_pre.mT @ x if for_up else grad_up
    return grad_x, grad_up, grad_down


def _backward_in_8_bits(
    grad: Tensor,
    activation: Tensor,
    up: Tensor,
    down: Tensor,
    for_x: bool,
    kernels: str,
    scales: tuple[Tensor, Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the pre-activation (tokens, h) in 16 bits, and the gradient of x (tokens, d)."""
    up_scale, down_scale, grad_scale, pre_scale = scales
    chosen = _choose_mlp(kernels, grad, fp8=True)
    grad_rows = _quantized_rows(grad, grad_scale, _E5M2, chosen)
    down_rows = _quantized_rows(down.mT, down_scale, _E4M3, chosen)
    if chosen == "triton":
        values = torch.empty_like(activation, dtype=_E5M2)
        quantized = QuantizedProduct(grad_scale, down_scale, pre_scale, values)
        grad_pre = product_relu2(grad_rows, down_rows, activation=activation, dtype=grad.dtype, quantized=quantized)
    else:
        product = scaled_product(grad_rows, down_rows, grad_scale, down_scale, torch.float32, fast=True, chosen=chosen)
        wide = relu2_backward_twin(product, activation)
        values, grad_pre = quantized_twin(wide, pre_scale, _E5M2), wide.to(grad.dtype)
    if not for_x:
        return grad_pre, grad.new_empty(0)
    # fast: sums of 14 bits lose far less than the two bits of mantissa of e5m2.
    up_rows = _quantized_rows(up.mT, up_scale, _E4M3, chosen)
    return grad_pre, scaled_product(values, up_rows, pre_scale, up_scale, grad.dtype, fast=True, chosen=chosen)


@_mlp_relu2_backward.register_fake
def _mlp_relu2_backward_fake(
    grad: Tensor, activation: Tensor, x: Tensor, up: Tensor, down: Tensor, needed: list[bool], *_: str | Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_up, grad_down = (
        grad.new_empty(tensor.shape if need else (0,)) for tensor, need in zip((x, up, down), needed, strict=True)
    )
    return grad_x, grad_up, grad_down


def _setup_mlp_relu2(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, up, down, kernels, fp8_backward, x_scale, *scales = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], x, up, down, *(scales if fp8_backward and x_scale is not None else ()))
    ctx.kernels = kernels


def _backward_mlp_relu2(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:3])
    if grad is None or not any(needed):
        return (None,) * 9
    activation, x, up, down, *scales = ctx.saved_tensors
    # An empty gradient has no largest entry to derive a scale from.
    if not grad.numel():
        scales = []
    elif scales:
        up_scale, activation_scale, down_scale = scales
        grad_scale = unit_of(grad, _E5M2)
        # The activation's scale is d max_j ||up_j||^2 / 448: this is sqrt(d) max_j ||up_j||.
        longest = (activation_scale * LARGEST[_E4M3]).sqrt()
        bound = 2 * down.shape[0] * LARGEST[_E4M3] * longest * down_scale
        scales = [up_scale, down_scale, grad_scale, (bound * grad_scale).clamp_min(SMALLEST_SCALE)]
    grads = torch.ops.quintic.mlp_relu2_backward(grad, activation, x, up, down, needed, ctx.kernels, *scales)
    return (*(found if need else None for found, need in zip(grads, needed, strict=True)), *(None,) * 6)


_mlp_relu2.register_autograd(_backward_mlp_relu2, setup_context=_setup_mlp_relu2)
