"""Matrix products whose result follows from their operands alone, whatever is set globally.

PyTorch has switches that change what a product computes: TF32 and bfloat16 for float32 operands, reductions and
accumulation in 16 bits, autocast. `nothing_ambient` turns them off around a computation and puts them back.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "add",
    "add_to_diagonal",
    "multiply_add",
    "nothing_ambient",
    "symmetric_multiply",
    "symmetric_multiply_add",
]

# Multiplications up to which PyTorch leaves a whole batch of bfloat16 products to its own loops (else oneDNN).
_SMALL_PRODUCT = 16**3

# torch.backends.cuda.matmul, by dtype: whether partial sums may be rounded to 16 bits.
_REDUCTIONS = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}


@contextlib.contextmanager
def nothing_ambient(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """Make products of `dtype` on a device exact up to float32 accumulation and one rounding, and leave no trace.

    The switches are the process's: a product that another thread starts meanwhile is as exact. Setting them makes no
    call to the device. A compiled graph would ignore them: callers keep out of `torch.compile`.
    """
    with contextlib.ExitStack() as stack:
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if device_type == "cuda" and dtype in _REDUCTIONS:
            stack.enter_context(_full_reductions(dtype))
        elif device_type == "cuda" and dtype == torch.float32:
            stack.enter_context(_full_float32(torch.backends.cuda.matmul))
        elif device_type == "cpu" and dtype != torch.float64:
            stack.enter_context(_full_float32(torch.backends.mkldnn.matmul))  # type: ignore[attr-defined]
        yield


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b.

    Args:
        a: (batch, m, k).
        b: (batch, k, n) of the same dtype.

    Returns:
        (batch, m, n) in that dtype, a new tensor.
    """
    if _needs_float32(a, b):
        return torch.bmm(a.float(), b.float()).to(a.dtype)
    return torch.bmm(a, b)


def multiply_add(c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """Return beta c + alpha a @ b, rounded once.

    Args:
        c: (batch, m, n); not read where `beta` is zero.
        a: (batch, m, k) of the same dtype.
        b: (batch, k, n) of the same dtype.
        beta: a number, as exact as float32 at least.
        alpha: likewise.

    Returns:
        (batch, m, n) in that dtype, a new tensor.
    """
    # Without a product there is nothing to accumulate, and PyTorch 2.13 forgets beta then (bfloat16 on CPUs).
    if _needs_float32(a, b) or (alpha == 0 and a.itemsize == 2):
        return torch.baddbmm(c.float(), a.float(), b.float(), beta=beta, alpha=alpha).to(a.dtype)
    return torch.baddbmm(c, a, b, beta=beta, alpha=alpha)


def symmetric_multiply(a: Tensor, b: Tensor, *, on_device: bool) -> Tensor:
    """Return a @ b, (batch, s, s), known to be symmetric; `on_device` takes the kernel of kernels/symmetric.py."""
    if not on_device:
        return multiply(a, b)
    from quintic.kernels.symmetric import symmetric_multiply_add as kernel

    return kernel(None, a, b)


def symmetric_multiply_add(
    c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0, on_device: bool
) -> Tensor:
    """Return what `multiply_add` returns, known to be symmetric; `on_device` as for `symmetric_multiply`."""
    if not on_device:
        return multiply_add(c, a, b, beta=beta, alpha=alpha)
    from quintic.kernels.symmetric import symmetric_multiply_add as kernel

    return kernel(c, a, b, beta=beta, alpha=alpha)


def add(a: Tensor, b: Tensor, *, alpha: float) -> Tensor:
    """Return a + alpha b, rounded once; alpha as exact as float32 at least. Shapes and dtypes are equal."""
    if a.device.type == "cpu" and a.itemsize == 2:  # PyTorch would round alpha first
        return a.float().add_(b, alpha=alpha).to(a.dtype)
    return torch.add(a, b, alpha=alpha)


def add_to_diagonal(a: Tensor, value: float) -> Tensor:
    """Return a + value I for square matrices (batch, n, n), rounded once; value as exact as float32 at least."""
    out = a.clone()
    diagonal = out.diagonal(dim1=-2, dim2=-1)
    diagonal.copy_(diagonal.to(torch.promote_types(a.dtype, torch.float32)) + value)
    return out


def _needs_float32(a: Tensor, b: Tensor) -> bool:
    """Return whether a product of 16-bit operands is computed as a GPU does: float32 sums, one rounding at the end.

    On CPUs, where PyTorch's own float16 products are some 40 times slower, and where a bfloat16 product of small
    matrices takes one of two ways by how many there are, which must not change a bit.
    """
    if a.device.type != "cpu" or a.itemsize != 2:
        return False
    return a.dtype == torch.float16 or a.shape[-2] * a.shape[-1] * b.shape[-1] <= _SMALL_PRODUCT


@contextlib.contextmanager
def _full_reductions(dtype: torch.dtype) -> Iterator[None]:
    switches = torch.backends.cuda.matmul
    name = _REDUCTIONS[dtype]
    reduced = getattr(switches, name)
    # Newer versions keep a second switch in the same setting: whether the sum may be split at all.
    split = getattr(switches, f"{name}_split_k", True)
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
def _full_float32(switches: Any) -> Iterator[None]:
    """Set `switches.fp32_precision` to full precision, if it is not."""
    before = switches.fp32_precision
    if before in ("ieee", "none"):
        yield
        return
    switches.fp32_precision = "ieee"
    try:
        yield
    finally:
        # What was read may be inherited from a more general switch: then "none" gives it back, and nothing is pinned.
        switches.fp32_precision = "none"
        if switches.fp32_precision != before:
            switches.fp32_precision = before
