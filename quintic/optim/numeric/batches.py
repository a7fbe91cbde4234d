"""Groups tensors that one fused call can take, and scales them."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["group_by_device_dtype", "scale_"]


def group_by_device_dtype(tensors: Sequence[Tensor | None]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Return (device, dtype) -> positions of the tensors that have entries; None and empty tensors are left out."""
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        if tensor is not None and tensor.numel():
            together.setdefault((tensor.device, tensor.dtype), []).append(position)
    return together


def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors on any devices by a () tensor in place; each product is rounded once."""
    for (device, dtype), positions in group_by_device_dtype(tensors).items():
        together = [tensors[position] for position in positions]
        wide = factor.to(device, torch.promote_types(dtype, torch.float32))
        if wide.dtype == dtype:
            torch._foreach_mul_(together, wide)
        else:
            # As () the factor would be rounded to the tensors' dtype before the product; as (1,) it is not.
            torch._foreach_mul_([tensor.unsqueeze(0) for tensor in together], [wide.view(1)] * len(together))
