"""What a bucket that a rank has alone allocates: upper bounds in bytes."""

from collections.abc import Sequence

import torch

from quintic.kernels.dispatch import Kernels
from quintic.optim.groups.options import Group
from quintic.optim.plan.members import adamw_entries, direction_dtype
from quintic.optim.plan.memory.workspace import (
    Footprint,
    Matrices,
    adamw_bytes,
    factor_bytes,
    matrices_bytes,
    neuron_bytes,
    polar_work,
)
from quintic.optim.polar.forms import Form

__all__ = ["batch_bytes", "is_put_in_order", "vectors_bytes"]


def vectors_bytes(largest: int, group: Group, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> int:
    """Return an upper bound of what AdamW allocates for parameters, or parts of them, one after the other.

    Gradients have the dtype of their parameters. The largest has so many entries.
    """
    of = Matrices.of_group(group, dtype, device, kernels)
    plain = not group.cautious and group.decay_coupling == "lr"
    is_fused = plain and dtype.itemsize >= 4 and not of.narrow and device.type in ("cpu", "cuda")
    return adamw_bytes(min(largest, adamw_entries(group.max_workspace_bytes) or largest), of, is_fused=is_fused)


def is_put_in_order(shape: Sequence[int], strides: tuple[int, ...], form: Form | None) -> bool:
    """Return whether directions that Triton's kernels wrote in the order of memory are copied into that of rows.

    Products of wide dtypes are, see `orthogonalize.apply_form`; the shape and strides are those of blocks without b.
    """
    from quintic.kernels.update.matrix_update import MatrixLayout

    if form is None or form.method == "svd" or form.compute_dtype.itemsize == 2:
        return False
    return MatrixLayout.of(shape, strides).transposed


def batch_bytes(
    count: int, largest: int, shape: tuple[int, int], form: Form | None, of: Matrices, is_copied: bool
) -> int:
    """Return an upper bound of what `LocalStep` allocates.

    Args:
        count: matrices.
        largest: how many of them are one parameter's at most, if there are so many.
        shape: (m, n) of each.
        form: how they are orthogonalised.
        of: their weights, device and kernels.
        is_copied: whether directions are put in another order.
    """
    m, n = shape
    direction = direction_dtype(form, of.dtype)
    work = polar_work(form, count, m, n, of)
    copied = count * m * n * direction.itemsize if is_copied else 0
    work = Footprint(max(work.peak + copied, work.kept + neuron_bytes(form, count, m, n, of)), work.kept)
    # Those of decay are put beside them.
    factors = factor_bytes(count, m, n, of) * (3 if of.scales_decay else 1)
    return matrices_bytes(count * m * n, min(count, largest) * m * n, direction, work, factors, of, in_order=True)
