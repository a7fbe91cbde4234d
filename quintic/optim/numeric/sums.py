"""Sums over rows or columns of matrices, in an order that does not depend on the number of matrices in the batch."""

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels

__all__ = ["divided_by_norms", "frobenius_norms", "norms", "scaled", "sums"]


def norms(x: Tensor, dim: int, dtype: torch.dtype | None = None, *, kernels: Kernels = "torch") -> Tensor:
    """Return the Euclidean norms of `x` along a dimension, which gets size 1; in `dtype`, or else the dtype of `x`.

    Args:
        x: matrices (b, m, n); without kernels any tensor.
        dim: the last dimension or the one before.
        dtype: of the norms and of the sums; None for that of `x`.
        kernels: `"triton"` reads `x` once and gives float32; float64 is computed without kernels.

    Raises:
        ValueError: kernels are given something else than rows or columns of matrices (b, m, n).
    """
    if kernels == "triton" and (dtype or x.dtype) != torch.float64:
        from quintic.kernels.update.square_sums import square_sums

        if x.ndim != 3 or dim not in (-1, 2, -2, 1):
            raise ValueError(f"norms of {tuple(x.shape)} along dimension {dim}: kernels take matrices (b, m, n)")
        is_of_rows = dim in (-1, 2)
        norm = _pairwise(square_sums(x, -1 if is_of_rows else -2), 1).sqrt()  # (b, 1, m or n)
        return norm.mT if is_of_rows else norm
    # PyTorch's own sums on CPUs do not depend on the batch.
    if not x.is_cuda:
        result: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=dtype)
        return result
    return _pairwise(x.to(dtype or x.dtype).square(), dim).sqrt()


def divided_by_norms(x: Tensor | float, norm: Tensor) -> Tensor:
    """Return x / norm for x >= 0: finite numbers, and zeros where a norm is zero, so that zeros stay zeros."""
    return torch.where(norm == 0, 0.0, (x / norm).clamp_max(torch.finfo(norm.dtype).max))


def frobenius_norms(x: Tensor, *, kernels: Kernels = "torch") -> Tensor:
    """Return the norms (..., 1, 1) of matrices (..., m, n), in float32 or float64; see `norms`."""
    # Norms of rows, then of these: GPUs, and the threads of CPUs, then add up in the same way in every batch.
    of_rows = norms(x, -1, torch.promote_types(x.dtype, torch.float32), kernels=kernels)
    return norms(of_rows, -2, kernels=kernels)


def scaled(x: Tensor, factors: Tensor) -> Tensor:
    """Return `x` times factors that broadcast to it, rounded once to the dtype of `x`."""
    # A product in the wider dtype of the factors would be written, and read again to be rounded.
    return torch.mul(x, factors, out=torch.empty_like(x))


def sums(x: Tensor, dim: int) -> Tensor:
    """Return the sums of `x` along a dimension, which gets size 1."""
    return _pairwise(x.clone(), dim) if x.is_cuda else x.sum(dim, keepdim=True)


def _pairwise(x: Tensor, dim: int) -> Tensor:
    """Return sums along a dimension, made by repeatedly adding its second half to its first; overwrites `x`."""
    # `torch.sum` on GPUs divides a sum among threads by the number of sums, which changes the last bit.
    if x.shape[dim] == 0:
        return x.sum(dim, keepdim=True)
    while (size := x.shape[dim]) > 1:
        # An odd middle entry stays for the next round.
        half = (size + 1) // 2
        x.narrow(dim, 0, size - half).add_(x.narrow(dim, half, size - half))
        x = x.narrow(dim, 0, half)
    return x
