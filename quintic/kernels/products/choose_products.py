"""The choice of kernels for the products of an orthogonalisation."""

from typing import Literal

import torch

from quintic.kernels.dispatch import fits_copy_engine
from quintic.versions import gluon_is_known

__all__ = ["ProductKernels", "choose_products", "queued_matrices"]

ProductKernels = Literal["queue", "hopper", "symmetric"]
"""Kernels for the products of an orthogonalisation: all in one launch on Hopper GPUs (`hopper_program.py`), one by one
there (`hopper.py`), or symmetric products anywhere (`symmetric.py`), with cuBLAS for the others."""

# Multiplications of one product, a batch of them together, up to which the queue is better: beyond that a launch takes
# less time than its product, and each tile costs the queue more (H200, 2026-11, docs/development/LOG.md).
_QUEUE_LIMIT = 5e10


def queued_matrices(m: int, n: int, dtype: torch.dtype, device: torch.device, *, worst_case: bool = False) -> int:
    """Return the largest batch of (m, n) matrices that runs as one queued launch; 0 if none does.

    Args:
        m: rows.
        n: columns.
        dtype: of the products.
        device: need not be there: then it counts as one that has the queue.
        worst_case: answer by the type of device alone, which is the same in every process.
    """
    if device.type != "cuda" or not fits_copy_engine(m, n, dtype):
        return 0
    is_there = not worst_case and torch.cuda.is_available()
    if is_there and not (gluon_is_known() and torch.cuda.get_device_capability(device) == (9, 0)):
        return 0
    return int(_QUEUE_LIMIT // (min(m, n) ** 2 * max(m, n)))


def choose_products(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> ProductKernels | None:
    """Return the kernels for products with matrices (b, m, n), contiguous, where Triton runs; None for plain PyTorch.

    "queue" and "hopper" give the same bits, and only between these two does the number of matrices decide.
    """
    from quintic.kernels.products.symmetric import can_multiply

    if device.type == "cuda" and gluon_is_known():
        from quintic.kernels.products.hopper import can_multiply_on_hopper

        if can_multiply_on_hopper(shape, dtype, device):
            small = shape[0] <= queued_matrices(shape[1], shape[2], dtype, device, worst_case=True)
            # A captured graph launches for nothing, and could not upload the queue's tables.
            return "queue" if small and not torch.cuda.is_current_stream_capturing() else "hopper"
    return "symmetric" if can_multiply(shape, dtype) else None
