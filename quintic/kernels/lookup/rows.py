"""Adds gradients of an embedding to the rows that were looked up, without a dense gradient of the whole table.

A batch looks up few rows of a large table. PyTorch allocates a gradient of the whole table, mostly zeros, and adds it
to the accumulated one, which takes longer than the sums themselves. Here positions are sorted by row, and each row is
read, added to and written once: in a fixed order, in float32, rounded once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quintic.kernels.dispatch import KernelsOption, decide, obstacle_to_triton
from quintic.kernels.lookup.segments import launch_add_to_rows

__all__ = ["add_to_rows_", "embedding_into_grad"]


def add_to_rows_(table: Tensor, rows: Tensor, grad: Tensor, *, kernels: KernelsOption = "auto") -> None:
    """Add each position's gradient to the row that the position looked up, in place.

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
    # The twin: read the touched rows, add in float32, round once.
    touched, places = rows.unique(return_inverse=True)
    wide = torch.promote_types(table.dtype, torch.float32)
    table[touched] = table[touched].to(wide).index_add_(0, places, grad.to(wide)).to(table.dtype)


def _obstacle(table: Tensor, grad: Tensor) -> str | None:
    wide = torch.float64 in (table.dtype, grad.dtype)
    return "float64 has no kernel" if wide else obstacle_to_triton(table.device, "table")


def embedding_into_grad(rows: Tensor, table: Tensor) -> Tensor:
    """Return `F.embedding(rows, table)`, with a backward pass that adds to `table.grad` directly.

    Autograd sees no gradient of the table: its hooks do not run, and `torch.autograd.grad` does not find it.

    Args:
        rows: int64 of any shape.
        table: (R, C) leaf; if it has no gradient yet, the backward pass begins with zeros.
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
