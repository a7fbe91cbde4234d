"""Gradients of an embedding, added to the rows that were looked up: no dense gradient is made for them.

A batch looks up few rows of a large table. PyTorch makes a gradient of the whole table of it, zeros mostly, and adds
that to the one that is there, which costs more than the sums themselves. Here positions are sorted by row, and each row
is read, added to and written once: in a fixed order, in float32, rounded once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quintic.kernels.dispatch import KernelsOption, decide, obstacle_to_triton
from quintic.kernels.lookup.segments import launch_add_to_rows

__all__ = ["add_to_rows_", "embedding_into_grad"]


def add_to_rows_(table: Tensor, rows: Tensor, grad: Tensor, *, kernels: KernelsOption = "auto") -> None:
    """Add each position's gradient to the row that it looked up, in place.

    Args:
        table: (R, C) contiguous, float32, bfloat16 or float16 (float64 without kernels).
        rows: (N,) int64, in [0, R).
        grad: (N, C), any float dtype.
        kernels: `"auto"` takes Triton on CUDA devices.

    Raises:
        ValueError: `kernels="triton"` cannot be honoured.
    """
    if not rows.numel():
        return
    grad = grad.contiguous()
    if decide(kernels, table.device, lambda: _obstacle(table, grad))[0] == "triton":
        launch_add_to_rows(table, rows, grad)
        return
    touched, places = rows.unique(return_inverse=True)
    wide = torch.promote_types(table.dtype, torch.float32)
    table[touched] = table[touched].to(wide).index_add_(0, places, grad.to(wide)).to(table.dtype)


def _obstacle(table: Tensor, grad: Tensor) -> str | None:
    wide = torch.float64 in (table.dtype, grad.dtype)
    return "float64 has no kernel" if wide else obstacle_to_triton(table.device, "table")


def embedding_into_grad(rows: Tensor, table: Tensor) -> Tensor:
    """Return `F.embedding(rows, table)`; its backward pass adds to `table.grad` itself, which autograd does not see.

    Hooks of the table do not run, and `torch.autograd.grad` finds no gradient of it.

    Args:
        rows: int64 of any shape.
        table: (R, C) leaf; where it has no gradient, the backward pass makes one of zeros.
    """
    out: Tensor = _IntoGrad.apply(rows, table)  # type: ignore[no-untyped-call]
    return out


class _IntoGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, table: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows, table)
        return F.embedding(rows, table)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, None]:  # type: ignore[no-untyped-def]
        rows, table = ctx.saved_tensors
        if table.grad is None:
            table.grad = torch.zeros_like(table)
        add_to_rows_(table.grad, rows.flatten(), grad.reshape(-1, grad.shape[-1]))
        return None, None
