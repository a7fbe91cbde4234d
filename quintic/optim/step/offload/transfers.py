"""Copies between host and device beside the computation: queues, the order between them, and buffers taken in turns.

    loads      | load 1 | load 2 | load 3 | ...      host -> device, on a stream of their own
    computing           | use 1  | use 2  | ...      the current stream
    stores                       | store 1| ...      device -> host, on another one: buses carry both at once

A load is started before the use of the one before it, into a buffer whose last store is over. Nothing here knows what
is copied; `offload.py` does. Where there are no streams (CPUs), copies are made at once, in the same order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["BufferPool", "Copies", "TransferBatch"]

# Of tensors in a buffer, in bytes: what every dtype and kernel likes.
_ALIGNMENT = 256


class Copies:
    """A device's queues of copies: on CUDA devices on streams, elsewhere copies are over when the call returns.

    Events stand for what was queued before them; None for nothing to wait for. Tensors on the host are pinned where
    there is CUDA, or it waits for every copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_streams = device.type == "cuda"
        if self._has_streams:
            self._loads, self._stores = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.stored: Any = None
        """Event after all stores so far; None if they are over."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return (num_bytes,) uint8 on the device, for any of the queues."""
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        if self._has_streams:
            # It may have been something else's until now, and will be again.
            self._loads.wait_stream(torch.cuda.current_stream(self._device))
            for stream in (self._loads, self._stores):
                memory.record_stream(stream)
        return memory

    def load(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Any]) -> Any:
        """Start to copy to the device when the events are over; return the copies' event."""
        if not self._has_streams:
            _copy(targets, sources)
            return None
        for event in after:
            if event is not None:
                self._loads.wait_event(event)
        with torch.cuda.stream(self._loads):
            _copy(targets, sources)
        return self._loads.record_event()

    def store(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        """Start to copy to the host when everything computed so far is over; return the copies' event."""
        if not self._has_streams:
            _copy(targets, sources)
            return None
        self._stores.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stores):
            _copy(targets, sources)
        self.stored = self._stores.record_event()
        return self.stored

    def mark(self) -> Any:
        """Return the event of everything computed so far."""
        return torch.cuda.current_stream(self._device).record_event() if self._has_streams else None

    def wait(self, event: Any) -> None:
        """Let what is computed from now on wait for an event; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        """Let the host wait for all stores."""
        if self.stored is not None:
            self.stored.synchronize()
            self.stored = None


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


class TransferBatch:
    """Tensors in host memory that are on the device, as views of one buffer, while something uses them.

    What is copied are runs of memory: of a tensor with gaps in it the gaps too, which may belong to other batches.
    Tensors that overlap have the same dtype.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self.hosts: list[Tensor] = []
        """Runs of memory on the host."""
        self._offsets: list[int] = []
        """The places of these in a buffer, in bytes."""
        self._places: dict[int, tuple[int, int]] = {}
        """Number of a tensor with entries -> (number of its run, the entry of the run where the tensor begins)."""
        self.has_gaps = False
        """Whether entries are copied that are none of the tensors'."""
        self.size = 0
        """Bytes in a buffer."""
        self.num_bytes = 0
        """Bytes that are copied, in each direction."""
        self._made: dict[int, tuple[Tensor, list[Tensor], list[Tensor]]] = {}
        storages: dict[int, list[int]] = {}
        for number, tensor in enumerate(self._tensors):
            if tensor.numel():
                # Not its address: on the meta device all have the same.
                storages.setdefault(tensor.untyped_storage()._cdata, []).append(number)
        for numbers in storages.values():
            self._add_runs(sorted(numbers, key=lambda number: self._tensors[number].storage_offset()))

    def _add_runs(self, numbers: Sequence[int]) -> None:
        """Add the runs of tensors of one storage, in the order of memory; those that overlap are one run."""
        runs: list[tuple[int, int, list[int]]] = []
        for number in numbers:
            start, stop = _extent(self._tensors[number])
            if runs and start < runs[-1][1]:
                first, last, members = runs[-1]
                runs[-1] = (first, max(last, stop), [*members, number])
            else:
                runs.append((start, stop, [number]))
        for start, stop, members in runs:
            host = self._tensors[members[0]].as_strided((stop - start,), (1,), start)
            self.has_gaps |= stop - start > sum(self._tensors[number].numel() for number in members)
            for number in members:
                self._places[number] = len(self.hosts), int(self._tensors[number].storage_offset()) - start
            self.hosts.append(host)
            self._offsets.append(self.size)
            self.num_bytes += host.nbytes
            self.size += -(-host.nbytes // _ALIGNMENT) * _ALIGNMENT

    def runs(self, buffer: Tensor) -> list[Tensor]:
        """Return the runs in a buffer, in the order of `hosts`."""
        return self._in(buffer)[1]

    def device_views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors in a buffer of at least `size` bytes, in their order, with their shapes and strides."""
        return self._in(buffer)[2]

    def _in(self, buffer: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        # The same buffers come again at every step.
        address = buffer.data_ptr()
        if address not in self._made:
            spans = zip(self.hosts, self._offsets, strict=True)
            runs = [buffer[offset : offset + host.nbytes].view(host.dtype) for host, offset in spans]
            device_views = []
            for number, tensor in enumerate(self._tensors):
                if number not in self._places:
                    device_views.append(torch.empty_like(tensor, device=buffer.device))
                    continue
                place, first = self._places[number]
                run = runs[place]
                device_views.append(run.as_strided(tensor.shape, tensor.stride(), run.storage_offset() + first))
            self._made[address] = buffer, runs, device_views
        return self._made[address]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the places of a tensor's first entry in its storage, and behind its last."""
    start = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + last + 1


class BufferPool:
    """Buffers on a device that batches take turns in; `offload_size.POOL_BUFFERS` are enough for any overlap."""

    def __init__(self, copies: Copies, size: int, number: int) -> None:
        self._copies = copies
        # The views of empty tensors are on the device, too.
        memory = copies.allocate(size * number)
        self._buffers = list(memory.split(size)) if size else [memory]
        self._stored: list[Any] = [None] * number
        self._number = number
        self._batches: list[TransferBatch] = []
        self._places: dict[int, int] = {}
        self._loaded: list[Any] = []
        self._used = 0

    def begin(self, batches: Sequence[TransferBatch]) -> None:
        """Say which batches a step takes, in which order. Nothing is copied yet."""
        if self._used < len(self._batches):
            # The last step ended in the middle: a buffer may still be in use.
            self._stored = [self._copies.mark()] * self._number
        self._batches, self._loaded, self._used = list(batches), [], 0
        self._places = {id(batch): place for place, batch in enumerate(batches)}

    def device_views(self, batch: TransferBatch) -> list[Tensor]:
        """Return a batch's tensors on the device; they hold values only while it is in use."""
        return batch.device_views(self._buffer(self._places[id(batch)]))

    @contextmanager
    def use(self, batch: TransferBatch) -> Iterator[None]:
        """Have a batch's values on the device while it is used, then store them; loads the next batch meanwhile."""
        place = self._used
        assert self._batches[place] is batch, "batches are taken in another order than was said"
        self._load(place)
        # What lies between tensors of the next one may be this one's, and not stored yet.
        if place + 1 < len(self._batches) and self._number > 1 and not self._batches[place + 1].has_gaps:
            self._load(place + 1)
        self._copies.wait(self._loaded[place])
        yield
        if batch.hosts:
            self._stored[place % self._number] = self._copies.store(batch.hosts, batch.runs(self._buffer(place)))
        self._used += 1

    def _load(self, place: int) -> None:
        if place < len(self._loaded):
            return
        batch = self._batches[place]
        after = [self._stored[place % self._number]]
        if place == 0 or batch.has_gaps:
            # Its own memory: of the last step, or of batches between whose tensors it lies.
            after.append(self._copies.stored)
        event = self._copies.load(batch.runs(self._buffer(place)), batch.hosts, after) if batch.hosts else None
        self._loaded.append(event)

    def _buffer(self, place: int) -> Tensor:
        return self._buffers[place % len(self._buffers)]
