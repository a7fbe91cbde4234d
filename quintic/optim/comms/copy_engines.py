"""Messages that GPUs of one host write into each other's memory, by their copy engines, beside the multiprocessors.

Collectives of NCCL are kernels: they take multiprocessors from the work that they should be hidden behind, and wait for
those that it holds. Copies between GPUs need none. Each rank has memory that all others write to; in it a message has a
place, the same on all ranks, until the work that reads it was started. Nobody waits on a host. On the devices

- all ranks meet when a step begins: from then on what nobody has written to yet is free everywhere. A message whose
  place was another one's before waits until the ranks have met again;
- the copies of a message run on a stream of their own, and who receives them is told by flags;
- the step's stream waits for these flags where it needs the message.

How much memory a step needs is what the step before asked for: the first step sends collectives.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.optim.comms.channels import Channel, Route
from quintic.optim.comms.collectives import Pending, ProcessGroup
from quintic.optim.comms.peer_memory import MOST_MESSAGES, PeerMemory
from quintic.optim.rules.device_memory import is_capturing

__all__ = ["CopyEngines", "Slots"]

# Places begin at multiples of so many bytes, as those of PyTorch's own allocations.
_ALIGNMENT = 512


class Slots:
    """Places in a memory, dealt out by the same rule on all ranks: the first gap that is large enough.

    Attributes:
        needed: bytes of a memory in which all places dealt out so far would have fitted.
    """

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []
        self._used: list[tuple[int, int]] = []
        self.needed = 0

    def take(self, num_bytes: int) -> tuple[int, bool]:
        """Return where a place begins that nobody has, and whether somebody had a part of it since `renew`."""
        size = max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
        start = 0
        for first, end in self._taken:
            if first - start >= size:
                break
            start = max(start, end)
        end = start + size
        self._taken = sorted([*self._taken, (start, end)])
        self.needed = max(self.needed, end)
        return start, any(first < end and start < last for first, last in self._used)

    def give_back(self, start: int) -> None:
        """Let others have the place that begins there."""
        self._used += [place for place in self._taken if place[0] == start]
        self._taken = [place for place in self._taken if place[0] != start]

    def renew(self) -> None:
        """Forget who had what is free now."""
        self._used = []

    def clear(self) -> None:
        """Take all places back."""
        self._taken = []
        self.renew()


class _Delivery(NamedTuple):
    """Bytes for a rank, by its position: where they go in its memory, where they are in what is sent, and how many."""

    rank: int
    start: int
    first: int
    num_bytes: int


class CopyEngines(Channel):
    """Sends messages by the copy engines of the ranks' GPUs, which are on one host.

    Args:
        group: the process group; its collectives send what has no place.
        device: of the messages.
        open_memory: makes the memory that ranks write to, given its bytes, the process group and the device; all ranks
            call it.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        open_memory: Callable[[int, ProcessGroup, torch.device], PeerMemory] = PeerMemory,
    ) -> None:
        super().__init__(group)
        self.device, self._open_memory = device, open_memory
        self._memory: PeerMemory | None = None
        self._slots = Slots()
        self._num_messages = 0
        self._is_even = True
        """Whether the ranks have met an even number of times: a CUDA graph is replayed as it was captured."""
        self._is_open = False

    def is_for(self, device: torch.device) -> bool:
        """Return whether messages are on the device whose copy engines send them."""
        return device == self.device

    @property
    def num_bytes(self) -> int:
        """Return how much memory this rank keeps for messages."""
        return 0 if self._memory is None else self._memory.num_bytes

    def without_memory(self) -> "CopyEngines":
        """Return a channel of the same ranks that has no memory yet."""
        return CopyEngines(self.group, self.device, self._open_memory)

    @contextmanager
    def messages(self) -> Iterator[None]:
        """Let the messages of a step be sent within. All ranks of the group must enter it.

        Raises:
            RuntimeError: the ranks cannot reach each other's memory, or have too little; raised on all of them.
        """
        self._begin()
        yield
        # Not after an error: nobody knows who sent what.
        self._end()

    def _begin(self) -> None:
        self._slots.clear()
        self._num_messages = 0
        capturing = is_capturing(self.device)
        if self._is_open and self._memory is not None:
            self._memory.reset()
            self._is_even = True
        self._is_open = True
        if self._slots.needed > self.num_bytes and not capturing:
            if self._memory is not None:
                self._memory.close()
                self._memory = None
            self._memory = self._open_memory(self._slots.needed, self.group, self.device)
        if self._memory is not None:
            self._meet(self._memory)

    def _end(self) -> None:
        self._is_open = False
        if self._memory is None:
            return
        if not self._is_even:
            self._meet(self._memory)
        if is_capturing(self.device):
            self._memory.join()
        else:
            self._memory.mark_end()

    def mark_end(self) -> None:
        """See `PeerMemory.mark_end`; for steps that were captured and are replayed."""
        if self._memory is not None:
            self._memory.mark_end()

    def _meet(self, memory: PeerMemory) -> None:
        """Let copies wait until all ranks have come here: whatever is free now is so on all of them."""
        memory.follow()
        memory.meet(0 if self._is_even else 1)
        self._is_even = not self._is_even
        self._slots.renew()

    def all_to_all(self, send: Tensor, route: Route, own: bool = True) -> Pending:
        """Start to send a run of entries to each rank, see `Channel.all_to_all`."""
        place, memory = self._place(route.most * send.itemsize)
        if memory is None:
            return super().all_to_all(send, route).released_by(self._release(place))
        received = memory.tensor(place, sum(route.receives), send.dtype)
        first = 0
        messages: list[_Delivery] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for rank, (count, start) in enumerate(zip(route.sends, route.places, strict=True)):
            if rank != self.position:
                width = send.itemsize
                messages.append(_Delivery(rank, place + start * width, first * width, count * width))
            elif own and count:
                copies.append((received[start : start + count], send.view(-1)[first : first + count]))
            first += count
        return self._start(memory, place, send, messages, received, copies, own)

    def all_gather(self, send: Tensor, out: Tensor | None = None, own: bool = True) -> Pending:
        """Start to collect a tensor of one shape from every rank, see `Channel.all_gather`."""
        place, memory = self._place(self.num_ranks * send.nbytes)
        if memory is None:
            return super().all_gather(send, out).released_by(self._release(place))
        shape = (self.num_ranks * send.shape[0], *send.shape[1:])
        received = memory.tensor(place, self.num_ranks * send.numel(), send.dtype).view(shape)
        return self._to_everybody(memory, place, send, [send.shape[0]] * self.num_ranks, received, out, own)

    def broadcasts(self, rows: Tensor, counts: Sequence[int]) -> Pending:
        """Start to give every rank the rows of a tensor that each rank has, see `Channel.broadcasts`."""
        place, memory = self._place(rows.nbytes)
        if memory is None:
            return super().broadcasts(rows, counts).released_by(self._release(place))
        received = memory.tensor(place, rows.numel(), rows.dtype).view(rows.shape)
        own = rows[sum(counts[: self.position]) :][: counts[self.position]]
        return self._to_everybody(memory, place, own, counts, received, rows, False)

    def _to_everybody(
        self,
        memory: PeerMemory,
        place: int,
        send: Tensor,
        counts: Sequence[int],
        received: Tensor,
        out: Tensor | None,
        own: bool,
    ) -> Pending:
        """Send this rank's rows to all others; what arrives goes on to `out`, which has them already."""
        start = place + sum(counts[: self.position]) * received[:1].nbytes
        ranks = [rank for rank in range(self.num_ranks) if rank != self.position]
        messages = [_Delivery(rank, start, 0, send.nbytes) for rank in ranks]
        parts = received.split(list(counts))
        if out is None:
            copies = [(parts[self.position], send)] if own else []
            return self._start(memory, place, send, messages, received, copies, own)
        targets = out.split(list(counts))
        return self._start(memory, place, send, messages, out, [(targets[rank], parts[rank]) for rank in ranks])

    def _start(
        self,
        memory: PeerMemory,
        place: int,
        send: Tensor,
        messages: Sequence[_Delivery],
        received: Tensor,
        copies: Sequence[tuple[Tensor, Tensor]],
        own: bool = True,
    ) -> Pending:
        """Start copies to other ranks. Once theirs are here, `copies` are made: pairs of target and source."""
        number = self._num_messages
        self._num_messages += 1
        # Each begins with another one, so that nobody receives from all at a time.
        in_turn = sorted(messages, key=lambda message: (message.rank - self.position) % self.num_ranks)
        memory.follow()
        for message in in_turn:
            memory.write(message.rank, message.start, message.first, message.num_bytes, send)
            memory.tell(message.rank, number)
        arrival = _Arrived(memory.arrival(number), copies)
        return Pending(arrival, received, send, lacks_own=not own).released_by(self._release(place))

    def _place(self, num_bytes: int) -> tuple[int, PeerMemory | None]:
        """Return where a message goes, and the memory; None where it has no place for it."""
        place, was_used = self._slots.take(num_bytes)
        memory = self._memory
        if memory is None or place + num_bytes > memory.num_bytes or self._num_messages >= MOST_MESSAGES:
            return place, None
        if was_used:
            self._meet(memory)
        return place, memory

    def _release(self, place: int) -> Callable[[], None]:
        return lambda: self._slots.give_back(place)


class _Arrived:
    """A message to wait for, and what is to be copied then, which needs multiprocessors: on the stream that waits."""

    def __init__(self, arrival: Callable[[], None], copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._arrival, self._copies = arrival, copies

    def wait(self) -> None:
        """Let the current stream wait for it."""
        self._arrival()
        for target, source in self._copies:
            target.copy_(source)
