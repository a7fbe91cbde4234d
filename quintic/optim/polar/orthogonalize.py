"""Orthogonalisation: the polar factor of a batch of matrices, by matrix products only.

For x = U S V^T the polar factor is U V^T: every singular value becomes one. A short composition of odd quintics
p(s) = a s + b s^3 + c s^5 brings the singular values near one; it is computed in one of two forms, which are the same
polynomial of the same matrix:

    standard    every step multiplies the whole matrix: X <- (a I + b R + c R^2) X with R = X X^T
    gram        the polynomials are multiplied with each other first, on the small R alone; X is multiplied, and R
                computed anew, only where rounding errors would grow too much otherwise (a restart)

so that the standard form is the Gram form with a restart at every step, and one list of products computes both. The SVD
computes the factor exactly and is the reference that the others are measured against. `forms.py` chooses among them.

Phases, for x of shape (batch, m, n):
    normalise   scale each matrix to a fixed Frobenius norm, in float32 or float64
    iterate     run the polynomials: most CPU forms in `cpu_orthogonalize.py`, all others as `program.py` lists them
    cast        to the dtype asked for
Invariant: the bits of a matrix depend on its values, shape, dtype and device, never on the batch that it is in.

Parameters, learning rates and ranks are unknown here. Read next: `rules/update.py`; the maths and the measured errors:
docs/explanation/orthogonalization.md.

Sources: K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Polar Express, N. Amsel et al. 2025,
https://arxiv.org/abs/2505.16932; Gram Newton-Schulz, J. Zhang, N. Amsel, B. Chen, T. Dao 2026,
https://dao-ailab.github.io/blog/2026/gram-newton-schulz/.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from quintic.kernels.dispatch import KernelsOption, choose_kernels
from quintic.kernels.products.choose_products import choose_products
from quintic.optim.numeric.dynamo import disable_dynamo
from quintic.optim.numeric.sums import frobenius_norms
from quintic.optim.polar.cpu_orthogonalize import iterate_on_cpu, iterates_on_cpu
from quintic.optim.polar.forms import Form, Method, Polynomials, resolve
from quintic.optim.polar.products import padded_side
from quintic.optim.polar.program import multiplier, products_of, run_products, run_queue
from quintic.versions import Float32Products, can_forbid_splits, float32_products

__all__ = ["apply_form", "apply_function", "ieee_matmul", "orthogonalize"]

# Frobenius norm that matrices enter the products with, instead of one: in float16 the entries of a large matrix of norm
# one would be subnormal numbers with few digits, above all in its smaller rows. R = X X^T can have entries up to the
# square of this, which float16 holds. A power of two, so that the other dtypes' results stay the same.
_ENTRY_NORM = 128.0

# Attributes of torch.backends.cuda.matmul, by dtype: whether partial sums may be rounded to 16 bits.
_REDUCTIONS = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}

_CAN_FORBID_SPLITS = can_forbid_splits()
_FLOAT32_PRODUCTS = {device_type: float32_products(device_type) for device_type in ("cpu", "cuda")}

# torch.compile must not trace the functions below: its graphs would run under the global settings that
# `ieee_matmul` switches off.


@disable_dynamo
def orthogonalize(
    x: Tensor,
    method: Method = "polar_express",
    steps: int | None = None,
    *,
    coefficients: Polynomials | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return an approximation of the polar factor of each matrix of `x`.

    Args:
        x: (..., m, n) floating point, any strides; not modified. The result does not depend on its scale; a zero
            matrix gives zeros; a matrix with a NaN or an infinity gives NaN and leaves the rest of the batch alone.
        method: `"polar_express"` (singular values that are not too small end within about [0.85, 1.15]),
            `"newton_schulz"` (the Muon post's triple; [0.68, 1.2]), `"gram"` (Polar Express in Gram form; up to 1.2 in
            float16), `"auto"` (Polar Express in the cheaper form for the shape and device) or `"svd"` (exact, slow).
            See `docs/explanation/orthogonalization.md`.
        steps: polynomial steps, >= 1; None is five, or as many as the named coefficients are made for. `"svd"` takes
            none and ignores it.
        coefficients: other polynomials, in the method's form: one triple (a, b, c), which is taken `steps` times; one
            per step, and then `steps` is ignored; or the name of a published list, `"polar_express"`, `"muon"`,
            `"moonlight"`, `"deepseek_v4"`, `"cubic"` or `"cans"`. `"newton_schulz"` starts them from a Frobenius norm
            of 1, which `"cubic"` does not bear, the others from 1 / 1.02, as Polar Express needs.
        compute_dtype: dtype of the matrix products: bfloat16, float16, float32 or float64. Autocast and PyTorch's
            switches for TF32 and reduced precision do not change it. The normalisation before the products is float32,
            or float64 where `x` or the products are. None is bfloat16 for `"polar_express"` and `"newton_schulz"`,
            float16 for `"gram"`, and for `"auto"` the fastest of the device: float16 on CUDA, bfloat16 or float32 on
            CPUs, bfloat16 on others. For `"svd"` float32 or float64; None is float64 for float64 input, else float32.

    Returns:
        (..., m, n) in the shape and dtype of `x`, a new tensor. Differentiable, though nothing in training needs that.
        Under `torch.compile` the call is a graph break.

    Raises:
        ValueError: fewer than two dimensions, or see `check_orthogonalizer`.
        TypeError: `x` is no tensor, or not floating point.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}: orthogonalize needs a tensor of matrices (..., m, n)")
    if x.ndim < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: orthogonalize needs matrices (..., m, n)")
    if not x.is_floating_point():
        raise TypeError(f"x has dtype {x.dtype}: orthogonalize needs a floating-point tensor")
    form = resolve(
        method,
        x.shape[-2],
        x.shape[-1],
        steps=steps,
        coefficients=coefficients,
        compute_dtype=compute_dtype,
        device_type=x.device.type,
        dtype=x.dtype,
    )
    return apply_form(x, form, dtype=x.dtype)


@disable_dynamo
def apply_form(x: Tensor, form: Form, kernels: KernelsOption = "auto", *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the polar factors of `x`, (..., m, n), computed as `form` says; never an alias of `x`.

    Args:
        x: floating point, any strides; not modified.
        form: from `resolve`.
        kernels: implementation of normalisation and symmetric products, see `quintic.kernels.dispatch`; plain PyTorch
            is used in any case for dtypes and sizes that Triton's kernels do not support or are slower at.
        dtype: of the result; None for the products' dtype.

    Raises:
        ValueError: `kernels="triton"` cannot be honoured for `x`.
    """
    if (x.is_cuda or kernels == "triton") and not (x.is_contiguous() or x.mT.is_contiguous()):
        x = x.contiguous()  # kernels take no gaps, and strides must not decide which kernels run
    uses_kernels = kernels != "torch" and choose_kernels(kernels, x) == "triton" and not x.requires_grad
    if x.numel() == 0:
        return torch.zeros(x.shape, dtype=dtype or form.compute_dtype, device=x.device)
    with ieee_matmul(x.device.type, form.compute_dtype):
        if form.method == "svd":
            return _svd(_normalized(x, 1.0, form.compute_dtype)).to(dtype or form.compute_dtype)
        matrices = x.reshape(-1, *x.shape[-2:])  # (batch, m, n)
        # The CPU's own way writes in place, which autograd cannot follow.
        has_graph = x.requires_grad and torch.is_grad_enabled()
        if x.device.type == "cpu" and not uses_kernels and not has_graph and iterates_on_cpu(form, *x.shape[-2:]):
            return iterate_on_cpu(matrices, form, form.entry_norm, dtype).reshape(x.shape)
        return _iterate_padded(matrices, form, uses_kernels, dtype).reshape(x.shape)


