"""Upper bounds of the bytes that the buckets of a plan allocate, stage by stage.

A bucket that one rank has whole needs its memory once (`batch_bytes`, `adamw_workspace_bytes`). A bucket whose state is
sharded (`stages_of_shards`, `transports.Shard`) holds, in turn: gradients sent and received, their mean, the step of
this rank's shards, and weights sent and received. A bucket whose matrices lie on several ranks (`stages_of_units`,
`transports.Gather` and `exchange.py`):

    starts      this rank's pieces of all units; what is sent, where that is a copy; what is received
    computes    what was received, or the pieces it is part of; the units it is assembled to; `matrices.units_work`
    scatters    the updates; then what is sent and received of them
    finishes    what was received; factors as large as pieces, where there are such; the plain second pass
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from quintic.kernels.dispatch import Kernels
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import size_of
from quintic.optim.layout.views import is_transposed
from quintic.optim.plan.bucket import Sharded, ShardedMatrices, ShardedTable, Units
from quintic.optim.plan.exchange import Exchange
from quintic.optim.plan.members import adamw_entries, direction_dtype
from quintic.optim.plan.row_sharding import MARK_BYTES
from quintic.optim.plan.schedule import Stages
from quintic.optim.plan.workspace.matrices import (
    WorkspaceSpec,
    applied_bytes,
    directions_bytes,
    factor_bytes,
    factors_of_pieces_bytes,
    matrices_bytes,
    stages_work,
    units_work,
    width_of,
)
from quintic.optim.polar.forms import Form

__all__ = [
    "adamw_workspace_bytes",
    "averaged_entries",
    "averaging_stages",
    "batch_bytes",
    "distinct_by_memory",
    "is_put_in_order",
    "memory_keys",
    "piece_entries",
    "stages_of_shards",
    "stages_of_units",
]


# ---------------------------------------------------------------------------------------------------------- on one rank


def adamw_workspace_bytes(
    largest: int, group: Group, dtype: torch.dtype, device: torch.device, kernels: Kernels, *, dense: bool = True
) -> int:
    """Return the bytes that AdamW allocates for parameters, or shards of them, one after the other.

    Gradients have the dtype of their parameters. The largest has so many entries, `dense` ones without gaps in memory.
    """
    spec = WorkspaceSpec.of_group(group, dtype, device, kernels)
    plain = not group.cautious and group.decay_coupling == "lr" and dense
    # What PyTorch's fused update does, see `torch_backend.step_adamw`.
    is_fused = plain and dtype.itemsize >= 4 and not spec.narrow and device.type in ("cpu", "cuda")
    if kernels == "triton" or is_fused:
        return 64
    numel = min(largest, adamw_entries(group.max_workspace_bytes) or largest)
    width, widened = width_of(dtype), (dtype.itemsize < 4) + 2 * spec.narrow
    # The two averages corrected, and a root or a quotient; then the update and what applies it.
    return numel * width * (widened + 1) + max(2 * numel * width, applied_bytes(numel, spec)) + 2**10


def is_put_in_order(shape: Sequence[int], strides: tuple[int, ...], form: Form | None) -> bool:
    """Return whether directions that Triton's kernels wrote in the order of memory are copied into that of rows.

    Products of wide dtypes are, see `orthogonalize.apply_form`; the shape and strides are those of blocks without b.
    """
    from quintic.kernels.update.matrix_layout import MatrixLayout

    if form is None or form.method == "svd" or form.compute_dtype.itemsize == 2:
        return False
    return MatrixLayout.of(shape, strides).transposed


def batch_bytes(
    count: int, largest: int, shape: tuple[int, int], form: Form | None, spec: WorkspaceSpec, is_copied: bool
) -> int:
    """Return the bytes that the step of a local bucket allocates for `count` matrices.

    At most `largest` of them are of one parameter. If directions are copied, they are put in another order before they
    are orthogonalised.
    """
    m, n = shape
    direction = direction_dtype(form, spec.dtype)
    work = stages_work(form, count, m, n, spec, copied=count * m * n * direction.itemsize if is_copied else 0)
    # Those of decay are put beside them.
    factors = factor_bytes(count, m, n, spec) * (3 if spec.scales_decay else 1)
    return matrices_bytes(count * m * n, min(count, largest) * m * n, direction, work, factors, spec, in_order=True)


# -------------------------------------------------------------------------------------------------- with sharded state


def stages_of_shards(bucket: Sharded, group: Group, *, worst_case: bool = False) -> Stages:
    """Return the temporary bytes of a bucket on its rank, its stages not counting.

    With `worst_case` on any rank, and on any device of the type: all ranks must agree how far they run ahead.
    """
    dtype, kernels = bucket.dtype, bucket.kernels
    if isinstance(bucket, ShardedMatrices):
        in_order = all(group.params[shard.index].is_contiguous() for shard in bucket.shards)
        spec = WorkspaceSpec.of_group(group, dtype, bucket.device, kernels)._replace(worst_case=worst_case)
        counts = {len(bucket.shards[owned]) for owned in (bucket.of_owners if worst_case else [bucket.local_slice])}
        work = max(_units_bytes(count, bucket.units, spec, in_order) for count in counts)
    else:
        shards = bucket.shards if worst_case else bucket.local
        work = adamw_workspace_bytes(
            max((shard.numel for shard in shards), default=0), group, dtype, bucket.device, kernels
        )
    marks = MARK_BYTES * bucket.rows.padded_rows if isinstance(bucket, ShardedTable) else 0
    own = max(bucket.entries) if worst_case else bucket.entries[bucket.position]
    stages = averaging_stages(bucket.entries, own, dtype, kernels, is_direct=bucket.is_direct, work=work)
    # Where touched rows travel, those sent and those received fit into the memory of whole gradients.
    return stages._replace(gathering=marks + stages.gathering, computing=marks + stages.computing)


def averaged_entries(group: Group, dtype: torch.dtype) -> int | None:
    """Return the number of entries of whole gradients that may travel together; None for any number."""
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
    """Return the bytes of a message to owners, their work on what they have of it, and a message back.

    Messages of a dtype have so many entries of each rank; this one has its own, or the most of any. With `is_direct`
    one tensor travels from where it is, and back; with `is_in_place` the mean is written to it. Besides the mean owners
    need so many bytes for their work.
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


