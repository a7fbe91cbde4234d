"""Copies that are made as late, or as early, as their order allows: what a stream may do.

`DelayedCopies` do so on a CPU. Everything computed is over when its call returns. Copies wait in their queues: with
`"late"` until they are waited for, with `"early"` only for the events they are told to wait for, with a
random generator for something between. A missing event then gives wrong numbers, and not just rarely. Memory of the
device holds NaN until something is loaded, and again once it is stored.

`SlowCopies` are those of a CUDA device, with one of its queues kept busy.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintic.optim.step.offload.transfers import Copies

__all__ = ["DelayedCopies", "SlowCopies"]

# About a tenth of a millisecond.
_CYCLES = 200_000


class Event(NamedTuple):
    """The end of the copies that were queued before it."""

    queue: "Queue"
    length: int

    @property
    def is_over(self) -> bool:
        return self.queue.done >= self.length

    def force(self) -> None:
        while not self.is_over:
            self.queue.advance(force=True)


class Queue:
    """Copies in order, each with the events that it waits for."""

    def __init__(self) -> None:
        self.entries: list[tuple[Sequence[Event], Callable[[], None]]] = []
        self.done = 0

    def add(self, after: Sequence[Event], copy: Callable[[], None]) -> Event:
        self.entries.append((after, copy))
        return Event(self, len(self.entries))

    def advance(self, force: bool = False) -> bool:
        """Make the next copy if it may be made; `force` makes what it waits for first. Returns whether it was made."""
        if self.done == len(self.entries):
            return False
        after, copy = self.entries[self.done]
        for event in after:
            if force:
                event.force()
            elif not event.is_over:
                return False
        copy()
        self.done += 1
        return True


class DelayedCopies:
    """See `quintic.optim.step.offload.transfers.Copies`.

    Args:
        policy: `"late"`, `"early"`, or a generator that decides.
    """

    def __init__(self, policy: str | random.Random) -> None:
        self._policy = policy
        self._loads, self._stores = Queue(), Queue()
        self.stored: Any = None
        self.log: list[tuple[str, int]] = []
        """("load" or "store", address in device memory) in the order in which they were asked for."""
        self.allocated = 0

    def allocate(self, num_bytes: int) -> Tensor:
        self.allocated += num_bytes
        return torch.full((num_bytes,), 255, dtype=torch.uint8, device="cpu")

    def load(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Any]) -> Any:
        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        self.log.append(("load", targets[0].data_ptr()))
        return self._queued(self._loads, [event for event in after if event is not None], copy)

    def store(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
                source.view(torch.uint8).fill_(255)

        self.log.append(("store", sources[0].data_ptr()))
        self.stored = self._queued(self._stores, [], copy)
        return self.stored

    def mark(self) -> Any:
        return None

    def wait(self, event: Any) -> None:
        if event is not None:
            event.force()

    def finish(self) -> None:
        while self._stores.advance(force=True):
            pass

    def _queued(self, queue: Queue, after: Sequence[Event], copy: Callable[[], None]) -> Event:
        event = queue.add(after, copy)
        queues = [self._loads, self._stores]
        if self._policy == "early":
            while self._loads.advance() or self._stores.advance():
                pass
        elif isinstance(self._policy, random.Random):
            for _ in range(self._policy.randrange(4)):
                self._policy.choice(queues).advance()
        return event


class SlowCopies(Copies):
    """Copies on streams, late in one of the queues.

    Args:
        device: a CUDA device.
        slow: `"loads"`, `"stores"`, `"computing"` or nothing.
    """

    def __init__(self, device: torch.device, slow: str) -> None:
        super().__init__(device)
        self._slow = slow
        self.log: list[tuple[str, int]] = []
        """As that of `DelayedCopies`."""

    def load(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Any]) -> Any:
        self.log.append(("load", targets[0].data_ptr()))
        if self._slow == "loads":
            with torch.cuda.stream(self._loads):
                torch.cuda._sleep(_CYCLES)
        event = super().load(targets, sources, after)
        if self._slow == "computing":
            torch.cuda._sleep(_CYCLES)
        return event

    def store(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        self.log.append(("store", sources[0].data_ptr()))
        if self._slow == "stores":
            with torch.cuda.stream(self._stores):
                torch.cuda._sleep(_CYCLES)
        return super().store(targets, sources)
