"""What a bucket with divided state allocates, stage by stage: upper bounds in bytes over all ranks.

The moments are those of `sharded_step.py`: gradients sent and received, their mean, the step of this rank's parts with
it, and weights sent and received.
"""

import math
from collections.abc import Sequence

import torch

from quintic.kernels.dispatch import Kernels
from quintic.optim.groups.options import Group
from quintic.optim.plan.bucket import Sharding, Travel
from quintic.optim.plan.members import ADAMW_BYTES, adamw_entries, direction_dtype
from quintic.optim.plan.memory.workspace import (
    Matrices,
    applied_bytes,
    directions_bytes,
    factor_bytes,
    factors_of_pieces_bytes,
    units_work,
)
from quintic.optim.plan.row_division import MARK_BYTES
from quintic.optim.plan.schedule import Stages
from quintic.optim.state.parts import Part

__all__ = ["stages_of_parts"]


def stages_of_parts(
    sharding: Sharding,
    travel: Travel | None,
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    *,
    anywhere: bool,
    elsewhere: bool = False,
) -> Stages:
    """Return upper bounds of the temporary bytes on any rank: all ranks must agree how far they run ahead.

    Args:
        sharding: who owns which part.
        travel: of parts that are matrices.
        group: the parameter group.
        dtype: of the weights.
        device: of the weights.
        kernels: implementation.
        anywhere: bound them for any device of the type, see `Matrices`.
        elsewhere: leave out what is received: it comes into memory that is kept, see `copy_engines.py`.
    """
    if travel is not None:
        in_order = all(group.params[part.index].is_contiguous() for part in sharding.parts)
        of = Matrices(dtype, device, kernels, group.normalize is not None, anywhere, group.state_dtype is not None)
        work = _matrices_bytes(travel, of, in_order)
    else:
        work = 0 if kernels == "triton" else _adamw_bytes(sharding.parts, group)
    most, num_ranks, width = max(sharding.entries), len(sharding.ranks), dtype.itemsize
    received, mean = 0 if elsewhere else num_ranks * most * width, most * width
    sums = 0
    if kernels == "torch":
        sums = most * max(width, 4)
    # Where touched rows travel, those sent and those received fit into the memory of whole gradients.
    marks = 0 if sharding.rows is None else MARK_BYTES * sharding.rows.padded_rows
    sent = 0 if sharding.is_direct else sum(sharding.entries) * width
    # Copy engines leave this rank's own part where it was sent from; collectives receive weights where they belong.
    copies = group.transport == "copy_engines"
    own, weights = (sent, received) if copies else (0, 0)
    return Stages(
        gathering=marks + sent + received,
        computing=marks + max(received + sums + own, work) + mean,
        updates=0,
        scattering=weights if sharding.is_direct else mean + received,
    )


def _matrices_bytes(travel: Travel, of: Matrices, in_order: bool) -> int:
    """Return an upper bound of what the step of matrices allocates on any rank, given their gradients."""
    exchange, kinds = travel.exchange, travel.kinds
    shape = exchange.unit_shape
    direction = max((direction_dtype(kind.form, of.dtype) for kind in kinds), key=lambda dtype: dtype.itemsize)
    most = 0
    for count in set(exchange.counts):
        numel = count * math.prod(shape)
        held = numel * direction.itemsize * (1 if in_order or of.kernels == "torch" else 2)
        work = units_work(kinds, travel.view, shape, count, of)
        factors = sum(factor_bytes(count, *kind.shape, of) for kind in kinds)
        factors += factors_of_pieces_bytes(kinds, travel.view, shape, shape, count, of)
        applying = work.kept + factors + applied_bytes(math.prod(shape), of)
        most = max(most, directions_bytes(numel, direction, of, in_order=in_order), held + max(work.peak, applying))
    return most


def _adamw_bytes(parts: Sequence[Part], group: Group) -> int:
    largest = max(part.numel for part in parts)
    return ADAMW_BYTES * min(largest, adamw_entries(group.max_workspace_bytes) or largest)
