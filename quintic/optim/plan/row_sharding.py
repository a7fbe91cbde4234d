"""The rows of an embedding table that ranks send each other with `comms="sharded_sparse"`: arithmetic, no messages.

A rank marks the rows that it touches with one byte per row of the table, and sends every owner the marks of its rows.
This message has a fixed size, so that no host must know a number before it is sent, and the marks determine everything
that follows: each rank sends its marked rows in ascending order, so an owner receives the marked rows of rank 0, then
the marked rows of rank 1, and so on:

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
"""Upper bound of the temporary memory for each row of a table: marks, and numbers that are computed from them."""

# Smaller tables, and tables with shorter rows, are always sent whole: finding rows would cost more than it saves.
_LEAST_BYTES = 2**22
_LEAST_ROW_BYTES = 64

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class RowSharding:
    """How the rows of a table are sharded: consecutive rows for each owner, equally many except for the last ones."""

    num_rows: int
    row_size: int
    """Entries of a row."""
    rows_per_rank: int
    num_ranks: int

    @property
    def padded_rows(self) -> int:
        """Return the number of rows if all ranks had equally many, which is the length of marks."""
        return self.rows_per_rank * self.num_ranks

    def rows_of(self, position: int) -> int:
        """Return the number of rows that a rank owns."""
        return min(self.num_rows - position * self.rows_per_rank, self.rows_per_rank)

    def is_sparse(self, counts: Sequence[Sequence[int]]) -> bool:
        """Return whether touched rows are sent instead of all: if no rank sends or receives more than half of the rows.

        `counts[r][o]` is the number of rows that rank r sends to owner o, itself included.
        """
        # Half, because the rows sent and received then fit into the memory that whole gradients would arrive in. Little
        # is lost near the limit: touched rows must be copied first, while whole gradients are sent from their memory.
        sent = max(map(sum, counts))
        received = max(map(sum, zip(*counts, strict=True)))
        return 2 * max(sent, received) <= self.padded_rows


def sharded_rows(param: Tensor, shards: Sequence[StateShard], num_ranks: int) -> RowSharding | None:
    """Return how the rows of an AdamW parameter are sharded; None if it is always sent whole.

    Always whole are parameters of one dimension, with strides that are not row-major, of less than 4 MiB, with rows of
    less than 64 bytes, or with too few rows for every rank to own some.
    """
    if param.ndim < 2 or not param.is_contiguous() or param.numel() * param.element_size() < _LEAST_BYTES:
        return None
    # One shard per rank, of equally many whole rows, in the order of the ranks.
    if len(shards) != num_ranks:
        return None
    row_size, size = param.numel() // param.shape[0], shards[0].numel
    if row_size * param.element_size() < _LEAST_ROW_BYTES or size % row_size:
        return None
    if any(shard.start != shard.owner * size for shard in shards):
        return None
    return RowSharding(param.shape[0], row_size, size // row_size, num_ranks)


def touched_rows(gradient: Tensor) -> Tensor:
    """Return (rows,) bool: the rows of a contiguous (rows, ...) gradient in which any bit is set."""
    # Compared as integers, so that a minus zero counts: it may survive a sum.
    return gradient.view(_INTEGERS[gradient.element_size()]).flatten(1).any(1)


def rows_to_send(marks: Tensor, count: int) -> Tensor:
    """Return the numbers of the marked rows in ascending order, (count,) int64. Does not wait for the device.

    `marks` is (rows,) uint8, with `count` ones.
    """
    numbers = torch.arange(marks.numel(), device=marks.device)
    # Scatter row numbers to their rank among the marked ones; unmarked rows all go to an extra place at the end.
    places = torch.where(marks != 0, marks.cumsum(0) - 1, count)
    return torch.empty(count + 1, dtype=torch.int64, device=marks.device).scatter_(0, places, numbers)[:count]


def places_of(marks: Tensor) -> Tensor:
    """Return the position of each rank's rows among the rows that an owner receives, (ranks, rows) int32; -1 for none.

    `marks` is (ranks, rows) uint8: which of the owner's rows each rank sends.
    """
    # Rows arrive rank by rank, so a row's position is the number of marks before it in the flattened marks.
    flat = marks.flatten()
    return torch.where(flat != 0, flat.cumsum(0, dtype=torch.int32) - 1, -1).view(marks.shape)


def mean_of_rows(received: Tensor, places: Tensor, kernels: Kernels) -> Tensor:
    """Return the mean over ranks of an owner's rows, (rows, row size); rows that a rank did not send count as zeros.

    The bits are the same as of `packing.mean_of_ranks` with the zeros written out.

    Args:
        received: (rows received, row size) contiguous, rank by rank.
        places: (ranks, rows) from `places_of`.
        kernels: implementation.
    """
    shape = (places.shape[1], received.shape[1])
    if kernels == "triton":
        from quintic.kernels.update.row_means import mean_of_rows_

        return mean_of_rows_(received, places, received.new_empty(shape))
    # Only rows that some rank sent; the others are zero.
    mean = received.new_zeros(shape)
    touched = (places >= 0).any(0).nonzero().squeeze(1)
    if touched.numel():
        mean[touched] = mean_in_order(_rows_by_rank(received, places[:, touched]), mean[touched])
    return mean


def _rows_by_rank(received: Tensor, places: Tensor) -> Iterator[Tensor]:
    # One rank's (rows, row size) at a time, with zeros for rows that it did not send.
    for of_rank in places:
        yield received[of_rank.clamp(min=0)].masked_fill_((of_rank < 0).unsqueeze(1), 0.0)
