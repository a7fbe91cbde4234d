"""Matrix products whose bits depend on their operands only, not on the batch that they are in.

Libraries choose kernels and split work among threads by the batch size, which changes the last bit. So products are
computed one matrix at a time, from memory aligned as a new tensor's, except where a batched product was seen to give
the same bits: 16-bit matrices on GPUs, with sides as `padded_side` pads them and sums of at most `MAX_SUM` terms.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quintic.kernels.dispatch import MAX_SUM

__all__ = ["ALIGNMENT", "SMALL_PRODUCT", "Multiply", "multiply", "padded_side"]

# Up to this many multiplications per matrix, PyTorch computes batches of bfloat16 products in its own loops instead of
# oneDNN, which depends on the batch size.
SMALL_PRODUCT = 16**3

# The addresses of new tensors are multiples of at least this many bytes; libraries choose kernels by alignment, too.
ALIGNMENT = 64

# Sides of 16-bit matrices are padded to multiples of this on GPUs. With other sizes cuBLAS chooses its kernel, and with
# it the last bit, by the addresses of the matrices in the batch and by their number.
_SIDE_MULTIPLE = 8

Multiply = Callable[..., Tensor]
"""`multiply`, or a kernel that takes the same arguments."""


def padded_side(side: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the length that a side of matrices is padded to so that batched products do not depend on the batch."""
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
        symmetric: whether the result is known to be symmetric; a kernel may then compute half of it.
        alpha: a number, applied in float32 or wider, as are the other factors.
        c: (batch, m, n) of the same dtype, or None.
        beta: factor of `c`.
        diagonal: added to the entries of the diagonal; only for symmetric results.
        dtype: of the result, if it is not symmetric; None for the operands' dtype.
    """
    dtype = dtype or a.dtype
    if _needs_float32(a, b, alpha):
        a, b, c = a.float(), b.float(), None if c is None else c.float()
    out = _products(a, b, alpha, c, beta)
    if diagonal:
        out = out.clone() if out.requires_grad else out
        entries = out.diagonal(dim1=-2, dim2=-1)
        if out.itemsize == 2 and out.device.type == "cpu":
            # The diagonal once more, in float32, (batch, n), to round it once: rounding twice costs half as much again.
            exact = alpha * (a.float() * b.mT.float()).sum(-1) + diagonal
            exact = exact if c is None else exact + beta * c.diagonal(dim1=-2, dim2=-1).float()
        else:
            exact = entries.to(torch.promote_types(out.dtype, torch.float32)) + diagonal
        entries.copy_(exact)
    return out.to(dtype)


def _products(a: Tensor, b: Tensor, alpha: float, c: Tensor | None, beta: float) -> Tensor:
    """Return alpha a @ b + beta c, a new (batch, m, n) tensor; each matrix has the bits of a batch of one."""
    batch = a.shape[0]
    if batch <= 1 or (a.is_cuda and a.itemsize == 2 and a.shape[2] <= MAX_SUM):
        return _batched(a, b, alpha, c, beta)

    # One matrix after the other, as the module's docstring explains.
    def operands(i: int) -> tuple[Tensor, Tensor, Tensor | None]:
        return _single(a, i), _single(b, i), None if c is None else c[i : i + 1]

    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (a, b, c)):
        rows = (operands(i) for i in range(batch))
        return torch.cat([_batched(left, right, alpha, addend, beta) for left, right, addend in rows])
    out = a.new_empty((batch, a.shape[1], b.shape[2]))
    for i, target in enumerate(out.split(1)):  # (1, m, n) each
        left, right, addend = operands(i)
        if _is_aligned(target):
            _batched(left, right, alpha, addend, beta, out=target)
        else:
            target.copy_(_batched(left, right, alpha, addend, beta))
        del left, right  # so that at most one matrix's aligned copies exist
    return out


def _batched(a: Tensor, b: Tensor, alpha: float, c: Tensor | None, beta: float, out: Tensor | None = None) -> Tensor:
    # a (batch, m, k), b (batch, k, n), c and out (batch, m, n)
    if c is None and alpha == 1:
        return torch.bmm(a, b, out=out)
    # `baddbmm` needs an addend for `alpha` to apply; with beta 0 it is ignored.
    addend = a.new_zeros(()) if c is None else c
    return torch.baddbmm(addend, a, b, beta=0.0 if c is None else beta, alpha=alpha, out=out)


def _single(a: Tensor, i: int) -> Tensor:
    """Return matrix `i` of a batch as a (1, m, n) batch, copied if its address is aligned less than a new tensor's."""
    matrix = a[i : i + 1]
    return matrix if _is_aligned(matrix) else matrix.clone()


def _is_aligned(a: Tensor) -> bool:
    return a.data_ptr() % ALIGNMENT == 0


def _needs_float32(a: Tensor, b: Tensor, alpha: float) -> bool:
    """Return whether a product of 16-bit operands must be computed in float32 and rounded at the end, as GPUs do."""
    if a.device.type != "cpu" or a.itemsize != 2:
        return False
    # PyTorch's own float16 products are some 40 times slower on CPUs; it ignores beta of bfloat16 if alpha is zero
    # (2.13); and it multiplies small bfloat16 matrices in one of two ways, by their number, which changes the bits.
    return a.dtype == torch.float16 or alpha == 0 or a.shape[-2] * a.shape[-1] * b.shape[-1] <= SMALL_PRODUCT