def _units_bytes(count: int, units: Units, spec: WorkspaceSpec, in_order: bool) -> int:
    """Return the bytes that the step of so many units allocates, given their gradients."""
    factors = sum(factor_bytes(count, *kind.shape, spec) for kind in units.kinds)
    factors += factors_of_pieces_bytes(units, units.shape, count, spec)
    work, numel = units_work(units, count, spec), math.prod(units.shape)
    return matrices_bytes(
        count * numel, numel, units.direction_dtype(spec.dtype), work, factors, spec, in_order=in_order
    )


# -------------------------------------------------------------------------------------------- with matrices in pieces


class _Gathered(NamedTuple):
    """Bytes of what every rank is given."""

    besides: int
    """While it starts, besides what is under way."""
    under_way: int
    arrived: int
    """When it has arrived, while it is brought in order."""
    in_order: int


def piece_entries(exchange: Exchange) -> int:
    """Return the number of entries that the exchange's rank holds."""
    return exchange.num_units * math.prod(exchange.piece_shape)


def memory_keys(exchange: Exchange) -> list[Hashable]:
    """Return for each rank what its need of memory follows from: ranks with equal ones need the same."""
    of_copies: Counter[int] = Counter()
    for copy, count in zip(exchange.copies, exchange.counts, strict=True):
        of_copies[copy] += count
    sizes = [None if piece is None else size_of(piece) for piece in exchange.pieces]
    return list(zip(sizes, exchange.counts, (of_copies[copy] for copy in exchange.copies), strict=True))


def distinct_by_memory(exchange: Exchange) -> list[Exchange]:
    """Return the exchange as ranks see it that need different memory."""
    positions = dict(zip(memory_keys(exchange), range(len(exchange.ranks)), strict=True)).values()
    return [replace(exchange, position=position) for position in positions]


