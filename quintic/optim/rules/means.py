"""Means over ranks: sums in the order of the ranks, in float32 or wider, divided and rounded once."""

from collections.abc import Iterable

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels

__all__ = ["mean_in_order", "mean_of_ranks"]


def mean_of_ranks(received: Tensor, kernels: Kernels, out: Tensor | None = None) -> Tensor:
    """Return the mean of (ranks, entries) contiguous over ranks, in `out`, (entries,), or new memory."""
    if out is None:
        out = received.new_empty(received.shape[1:])
    if kernels == "triton":
        from quintic.kernels.runs import mean_of_ranks_

        return mean_of_ranks_(received, out)
    return mean_in_order(received.unbind(), out)


def mean_in_order(tensors: Iterable[Tensor], out: Tensor) -> Tensor:
    """Write the mean of tensors of one shape to `out`, and return it; an iterator may make them one at a time."""
    tensors = iter(tensors)
    total, count = next(tensors).to(torch.promote_types(out.dtype, torch.float32), copy=True), 1
    for tensor in tensors:
        total += tensor
        count += 1
    # A number would become its reciprocal on GPUs, and the quotient be rounded twice.
    return out.copy_(total.div_(torch.full((), count, dtype=total.dtype, device=total.device)))
