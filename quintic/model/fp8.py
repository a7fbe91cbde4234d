"""Linear layers that multiply in 8 bits with dynamic scaling: each scale is computed from the tensor it quantises.

For y = x W^T a layer has three products: y itself, grad_x = grad_y W, and grad_W = grad_y^T x.

*Tensorwise*: one scale per tensor. One pass finds the largest magnitude, a second one quantises the tensor in both
orientations (`quintic.kernels.linear.fp8`). Gradients are e5m2, whose range is wider, all others e4m3.

*Rowwise*: one scale for each row of the left operand and each column of the right one, so that an outlier only costs
its own row precision. Each operand is quantised separately for each product, along the dimension that is summed, always
as e4m3. These are plain PyTorch operations, for `torch.compile` to fuse.

Sources: P. Micikevicius et al., FP8 Formats for Deep Learning (2022), https://arxiv.org/abs/2209.05433; the two recipes
and their names are torchao's (https://github.com/pytorch/ao).
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quintic.kernels.dispatch import KernelsOption
from quintic.kernels.linear.fp8 import fp8_linear
from quintic.kernels.linear.fp8_quantize import (
    LARGEST,
    MULTIPLE,
    SMALLEST_SCALE,
    choose_fp8_kernels,
    quantized_twin,
    unit_of,
)
from quintic.kernels.loss.loss import Fp8Scales

__all__ = [
    "FP8_BOTH",
    "FP8_FORWARD",
    "Fp8Recipe",
    "Fp8Scaling",
    "dynamic_fp8_linear",
    "fp8_lines",
    "head_scales",
    "obstacle_to_fp8_layer",
]

Fp8Scaling = Literal["tensorwise", "rowwise"]

# "auto" is tensorwise, only in the layers that become faster.
Fp8Recipe = Literal["auto", Fp8Scaling]

# The passes in which a layer multiplies in 8 bits, as texts for the log.
FP8_BOTH, FP8_FORWARD = "forward and backward", "forward alone"

_E4M3 = torch.float8_e4m3fn

# Smaller matrices do not keep tensor cores busy.
_SMALLEST = 128

# From this size on, both passes of a layer are faster in 8 bits, quantisation included. On an H200, steps of a GPT were
# 1 % slower at width 768, but 11 and 18 % faster at 1,280 and 2,048 (docs/how-to/train/fp8.md).
_SMALLEST_THAT_PAYS = 1024


def obstacle_to_fp8_layer(weight: Tensor, *, needs_gain: bool = False) -> str:
    """Return the reason why a layer cannot multiply in 8 bits in both passes; "" if it can.

    Args:
        weight: (out, in) weight of the layer.
        needs_gain: also reject layers that would not become faster.
    """
    if any(size % MULTIPLE for size in weight.shape):
        return f"a size is not a multiple of {MULTIPLE}"
    if min(weight.shape) < _SMALLEST:
        return f"a size is below {_SMALLEST}"
    if needs_gain and min(weight.shape) < _SMALLEST_THAT_PAYS:
        return f"a size is below {_SMALLEST_THAT_PAYS:,}: 8 bits would be slower"
    return ""


def fp8_lines(layers: Mapping[str, str]) -> list[str]:
    """Return lines for the user that describe the result of `GPT.use_fp8`, a line for each use or reason."""
    names: dict[str, list[str]] = {}
    for name, use in layers.items():
        # A star in place of the number of a block.
        names.setdefault(use, []).append(re.sub(r"\.\d+\.", ".*.", name))
    passes = FP8_FORWARD, FP8_BOTH
    start = "8-bit products" if any(use in names for use in passes) else "--fp8 changes nothing in this model"
    # Layers that multiply in 8 bits first, then the reasons of the others in alphabetical order.
    return [
        f"{start}: {use if use in passes else f'none, because {use},'} in {len(names[use])} of {len(layers)} linear "
        f"layers ({', '.join(dict.fromkeys(names[use]))})"
        for use in sorted(names, key=lambda use: (use not in passes, use))
    ]


def dynamic_fp8_linear(x: Tensor, weight: Tensor, recipe: Fp8Scaling, *, kernels: KernelsOption = "auto") -> Tensor:
    """Return x @ weight.T, multiplied in 8 bits in both passes, with sums in float32.

    Args:
        x: (..., in) float32, bfloat16 or float16.
        weight: (out, in) in one of these dtypes; both sizes are multiples of 16.
        recipe: scaling, see the module's docstring.
        kernels: `"auto"` uses tensor cores on CUDA devices of compute capability 8.9 or more (rowwise: 9.0), `"torch"`
            emulates them.

    Returns:
        (..., out) in the dtype of `x`. Gradients have the dtypes of `x` and `weight`.
    """
    if recipe == "tensorwise":
        x_scale, weight_scale = unit_of(x, _E4M3), unit_of(weight, _E4M3)
        return fp8_linear(x, weight.mT, x_scale=x_scale, weight_scale=weight_scale, grad_scale=None, kernels=kernels)
    # All leading dimensions become rows: (..., in) -> (m, in), and back.
    out: Tensor = _Rowwise.apply(x.reshape(-1, x.shape[-1]), weight, kernels)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], weight.shape[0])


def head_scales(x: Tensor, weight: Tensor) -> Fp8Scales:
    """Return the scales of an output head's products for `softcap_cross_entropy`.

    Args:
        x: (..., C) hidden states.
        weight: (vocab_size, C).
    """
    # The gradient of a cross entropy with respect to logits lies in [-1, 1], so its scale is constant.
    largest = LARGEST[torch.float8_e5m2]
    return Fp8Scales(unit_of(x, _E4M3), unit_of(weight, _E4M3), x.new_full((), 1 / largest, dtype=torch.float32))


class _Rowwise(torch.autograd.Function):
    """x (m, in), weight (out, in) -> (m, out), with one scale per row and column."""

    # The backward pass sums over m and over out, so it needs x and weight quantised along these dimensions. Saving them
    # in 8 bits takes less memory than saving the originals.
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kernels: KernelsOption) -> Tensor:
        ctx.save_for_backward(*_quantize_rows(x.mT), *_quantize_rows(weight.mT))
        ctx.dtypes, ctx.kernels = (x.dtype, weight.dtype), kernels
        return _product(_quantize_rows(x), _quantize_rows(weight), x.dtype, kernels, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_columns, x_scales, weight_columns, weight_scales = ctx.saved_tensors
        (x_dtype, weight_dtype), (for_x, for_weight, _) = ctx.dtypes, ctx.needs_input_grad
        grad_x = grad_weight = None
        if for_x:
            grad_x = _product(_quantize_rows(grad), (weight_columns, weight_scales), x_dtype, ctx.kernels, fast=False)
        if for_weight:
            columns = _quantize_rows(grad.mT)
            grad_weight = _product(columns, (x_columns, x_scales), weight_dtype, ctx.kernels, fast=False)
        return grad_x, grad_weight, None


def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise (m, n) by rows: return contiguous e4m3, its columns padded to a multiple of 16, and (m, 1) scales."""
    # The largest magnitude of a row becomes the largest e4m3 number; all-zero rows get the smallest scale.
    wide = x.float()
    scales = (wide.abs().amax(1, keepdim=True) / LARGEST[_E4M3]).clamp_min(SMALLEST_SCALE)
    padded = F.pad(wide, (0, -x.shape[1] % MULTIPLE))
    return quantized_twin(padded, scales, _E4M3).contiguous(), scales


def _product(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, kernels: KernelsOption, *, fast: bool
) -> Tensor:
    """Return a @ b.T for operands quantised by rows, each (values, scales)."""
    (left, left_scales), (right, right_scales) = a, b
    if left.is_cuda and choose_fp8_kernels(kernels, left) == "triton":
        # With rowwise scales, `_scaled_mm` only writes bfloat16. `fast` lets Hopper accumulate with fewer bits.
        scales = left_scales, right_scales.mT
        out: Tensor = torch._scaled_mm(left, right.mT, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
    else:
        out = left.float() @ right.float().mT * left_scales * right_scales.mT
    # No conversion to the same dtype: with one last in `forward`, PyTorch 2.11 compiles gradients of zero (its issue
    # 180642).
    return out if out.dtype == dtype else out.to(dtype)
