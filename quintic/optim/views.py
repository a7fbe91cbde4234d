"""Views: which matrices a parameter is made of.

Muon orthogonalises matrices; a parameter often stores several of them in one tensor (the heads of an attention
projection, a fused QKV, a stack of experts). A view maps the tensor to batches `(b, m, n)` that share its memory, so
that writing to a batch writes to the parameter. Views know nothing of optimizers, devices or ranks.

`transposed=True` says that the tensor stores each matrix as (in_features, out_features) and not as PyTorch's
(out_features, in_features), for example GPT-2's Conv1D: the batch is then the transpose, so that the learning-rate
scale sees m outputs and n inputs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Experts", "Flatten", "Heads", "Matrix", "Rows", "Split", "View"]


class View(ABC):
    """A description of the matrices inside a tensor; equal descriptions compare equal."""

    @abstractmethod
    def batches(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return one `(b, m, n)` tensor per matrix shape, together covering `tensor` and sharing its memory.

        Raises:
            ValueError: the view does not fit the shape of `tensor`.
        """

    def shapes(self, shape: torch.Size) -> tuple[tuple[int, int, int], ...]:
        """Return the `(b, m, n)` shapes for a tensor of `shape`, without touching data."""
        batches = self.batches(torch.empty(shape, device="meta"))
        return tuple((batch.shape[0], batch.shape[1], batch.shape[2]) for batch in batches)


@dataclass(frozen=True)
class Matrix(View):
    """The whole 2-D tensor is one matrix."""

    transposed: bool = False

    def batches(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return `(tensor,)` as (1, m, n)."""
        _check_ndim(self, tensor, 2)
        return (_oriented(tensor.unsqueeze(0), self.transposed),)


@dataclass(frozen=True)
class Heads(View):
    """`num_heads` equal blocks of rows (output features), one matrix each: per-head query, key or value."""

    num_heads: int
    transposed: bool = False

    def batches(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the heads as one (num_heads, rows / num_heads, columns) batch."""
        _check_ndim(self, tensor, 2)
        features = tensor.mT if self.transposed else tensor
        if self.num_heads < 1 or features.shape[0] % self.num_heads:
            raise ValueError(
                f"{self} does not divide the {features.shape[0]} output features of shape {tuple(tensor.shape)}; "
                f"use Split or a number of heads that divides them"
            )
        return (features.unflatten(0, (self.num_heads, -1)),)


@dataclass(frozen=True)
class Split(View):
    """Consecutive blocks of output features of the given sizes, one matrix each: fused QKV, fused gate and up."""

    sizes: tuple[int, ...]
    transposed: bool = False

    def __post_init__(self) -> None:
        """Accept any sequence of sizes, so that `Split([256, 256])` is hashable too."""
        object.__setattr__(self, "sizes", tuple(self.sizes))

    def batches(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return one (1, size, columns) batch per block."""
        _check_ndim(self, tensor, 2)
        features = tensor.mT if self.transposed else tensor
        if not self.sizes or min(self.sizes) < 1 or sum(self.sizes) != features.shape[0]:
            raise ValueError(
                f"{self}: the sizes must be positive and add up to the {features.shape[0]} output features "
                f"of shape {tuple(tensor.shape)}, they add up to {sum(self.sizes)}"
            )
        return tuple(block.unsqueeze(0) for block in features.split(list(self.sizes)))


@dataclass(frozen=True)
class Experts(View):
    """A 3-D stack (experts, m, n), one matrix per expert."""

    transposed: bool = False

    def batches(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the stack itself."""
        _check_ndim(self, tensor, 3)
        return (_oriented(tensor, self.transposed),)


@dataclass(frozen=True)
class Rows(View):
    """A bank: every `num_rows` rows of a 2-D tensor are one matrix."""

    num_rows: int
    transposed: bool = False

    def batches(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the bank as (rows / num_rows, num_rows, columns)."""
        _check_ndim(self, tensor, 2)
        if self.num_rows < 1 or tensor.shape[0] % self.num_rows:
            raise ValueError(f"{self} does not divide the {tensor.shape[0]} rows of shape {tuple(tensor.shape)}")
        return (_oriented(tensor.unflatten(0, (-1, self.num_rows)), self.transposed),)


@dataclass(frozen=True)
class Flatten(View):
    """A convolution (out_channels, in_channels, *kernel) as one (out_channels, in_channels * kernel) matrix."""

    transposed: bool = False

    def batches(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the flattened filter bank as (1, out_channels, rest)."""
        if tensor.ndim < 3:
            raise ValueError(f"{self} is for convolutions (3 or more dimensions), got shape {tuple(tensor.shape)}")
        try:
            flat = tensor.view(tensor.shape[0], -1)
        except RuntimeError as error:
            raise ValueError(
                f"{self}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be flattened "
                f"without a copy; make the parameter contiguous"
            ) from error
        return (_oriented(flat.unsqueeze(0), self.transposed),)


def _check_ndim(view: View, tensor: Tensor, ndim: int) -> None:
    if tensor.ndim != ndim:
        raise ValueError(f"{view} is for {ndim}-D parameters, got shape {tuple(tensor.shape)}")


def _oriented(batch: Tensor, transposed: bool) -> Tensor:
    return batch.mT if transposed else batch
