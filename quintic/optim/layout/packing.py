"""Packs ranges of many tensors' memory into one message buffer and back, and averages the buffers of all ranks.

    pack      tensors, dense in any memory order  ->  buffer (entries,), cast to its dtype
    send      by `collectives.py`, buffer -> (ranks, entries)
    mean      (ranks, entries)  ->  (entries,): summed in rank order in float32 or wider, divided, and rounded once
    unpack    buffer  ->  tensors

Plain PyTorch here; the Triton twin is in `quintic/kernels/spans.py`.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels
from quintic.optim.layout.tables import ALIGNMENT, AddressTable, upload_programs
from quintic.optim.rules.device import host_tensor, upload

__all__ = ["MemorySpan", "Packing", "in_memory_order", "mean_in_order", "mean_of_ranks", "span_of"]


class MemorySpan(NamedTuple):
    """A range of one tensor's memory, counted in entries, and its place in a buffer."""

    tensor: int
    """The index of the tensor in the list that is packed."""
    start: int
    stop: int
    place: int
    """The entry of the buffer at which the range begins."""


class Packing:
    """Copies fixed ranges of some tensors into a buffer or back; keeps the tables that the kernels need.

    The ranges must not overlap. The tensors may be others at each call, of the same sizes.
    """

    def __init__(self, spans: Sequence[MemorySpan], kernels: Kernels, device: torch.device) -> None:
        self._spans = [span for span in spans if span.stop > span.start]
        self._sizes = [span.stop - span.start for span in self._spans]
        self._tensors = list(dict.fromkeys(span.tensor for span in self._spans))
        self._kernels, self._device = kernels, device
        self._table = AddressTable()
        # The kernels' tables that do not change, uploaded once: a place, a length and the programs of each range.
        if kernels == "triton" and self._spans:
            from quintic.kernels.spans import span_programs

            self._places = upload(host_tensor([span.place for span in self._spans]), device)
            self._numels = upload(host_tensor(self._sizes), device)
            self._programs = upload_programs(span_programs(self._sizes), device)
            self._alignments = {span.place % ALIGNMENT for span in self._spans}

    def pack(self, tensors: Sequence[Tensor | None], buffer: Tensor) -> None:
        """Copy the ranges of dense tensors, None meaning zeros, into a contiguous (entries,) buffer of any dtype."""
        if self._kernels == "triton":
            self._copy(tensors, buffer, packs=True)
            return
        # Plain PyTorch: one copy per range. The kernels copy all of them in one launch.
        for (number, start, _, place), size in zip(self._spans, self._sizes, strict=True):
            source, target = tensors[number], buffer[place : place + size]
            # A range of memory is (size,) with stride one, for any shape and memory order of the tensor.
            if source is None:
                target.zero_()
            else:
                target.copy_(source.as_strided((size,), (1,), source.storage_offset() + start))

    def unpack(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the ranges from a contiguous buffer back into dense tensors; the inverse of `pack`."""
        if self._kernels == "triton":
            self._copy(tensors, buffer, packs=False)
            return
        flat = buffer.view(-1)  # also of a buffer (ranks, entries)
        for (number, start, _, place), size in zip(self._spans, self._sizes, strict=True):
            target = tensors[number]
            target.as_strided((size,), (1,), target.storage_offset() + start).copy_(flat[place : place + size])

    def _copy(self, tensors: Sequence[Tensor | None], buffer: Tensor, *, packs: bool) -> None:
        from quintic.kernels.spans import copy_spans_

        if not self._spans:
            return
        # All tensors have one dtype; address 0 stands for a missing tensor.
        dtype = next((tensor.dtype for tensor in tensors if tensor is not None), buffer.dtype)
        bases = {n: 0 if (tensor := tensors[n]) is None else tensor.data_ptr() for n in self._tensors}

        # (ranges,) int64: the address of the first entry of each range.
        def addresses() -> Tensor:
            rows = ((bases[span.tensor], span.start) for span in self._spans)
            return host_tensor([base + start * dtype.itemsize if base else 0 for base, start in rows])

        # Uploaded only if a tensor has moved since the last call.
        table = self._table.get((bases, dtype), addresses, self._device)
        # Both ends of every copy must be aligned for the faster kernel: the tensors' ranges and their places.
        base, width = buffer.data_ptr(), buffer.itemsize
        is_aligned = all((base + place * width) % ALIGNMENT == 0 for place in self._alignments)
        copy_spans_(
            table,
            self._places,
            self._numels,
            self._programs,
            buffer,
            dtype=dtype,
            packs=packs,
            aligned=self._table.aligned and is_aligned,
        )


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return the entries of a tensor without gaps as a (numel,) view, in the order of its memory."""
    # Unlike `flatten`, this copies no transposed or channels_last tensor.
    return span_of(tensor, 0, tensor.numel())


def span_of(tensor: Tensor, start: int, numel: int) -> Tensor:
    """Return `in_memory_order(tensor)[start : start + numel]`, (numel,), in one operation."""
    return tensor.as_strided((numel,), (1,), tensor.storage_offset() + start)


def mean_of_ranks(received: Tensor, kernels: Kernels, out: Tensor | None = None) -> Tensor:
    """Return the mean over ranks of a contiguous (ranks, entries), written to `out`, (entries,), or to new memory."""
    if out is None:
        out = received.new_empty(received.shape[1:])
    if kernels == "triton":
        from quintic.kernels.spans import mean_of_ranks_

        return mean_of_ranks_(received, out)
    return mean_in_order(received.unbind(), out)


def mean_in_order(tensors: Iterable[Tensor], out: Tensor) -> Tensor:
    """Write the mean of tensors of one shape to `out`, and return it; an iterator may make them one at a time."""
    tensors = iter(tensors)
    # Summed in the given order, in float32 or wider, so that all ranks get the same bits.
    total, count = next(tensors).to(torch.promote_types(out.dtype, torch.float32), copy=True), 1
    for tensor in tensors:
        total += tensor
        count += 1
    # The divisor is a tensor: PyTorch would multiply by the reciprocal of a Python number on GPUs, which rounds twice.
    return out.copy_(total.div_(torch.full((), count, dtype=total.dtype, device=total.device)))
