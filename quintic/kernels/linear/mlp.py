"""relu(x U^T)^2 V^T, an MLP, with its element-wise work inside the products, forward and backward.

The pre-activation is never written: the backward pass needs relu(pre) only, which is the square root of the activation
that the second layer keeps anyway. What is left of element-wise work hides behind products:

    forward    s = relu(x U^T)^2          in the epilogue of the product
    backward   dpre = 2 sqrt(s) (dy V)    in the epilogue of the product that makes the activation's gradient

The other products are cuBLAS's. Rounding the activation costs dpre half a unit in its last place at most: no more than
rounding the pre-activation does.

Read next: relu2.py for the kernel.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from quintic.kernels.dispatch import Kernels, KernelsOption, decide, obstacle_to_triton
from quintic.kernels.linear.relu2 import product_relu2, relu2_backward_twin

__all__ = ["mlp_relu2", "obstacle_to_mlp_relu2"]

_DTYPES = (torch.bfloat16, torch.float16)


def _choose(option: str, x: Tensor) -> Kernels:
    return decide(cast(KernelsOption, option), x.device, lambda: obstacle_to_mlp_relu2(x))[0]


def obstacle_to_mlp_relu2(x: Tensor) -> str | None:
    """Return why Triton cannot compute `mlp_relu2` of these inputs, or None."""
    if x.dtype not in _DTYPES:
        return f"products of {x.dtype} are left to PyTorch, which has a setting for their precision"
    return obstacle_to_triton(x.device, "x")


def mlp_relu2(x: Tensor, up: Tensor, down: Tensor, *, kernels: KernelsOption = "auto") -> Tensor:
    """Return relu(x @ up.T)^2 @ down.T, with all of the element-wise work inside products.

    Of the intermediate results only the activation is kept for the backward pass, which never writes its gradient: the
    product that makes it turns it into the gradient of the pre-activation.

    Args:
        x: (..., d) bfloat16 or float16; float32 and float64 are computed by the twin. Any strides.
        up: (h, d), same dtype.
        down: (o, h), same dtype.
        kernels: `"auto"` takes Triton on CUDA devices where the dtype allows, see `dispatch.py`.

    Returns:
        (..., o) in that dtype. float16 overflows beyond 65504, where PyTorch's does.

    Raises:
        TypeError: dtypes differ, or there is no such product.
        ValueError: shapes or devices do not fit, or `kernels="triton"` cannot be honoured.
    """
    _check(x, up, down)
    out, _ = torch.ops.quintic.mlp_relu2(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), up, down, kernels)
    result: Tensor = out.view(*x.shape[:-1], down.shape[0])
    return result


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
def _mlp_relu2(x: Tensor, up: Tensor, down: Tensor, kernels: str) -> tuple[Tensor, Tensor]:
    """Return the output and the activation."""
    if _choose(kernels, x) == "triton":
        activation = product_relu2(x, up)
    else:
        activation = F.linear(x, up).relu().square()
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