def stages_of_units(units: Units, exchange: Exchange, spec: WorkspaceSpec, *, in_order: bool) -> Stages:
    """Return the temporary bytes of a bucket on the exchange's rank.

    `in_order` says whether parameters lie in memory row by row.
    """
    direction = units.direction_dtype(spec.dtype)
    owned, pieces = exchange.num_owned * math.prod(units.shape), piece_entries(exchange)
    work = units_work(units, exchange.num_owned, spec)
    # State that stages on whole matrices need travels beside the directions, and back beside the updates.
    item = direction.itemsize + spec.state_width
    directions = pieces * item
    starting = directions_bytes(pieces, direction, spec, in_order=in_order or spec.kernels == "torch")
    starting = max(starting, directions)
    if exchange.is_local or exchange.is_replicated:
        # The units are a part of the pieces, which they keep alive.
        gathering, computing = directions, directions + work.peak
    else:
        sent, received = sum(exchange.gathering.sends), sum(exchange.gathering.receives)
        # What other copies' owners would get stays behind; pieces in another order are put in order.
        copied = (0 if sent == pieces else sent) + (0 if in_order else pieces)
        starting = max(starting, directions + (copied + received) * item)
        # What was sent is given back once it has arrived, what was received once it is assembled.
        gathering = (sent + received) * item
        computing = max((received + owned) * item, owned * item + work.peak)
    updates, scattering, finishing = _results(units, exchange, work.kept + owned * spec.state_width, spec)
    return Stages(gathering, computing, updates, scattering, starting, finishing)


def _results(units: Units, exchange: Exchange, kept: int, spec: WorkspaceSpec) -> tuple[int, int, int]:
    """Return the bytes of the updates from when they are there: besides what is under way, under way, and at the end.

    The updates of the units that the exchange's rank owns keep so many bytes alive.
    """
    width = units.update_dtype(spec.dtype).itemsize
    item = width + spec.state_width
    if exchange.is_local:
        updates = _Gathered(0, kept, kept, kept)
    elif exchange.is_replicated:
        size = math.prod(units.shape) * item
        # A transpose is put in order before it is sent; 16-bit ones are computed in the order of their directions.
        turned = is_transposed(units.view) and (width != 2 or spec.kernels == "torch")
        updates = _all_gathered(exchange, size, kept, copied=exchange.num_owned * size * turned)
    else:
        received = piece_entries(exchange) * item
        updates = _Gathered(kept, sum(exchange.scattering.sends) * item + received, received, received)
    neurons, factors = _Gathered(0, 0, 0, 0), 0
    if spec.normalizes:
        # Factors and second moments, side by side.
        size = 2 * width_of(spec.dtype) * units.num_neurons
        own = exchange.num_owned * size
        neurons = _Gathered(0, own, own, own) if exchange.is_local else _all_gathered(exchange, size, own)
        neurons = neurons._replace(besides=neurons.besides + own)
        factors = exchange.num_units * size // 2
    factors += factors_of_pieces_bytes(units, exchange.piece_shape, exchange.num_units, spec)
    applied = factors + applied_bytes(math.prod(exchange.piece_shape), spec)
    return (
        updates.besides + neurons.besides,
        updates.under_way + neurons.under_way,
        max(updates.arrived + neurons.under_way, updates.in_order + max(neurons.arrived, neurons.in_order + applied)),
    )


def _all_gathered(exchange: Exchange, size: int, kept: int, *, copied: int = 0) -> _Gathered:
    """Return the bytes of `Exchange.start_all_gather`.

    Each unit's part has `size` bytes; this rank's keep `kept` bytes alive, and `copied` bytes more put them in order.
    """
    everything, most = exchange.num_units * size, max(exchange.counts)
    if exchange.is_sparse:
        return _Gathered(kept + copied, everything, everything, everything)
    received = len(exchange.ranks) * most * size
    if exchange.num_owned < most:
        # With padding, as the others have more.
        besides, sent = kept + copied, most * size
    else:
        besides, sent = (kept, copied) if copied else (0, kept)
    if min(exchange.counts) == most:
        return _Gathered(besides, sent + received, received, received)
    return _Gathered(besides, sent + received, received + everything, everything)
