"""Products of 8-bit floats: quantisation with per-tensor scales, and a linear layer as a function.

A tensor is kept as `quantised * scale`: e4m3 (4 bits of exponent, 3 of mantissa) for activations and weights, e5m2 for
gradients, whose range is wider. Tensor cores multiply both and add in float32; the scales come in at the end. They take
the left operand row by row and the right one column by column, so what a backward pass needs in the other orientation
is written transposed by the same pass that quantises.

On CPUs, and on GPUs that have no such tensor cores, the twin quantises in the same way and multiplies in float32.

Source: P. Micikevicius et al., FP8 Formats for Deep Learning (2022), https://arxiv.org/abs/2209.05433, sections 3, 4.
Read next: fp8_scaling.py, where scales come from; linear.py.
"""

import functools
import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels, KernelsOption, decide, obstacle_to_triton
from quintic.kernels.jit import jit, tl, triton

__all__ = ["Fp8LinearScales", "fp8_linear", "obstacle_to_fp8", "quantize_fp8", "quantize_fp8_both"]

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}

# What tensor cores ask of the sizes of a product: 16 bytes.
_MULTIPLE = 16


# --------------------------------------------------------------------------------------------------------- quantising


def quantize_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype, *, kernels: KernelsOption = "auto") -> Tensor:
    """Return x / scale rounded to the nearest 8-bit float, ties to even.

    What is too large, infinities included, becomes the dtype's largest finite value; NaN stays NaN.

    Args:
        x: float32, bfloat16 or float16, any shape and strides. No gradient flows through.
        scale: () float32 on the device of `x`, > 0: one unit of the result. Value = quantised * scale.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        kernels: `"auto"`, `"triton"` or `"torch"`, see `dispatch.py`; all of them give the same bits.

    Returns:
        Tensor of the shape of `x`, contiguous.

    Raises:
        TypeError: `x` or `dtype` has no such quantisation.
        ValueError: `scale` is not such a tensor, or `kernels="triton"` cannot be honoured.
    """
    _check_quantisation(x, scale, dtype)
    flat = x.detach().reshape(1, -1)
    quantised, _, _ = torch.ops.quintic.quantize_fp8(flat, scale, dtype, True, False, False, kernels)
    out: Tensor = quantised.view(x.shape)
    return out


