"""Upper bounds of the bytes that the buckets of a plan allocate, phase by phase (`schedule.PhaseBytes`).

A local bucket has one bound (`batch_bytes`, `adamw_workspace_bytes`). A bucket with sharded state
(`shard_phase_bytes`, for `transports.Shard`) holds, one after the other: gradients sent and received, their mean, the
memory of this rank's step, and weights sent and received. A bucket whose matrices lie on several ranks
(`unit_phase_bytes`, for `transports.Gather` and `exchange.py`) holds

    when it starts      this rank's pieces of all units; the message sent, if it is a copy; the message received
    while it computes   the message received, or the pieces that it is a view of; the assembled units;
                        `units_footprint`
    while it scatters   the updates; then the messages sent and received
    when it finishes    the message received; factors of the size of pieces, if any; the memory for writing weights
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from quintic.kernels.dispatch import Kernels
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import size_of
from quintic.optim.plan.bucket import Sharded, Units
from quintic.optim.plan.exchange import Exchange
from quintic.optim.plan.kinds import adamw_entries, direction_dtype
from quintic.optim.plan.row_sharding import MARK_BYTES
from quintic.optim.plan.schedule import PhaseBytes
from quintic.optim.plan.workspace.matrices import (
    WorkspaceSpec,
    applied_bytes,
    directions_bytes,
    factor_bytes,
    factors_of_pieces_bytes,
    matrices_bytes,
    matrices_footprint,
    packing_bytes,
    units_footprint,
    width_of,
)
from quintic.optim.polar.forms import Form

__all__ = [
    "adamw_workspace_bytes",
    "averaged_entries",
    "averaging_phase_bytes",
    "batch_bytes",
    "distinct_by_memory",
    "memory_keys",
    "needs_row_order",
    "piece_entries",
    "shard_phase_bytes",
    "unit_phase_bytes",
]


# ---------------------------------------------------------------------------------------------------------- on one rank


def adamw_workspace_bytes(
    largest: int, group: Group, dtype: torch.dtype, device: torch.device, kernels: Kernels, *, dense: bool = True
) -> int:
    """Return the bytes that AdamW allocates for parameters, or shards of them, which are stepped one after the other.

    Gradients have the dtype of their parameters. `largest` are the entries of the largest parameter or shard; `dense`
    says whether they have no gaps in memory.
    """
    # Kernels, and PyTorch's fused update, need no temporary tensors.
    spec = WorkspaceSpec.of_group(group, dtype, device, kernels)
    plain = not group.cautious and group.decay_coupling == "lr" and dense
    # The cases of PyTorch's fused update, see `torch_backend.step_adamw`.
    is_fused = plain and dtype.itemsize >= 4 and group.state_dtype is None and device.type in ("cpu", "cuda")
    if kernels == "triton" or is_fused:
        return 64
    numel = min(largest, adamw_entries(group.max_workspace_bytes) or largest)
    width, widened = width_of(dtype), (dtype.itemsize < 4) + 2 * (group.state_dtype is not None)
    # The two corrected averages, and a root or a quotient; then the update and the memory for writing weights.
    most = max(2 * numel * width, applied_bytes(numel, spec), packing_bytes(numel, spec))
    return numel * width * (widened + 1) + most + 2**10


def needs_row_order(shape: Sequence[int], strides: tuple[int, ...], form: Form | None) -> bool:
    """Return whether directions must be copied into row order before they are orthogonalised.

    Triton's kernels write them in the order of memory, and products of 32 bits and more need row order, see
    `orthogonalize.apply_form`. Shape and strides are those of one matrix in a block, (g, r, n) or (g, r, c, k).
    """
    from quintic.kernels.update.matrix_layout import MatrixLayout

    if form is None or form.method == "svd" or form.compute_dtype.itemsize == 2:
        return False
    return MatrixLayout.of(shape, strides).transposed


def batch_bytes(
    count: int, largest: int, shape: tuple[int, int], form: Form | None, spec: WorkspaceSpec, is_copied: bool
) -> int:
    """Return the bytes that the step of a local bucket allocates for `count` matrices.

    At most `largest` of them are of one parameter; `is_copied` is the result of `needs_row_order`.
    """
    (m, n), direction = shape, direction_dtype(form, spec.dtype)
    work = matrices_footprint(form, count, m, n, spec, copied=count * m * n * direction.itemsize * is_copied)
    # With `scale_decay`, factors of decay stand beside them.
    factors = factor_bytes(count, m, n, spec) * (3 if spec.scales_decay else 1)
    return matrices_bytes(count * m * n, min(count, largest) * m * n, direction, work, factors, spec, in_order=True)


# -------------------------------------------------------------------------------------------------- with sharded state


def shard_phase_bytes(bucket: Sharded, group: Group, *, worst_case: bool = False) -> PhaseBytes:
    """Return the temporary bytes of a bucket on its rank; the bucket's own `phase_bytes` are not read.

    With `worst_case`, return the most on any rank and any device of the type: all ranks must decide alike how many
    buckets are under way at a time.
    """
    dtype, kernels = bucket.dtype, bucket.kernels
    # The memory of the owner's step.
    units = bucket.units
    if units is not None:
        in_order = all(group.params[shard.index].is_contiguous() for shard in bucket.shards)
        spec = WorkspaceSpec.of_group(group, dtype, bucket.device, kernels)._replace(worst_case=worst_case)
        counts = {len(bucket.shards[owned]) for owned in (bucket.of_owners if worst_case else [bucket.local_slice])}
        work = max(_units_bytes(count, units, spec, in_order) for count in counts)
    else:
        shards = bucket.shards if worst_case else bucket.members
        work = adamw_workspace_bytes(
            max((shard.numel for shard in shards), default=0), group, dtype, bucket.device, kernels
        )
    # The memory of messages; marks of touched rows are held beside gradients.
    marks = 0 if bucket.rows is None else MARK_BYTES * bucket.rows.padded_rows
    own = max(bucket.entries) if worst_case else bucket.entries[bucket.position]
    of_messages = averaging_phase_bytes(bucket.entries, own, dtype, kernels, is_direct=bucket.is_direct, work=work)
    # If touched rows are sent, the rows sent and received fit into the memory of whole gradients.
    return of_messages._replace(gathering=marks + of_messages.gathering, computing=marks + of_messages.computing)


def averaged_entries(group: Group, dtype: torch.dtype) -> int | None:
    """Return the most entries of whole gradients that one message may have; None for no limit."""
    # Six tensors: sent and received by two messages under way, a third one before it is unpacked, and sums.
    budget = group.max_workspace_bytes
    return None if budget is None else max(1, budget // (6 * dtype.itemsize))


def averaging_phase_bytes(
    entries: Sequence[int],
    own: int,
    dtype: torch.dtype,
    kernels: Kernels,
    *,
    is_direct: bool,
    work: int = 0,
    is_in_place: bool = False,
) -> PhaseBytes:
    """Return the bytes of a reduce-scatter to owners, of their work, and of an all-gather back, by phase.

    Args:
        entries: for each rank the number of entries that it owns.
        own: the number that this rank owns, or the most of any rank.
        dtype: of the messages.
        kernels: of the mean: plain PyTorch sums in float32 or wider.
        is_direct: whether one tensor is sent from its own memory, and received there.
        work: the bytes of the owner's work, beside the mean.
        is_in_place: whether the mean is written to memory that exists already.
    """
    # Every rank sends all entries, and receives its own from each rank; an all-gather pads to the most of any rank.
    width = dtype.itemsize
    sent = 0 if is_direct else sum(entries) * width
    received, gathered = (len(entries) * numel * width for numel in (own, max(entries)))
    sums = own * max(width, 4) if kernels == "torch" else 0
    mean, given = 0 if is_in_place else own * width, max(entries) * width
    return PhaseBytes(
        gathering=sent + received,
        computing=max(received + sums, work) + mean,
        updates=0,
        # A direct message is received in the parameter itself.
        scattering=0 if is_direct else given + gathered,
    )


def _units_bytes(count: int, units: Units, spec: WorkspaceSpec, in_order: bool) -> int:
    """Return the bytes that the step of `count` units allocates, given their gradients."""
    factors = sum(factor_bytes(count, *kind.shape, spec) for kind in units.kinds)
    factors += factors_of_pieces_bytes(units, units.shape, count, spec)
    work, numel = units_footprint(units, count, spec), math.prod(units.shape)
    return matrices_bytes(
        count * numel, numel, units.direction_dtype(spec.dtype), work, factors, spec, in_order=in_order
    )


# -------------------------------------------------------------------------------------------- with matrices in pieces


def piece_entries(exchange: Exchange) -> int:
    """Return the number of entries of all units' pieces on the exchange's rank."""
    return exchange.num_units * math.prod(exchange.piece_shape)


def memory_keys(exchange: Exchange) -> list[Hashable]:
    """Return a key for each rank; ranks with equal keys need the same memory."""
    # The shape of its pieces, the number of its units, and the number of units of its copy.
    of_copies: Counter[int] = Counter()
    for copy, count in zip(exchange.copies, exchange.counts, strict=True):
        of_copies[copy] += count
    sizes = [None if piece is None else size_of(piece) for piece in exchange.pieces]
    return list(zip(sizes, exchange.counts, (of_copies[copy] for copy in exchange.copies), strict=True))


def distinct_by_memory(exchange: Exchange) -> list[Exchange]:
    """Return one view of the exchange for each distinct need of memory."""
    positions = dict(zip(memory_keys(exchange), range(len(exchange.ranks)), strict=True)).values()
    return [replace(exchange, position=position) for position in positions]


def unit_phase_bytes(units: Units, exchange: Exchange, spec: WorkspaceSpec, *, in_order: bool) -> PhaseBytes:
    """Return the temporary bytes of a bucket on the exchange's rank, by phase.

    `in_order` says whether parameters lie in memory row by row.
    """
    direction = units.direction_dtype(spec.dtype)
    owned, pieces = exchange.num_owned * math.prod(units.shape), piece_entries(exchange)
    work = units_footprint(units, exchange.num_owned, spec)
    # State that stages on whole matrices need travels beside the directions, and back beside the updates.
    item = direction.itemsize + spec.sent_width
    directions = pieces * item
    starting = directions_bytes(pieces, direction, spec, in_order=in_order or spec.kernels == "torch")
    starting = max(starting, directions)
    if exchange.is_local or exchange.is_replicated:
        # The units are views of the pieces, and keep these alive.
        gathering, computing = directions, directions + work.peak
    else:
        sent, received = sum(exchange.gathering.sends), sum(exchange.gathering.receives)
        # A rank sends only to owners of its copy, so with several copies it packs a part of its pieces; pieces in
        # another memory order are copied into row order.
        copied = (0 if sent == pieces else sent) + (0 if in_order else pieces)
        starting = max(starting, directions + (copied + received) * item)
        # The message sent is freed when it has arrived, the message received when the units are assembled.
        gathering = (sent + received) * item
        computing = max((received + owned) * item, owned * item + work.peak)
    updates, scattering, finishing = _update_bytes(units, exchange, work.kept + owned * spec.state_width, spec)
    return PhaseBytes(gathering, computing, updates, scattering, starting, finishing)


def _update_bytes(units: Units, exchange: Exchange, kept: int, spec: WorkspaceSpec) -> tuple[int, int, int]:
    """Return `updates`, `scattering` and `finishing` of `PhaseBytes`.

    `kept` are the bytes that the updates of this rank's units keep alive.
    """
    item = units.update_dtype(spec.dtype).itemsize + spec.state_width
    pieces = piece_entries(exchange) * item  # the updates of this rank's pieces
    if exchange.is_local:
        besides, message, arriving, pieces = 0, kept, 0, kept
    elif exchange.is_replicated:
        # A transposed update is copied into row order before it is sent, except in 16 bits, where updates are computed
        # in the order of their directions.
        size = math.prod(units.shape) * item
        is_copied = units.is_transposed and (item - spec.state_width != 2 or spec.kernels == "torch")
        besides, message, arriving = _all_gather(exchange, size, kept, copied=exchange.num_owned * size * is_copied)
    else:
        besides, message, arriving = kept, sum(exchange.scattering.sends) * item + pieces, 0
    factors = factors_of_pieces_bytes(units, exchange.piece_shape, exchange.num_units, spec)
    applied = factors + applied_bytes(math.prod(exchange.piece_shape), spec)
    size = spec.message_bytes(units.shapes)
    if not size:
        return besides, message, max(arriving, pieces + applied)
    # Numbers and vectors of each unit travel side by side in one more message.
    own, everything = exchange.num_owned * size, exchange.num_units * size
    beside_numbers, numbers, arriving_numbers = (0, own, 0) if exchange.is_local else _all_gather(exchange, size, own)
    # Numbers are copied from the message before they are spread over the pieces.
    finishing = pieces + max(arriving_numbers, 2 * everything + applied)
    return besides + beside_numbers + own, message + numbers, max(arriving + numbers, finishing)


def _all_gather(exchange: Exchange, size: int, kept: int, *, copied: int = 0) -> tuple[int, int, int]:
    """Return the bytes of `Exchange.start_all_gather`: beside the message while it starts, under way, and arriving.

    Args:
        exchange: the exchange, as this rank sees it.
        size: the bytes of one unit's tensor.
        kept: the bytes that this rank's tensors keep alive.
        copied: the bytes of copies that put them in order.
    """
    # Broadcasts fill one tensor in place.
    everything, most = exchange.num_units * size, max(exchange.counts)
    if exchange.has_few_owners:
        return kept + copied, everything, 0
    if exchange.num_owned < most:
        # Another rank has more units, so this rank sends padding, in a copy.
        besides, sent = kept + copied, most * size
    else:
        besides, sent = (kept, copied) if copied else (0, kept)
    received = len(exchange.ranks) * most * size
    return besides, sent + received, received + everything if min(exchange.counts) < most else received
