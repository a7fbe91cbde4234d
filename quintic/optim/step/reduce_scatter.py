"""One message of gradients to the owners of their entries, and one of the owners' entries back to all ranks.

    gradients            -> the owners of their entries    as in a reduce-scatter
    mean                 summed in the order of the ranks, in float32 or wider, divided and rounded once
    averages or weights  -> all ranks                      as in an all-gather

The bits of a mean are the same on all ranks and in every layout; a library's own reduction promises neither.
`reduction.py` says which gradients are averaged, and when.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels
from quintic.optim.comms.collectives import ProcessGroup, start_all_gather, start_all_to_all, start_broadcasts
from quintic.optim.layout.packing import MemorySpan, Packing, in_memory_order, mean_of_ranks

__all__ = ["ReduceScatter", "evenly_owned"]

# From this number of entries on a tensor is sent from its own memory, and received there. Smaller ones are packed into
# one buffer.
_LEAST_DIRECT = 2**24

# The most entries of one message: while the gradients of one are added up, the next is under way.
_MOST_TOGETHER = 2**25

# In a packed message each rank's entries begin at a multiple of this number: an alignment that suits every kernel.
_MULTIPLE = 64

# (Index of the tensor, start, stop): a range of its entries in the order of memory.
Entries = tuple[int, int, int]


class ReduceScatter:
    """The plan of two messages: gradients to the owners of their entries, and the owners' entries to all ranks.

    Args:
        owned: for each rank the entries that it owns, of dense tensors.
        position: this rank's place among them.
        dtype: of the messages.
        device: where the tensors are.
        kernels: implementation of packing and of sums.
        is_direct: whether the entries are one whole tensor, in order: then nothing is packed.
    """

    def __init__(
        self,
        owned: Sequence[Sequence[Entries]],
        position: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        *,
        is_direct: bool = False,
    ) -> None:
        self._dtype, self._device, self._kernels = dtype, device, kernels
        self.is_direct, self._position = is_direct, position
        # The number of entries that each rank owns.
        self.counts = [sum(stop - start for _, start, stop in entries) for entries in owned]
        # The number of entries of the rank that owns most.
        self.most = max(self.counts)
        counts = self.counts
        # This rank's entries within one tensor that is sent from its own memory.
        self._own = slice(sum(counts[:position]), sum(counts[: position + 1]))

        # The copy plans of three buffers: all entries in the order of their owners; this rank's entries; the entries of
        # the other ranks, each rank's padded to the longest, as an all-gather delivers them.
        def packing(owners: Iterable[int], starts: Sequence[int]) -> Packing:
            spans = []
            for owner in owners:
                place = starts[owner]
                for tensor, start, stop in owned[owner]:
                    spans.append(MemorySpan(tensor, start, stop, place))
                    place += stop - start
            return Packing(spans, kernels, device)

        all_ranks = range(len(counts))
        self._to_owners = packing(all_ranks, list(accumulate(counts, initial=0)))
        self._of_own = packing([position], [0] * len(counts))
        self._of_others = packing([rank for rank in all_ranks if rank != position], [r * self.most for r in all_ranks])

    def start_mean(
        self, gradients: Sequence[Tensor | None], group: ProcessGroup, out: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """Send gradients, None standing for zeros, to the owners; wait for the mean of this rank's entries, (entries,).

        All ranks must call it. The mean is written to `out`, contiguous, or to new memory.
        """
        dtypes = {gradient.dtype for gradient in gradients if gradient is not None}
        # Packing reads tensors of one dtype.
        if len(dtypes) > 1:
            gradients = [None if gradient is None else gradient.to(self._dtype) for gradient in gradients]
        # A direct tensor is sent from its own memory, if this rank has it.
        if self.is_direct and gradients[0] is not None:
            send = in_memory_order(gradients[0]).to(self._dtype)
        else:
            send = torch.empty(sum(self.counts), dtype=self._dtype, device=self._device)
            self._to_owners.pack(gradients, send)
        counts, own = self.counts, self.counts[self._position]
        pending = start_all_to_all(send, counts, [own] * len(counts), group)
        del send  # the message frees it when it has arrived

        return lambda: mean_of_ranks(pending.wait().view(len(counts), own), self._kernels, out)

    def start_all_gather(
        self, tensors: Sequence[Tensor], group: ProcessGroup, own: Tensor | None = None
    ) -> Callable[[], None]:
        """Send this rank's entries to all ranks; wait for the entries of the others, in the tensors.

        All ranks must call it. `own`, (entries,), is copied into the tensors and sent; without it, and with
        `is_direct`, the tensors have these entries already.
        """
        num_ranks = len(self.counts)
        if self.is_direct:
            whole = in_memory_order(tensors[0])
            # The tensor's own memory is sent and received: padding would need a copy, so uneven ranks broadcast.
            if min(self.counts) == self.most:
                pending = start_all_gather(whole[self._own], num_ranks, group, whole)
            else:
                pending = start_broadcasts(whole, self.counts, group)
        else:
            if own is None:
                own = torch.empty(self.most, dtype=self._dtype, device=self._device)
                self._of_own.pack(tensors, own)
            else:
                self._of_own.unpack(own, tensors)
                # An all-gather takes equally many entries of every rank.
                if len(own) < self.most:
                    own = torch.nn.functional.pad(own, (0, self.most - len(own)))
            pending = start_all_gather(own, num_ranks, group)

        def finish() -> None:
            received = pending.wait()
            if not self.is_direct:
                self._of_others.unpack(received, tensors)

        return finish

    def average(self, tensors: Sequence[Tensor], group: ProcessGroup) -> Iterator[None]:
        """Average tensors in place; yields twice, while a message is under way. All ranks must call it."""
        # The mean of a tensor that is sent directly is written where this rank's entries are.
        own = in_memory_order(tensors[0])[self._own] if self.is_direct else None
        wait_for_mean = self.start_mean(tensors, group, own)
        yield
        mean = wait_for_mean()
        del wait_for_mean  # and the gradients that were sent
        wait_for_others = self.start_all_gather(tensors, group, mean)
        del mean
        yield
        wait_for_others()


def evenly_owned(
    numels: Sequence[int],
    num_ranks: int,
    position: int,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    *,
    limit: int | None,
) -> Iterator[tuple[ReduceScatter, list[int]]]:
    """Yield messages, each with the indices of its tensors; every rank owns equally many entries of a message.

    Args:
        numels: the number of entries of each tensor.
        num_ranks: the number of owners.
        position: this rank's place among them.
        dtype: as for `ReduceScatter`, like `device` and `kernels`.
        device: where the tensors are.
        kernels: implementation of packing and of sums.
        limit: the most entries of one message, None for any number; a single tensor may exceed it.
    """
    limit = _MOST_TOGETHER if limit is None else max(1, min(limit, _MOST_TOGETHER))
    direct = [n for n, numel in enumerate(numels) if numel >= _LEAST_DIRECT and numel % num_ranks == 0]
    # Large tensors whose entries divide evenly are messages of their own; the others are packed together.
    for number in direct:
        owned = _evenly_divided([numels[number]], num_ranks, 1)
        yield ReduceScatter(owned, position, dtype, device, kernels, is_direct=True), [number]
    for numbers in _gradient_chunks(sorted({*range(len(numels))} - {*direct}), numels, limit):
        owned = _evenly_divided([numels[number] for number in numbers], num_ranks, _MULTIPLE)
        yield ReduceScatter(owned, position, dtype, device, kernels), numbers


def _gradient_chunks(numbers: Sequence[int], numels: Sequence[int], limit: int) -> Iterator[list[int]]:
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


def _evenly_divided(numels: Sequence[int], num_ranks: int, multiple: int) -> list[list[Entries]]:
    """Return the entries that each rank owns of some tensors, one after the other.

    Every rank owns equally many, a multiple of `multiple`; the last ranks own the rest, or nothing.
    """
    # Entries of each rank, rounded up to the alignment.
    size = -(-sum(numels) // (num_ranks * multiple)) * multiple
    starts = list(accumulate(numels, initial=0))

    def between(first: int, last: int) -> Iterator[Entries]:
        for number, (start, stop) in enumerate(pairwise(starts)):
            # The entries of tensor `number` between `first` and `last`, counted within the tensor.
            if max(start, first) < min(stop, last):
                yield number, max(start, first) - start, min(stop, last) - start

    return [list(between(rank * size, (rank + 1) * size)) for rank in range(num_ranks)]
