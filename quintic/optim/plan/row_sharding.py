"""The rows of a table that ranks send each other under `comms="sharded_sparse"`: arithmetic, no communication.

A rank says which rows it touches with one byte for each row of the table, its marks. Every owner is sent the marks of
its own rows. That is a message of a fixed size, so that no host has to know a number first; and marks tell everything
else. The rows that a rank sends follow in ascending order, so that what an owner receives is, rank by rank, the marked
rows in ascending order:

    owner's rows       0  1  2  3  4        received    rows of rank 0   rows of rank 1
    marks of rank 0    0  1  0  0  1                       1  4             1  2  3
    marks of rank 1    0  1  1  1  0        places of rank 0    .  0  .  .  1
                                            places of rank 1    .  2  3  4  .
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels
from quintic.optim.layout.packing import mean_in_order
from quintic.optim.state.shards import StateShard

__all__ = ["MARK_BYTES", "RowSharding", "mean_of_rows", "places_of", "rows_to_send", "sharded_rows", "touched_rows"]

MARK_BYTES = 32
"""Temporary memory for each row of a table, at most: marks, and what follows from them."""

# Smaller tables, and shorter rows, always travel whole: finding rows costs more than it saves.
_LEAST_BYTES = 2**22
_LEAST_ROW_BYTES = 64

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class RowSharding:
    """How the rows of one table are divided among its owners: in order, equally many each, the last ones less."""

    num_rows: int
    row_size: int
    """Entries of a row."""
    rows_per_rank: int
    num_ranks: int

    @property
    def padded_rows(self) -> int:
        """Return the number of rows that there would be if all ranks had equally many; marks have this length."""
        return self.rows_per_rank * self.num_ranks

    def rows_of(self, position: int) -> int:
        """Return the number of rows that a rank owns."""
        return min(self.num_rows - position * self.rows_per_rank, self.rows_per_rank)

    def is_sparse(self, counts: Sequence[Sequence[int]]) -> bool:
        """Return whether sending touched rows is worth it: if no rank sends or receives more than half of all rows.

        What is sent and what is received then fit into the memory in which whole gradients arrive. They are sent from
        where they are, while touched rows are copied first: much is not lost. Counts are the rows that each rank sends
        to each owner, itself included.
        """
        sent = max(map(sum, counts))
        received = max(map(sum, zip(*counts, strict=True)))
        return 2 * max(sent, received) <= self.padded_rows


def sharded_rows(param: Tensor, shards: Sequence[StateShard], num_ranks: int) -> RowSharding | None:
    """Return how the rows of an AdamW parameter are divided; None if it always travels whole.

    Those are parameters of one dimension, with strides that are not row-major, of less than 4 MiB or with rows of less
    than 64 bytes, and those of which not every rank has whole rows: with fewer rows than ranks, or not many more.
    """
    if param.ndim < 2 or not param.is_contiguous() or param.numel() * param.element_size() < _LEAST_BYTES:
        return None
    if len(shards) != num_ranks:
        return None
    row_size, size = param.numel() // param.shape[0], shards[0].numel
    if row_size * param.element_size() < _LEAST_ROW_BYTES or size % row_size:
        return None
    if any(shard.start != shard.owner * size for shard in shards):
        return None
    return RowSharding(param.shape[0], row_size, size // row_size, num_ranks)


def touched_rows(gradient: Tensor) -> Tensor:
    """Return (rows,) bool: the rows of a contiguous gradient with a bit set.

    Minus zero counts, it may survive a sum.
    """
    return gradient.view(_INTEGERS[gradient.element_size()]).flatten(1).any(1)


def rows_to_send(marks: Tensor, count: int) -> Tensor:
    """Return the marked rows in ascending order, (count,) int64. Does not wait for the device.

    Marks are (rows,) uint8, and so many of them are 1.
    """
    numbers = torch.arange(marks.numel(), device=marks.device)
    # What is not marked is written behind the end.
    places = torch.where(marks != 0, marks.cumsum(0) - 1, count)
    return torch.empty(count + 1, dtype=torch.int64, device=marks.device).scatter_(0, places, numbers)[:count]


def places_of(marks: Tensor) -> Tensor:
    """Return the places of each rank's rows among those that an owner receives, (ranks, rows) int32; -1 for no place.

    Marks, (ranks, rows) uint8, say which of the owner's rows each rank sends.
    """
    flat = marks.flatten()
    return torch.where(flat != 0, flat.cumsum(0, dtype=torch.int32) - 1, -1).view(marks.shape)


def mean_of_rows(received: Tensor, places: Tensor, kernels: Kernels) -> Tensor:
    """Return the mean over ranks of an owner's rows, (rows, row size): what is missing counts as zeros.

    The bits are those of `packing.mean_of_ranks` with the zeros written out. Rows received are (rows received, row
    size) contiguous, places from `places_of`.
    """
    shape = (places.shape[1], received.shape[1])
    if kernels == "triton":
        from quintic.kernels.update.row_means import mean_of_rows_

        return mean_of_rows_(received, places, received.new_empty(shape))
    mean = received.new_zeros(shape)
    touched = (places >= 0).any(0).nonzero().squeeze(1)
    if touched.numel():
        mean[touched] = mean_in_order(_rows_by_rank(received, places[:, touched]), mean[touched])
    return mean


def _rows_by_rank(received: Tensor, places: Tensor) -> Iterator[Tensor]:
    for of_rank in places:
        yield received[of_rank.clamp(min=0)].masked_fill_((of_rank < 0).unsqueeze(1), 0.0)
