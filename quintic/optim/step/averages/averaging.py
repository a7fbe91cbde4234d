"""Averages of gradients that differ among ranks: of whole tensors in place, or on the way to those who own a part.

Averages are sums in the order of the ranks, in float32, divided and rounded once: the same on all ranks and in every
layout, whatever a library's own reduction would do. All entries travel once to the rank that adds them up, as in a
reduce-scatter, and `"replicated"` sends the sums back, as in an all-gather.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from quintic.kernels.dispatch import Kernels
from quintic.optim.comms.channels import Channel, Route
from quintic.optim.layout.packing import Packing, Run, in_memory_order
from quintic.optim.plan.schedule import run_overlapping
from quintic.optim.rules.means import mean_of_ranks

__all__ = [
    "Averaging",
]

# Tensors with at least so many entries travel from where they are and back; smaller ones together, as a copy.
_LEAST_ALONE = 2**24

# Entries that travel together, at most: while some are added up, others are under way.
_MOST_TOGETHER = 2**25


class _Message(NamedTuple):
    """Tensors that travel together."""

    numbers: list[int]
    numel: int
    route: Route
    """Of the parts that ranks add up, to these."""
    packing: Packing | None
    """None for a single tensor, which travels from where it is and back."""


class Averaging:
    """Replaces tensors by their means over ranks, the same bits on all of them.

    Args:
        tensors: examples of one dtype and device: dense, with the shapes of those to come.
        num_ranks: how many ranks average.
        position: of this rank among them.
        kernels: implementation.
        max_workspace_bytes: bound of what is under way at a time (a single tensor may exceed it); None for none.
        elsewhere: whether what is received comes into memory that is kept, see `copy_engines.py`.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        num_ranks: int,
        position: int,
        kernels: Kernels,
        max_workspace_bytes: int | None = None,
        *,
        elsewhere: bool = False,
    ) -> None:
        self._num_ranks, self._position, self._kernels, self._elsewhere = num_ranks, position, kernels, elsewhere
        self._itemsize, device = tensors[0].itemsize, tensors[0].device
        limit = _MOST_TOGETHER
        if max_workspace_bytes is not None:
            # Two neighbours with what is sent and what is received, a third before it is unpacked, and sums.
            limit = max(1, min(limit, max_workspace_bytes // (6 * self._itemsize)))
        numels = [tensor.numel() for tensor in tensors]
        alone = [n for n, numel in enumerate(numels) if numel >= _LEAST_ALONE and numel % num_ranks == 0]
        together = sorted({*range(len(numels))} - {*alone})

        def route(numel: int) -> Route:
            size = -(-numel // num_ranks)
            return Route(num_ranks, position, lambda _, __: size)

        self._messages = [_Message([number], numels[number], route(numels[number]), None) for number in alone]
        for numbers in _chunks(together, numels, limit):
            sizes = [numels[number] for number in numbers]
            starts = accumulate(sizes, initial=0)
            runs = [Run(n, 0, size, start) for n, (size, start) in enumerate(zip(sizes, starts, strict=False))]
            packing = Packing(runs, kernels, device)
            self._messages.append(_Message(numbers, sum(sizes), route(sum(sizes)), packing))

    @property
    def workspace_bytes(self) -> int:
        """Return an upper bound of the temporary bytes."""
        sizes = [-(-message.numel // self._num_ranks) for message in self._messages]
        received = [0 if self._elsewhere else size * self._num_ranks for size in sizes]
        # What is sent is a copy where tensors travel together, and stays until they are unpacked.
        found = zip(self._messages, sizes, strict=True)
        copied = [0 if message.packing is None else size * self._num_ranks for message, size in found]
        before = [0, *copied]
        after = [*map(sum, zip(received[1:], copied[1:], strict=True)), 0]
        under_way = max(map(sum, zip(received, copied, before, after, strict=False)), default=0)
        # Plain PyTorch's sums.
        width = 0 if self._kernels == "triton" else max(4, self._itemsize)
        return under_way * self._itemsize + max(sizes, default=0) * width

    def average_(self, tensors: Sequence[Tensor], channel: Channel) -> None:
        """Average tensors in place. All ranks of the group must call it.

        Args:
            tensors: as the examples.
            channel: of the ranks.
        """
        run_overlapping(
            [self._average(message, [tensors[n] for n in message.numbers], channel) for message in self._messages]
        )

    def _average(self, message: _Message, tensors: Sequence[Tensor], channel: Channel) -> Iterator[None]:
        """Average one message's tensors; yields twice, while a collective is under way."""
        packing = message.packing
        if packing is None:
            flat = in_memory_order(tensors[0])
        else:
            size = -(-message.numel // self._num_ranks)
            flat = tensors[0].new_empty(size * self._num_ranks)
            flat[message.numel :] = 0
            packing.pack(tensors, flat)
        size = flat.numel() // self._num_ranks
        pending = channel.all_to_all(flat, message.route, own=False)
        yield
        own = flat[self._position * size : (self._position + 1) * size]
        received = pending.wait().view(self._num_ranks, size)
        mean_of_ranks(received, self._kernels, out=own, own=(self._position, own) if pending.lacks_own else None)
        del received
        pending.release()
        pending = channel.all_gather(own, out=flat)
        yield
        pending.wait()
        pending.release()
        if packing is not None:
            packing.unpack(flat, tensors)


def _chunks(numbers: Sequence[int], numels: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Yield which tensors travel together."""
    chunk: list[int] = []
    entries = 0
    for number in numbers:
        if chunk and entries + numels[number] > limit:
            yield chunk
            chunk, entries = [], 0
        chunk.append(number)
        entries += numels[number]
    if entries:
        yield chunk
