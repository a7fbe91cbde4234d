"""The way of pieces of matrices to the rank that orthogonalises them, and of the updates back.

An exchange serves one bucket: units (boxes of parameters that hold whole matrices) of one shape, which all ranks of a
process group hold in the same way, be it a few rows each, a whole copy each, or nothing on some ranks. Each unit has an
owner among these ranks. Units are in the order of their owners.

    gather     every rank of the owner's copy sends its piece of each unit to the owner
    scatter    the owner sends to every rank the piece that this rank holds

One all-to-all each; where every rank holds everything, gathering costs nothing and scattering is one all-gather, or a
broadcast by each of few owners. What a rank receives, and in which order, follows from the plan: no sizes are sent.
`Exchange` answers for one rank, `traffic_of` for all of them at a time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.optim.comms.collectives import ProcessGroup, start_all_gather, start_all_to_all, start_broadcasts
from quintic.optim.layout.layouts import Box, numel_of, relative, size_of

__all__ = ["Exchange", "ExchangeBytes", "RankTraffic", "segment_sum", "traffic_of"]


class Amounts(NamedTuple):
    """How many entries this rank sends to each rank, and how many it receives from each, in their order."""

    sends: list[int]
    receives: list[int]


@dataclass(frozen=True)
class Exchange:
    """The messages of one bucket.

    Attributes:
        ranks: global ranks of the process group, in its order.
        position: of this rank in it.
        unit_shape: of every unit.
        pieces: for each rank the box of a unit that it holds, relative to the unit; None where it holds nothing.
        copies: for each rank the number of the complete copy of the unit that its piece belongs to.
        counts: for each rank how many units it owns.
    """

    ranks: tuple[int, ...]
    position: int
    unit_shape: tuple[int, ...]
    pieces: tuple[Box | None, ...]
    copies: tuple[int, ...]
    counts: tuple[int, ...]

    # ------------------------------------------------------------------------------------------------------- geometry

    @cached_property
    def num_units(self) -> int:
        """Return the number of units that travel."""
        return sum(self.counts)

    @cached_property
    def num_owned(self) -> int:
        """Return the number of units that this rank orthogonalises."""
        return self.counts[self.position]

    @cached_property
    def local_slice(self) -> slice:
        """Return which of all units this rank orthogonalises."""
        first = sum(self.counts[: self.position])
        return slice(first, first + self.num_owned)

    @cached_property
    def piece(self) -> Box | None:
        """Return the box of each unit that this rank holds."""
        return self.pieces[self.position]

    @cached_property
    def piece_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's pieces; its first size is 0 where it holds nothing."""
        return (0, *self.unit_shape[1:]) if self.piece is None else size_of(self.piece)

    @cached_property
    def is_replicated(self) -> bool:
        """Return whether every rank holds every unit whole."""
        return all(piece is not None and size_of(piece) == self.unit_shape for piece in self.pieces)

    @cached_property
    def is_sparse(self) -> bool:
        """Return whether so few ranks own units that an all-gather would send more padding than units."""
        return len(self.ranks) * max(self.counts) > 2 * self.num_units

    @cached_property
    def is_local(self) -> bool:
        """Return whether nothing travels: owners hold their units whole, and nobody else holds any of them."""
        owners = [position for position, count in enumerate(self.counts) if count]
        holders = [position for position, piece in enumerate(self.pieces) if piece is not None]
        return len(owners) <= 1 and holders == owners and size_of(self.pieces[owners[0]] or ()) == self.unit_shape

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Entries of each rank's piece of a unit."""
        return tuple(0 if piece is None else numel_of(piece) for piece in self.pieces)

    @cached_property
    def _places(self) -> list[tuple[slice, ...]]:
        """Where each rank's pieces are in a batch of whole units."""
        whole = tuple((0, size) for size in self.unit_shape)
        return [() if piece is None else (slice(None), *relative(piece, whole)) for piece in self.pieces]

    @cached_property
    def _same_copy(self) -> tuple[bool, ...]:
        return tuple(copy == self.copies[self.position] for copy in self.copies)

    @cached_property
    def gathering(self) -> Amounts:
        """The entries that this rank sends and receives while gathering, which happens within a copy."""
        own, rows = self.numels[self.position], list(zip(self._same_copy, self.counts, self.numels, strict=True))
        return Amounts(
            [count * own if same else 0 for same, count, _ in rows],
            [self.num_owned * numel if same else 0 for same, _, numel in rows],
        )

    @cached_property
    def scattering(self) -> Amounts:
        """The entries that this rank sends and receives while scattering."""
        own = self.numels[self.position]
        return Amounts([self.num_owned * numel for numel in self.numels], [count * own for count in self.counts])

    # ------------------------------------------------------------------------------------------------------- movement

    # All ranks of the group must call what starts; the functions returned wait.

    def start_gather(self, pieces: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        """Start to collect the units that this rank owns, (num_owned, *unit_shape).

        Pieces are this rank's ones of every unit, (num_units, *piece_shape) contiguous.
        """
        if self.is_local or self.is_replicated:
            own = pieces[self.local_slice].view(self.num_owned, *self.unit_shape)
            return lambda: own
        send = pieces
        if not all(self._same_copy):
            parts = pieces.split(list(self.counts))
            send = torch.cat([part for part, same in zip(parts, self._same_copy, strict=True) if same])
        pending = start_all_to_all(send, *self.gathering, group)
        return lambda: self.assemble(pending.wait())

    def assemble(self, received: Tensor) -> Tensor:
        """Return (num_owned, *unit_shape) from the pieces of all ranks, in their order."""
        units = received.new_empty((self.num_owned, *self.unit_shape))
        for part, place in zip(received.split(self.gathering.receives), self._places, strict=True):
            if part.numel():
                target = units[place]
                target.copy_(part.view(target.shape))
        return units

    def start_scatter(self, units: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        """Start to hand out the units that this rank owns; return this rank's piece of every unit in the end.

        Units are (num_owned, *unit_shape), with any strides, pieces (num_units, *piece_shape).
        """
        if self.is_local or self.is_replicated:
            return self.start_all_gather(units, group)
        sends = self.scattering.sends
        send = units.new_empty(sum(sends))
        for part, place in zip(send.split(sends), self._places, strict=True):
            if part.numel():
                source = units[place]
                part.view(source.shape).copy_(source)
        pending = start_all_to_all(send, *self.scattering, group)
        return lambda: pending.wait().view(self.num_units, *self.piece_shape)

    def start_all_gather(self, owned: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        """Start to give every rank what each owner has, (num_units, ...).

        What this rank owns is (num_owned, ...), with the same sizes behind the first on all ranks.
        """
        if self.is_local:
            return lambda: owned
        if self.is_sparse:
            received = owned.new_empty((self.num_units, *owned.shape[1:]))
            received[self.local_slice] = owned
            return start_broadcasts(received, self.counts, group).wait
        most = max(self.counts)
        send = owned.contiguous()
        if self.num_owned < most:
            send = owned.new_empty((most, *owned.shape[1:]))
            send[: self.num_owned] = owned
        pending = start_all_gather(send, len(self.ranks), group)
        if min(self.counts) == most:
            return pending.wait

        def without_padding() -> Tensor:
            parts = pending.wait().split(most)
            return torch.cat([part[:count] for part, count in zip(parts, self.counts, strict=True)])

        return without_padding


class ExchangeBytes(NamedTuple):
    """An exchange, and the bytes of what it moves."""

    exchange: Exchange
    direction: int
    """Bytes of one entry of a gather."""
    update: int
    """Bytes of one entry of a scatter."""
    factors: int
    """Bytes of NorMuon's factors and second moments of one unit, which every rank gets with a scatter; 0 for none."""


class RankTraffic(NamedTuple):
    """Bytes that each rank sends and receives, gathering and scattering, (ranks,) int64."""

    sent: Tensor
    received: Tensor


def traffic_of(exchange_bytes: ExchangeBytes, places: Tensor | None = None) -> RankTraffic:
    """Return the traffic between places of an exchange that is not local.

    Places are (ranks,) int64, whole numbers from 0, such as the host of each rank; None if every rank is a place of its
    own.
    """
    exchange = exchange_bytes.exchange
    counts, copies = (torch.tensor(values, device="cpu") for values in (exchange.counts, exchange.copies))
    pieces = torch.tensor(exchange.numels, device="cpu")
    places = torch.arange(len(counts), device="cpu") if places is None else places
    elsewhere, owned_elsewhere = (
        len(counts) - segment_sum(torch.ones_like(counts), places),
        _off_rank_sum(counts, places),
    )
    if exchange.is_sparse:  # broadcasts of what there is
        given, taken = counts * elsewhere, owned_elsewhere
    else:  # all-gathers of parts as long as the longest
        given = taken = max(exchange.counts) * elsewhere
    if exchange.is_replicated:
        each = math.prod(exchange.unit_shape) * exchange_bytes.update + exchange_bytes.factors
        return RankTraffic(each * given, each * taken)
    # A gather stays within a copy of the parameters, a scatter reaches all of them.
    of_copy = copies * (int(places.max()) + 1) + places
    gather_sent = pieces * (segment_sum(counts, copies) - segment_sum(counts, of_copy))
    gather_received = counts * (segment_sum(pieces, copies) - segment_sum(pieces, of_copy))
    scatter_sent, scatter_received = counts * _off_rank_sum(pieces, places), pieces * owned_elsewhere
    return RankTraffic(
        gather_sent * exchange_bytes.direction + scatter_sent * exchange_bytes.update + given * exchange_bytes.factors,
        gather_received * exchange_bytes.direction
        + scatter_received * exchange_bytes.update
        + taken * exchange_bytes.factors,
    )


def segment_sum(values: Tensor, keys: Tensor) -> Tensor:
    """Return for each position the sum of the values whose keys, whole numbers from 0, are that position's."""
    return values.new_zeros(int(keys.max()) + 1).index_add_(0, keys, values)[keys]


def _off_rank_sum(values: Tensor, places: Tensor) -> Tensor:
    """Return for each position the sum of the values whose place is another one."""
    return values.sum() - segment_sum(values, places)
