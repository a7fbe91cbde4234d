"""The communication pattern that brings pieces of matrices to their owner, and the updates back.

An exchange serves one bucket: units (boxes of parameters that hold whole matrices) of one shape, which the ranks of a
process group hold in the same way: a few rows each, a whole copy each, or nothing on some ranks. Each unit has an owner
among these ranks, which orthogonalises it. Units are in the order of their owners.

    gather     every rank of the owner's copy sends its piece of each unit to the owner       (one all-to-all)
    scatter    the owner sends every rank the piece that this rank holds                      (one all-to-all)

Where every rank holds every unit whole, a gather sends nothing, and a scatter is one all-gather, or a broadcast by each
owner if these are few. Sizes and order of a message follow from the plan, which all ranks have: no sizes are sent.
`Exchange` is one rank's view, `traffic_of` adds up the bytes of all ranks.

Invariant: every rank of the process group starts every message, with or without pieces and units of its own.
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

__all__ = ["Exchange", "ExchangeBytes", "segment_sum", "traffic_of"]


class Amounts(NamedTuple):
    """The number of entries that this rank sends to each rank, and receives from each, in the order of the ranks."""

    sends: list[int]
    receives: list[int]


@dataclass(frozen=True)
class Exchange:
    """The messages of one bucket, as one rank sees them.

    Attributes:
        ranks: global ranks of the process group, in its order.
        position: this rank's place among them.
        unit_shape: the shape of every unit.
        pieces: for each rank the box of a unit that it holds, relative to the unit; None where it holds nothing.
        copies: for each rank the index of the complete copy of the unit that its piece belongs to (HSDP has several).
        counts: for each rank the number of units that it owns.
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
        """Return the number of units of all owners."""
        return sum(self.counts)

    @cached_property
    def num_owned(self) -> int:
        """Return the number of units that this rank orthogonalises."""
        # Zero is usual: there may be fewer units than ranks.
        return self.counts[self.position]

    @cached_property
    def local_slice(self) -> slice:
        """Return the places, among all units, of the units that this rank orthogonalises."""
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
    def has_few_owners(self) -> bool:
        """Return whether so few ranks own units that an all-gather would send more padding than units."""
        # An all-gather sends max(counts) units for each rank.
        return len(self.ranks) * max(self.counts) > 2 * self.num_units

    @cached_property
    def is_local(self) -> bool:
        """Return whether nothing is sent: one rank owns all units and holds them whole, other ranks hold none."""
        owners = [position for position, count in enumerate(self.counts) if count]
        holders = [position for position, piece in enumerate(self.pieces) if piece is not None]
        return len(owners) <= 1 and holders == owners and size_of(self.pieces[owners[0]] or ()) == self.unit_shape

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Entries of each rank's piece of a unit."""
        return tuple(0 if piece is None else numel_of(piece) for piece in self.pieces)

    @cached_property
    def _places(self) -> list[tuple[slice, ...]]:
        """For each rank the index of its pieces in a batch of whole units, (units, *unit_shape)."""
        whole = tuple((0, size) for size in self.unit_shape)
        return [() if piece is None else (slice(None), *relative(piece, whole)) for piece in self.pieces]

    @cached_property
    def _same_copy(self) -> tuple[bool, ...]:
        # For each rank whether its piece belongs to the copy of this rank's piece.
        return tuple(copy == self.copies[self.position] for copy in self.copies)

    @cached_property
    def gathering(self) -> Amounts:
        """The entries that this rank sends and receives in a gather, which stays within a copy."""
        own, rows = self.numels[self.position], list(zip(self._same_copy, self.counts, self.numels, strict=True))
        # Send this rank's piece of each unit to the unit's owner; receive each rank's piece of the units owned here.
        return Amounts(
            [count * own if same else 0 for same, count, _ in rows],
            [self.num_owned * numel if same else 0 for same, _, numel in rows],
        )

    @cached_property
    def scattering(self) -> Amounts:
        """The entries that this rank sends and receives in a scatter, which reaches all copies."""
        # Send each rank its piece of the units owned here; receive this rank's piece of each unit from its owner.
        own = self.numels[self.position]
        return Amounts([self.num_owned * numel for numel in self.numels], [count * own for count in self.counts])

    # ------------------------------------------------------------------------------------------------------- movement

    # All ranks of the process group must call each method, in the same order; the functions that they return wait.

    def start_gather(self, pieces: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        """Start to collect the units that this rank owns; wait for (num_owned, *unit_shape).

        Args:
            pieces: this rank's piece of every unit, (num_units, *piece_shape) contiguous.
            group: the process group of `ranks`.
        """
        if self.is_local or self.is_replicated:
            # The units are among the pieces, which they keep alive.
            own = pieces[self.local_slice].view(self.num_owned, *self.unit_shape)
            return lambda: own
        send = pieces
        if not all(self._same_copy):
            # Owners in another copy get their pieces from the ranks of that copy.
            parts = pieces.split(list(self.counts))
            send = torch.cat([part for part, same in zip(parts, self._same_copy, strict=True) if same])
        pending = start_all_to_all(send, *self.gathering, group)
        return lambda: self.assemble(pending.wait())

    def assemble(self, received: Tensor) -> Tensor:
        """Return (num_owned, *unit_shape) from the pieces of all ranks, one rank after the other, (entries,)."""
        units = received.new_empty((self.num_owned, *self.unit_shape))
        # From each rank (num_owned * entries of its piece,), which becomes a box of every unit.
        for part, place in zip(received.split(self.gathering.receives), self._places, strict=True):
            if part.numel():
                target = units[place]  # (num_owned, *shape of that rank's piece)
                target.copy_(part.view(target.shape))
        return units

    def start_scatter(self, units: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        """Start to send the units that this rank owns; wait for this rank's piece of every unit.

        Args:
            units: (num_owned, *unit_shape), with any strides.
            group: the process group of `ranks`.

        Returns:
            A function that returns (num_units, *piece_shape).
        """
        if self.is_local or self.is_replicated:
            return self.start_all_gather(units, group)
        # Pack the boxes of the units by receiver: (entries,), first rank 0's box of every unit.
        sends = self.scattering.sends
        send = units.new_empty(sum(sends))
        for part, place in zip(send.split(sends), self._places, strict=True):
            if part.numel():
                source = units[place]  # (num_owned, *shape of that rank's piece)
                part.view(source.shape).copy_(source)
        pending = start_all_to_all(send, *self.scattering, group)
        return lambda: pending.wait().view(self.num_units, *self.piece_shape)

    def start_all_gather(self, owned: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        """Start to send a tensor of each owner's units to all ranks; wait for that of all units, (num_units, ...).

        Args:
            owned: (num_owned, ...), with the same sizes behind the first on all ranks.
            group: the process group of `ranks`.
        """
        if self.is_local:
            return lambda: owned
        # Few owners: each broadcasts its units into their places.
        if self.has_few_owners:
            received = owned.new_empty((self.num_units, *owned.shape[1:]))
            received[self.local_slice] = owned
            return start_broadcasts(received, self.counts, group).wait
        # An all-gather takes equally many units of every rank: those with fewer send padding.
        most = max(self.counts)
        send = owned.contiguous()
        if self.num_owned < most:
            send = owned.new_empty((most, *owned.shape[1:]))
            send[: self.num_owned] = owned
        pending = start_all_gather(send, len(self.ranks), group)
        if min(self.counts) == most:
            return pending.wait

        # (ranks * most, ...) -> (num_units, ...)
        def without_padding() -> Tensor:
            parts = pending.wait().split(most)
            return torch.cat([part[:count] for part, count in zip(parts, self.counts, strict=True)])

        return without_padding


class ExchangeBytes(NamedTuple):
    """An exchange, and the bytes of each entry and unit that it sends."""

    exchange: Exchange
    # Bytes of one entry of a gather.
    direction: int
    # Bytes of one entry of a scatter.
    update: int
    # Bytes of one unit's factors and second moments with NorMuon, which every rank gets with a scatter; else 0.
    factors: int


def traffic_of(exchange_bytes: ExchangeBytes, places: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the bytes that each rank sends to other places, and receives from them, in an exchange that is not local.

    Both are (ranks,) int64, of a gather and a scatter together.

    Args:
        exchange_bytes: the exchange.
        places: (ranks,) int64, the place of each rank, such as its host, numbered from 0; None if every rank is a
            place of its own.
    """
    exchange = exchange_bytes.exchange
    counts, copies = (torch.tensor(values, device="cpu") for values in (exchange.counts, exchange.copies))
    pieces = torch.tensor(exchange.numels, device="cpu")
    places = torch.arange(len(counts), device="cpu") if places is None else places
    # Everything below is (ranks,): units, copies, entries of pieces; the number of ranks at other places, and of the
    # units that these own.
    elsewhere, owned_elsewhere = (
        len(counts) - segment_sum(torch.ones_like(counts), places),
        _sum_at_other_places(counts, places),
    )
    if exchange.has_few_owners:  # broadcasts, without padding
        given, taken = counts * elsewhere, owned_elsewhere
    else:  # all-gathers, in which every rank sends as much as the one with most units
        given = taken = max(exchange.counts) * elsewhere
    # Whole units on every rank: there is no gather, and a scatter is one of the two above.
    if exchange.is_replicated:
        each = math.prod(exchange.unit_shape) * exchange_bytes.update + exchange_bytes.factors
        return each * given, each * taken
    # A gather stays within a copy of the parameters, a scatter reaches all of them. `of_copy` is a number for each pair
    # of copy and place, so that the difference of two sums counts the ranks of a copy at other places.
    of_copy = copies * (int(places.max()) + 1) + places
    gather_sent = pieces * (segment_sum(counts, copies) - segment_sum(counts, of_copy))
    gather_received = counts * (segment_sum(pieces, copies) - segment_sum(pieces, of_copy))
    scatter_sent, scatter_received = counts * _sum_at_other_places(pieces, places), pieces * owned_elsewhere
    return (
        gather_sent * exchange_bytes.direction + scatter_sent * exchange_bytes.update + given * exchange_bytes.factors,
        gather_received * exchange_bytes.direction
        + scatter_received * exchange_bytes.update
        + taken * exchange_bytes.factors,
    )


def segment_sum(values: Tensor, keys: Tensor) -> Tensor:
    """Return for each position the sum of all values with the same key; `keys` are whole numbers from 0, (n,)."""
    return values.new_zeros(int(keys.max()) + 1).index_add_(0, keys, values)[keys]


def _sum_at_other_places(values: Tensor, places: Tensor) -> Tensor:
    """Return for each position the sum of all values at other places, (n,)."""
    return values.sum() - segment_sum(values, places)