def quantize_fp8_both(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, kernels: KernelsOption = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a matrix in both orientations and find its largest magnitude, in one pass.

    Args:
        x: (m, n) float32, bfloat16 or float16, any strides. No gradient flows through.
        scale: as in `quantize_fp8`.
        dtype: as in `quantize_fp8`.
        kernels: as in `quantize_fp8`.

    Returns:
        quantised (m, n) contiguous; its transpose (n, m') contiguous, m' the next multiple of 16, padded with zeros;
        the largest magnitude of `x`, () float32 (NaN where x has one, 0 without entries).

    Raises:
        TypeError: as `quantize_fp8`.
        ValueError: as `quantize_fp8`, or `x` is not a matrix.
    """
    _check_quantisation(x, scale, dtype)
    if x.ndim != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; need a matrix")
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.quintic.quantize_fp8(
        x.detach(), scale, dtype, True, True, True, kernels
    )
    return out


def _check_quantisation(x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    if dtype not in LARGEST:
        raise TypeError(f"dtype={dtype}: choose torch.float8_e4m3fn or torch.float8_e5m2")
    check_float("x", x)
    check_scalar("scale", scale, x)


def check_float(name: str, x: Tensor) -> None:
    """Raise TypeError for a dtype that has no kernel."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{name} is {x.dtype}; need float32, bfloat16 or float16")


def check_scalar(name: str, scalar: Tensor, x: Tensor) -> None:
    """Raise ValueError for what is no () float32 tensor beside `x`."""
    if scalar.shape != () or scalar.dtype != torch.float32 or scalar.device != x.device:
        raise ValueError(
            f"{name} is {scalar.dtype} of shape {tuple(scalar.shape)} on {str(scalar.device)!r}; "
            f"need a () float32 tensor on {str(x.device)!r}"
        )


def choose_fp8_kernels(option: str, x: Tensor) -> Kernels:
    """Return the implementation, Triton with tensor cores or the twin; inside operators only."""
    return decide(cast(KernelsOption, option), x.device, lambda: obstacle_to_fp8(x.device))[0]


def obstacle_to_fp8(device: torch.device) -> str | None:
    """Return what keeps tensor cores from 8-bit products on a device, or None."""
    obstacle = obstacle_to_triton(device, "x")
    if obstacle is None and device.type == "cuda" and not _has_fp8(device):
        return f"{device} has no 8-bit floats, which began with compute capability 8.9"
    return obstacle


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def tiles_are_trusted(x: Tensor, chosen: Kernels) -> bool:
    """Return whether kernels may write tiles of 8-bit floats in both orientations.

    Not on CUDA devices: there the tests found wrong entries (H200, Triton 3.6, 2026-11, docs/LOG.md), and the cause is
    not known. PyTorch's own operations quantise there, in more passes; the products run on tensor cores all the same.
    """
    return chosen == "triton" and not x.is_cuda


def next_multiple(size: int) -> int:
    """Return the size with the padding that tensor cores want."""
    return -(-size // _MULTIPLE) * _MULTIPLE


@torch.library.custom_op("quintic::quantize_fp8", mutates_args=())
def _quantize(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool, amax: bool, kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    return quantized_layouts(x, scale, dtype, rows, columns, amax, choose_fp8_kernels(kernels, x))


def quantized_layouts(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool, amax: bool, chosen: Kernels
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `quantize_fp8_both` does, with tensors of size 0 for what is not asked for: inside operators only."""
    if tiles_are_trusted(x, chosen):
        return _launch_quantize(x, scale, dtype, rows, columns, amax)
    quantised = quantized_twin(x.float(), scale, dtype)
    by_rows, by_columns, peak = empty_quantized(x, dtype, rows, columns, amax)
    if rows:
        by_rows.copy_(quantised)
    if columns:
        by_columns.zero_()
        by_columns[:, : x.shape[0]] = quantised.mT
    if amax:
        peak = x.abs().amax().float() if x.numel() else peak.zero_()
    return by_rows, by_columns, peak


@_quantize.register_fake
def _quantize_fake(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool, amax: bool, kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_quantized(x, dtype, rows, columns, amax)


def empty_quantized(
    x: Tensor, dtype: torch.dtype, rows: bool, columns: bool, amax: bool
) -> tuple[Tensor, Tensor, Tensor]:
    m, n = x.shape
    return (
        x.new_empty((m, n) if rows else (0,), dtype=dtype),
        x.new_empty((n, next_multiple(m)) if columns else (0,), dtype=dtype),
        x.new_empty(() if amax else (0,), dtype=torch.float32),
    )


def quantized_twin(value: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float32 tensor quantised, in plain PyTorch."""
    return (value / scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


@jit
def quantized_value(value, scale, LARGEST: tl.constexpr):
    """Return value / scale within the range of an 8-bit float, in float32, for kernels to convert."""
    # Exact division: with an approximate one the twin would differ in ties.
    value = tl.div_rn(value, scale)
    # Comparisons keep NaN, which minimum and maximum would drop.
    value = tl.where(value > LARGEST, LARGEST, value)
    return tl.where(value < -LARGEST, -LARGEST, value)


@jit
def raise_amax(amax, value):
    """Raise the float32 at the int32 pointer `amax` to the largest magnitude of a tile."""
    # Magnitudes are ordered as their bits are, NaN above all: an integer maximum, in whatever order, is deterministic.
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(amax, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")


@jit
def _quantize_kernel(
    x,
    scale,
    by_rows,
    by_columns,
    amax,
    num_rows,
    num_columns,
    padded_rows,
    x_row,
    x_column,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AMAX: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    column_tiles = tl.cdiv(num_columns, BLOCK_COLUMNS)
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_ROWS
    column = (tl.program_id(0) % column_tiles).to(tl.int64) * BLOCK_COLUMNS
    i, j = tile_offsets(WIDE, BLOCK_ROWS, BLOCK_COLUMNS)
    rows_left = tl.minimum(num_rows - row, BLOCK_ROWS).to(tl.int32)
    columns_left = tl.minimum(num_columns - column, BLOCK_COLUMNS).to(tl.int32)
    inside = (i[:, None] < rows_left) & (j[None, :] < columns_left)
    x += row * x_row + column * x_column
    value = tl.load(x + i[:, None] * x_row + j[None, :] * x_column, mask=inside, other=0.0).to(tl.float32)
    if AMAX:
        raise_amax(amax, value)
    value = quantized_value(value, tl.load(scale), LARGEST)
    if ROWS:
        by_rows += row * num_columns + column
        quantized = value.to(by_rows.dtype.element_ty)
        tl.store(by_rows + i[:, None] * num_columns + j[None, :], quantized, mask=inside)
    if COLUMNS:
        # Rows beyond the last were read as zeros, which is what the padding holds.
        padded_left = tl.minimum(padded_rows - row, BLOCK_ROWS).to(tl.int32)
        padded = (j[:, None] < columns_left) & (i[None, :] < padded_left)
        by_columns += column * padded_rows + row
        # Turned before it is converted: Triton 3.6 moves tiles of 8-bit floats to wrong places (H200, 2026-11).
        turned = tl.trans(value).to(by_columns.dtype.element_ty)
        tl.store(by_columns + j[:, None] * padded_rows + i[None, :], turned, mask=padded)


@jit
def tile_offsets(WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Return the indices of a tile's rows and columns: in 64 bits only where needed, they fill the registers."""
    i = tl.arange(0, BLOCK_ROWS)
    j = tl.arange(0, BLOCK_COLUMNS)
    if WIDE:
        i = i.to(tl.int64)
        j = j.to(tl.int64)
    return i, j


def needs_wide_offsets(*strides: int) -> bool:
    """Return whether a tile of at most 256 rows and columns spans more than 32 bits count."""
    return max(strides) * 256 * 2 >= 2**31


# Bound by memory: both orientations are written in lines of at least 64 bytes.
_BOTH_BLOCK = (64, 128)
_ROWS_BLOCK = (1, 4096)


def _launch_quantize(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool, amax: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from quintic.kernels.weights import on_device_of

    by_rows, by_columns, peak = empty_quantized(x, dtype, rows, columns, amax)
    if amax:
        peak.zero_()
    m, n = x.shape
    if m and n:
        block_rows, block_columns = _BOTH_BLOCK if m > 1 else _ROWS_BLOCK
        padded_rows = next_multiple(m) if columns else m
        with on_device_of(x):
            _quantize_kernel[(triton.cdiv(padded_rows, block_rows) * triton.cdiv(n, block_columns),)](
                x,
                scale,
                by_rows if rows else by_columns,
                by_columns,
                peak.view(torch.int32),
                m,
                n,
                padded_rows,
                x.stride(0),
                x.stride(1),
                LARGEST=LARGEST[dtype],
                ROWS=rows,
                COLUMNS=columns,
                AMAX=amax,
                WIDE=needs_wide_offsets(n if m > 1 else 1, padded_rows, *(x.stride() if m > 1 else x.stride()[1:])),
                BLOCK_ROWS=block_rows,
                BLOCK_COLUMNS=block_columns,
                num_warps=8,
            )
    return by_rows, by_columns, peak


# ----------------------------------------------------------------------------------------------------------- products


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
    """The scales of one linear layer, and where to collect the magnitudes that the next ones come from.

    Scales are () float32, > 0: the value of one unit of the quantised tensor. Magnitudes are () float32 or None; the
    layer raises them to the largest magnitude it sees, that of the gradient during the backward pass. All are on the
    device of the input.
    """

    x_scale: Tensor
    weight_scale: Tensor
    grad_scale: Tensor
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
    if any(size % _MULTIPLE for size in shape):
        padded = tuple(next_multiple(size) for size in shape)
        raise ValueError(
            f"{name} has shape {tuple(shape)}; 8-bit products need multiples of {_MULTIPLE}: pad it to {padded}"
        )


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    *,
    x_scale: Tensor,
    weight_scale: Tensor,
    grad_scale: Tensor,
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
        grad_scale: the same for the gradient of the result.
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
    grad_scale: Tensor,
    grad_amax: Tensor | None,
    keep_x: bool,
    keep_weight: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the product, what its backward needs of x (transposed) and weight, and their largest magnitudes."""
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
    grad_scale: Tensor,
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
    """Return the gradients that are asked for, and the largest magnitude of the one that came."""
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
    grad_x, grad_weight, found = torch.ops.quintic.fp8_linear_backward(
        grad, *ctx.saved_tensors, ctx.weight_dtype, for_x, for_weight, ctx.kernels
    )
    raise_(ctx.grad_amax, found)
    return (grad_x if for_x else None, grad_weight if for_weight else None, *(None,) * 7)


_fp8_linear.register_autograd(_backward_fp8_linear, setup_context=_setup_fp8_linear)
