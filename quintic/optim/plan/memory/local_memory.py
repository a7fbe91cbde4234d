"""What a bucket that a rank has alone allocates: upper bounds in bytes."""

from collections.abc import Sequence

import torch

from quintic.kernels.dispatch import Kernels
from quintic.optim.groups.options import Group
from quintic.optim.plan.members import adamw_entries, direction_dtype
from quintic.optim.plan.memory.workspace import (
    Matrices,
    adamw_bytes,
    applied_bytes,
    directions_bytes,
    factor_bytes,
    neuron_bytes,
    polar_work,
)
from quintic.optim.polar.forms import Form

__all__ = ["is_put_in_order", "matrices_bytes", "vectors_bytes"]


def vectors_bytes(largest: int, group: Group, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> int:
    """Return an upper bound of what AdamW allocates for parameters, or parts of them, one after the other.

    Gradients have the dtype of their parameters.

    Args:
        largest: entries of the largest one.
        group: its parameter group.
        dtype: of the weights.
        device: of the weights.
        kernels: implementation.
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


def matrices_bytes(
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
    factors = factor_bytes(count, m, n, of)
    held = count * m * n * direction.itemsize
    computing = max(work.peak + (held if is_copied else 0), work.kept + neuron_bytes(form, count, m, n, of))
    # Those of decay are put beside them.
    applying = work.kept + factors * (3 if of.scales_decay else 1) + applied_bytes(min(count, largest) * m * n, of)
    starting = directions_bytes(count * m * n, direction, of)
    return max(starting, held + max(computing, applying))
