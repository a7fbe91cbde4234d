"""What a bucket with divided state allocates, stage by stage: upper bounds in bytes.

The moments are those of `divided_step.py`: gradients sent and received, their mean, the step of this rank's parts with
it, and weights sent and received.
"""

import math
from collections.abc import Sequence

import torch

from quintic.kernels.dispatch import Kernels
from quintic.optim.groups.options import Group
from quintic.optim.plan.bucket import Divided, DividedMatrices, DividedTable, Units
from quintic.optim.plan.members import direction_dtype
from quintic.optim.plan.memory.local_memory import vectors_bytes
from quintic.optim.plan.memory.workspace import (
    Matrices,
    factor_bytes,
    factors_of_pieces_bytes,
    matrices_bytes,
    units_work,
)
from quintic.optim.plan.row_division import MARK_BYTES
from quintic.optim.plan.schedule import Stages

__all__ = ["averaged_entries", "averaging_stages", "stages_of_parts"]


def stages_of_parts(bucket: Divided, group: Group, *, anywhere: bool = False) -> Stages:
    """Return upper bounds of the temporary bytes of a bucket on its rank, its stages not counting.

    With `anywhere` on any rank, and on any device of the type: all ranks must agree how far they run ahead.
    """
    dtype, kernels = bucket.dtype, bucket.kernels
    if isinstance(bucket, DividedMatrices):
        in_order = all(group.params[part.index].is_contiguous() for part in bucket.parts)
        of = Matrices.of_group(group, dtype, bucket.device, kernels)._replace(anywhere=anywhere)
        counts = {len(bucket.parts[owned]) for owned in (bucket.of_owners if anywhere else [bucket.owned])}
        work = max(_units_bytes(count, bucket.units, of, in_order) for count in counts)
    else:
        parts = bucket.parts if anywhere else bucket.own
        work = vectors_bytes(max((part.numel for part in parts), default=0), group, dtype, bucket.device, kernels)
    marks = MARK_BYTES * bucket.rows.padded_rows if isinstance(bucket, DividedTable) else 0
    stages = averaging_stages(
        bucket.entries,
        max(bucket.entries) if anywhere else bucket.entries[bucket.position],
        dtype,
        kernels,
        is_direct=bucket.is_direct,
        work=work,
    )
    # Where touched rows travel, those sent and those received fit into the memory of whole gradients.
    return stages._replace(gathering=marks + stages.gathering, computing=marks + stages.computing)


def averaged_entries(group: Group, dtype: torch.dtype) -> int | None:
    """Return how many entries of whole gradients may travel together; None for any number."""
    # Two neighbours with what is sent and what is received, a third before it is unpacked, and sums.
    budget = group.max_workspace_bytes
    return None if budget is None else max(1, budget // (6 * dtype.itemsize))


def averaging_stages(
    entries: Sequence[int],
    own: int,
    dtype: torch.dtype,
    kernels: Kernels,
    *,
    is_direct: bool,
    work: int = 0,
    is_in_place: bool = False,
) -> Stages:
    """Return upper bounds in bytes for a message to owners, their work on what they have of it, and a message back.

    Args:
        entries: of each rank.
        own: entries of this rank, or the most of any.
        dtype: of messages.
        kernels: implementation.
        is_direct: whether one tensor travels from where it is, and back.
        work: what owners need besides the mean.
        is_in_place: whether the mean is written to the tensor.
    """
    width = dtype.itemsize
    sent = 0 if is_direct else sum(entries) * width
    received, gathered = (len(entries) * numel * width for numel in (own, max(entries)))
    sums = own * max(width, 4) if kernels == "torch" else 0
    mean, given = 0 if is_in_place else own * width, max(entries) * width
    return Stages(
        gathering=sent + received,
        computing=max(received + sums, work) + mean,
        updates=0,
        # Direct messages are received where they belong.
        scattering=0 if is_direct else given + gathered,
    )


def _units_bytes(count: int, units: Units, of: Matrices, in_order: bool) -> int:
    """Return an upper bound of what the step of so many units allocates, given their gradients."""
    shape, view, kinds = units.shape, units.view, units.kinds
    direction = max((direction_dtype(kind.form, of.dtype) for kind in kinds), key=lambda dtype: dtype.itemsize)
    work = units_work(kinds, view, shape, count, of)
    factors = sum(factor_bytes(count, *kind.shape, of) for kind in kinds)
    factors += factors_of_pieces_bytes(kinds, view, shape, shape, count, of)
    numel = math.prod(shape)
    return matrices_bytes(count * numel, numel, direction, work, factors, of, in_order=in_order)