def apply_function(x: Tensor, function: Callable[[Tensor], Any], name: str) -> Tensor:
    """Orthogonalise directions (b, m, n) of the named parameter by a user's function; the result has their dtype.

    Raises:
        TypeError: the function does not return a floating-point tensor; this and the next error name parameter and
            function.
        ValueError: the tensor has another shape, or is on another device.
    """
    result = function(x)
    if isinstance(result, Tensor) and result.is_floating_point():
        if (result.shape, result.device) == (x.shape, x.device):
            return result.to(x.dtype)
        error: type[Exception] = ValueError
        what = f"a tensor of shape {tuple(result.shape)} on {result.device}"
    else:
        error = TypeError
        what = f"a tensor of {result.dtype}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
    which = getattr(function, "__qualname__", type(function).__qualname__)
    raise error(
        f"{name}: the orthogonalizer {which} returned {'None' if result is None else what}; it must return a "
        f"floating-point tensor of the shape and on the device of its argument, here {tuple(x.shape)} on {x.device}"
    )


def _normalized(
    x: Tensor, norm: float, dtype: torch.dtype, *, uses_kernels: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return each matrix of `x`, (..., m, n) and not empty, scaled to the Frobenius norm `norm`, however large it is.

    A zero matrix stays zero; a matrix with a NaN or an infinity becomes NaN. The arithmetic is float32, or float64
    where `x` or the result is. With `uses_kernels`, Triton's kernel runs if it supports `x`; `out` has the memory order
    of `x`.
    """
    if uses_kernels:
        from quintic.kernels.products.normalize import can_normalize, normalize_matrices

        if can_normalize(x, dtype):
            return normalize_matrices(x, norm, dtype, out)
    work_dtype = torch.promote_types(x.dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    # Divide by the largest entry first: squares of entries below 1e-19 or above 1e19 would leave float32's range.
    peak = torch.linalg.vector_norm(x, math.inf, dim=(-2, -1), keepdim=True).to(work_dtype)  # (..., 1, 1)
    work = x / peak.masked_fill(peak == 0, 1)
    total = frobenius_norms(work)  # (..., 1, 1)
    divisor = total.masked_fill(total == 0, 1) / norm
    result: Tensor = work / divisor if work.requires_grad else work.div_(divisor)
    return result.to(dtype) if out is None else out.copy_(result)


def _iterate_padded(x: Tensor, form: Form, uses_kernels: bool, dtype: torch.dtype | None) -> Tensor:
    """Return `_iterate` of `x`, (batch, m, n), padded with zeros to sides of `padded_side` and then sliced back."""
    m, n = x.shape[-2:]
    rows, columns = (padded_side(side, form.compute_dtype, x.device) for side in (m, n))
    if (rows, columns) == (m, n):
        return _iterate(x, form, uses_kernels, dtype)
    # (batch, rows, columns): every product keeps the padding zero, so that the slice is the result for `x`.
    padded = torch.nn.functional.pad(x, (0, columns - n, 0, rows - m))
    return _iterate(padded, form, uses_kernels, dtype)[:, :m, :n].contiguous()


def _iterate(x: Tensor, form: Form, uses_kernels: bool, dtype: torch.dtype | None) -> Tensor:
    """Normalise `x`, (batch, m, n), and return the form's polynomials of it, by the products of `program.py`."""
    norm = _ENTRY_NORM * form.entry_norm
    # A column-major x is computed as its transpose, so that products read and write contiguous rows. Only in 16 bits:
    # for wider dtypes the libraries' last bit depends on the memory order, and a matrix that was sent from another
    # rank may be in another order than one that was not.
    transposed = form.compute_dtype.itemsize == 2 and not x.is_contiguous() and x.mT.is_contiguous()
    x = x.mT if transposed else x.contiguous()
    program = products_of(tuple(form.segments), form.coefficients, _ENTRY_NORM)
    # The plan counts the memory of a tensor without any: all kernels of single products allocate as PyTorch does.
    kernels = choose_products(x.shape, form.compute_dtype, x.device) if uses_kernels and not x.is_meta else None
    if kernels == "queue":
        # One launch for all products: (2, batch, m, n), the normalised x and room for the next.
        pair = x.new_empty((2, *x.shape), dtype=form.compute_dtype)
        _normalized(x, norm, form.compute_dtype, uses_kernels=True, out=pair[0])
        result = run_queue(program, pair, dtype)
    else:
        # Passed in a list, which `run_products` empties: the normalised matrices are freed after the first segment.
        result = run_products(
            program, [_normalized(x, norm, form.compute_dtype, uses_kernels=uses_kernels)], multiplier(kernels), dtype
        )
    return result.mT if transposed else result


def _svd(x: Tensor) -> Tensor:
    """Return U V^T of each normalised matrix of `x`; directions of singular value zero stay zero, and so do rows."""
    if x.device.type != "cpu":
        return _svd_of_batch(x)
    # The last bits of LAPACK and of MKL's products depend on a matrix's address, and so on its place in a batch. One
    # at a time all have the same alignment; LAPACK computes them one after the other in any case.
    factors = [_svd_of_batch(matrix) for matrix in x.reshape(-1, *x.shape[-2:])]
    return torch.stack(factors).view(x.shape)


def _svd_of_batch(x: Tensor) -> Tensor:
    # LAPACK and cuSOLVER reject a whole batch for one NaN. `_normalized` has filled its matrix with NaN, so that the
    # first entry tells, (..., 1, 1).
    bad = x[..., :1, :1].isnan()
    u, s, vh = torch.linalg.svd(x.masked_fill(bad, 0), full_matrices=False)
    # The usual numerical rank: smaller singular values are rounding errors.
    cutoff = s[..., :1] * max(x.shape[-2:]) * torch.finfo(x.dtype).eps
    factor: Tensor = (u * (s > cutoff).to(u.dtype).unsqueeze(-2)) @ vh
    # Rows and columns of zeros have rounding errors here, and stages that divide by their norms would enlarge them.
    is_zero = x == 0
    empty = is_zero.all(-1, keepdim=True) | is_zero.all(-2, keepdim=True)
    return factor.masked_fill(empty, 0).masked_fill(bad, math.nan)


def ieee_matmul(device_type: str, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Make products of `dtype` on a device accumulate in float32 and round once, within the `with` block.

    PyTorch has process-wide switches that change the result of a product: TF32 and bfloat16 for float32 operands,
    reductions and accumulation in 16 bits, autocast. They are set back at the end. A compiled graph would ignore the
    change, so callers keep out of `torch.compile`.
    """
    stack = contextlib.ExitStack()
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        stack.enter_context(torch.autocast(device_type, enabled=False))
    if device_type == "cuda" and dtype in _REDUCTIONS:
        stack.enter_context(_full_reductions(dtype))
    if (device_type == "cuda" and dtype == torch.float32) or (device_type == "cpu" and dtype != torch.float64):
        switches = _FLOAT32_PRODUCTS[device_type]
        if switches.fp32_precision not in ("ieee", "none"):
            stack.enter_context(_full_float32(switches))
    return stack


@contextlib.contextmanager
def _full_reductions(dtype: torch.dtype) -> Iterator[None]:
    switches = torch.backends.cuda.matmul
    name = _REDUCTIONS[dtype]
    reduced = getattr(switches, name)
    # Newer versions of PyTorch have a second switch in the same setting: whether a sum may be split at all.
    split = getattr(switches, f"{name}_split_k") if _CAN_FORBID_SPLITS else True
    accumulation = switches.allow_fp16_accumulation
    try:
        if reduced or not split:
            setattr(switches, name, False)
        if accumulation:
            switches.allow_fp16_accumulation = False
        yield
    finally:
        if reduced or not split:
            setattr(switches, name, reduced if split else (reduced, split))
        if accumulation:
            switches.allow_fp16_accumulation = True


@contextlib.contextmanager
def _full_float32(switches: Float32Products) -> Iterator[None]:
    """Set `switches.fp32_precision` to full precision within the `with` block."""
    before = switches.fp32_precision
    switches.fp32_precision = "ieee"
    try:
        yield
    finally:
        # The old value may have been inherited from a more general switch. "none" inherits it again, without pinning
        # it here; only a value that was set on this switch is set again.
        switches.fp32_precision = "none"
        if switches.fp32_precision != before:
            switches.fp32_precision = before
