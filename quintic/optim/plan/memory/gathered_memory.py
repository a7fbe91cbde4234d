"""What a bucket whose matrices lie on several ranks allocates on each of them, stage by stage: upper bounds in bytes.

The moments are those of `gathered_step.py` and `exchange.py`:

    starts      this rank's pieces of all units; what is sent, where that is a copy; what is received
    computes    what was received, or the pieces it is part of; the units it is assembled to; `workspace.units_work`
    scatters    the updates; then what is sent and received of them
    finishes    what was received; factors as large as pieces, where there are such; the plain second pass
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from quintic.optim.layout.layouts import Box, size_of
from quintic.optim.layout.views import View, is_transposed
from quintic.optim.plan.exchange import Exchange
from quintic.optim.plan.members import Kind, direction_dtype, update_dtype
from quintic.optim.plan.memory.workspace import (
    Matrices,
    applied_bytes,
    directions_bytes,
    factors_of_pieces_bytes,
    units_work,
    width_of,
)
from quintic.optim.plan.schedule import Stages

__all__ = ["Key", "different", "needs_of", "piece_entries", "stages_of"]


class Key(NamedTuple):
    """What units of one bucket have in common."""

    group: int
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    view: View
    pieces: tuple[Box | None, ...]
    copies: tuple[int, ...]
    of: Matrices
    in_order: bool
    """Whether parameters lie in memory row by row."""


class _Gathered(NamedTuple):
    """Bytes of what every rank is given."""

    besides: int
    """While it starts, besides what is under way."""
    under_way: int
    arrived: int
    """When it has arrived, while it is brought in order."""
    in_order: int


def piece_entries(exchange: Exchange) -> int:
    """Return how many entries the exchange's rank holds."""
    return exchange.num_units * math.prod(exchange.piece_shape)


def needs_of(exchange: Exchange) -> list[Hashable]:
    """Return for each rank what its need of memory follows from: ranks with equal ones need the same."""
    of_copies: Counter[int] = Counter()
    for copy, count in zip(exchange.copies, exchange.counts, strict=True):
        of_copies[copy] += count
    sizes = [None if piece is None else size_of(piece) for piece in exchange.pieces]
    return list(zip(sizes, exchange.counts, (of_copies[copy] for copy in exchange.copies), strict=True))


def different(exchange: Exchange) -> list[Exchange]:
    """Return the exchange as ranks see it that need different memory."""
    positions = dict(zip(needs_of(exchange), range(len(exchange.ranks)), strict=True)).values()
    return [replace(exchange, position=position) for position in positions]


def stages_of(key: Key, kinds: Sequence[Kind], exchange: Exchange, *, anywhere: bool = False) -> Stages:
    """Return upper bounds of the temporary bytes of a bucket on the exchange's rank; `anywhere` as in `Matrices`."""
    of = key.of._replace(anywhere=anywhere)
    direction = max((direction_dtype(kind.form, key.of.dtype) for kind in kinds), key=lambda dtype: dtype.itemsize)
    owned, pieces = exchange.num_owned * math.prod(exchange.unit_shape), piece_entries(exchange)
    work = units_work(kinds, key.view, exchange.unit_shape, exchange.num_owned, of)
    directions = pieces * direction.itemsize
    starting = directions_bytes(pieces, direction, of, in_order=key.in_order or key.of.kernels == "torch")
    if exchange.is_local or exchange.is_replicated:
        # The units are a part of the pieces, which they keep alive.
        gathering, computing = directions, directions + work.peak
    else:
        sent, received = sum(exchange.gathering.sends), sum(exchange.gathering.receives)
        # What other copies' owners would get stays behind; pieces in another order are put in order.
        copied = (0 if sent == pieces else sent) + (0 if key.in_order else pieces)
        starting = max(starting, directions + (copied + received) * direction.itemsize)
        # What was sent is given back once it has arrived, what was received once it is assembled.
        gathering = (sent + received) * direction.itemsize
        computing = max((received + owned) * direction.itemsize, owned * direction.itemsize + work.peak)
    updates, scattering, finishing = _results(key, kinds, exchange, work.kept, of)
    return Stages(gathering, computing, updates, scattering, starting, finishing)


def _results(key: Key, kinds: Sequence[Kind], exchange: Exchange, kept: int, of: Matrices) -> tuple[int, int, int]:
    """Return the bytes of the updates from when they are there: besides what is under way, under way, and at the end.

    The updates of the units that the exchange's rank owns keep so many bytes alive.
    """
    item = max(update_dtype(kind.form, key.of.dtype).itemsize for kind in kinds)
    if exchange.is_local:
        updates = _Gathered(0, kept, kept, kept)
    elif exchange.is_replicated:
        size = math.prod(exchange.unit_shape) * item
        # A transpose is put in order before it is sent; 16-bit ones are computed in the order of their directions.
        turned = is_transposed(key.view) and (item != 2 or key.of.kernels == "torch")
        updates = _all_gathered(exchange, size, kept, copied=exchange.num_owned * size * turned)
    else:
        received = piece_entries(exchange) * item
        updates = _Gathered(kept, sum(exchange.scattering.sends) * item + received, received, received)
    neurons, factors = _Gathered(0, 0, 0, 0), 0
    if key.of.normalizes:
        # Factors and second moments, side by side.
        size = 2 * width_of(key.of.dtype) * sum(max(kind.shape) for kind in kinds)
        own = exchange.num_owned * size
        neurons = _Gathered(0, own, own, own) if exchange.is_local else _all_gathered(exchange, size, own)
        neurons = neurons._replace(besides=neurons.besides + own)
        factors = exchange.num_units * size // 2
    factors += factors_of_pieces_bytes(
        kinds, key.view, exchange.unit_shape, exchange.piece_shape, exchange.num_units, of
    )
    applied = factors + applied_bytes(math.prod(exchange.piece_shape), of)
    return (
        updates.besides + neurons.besides,
        updates.under_way + neurons.under_way,
        max(updates.arrived + neurons.under_way, updates.in_order + max(neurons.arrived, neurons.in_order + applied)),
    )


def _all_gathered(exchange: Exchange, size: int, kept: int, *, copied: int = 0) -> _Gathered:
    """Return the bytes of `Exchange.all_gather`.

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
