"""Copies between host and device that overlap with computation: streams, events, and buffers used in turn.

    loads      | load 1 | load 2 | load 3 | ...      host -> device, on a stream of their own
    computing           | use 1  | use 2  | ...      the current stream
    stores                       | store 1| ...      device -> host, on another one: buses carry both at once

A load starts before the previous batch is used, into a buffer whose last store is over. `pieces.py` decides which
tensors are copied. Devices without streams (CPUs) copy at once, in the same order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["BufferPool", "Copies", "CopyDirection", "TransferBatch"]

CopyDirection: TypeAlias = Literal["load", "store", "both"]
"""Whether a tensor is copied to the device before its batch is used, to the host afterwards, or both."""

# Alignment of tensors in a buffer, in bytes, for every dtype and kernel.
_ALIGNMENT = 256


class Copies:
    """A device's queues of copies: streams on CUDA devices; other devices copy before the call returns.

    An event is over when all work queued before it is; None means that there is nothing to wait for. For CUDA devices,
    host tensors must be pinned, or each copy would make the host wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_streams = device.type == "cuda"
        if self._has_streams:
            self._loads, self._stores = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # Event after all stores so far; None if they are over.
        self.stored: Any = None

    def allocate(self, num_bytes: int) -> Tensor:
        """Return (num_bytes,) uint8 on the device, for any of the queues."""
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        if self._has_streams:
            # Until now, and after it is freed, the memory may belong to tensors of the current stream.
            self._loads.wait_stream(torch.cuda.current_stream(self._device))
            for stream in (self._loads, self._stores):
                memory.record_stream(stream)
        return memory

    def load(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Any]) -> Any:
        """Start to copy to the device when the events `after` are over; return an event after the copies."""
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
        """Start to copy to the host when all work of the current stream so far is over; return an event after it."""
        if not self._has_streams:
            _copy(targets, sources)
            return None
        self._stores.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stores):
            _copy(targets, sources)
        self.stored = self._stores.record_event()
        return self.stored

    def mark(self) -> Any:
        """Return an event after all work of the current stream so far."""
        return torch.cuda.current_stream(self._device).record_event() if self._has_streams else None

    def wait(self, event: Any) -> None:
        """Let the current stream wait for an event; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        """Wait, on the host, for all stores."""
        if self.stored is not None:
            self.stored.synchronize()
            self.stored = None


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


class TransferBatch:
    """Tensors in host memory that have places in one buffer on the device: loaded together, used there, and stored.

    Ranges of memory are copied. If a tensor has gaps, these are copied, too, although their entries may belong to
    other batches. Tensors that overlap have the same dtype.

    Args:
        tensors: the tensors, and the directions in which each is copied. One that is only stored has arbitrary values
            until its use writes them.
    """

    def __init__(self, tensors: Sequence[tuple[Tensor, CopyDirection]]) -> None:
        self._tensors = [tensor for tensor, _ in tensors]
        # Ranges of host memory, (entries,) each, their positions in a buffer, in bytes, and which of them are copied.
        self._hosts: list[Tensor] = []
        self._offsets: list[int] = []
        self._loaded: list[int] = []
        self._stored: list[int] = []
        # Index of a tensor with entries -> (index of its range, the entry of the range where the tensor begins).
        self._places: dict[int, tuple[int, int]] = {}
        # Whether entries are copied that belong to none of the tensors.
        self.has_gaps = False
        # Bytes in a buffer, and bytes that are stored.
        self.size = 0
        self.num_bytes = 0
        # By the address of a buffer: the buffer, the ranges in it, and the tensors in it.
        self._made: dict[int, tuple[Tensor, list[Tensor], list[Tensor]]] = {}
        storages: dict[int, list[int]] = {}
        for number, tensor in enumerate(self._tensors):
            if tensor.numel():
                # The objects distinguish storages, because on the meta device all have one address.
                storages.setdefault(tensor.untyped_storage()._cdata, []).append(number)
        for numbers in storages.values():
            in_order = sorted(numbers, key=lambda number: self._tensors[number].storage_offset())
            self._add_ranges(in_order, [how for _, how in tensors])

    def _add_ranges(self, numbers: Sequence[int], directions: Sequence[CopyDirection]) -> None:
        """Add the ranges of the tensors of one storage, given in the order of memory; overlapping ranges are merged."""
        ranges: list[tuple[int, int, list[int]]] = []
        for number in numbers:
            start, stop = _extent(self._tensors[number])
            if ranges and start < ranges[-1][1]:
                first, last, members = ranges[-1]
                ranges[-1] = (first, max(last, stop), [*members, number])
            else:
                ranges.append((start, stop, [number]))
        # Place the ranges one after the other in the buffer.
        for start, stop, members in ranges:
            host = self._tensors[members[0]].as_strided((stop - start,), (1,), start)
            has_gaps = stop - start > sum(self._tensors[number].numel() for number in members)
            self.has_gaps |= has_gaps
            place = len(self._hosts)
            for number in members:
                self._places[number] = place, int(self._tensors[number].storage_offset()) - start
            self._hosts.append(host)
            self._offsets.append(self.size)
            self.size += -(-host.nbytes // _ALIGNMENT) * _ALIGNMENT
            # A store writes the gaps, too, and must find their values in the buffer.
            if has_gaps or any(directions[number] != "store" for number in members):
                self._loaded.append(place)
            if any(directions[number] != "load" for number in members):
                self._stored.append(place)
                self.num_bytes += host.nbytes

    def loads(self, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the targets in a buffer, and the sources in host memory, that are loaded before the batch is used."""
        ranges = self._in(buffer)[1]
        return [ranges[place] for place in self._loaded], [self._hosts[place] for place in self._loaded]

    def stores(self, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the targets in host memory, and the sources in a buffer, that are stored after the use."""
        ranges = self._in(buffer)[1]
        return [self._hosts[place] for place in self._stored], [ranges[place] for place in self._stored]

    def device_views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors in a buffer of at least `size` bytes, in their order, with their shapes and strides."""
        return self._in(buffer)[2]

    def _in(self, buffer: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        # Views are made once for each buffer, as the same buffers are used in every step.
        address = buffer.data_ptr()
        if address not in self._made:
            spans = zip(self._hosts, self._offsets, strict=True)
            ranges = [buffer[offset : offset + host.nbytes].view(host.dtype) for host, offset in spans]
            device_views = []
            for number, tensor in enumerate(self._tensors):
                if number not in self._places:
                    device_views.append(torch.empty_like(tensor, device=buffer.device))
                    continue
                place, first = self._places[number]
                whole = ranges[place]
                device_views.append(whole.as_strided(tensor.shape, tensor.stride(), whole.storage_offset() + first))
            self._made[address] = buffer, ranges, device_views
        return self._made[address]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the range of a tensor's storage from its first entry to behind its last."""
    start = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + last + 1


class BufferPool:
    """Buffers on a device that batches use in turn; `offload_size.POOL_BUFFERS` are enough for any overlap.

    Args:
        copies: the device's queues of copies, which all of its pools use.
        size: bytes of a buffer.
        number: the number of buffers.
    """

    def __init__(self, copies: Copies, size: int, number: int) -> None:
        self._copies = copies
        # A pool of size 0 has one empty buffer, for batches of empty tensors.
        memory = copies.allocate(size * number)
        self._buffers = list(memory.split(size)) if size else [memory]
        # For each buffer the event after its last store.
        self._stored: list[Any] = [None] * number
        self._number = number
        # The batches of a step in order, and the place of each in this order.
        self._batches: list[TransferBatch] = []
        self._places: dict[int, int] = {}
        # Within a step: for the first batches the event after which each can be used, whether any of them was copied,
        # and the number of batches that have been used.
        self._loaded: list[Any] = []
        self._has_loads = False
        self._used = 0

    def begin(self, batches: Sequence[TransferBatch]) -> None:
        """Register the batches of a step, in the order of their use. Nothing is copied yet."""
        # If the last step raised in the middle, buffers may still be in use by the current stream.
        if self._used < len(self._batches):
            self._stored = [self._copies.mark()] * self._number
        self._batches, self._loaded, self._used, self._has_loads = list(batches), [], 0, False
        self._places = {id(batch): place for place, batch in enumerate(batches)}

    def device_views(self, batch: TransferBatch) -> list[Tensor]:
        """Return a batch's tensors on the device; they hold values only while it is in use."""
        return batch.device_views(self._buffer(self._places[id(batch)]))

    @contextmanager
    def use(self, batch: TransferBatch) -> Iterator[None]:
        """Have a batch's values on the device within the block, and start to store them afterwards.

        Loads the next batch in the background.
        """
        place = self._used
        assert self._batches[place] is batch, "batches are used in another order than begin() was given"
        self._load(place)
        # A next batch with gaps waits: the entries in its gaps may be this batch's, which are not stored yet.
        if place + 1 < len(self._batches) and self._number > 1 and not self._batches[place + 1].has_gaps:
            self._load(place + 1)
        self._copies.wait(self._loaded[place])
        yield
        targets, sources = batch.stores(self._buffer(place))
        if targets:
            self._stored[place % self._number] = self._copies.store(targets, sources)
        self._used += 1

    def _load(self, place: int) -> None:
        if place < len(self._loaded):
            return
        batch = self._batches[place]
        # The buffer can be written when its last store is over.
        event = self._stored[place % self._number]
        targets, sources = batch.loads(self._buffer(place))
        if targets:
            after = [event]
            # Its host memory may still be written by stores of the last step, or of batches that lie in its gaps. Loads
            # are made in order, so only the first one of a step needs to wait for the last step.
            if batch.has_gaps or not self._has_loads:
                after.append(self._copies.stored)
            event = self._copies.load(targets, sources, after)
            self._has_loads = True
        self._loaded.append(event)

    def _buffer(self, place: int) -> Tensor:
        return self._buffers[place % len(self._buffers)]
