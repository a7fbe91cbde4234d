"""Sums over rows or columns of matrices, in an order that does not depend on how many matrices there are."""

import torch
from torch import Tensor

__all__ = ["norms", "sums"]


def norms(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the Euclidean norms of `x` along a dimension, which becomes 1; in the dtype of `x` where none is given."""
    if not x.is_cuda:
        result: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=dtype)
        return result
    return _pairwise(x.to(dtype or x.dtype).square(), dim).sqrt()


def sums(x: Tensor, dim: int) -> Tensor:
    """Return the sums of `x` along a dimension, which becomes 1."""
    return _pairwise(x.clone(), dim) if x.is_cuda else x.sum(dim, keepdim=True)


def _pairwise(x: Tensor, dim: int) -> Tensor:
    """Return sums made by adding halves to each other; overwrites `x`.

    A GPU divides one sum among its threads in parts that depend on how many sums there are, and the last bit with them.
    """
    if x.shape[dim] == 0:
        return x.sum(dim, keepdim=True)
    while (size := x.shape[dim]) > 1:
        half = (size + 1) // 2
        x.narrow(dim, 0, size - half).add_(x.narrow(dim, half, size - half))
        x = x.narrow(dim, 0, half)
    return x
