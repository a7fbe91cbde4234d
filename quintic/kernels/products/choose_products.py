"""Chooses the kernels for the products of an orthogonalisation."""

from typing import Literal

import torch

from quintic.kernels.dispatch import fits_copy_engine
from quintic.versions import gluon_is_known

__all__ = ["ProductKernels", "choose_products", "has_hopper_kernels", "largest_queued_batch"]

ProductKernels = Literal["queue", "hopper", "symmetric"]
"""Kernels for the products of an orthogonalisation.

- "queue": all products in one launch, on Hopper GPUs (`hopper_program.py`).
- "hopper": one launch per product, on Hopper GPUs (`hopper.py`).
- "symmetric": symmetric products on any GPU (`symmetric.py`), and cuBLAS for the others."""

# Multiplications of one product of a whole batch up to which the queue is faster. Beyond that the launches of single
# products are hidden by their work, and the queue spends more time per tile (H200, 2026-11, docs/development/LOG.md).
_QUEUE_LIMIT = 5e10


def has_hopper_kernels(device: torch.device) -> bool:
    """Return whether `hopper.py` and `hopper_program.py` run on a device that exists in this process."""
    if device.type != "cuda" or torch.version.hip is not None or not gluon_is_known():
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def largest_queued_batch(m: int, n: int, dtype: torch.dtype, device: torch.device, *, worst_case: bool = False) -> int:
    """Return the largest batch of (m, n) matrices whose products run as one queued launch; 0 if no batch does.

    Args:
        m: number of rows.
        n: number of columns.
        dtype: dtype of the products.
        device: a CUDA device that does not exist in this process counts as one with the queue.
        worst_case: look at the type of the device only, so that the answer is the same in every process.
    """
    if device.type != "cuda" or not fits_copy_engine(m, n, dtype):
        return 0
    if not worst_case and torch.cuda.is_available() and not has_hopper_kernels(device):
        return 0
    # A product of an (s, s) and an (s, l) matrix, s the shorter side, has s * s * l multiplications.
    return int(_QUEUE_LIMIT // (min(m, n) ** 2 * max(m, n)))


def choose_products(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> ProductKernels | None:
    """Return the kernels for products with contiguous (b, m, n) matrices if Triton runs; None for plain PyTorch.

    The number of matrices b only decides between "queue" and "hopper", which give the same bits.
    """
    from quintic.kernels.products.symmetric import can_multiply

    if has_hopper_kernels(device) and fits_copy_engine(shape[1], shape[2], dtype):
        small = shape[0] <= largest_queued_batch(shape[1], shape[2], dtype, device, worst_case=True)
        # In a captured graph launches cost nothing, and the queue's tables could not be copied to the device.
        return "queue" if small and not torch.cuda.is_current_stream_capturing() else "hopper"
    return "symmetric" if can_multiply(shape, dtype) else None
