"""Matrix products whose result follows from their operands alone, not from the batch that they are in."""

from collections.abc import Callable

import torch
from torch import Tensor

from quintic.kernels.dispatch import MAX_SUM

__all__ = ["ALIGNMENT", "SMALL_PRODUCT", "Multiply", "multiply", "padded_side"]

# Multiplications up to which PyTorch leaves a whole batch of bfloat16 products to its own loops (else oneDNN).
SMALL_PRODUCT = 16**3

# Bytes that new tensors' addresses are multiples of, at least; kernels are chosen by it, too.
ALIGNMENT = 64

# Sides of 16-bit matrices are padded to multiples of this on GPUs. With other sizes, which of cuBLAS's kernels runs
# depends on the addresses of matrices in the batch and on how many there are, and the last bit with it.
_SIDE_MULTIPLE = 8

Multiply = Callable[..., Tensor]
"""`multiply`, or a kernel that takes the same arguments."""


def padded_side(side: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the length that a side of matrices is padded to, so that products do not depend on the batch."""
    pads = device.type == "cuda" and dtype.itemsize == 2
    return -(-side // _SIDE_MULTIPLE) * _SIDE_MULTIPLE if pads else side


def multiply(
    a: Tensor,
    b: Tensor,
    *,
    symmetric: bool,
    alpha: float = 1.0,
    c: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return alpha a @ b + beta c + diagonal I, rounded once, a new tensor: the kernels' plain twin.

    On GPUs the diagonal of 16-bit results is rounded twice.

    Args:
        a: (batch, m, k).
        b: (batch, k, n) of the same dtype.
        symmetric: the result is known to be: a kernel may compute half of it.
        alpha: a number, as exact as float32 at least; so are the others.
        c: (batch, m, n) of the same dtype, or None.
        beta: factor of `c`.
        diagonal: added to the entries of the diagonal; only for symmetric results.
        dtype: of the result, where it is not symmetric; None for that of the operands.
    """
    dtype = dtype or a.dtype
    if _needs_float32(a, b, alpha):
        a, b, c = a.float(), b.float(), None if c is None else c.float()
    out = _products(a, b, alpha, c, beta)
    if diagonal:
        out = out.clone() if out.requires_grad else out
        entries = out.diagonal(dim1=-2, dim2=-1)
        if out.itemsize == 2 and out.device.type == "cpu":
            # Computed apart, and rounded once: twice costs bfloat16 half as much error again.
            exact = alpha * (a.float() * b.mT.float()).sum(-1) + diagonal
            exact = exact if c is None else exact + beta * c.diagonal(dim1=-2, dim2=-1).float()
        else:
            exact = entries.to(torch.promote_types(out.dtype, torch.float32)) + diagonal
        entries.copy_(exact)
    return out.to(dtype)


def _products(a: Tensor, b: Tensor, alpha: float, c: Tensor | None, beta: float) -> Tensor:
    """Return alpha a @ b + beta c, a new tensor, each matrix as if it were alone."""
    batch = a.shape[0]
    if batch <= 1 or (a.is_cuda and a.itemsize == 2 and a.shape[2] <= MAX_SUM):
        return _batched(a, b, alpha, c, beta)

    # Libraries divide a batch of products among threads, or choose among kernels, by how many there are: the last bit
    # would follow. On GPUs those of 16 bits do not, with sides as `padded_side` says and sums that are not too long.
    def operands(i: int) -> tuple[Tensor, Tensor, Tensor | None]:
        return _alone(a, i), _alone(b, i), None if c is None else c[i : i + 1]

    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (a, b, c)):
        rows = (operands(i) for i in range(batch))
        return torch.cat([_batched(left, right, alpha, addend, beta) for left, right, addend in rows])
    out = a.new_empty((batch, a.shape[1], b.shape[2]))
    for i, target in enumerate(out.split(1)):
        left, right, addend = operands(i)
        if _is_aligned(target):
            _batched(left, right, alpha, addend, beta, out=target)
        else:
            target.copy_(_batched(left, right, alpha, addend, beta))
        del left, right  # copies of one matrix at a time
    return out


def _batched(a: Tensor, b: Tensor, alpha: float, c: Tensor | None, beta: float, out: Tensor | None = None) -> Tensor:
    if c is None and alpha == 1:
        return torch.bmm(a, b, out=out)
    addend = a.new_zeros(()) if c is None else c
    return torch.baddbmm(addend, a, b, beta=0.0 if c is None else beta, alpha=alpha, out=out)


def _alone(a: Tensor, i: int) -> Tensor:
    """Return a matrix of a batch as a batch of one, placed in memory as a tensor of its own would be."""
    matrix = a[i : i + 1]
    return matrix if _is_aligned(matrix) else matrix.clone()


def _is_aligned(a: Tensor) -> bool:
    return a.data_ptr() % ALIGNMENT == 0


def _needs_float32(a: Tensor, b: Tensor, alpha: float) -> bool:
    """Return whether a product of 16-bit operands is computed as a GPU does: float32 sums, one rounding at the end.

    On CPUs, where PyTorch's own float16 products are some 40 times slower, where a bfloat16 product of small matrices
    takes one of two ways by how many there are, which must not change a bit, and where PyTorch 2.13 forgets the
    addend's factor if `alpha` is zero (bfloat16).
    """
    if a.device.type != "cpu" or a.itemsize != 2:
        return False
    return a.dtype == torch.float16 or alpha == 0 or a.shape[-2] * a.shape[-1] * b.shape[-1] <= SMALL_PRODUCT
