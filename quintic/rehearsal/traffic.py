"""What an exchange moves, for all of its ranks at a time: `Exchange` itself answers for one rank."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.optim.layout.layouts import numel_of
from quintic.optim.plan.exchange import Exchange

__all__ = ["Cargo", "Traffic", "per_key", "piece_numels", "traffic_of"]


class Cargo(NamedTuple):
    """An exchange, and the bytes of what it moves."""

    exchange: Exchange
    direction: int
    """Of one entry of a gather."""
    update: int
    """Of one entry of a scatter."""
    factors: int
    """Of NorMuon's factors and second moments of one unit, which every rank gets with a scatter; 0 for none."""


class Traffic(NamedTuple):
    """Bytes that each rank sends and receives, those that it keeps not counted; (ranks,) int64."""

    gather_sent: Tensor
    gather_received: Tensor
    scatter_sent: Tensor
    scatter_received: Tensor


def traffic_of(cargo: Cargo) -> Traffic:
    """Return what moves between ranks, of an exchange that is not local."""
    exchange = cargo.exchange
    counts, copies, pieces = torch.tensor(exchange.counts), torch.tensor(exchange.copies), piece_numels(exchange)
    others = len(counts) - 1
    if exchange.is_sparse:  # broadcasts of what there is
        given, taken = counts * others, counts.sum() - counts
    else:  # all-gathers of parts as long as the longest
        given = taken = torch.full_like(counts, max(exchange.counts) * others)
    if exchange.is_replicated:
        zeros, entries = torch.zeros_like(counts), math.prod(exchange.unit_shape) * cargo.update + cargo.factors
        return Traffic(zeros, zeros, entries * given, entries * taken)
    # A gather stays within a copy of the parameters, a scatter reaches all of them.
    return Traffic(
        gather_sent=pieces * (per_key(counts, copies) - counts) * cargo.direction,
        gather_received=counts * (per_key(pieces, copies) - pieces) * cargo.direction,
        scatter_sent=counts * (pieces.sum() - pieces) * cargo.update + cargo.factors * given,
        scatter_received=pieces * (counts.sum() - counts) * cargo.update + cargo.factors * taken,
    )


def piece_numels(exchange: Exchange) -> Tensor:
    """Return the entries of each rank's piece of a unit, (ranks,) int64."""
    return torch.tensor([0 if piece is None else numel_of(piece) for piece in exchange.pieces])


def per_key(values: Tensor, keys: Tensor) -> Tensor:
    """Return for each position the sum of the values whose keys, whole numbers from 0, are that position's."""
    sums = torch.zeros(int(keys.max()) + 1, dtype=values.dtype).index_add_(0, keys, values)
    return sums[keys]
