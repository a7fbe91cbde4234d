"""How a step's large messages travel among the ranks of a process group: here as collectives of its backend.

`copy_engines.py` has the other way. Both send the same bytes to the same places, so that a step has the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quintic.optim.comms.collectives import (
    Pending,
    ProcessGroup,
    group_ranks,
    start_all_gather,
    start_all_to_all,
    start_broadcasts,
    this_rank,
)

__all__ = ["Channel", "Route"]


@dataclass(frozen=True)
class Route:
    """How many entries each rank sends to each in an all-to-all.

    Attributes:
        num_ranks: of the process group.
        position: of this rank among them.
        amount: returns how many entries one rank sends to another, given their positions; what each receives is in the
            order of those who send it.
    """

    num_ranks: int
    position: int
    amount: Callable[[int, int], int]

    @cached_property
    def sends(self) -> list[int]:
        """Return how many entries this rank sends to each."""
        return [self.amount(self.position, rank) for rank in range(self.num_ranks)]

    @cached_property
    def receives(self) -> list[int]:
        """Return how many entries this rank receives from each."""
        return [self.amount(rank, self.position) for rank in range(self.num_ranks)]

    @cached_property
    def places(self) -> list[int]:
        """Return where on each rank, in all that it receives, this rank's entries begin."""
        return [sum(self.amount(i, rank) for i in range(self.position)) for rank in range(self.num_ranks)]

    @cached_property
    def most(self) -> int:
        """Return how many entries that rank receives which receives most."""
        ranks = range(self.num_ranks)
        return max(sum(self.amount(i, j) for i in ranks) for j in ranks)


class Channel:
    """Sends messages among the ranks of a process group, as its collectives.

    Args:
        group: the process group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        ranks = group_ranks(group)
        self.group, self.num_ranks, self.position = group, len(ranks), ranks.index(this_rank())

    def is_for(self, device: torch.device) -> bool:
        """Return whether it can send messages of a device."""
        return True

    @property
    def num_bytes(self) -> int:
        """Return how much memory this rank keeps for messages."""
        return 0

    @contextmanager
    def messages(self) -> Iterator[None]:
        """Let the messages of a step be sent within. All ranks of the group must enter it."""
        yield

    def mark_end(self) -> None:
        """Say that a step was started that is not within `messages`: replayed from a CUDA graph."""

    def all_to_all(self, send: Tensor, route: Route, own: bool = True) -> Pending:
        """Start to send a run of entries to each rank. All ranks of the group must call it.

        Args:
            send: contiguous, any shape; its entries are sent in order.
            route: how many of them each rank gets.
            own: whether this rank's own part is needed in what is received; if not, see `Pending.lacks_own`.
        """
        return start_all_to_all(send, route.sends, route.receives, self.group)

    def all_gather(self, send: Tensor, out: Tensor | None = None, own: bool = True) -> Pending:
        """Start to collect a tensor of one shape from every rank, along its first dimension. All ranks must call it.

        Args:
            send: contiguous; may be this rank's own part of `out`.
            out: (num_ranks * first size, ...) contiguous, where everything is received; None for memory of the channel.
            own: likewise, without `out`.
        """
        return start_all_gather(send, self.num_ranks, self.group, out)

    def broadcasts(self, rows: Tensor, counts: Sequence[int]) -> Pending:
        """Start to give every rank the rows of a tensor that each rank has. All ranks of the group must call it.

        Args:
            rows: contiguous; of each rank in turn its rows, right where they are its own, filled in elsewhere.
            counts: how many rows each rank has.
        """
        return start_broadcasts(rows, counts, self.group)
