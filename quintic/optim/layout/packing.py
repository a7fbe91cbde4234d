"""Messages of the memory of many tensors: spans packed into one buffer and back, and the mean of all ranks' buffers.

Twin of the kernels in `quintic/kernels/spans.py`. Means are sums in the order of the ranks, in float32 or wider,
divided and rounded once.
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
    """Some entries of one of several tensors, in the order of memory, and where they stand in a buffer."""

    tensor: int
    """The number of the tensor."""
    start: int
    stop: int
    place: int
    """The entry of the buffer where they begin."""


class Packing:
    """Copies spans, which do not overlap, of some tensors into a buffer or back, with what the kernels need kept."""

    def __init__(self, spans: Sequence[MemorySpan], kernels: Kernels, device: torch.device) -> None:
        self._spans = [span for span in spans if span.stop > span.start]
        self._sizes = [span.stop - span.start for span in self._spans]
        self._tensors = list(dict.fromkeys(span.tensor for span in self._spans))
        self._kernels, self._device = kernels, device
        self._table = AddressTable()
        if kernels == "triton" and self._spans:
            from quintic.kernels.spans import span_programs

            self._places = upload(host_tensor([span.place for span in self._spans]), device)
            self._numels = upload(host_tensor(self._sizes), device)
            self._programs = upload_programs(span_programs(self._sizes), device)
            self._alignments = {span.place % ALIGNMENT for span in self._spans}

    def pack(self, tensors: Sequence[Tensor | None], buffer: Tensor) -> None:
        """Copy the spans of dense tensors, None for zeros, into a contiguous (entries,) buffer of any dtype."""
        if self._kernels == "triton":
            self._copy(tensors, buffer, packs=True)
            return
        for (number, start, _, place), size in zip(self._spans, self._sizes, strict=True):
            source, target = tensors[number], buffer[place : place + size]
            if source is None:
                target.zero_()
            else:
                target.copy_(source.as_strided((size,), (1,), source.storage_offset() + start))

    def unpack(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the spans of a buffer back into tensors, arguments as those of `pack`."""
        if self._kernels == "triton":
            self._copy(tensors, buffer, packs=False)
            return
        flat = buffer.view(-1)
        for (number, start, _, place), size in zip(self._spans, self._sizes, strict=True):
            target = tensors[number]
            target.as_strided((size,), (1,), target.storage_offset() + start).copy_(flat[place : place + size])

    def _copy(self, tensors: Sequence[Tensor | None], buffer: Tensor, *, packs: bool) -> None:
        from quintic.kernels.spans import copy_spans_

        if not self._spans:
            return
        dtype = next((tensor.dtype for tensor in tensors if tensor is not None), buffer.dtype)
        bases = {n: 0 if (tensor := tensors[n]) is None else tensor.data_ptr() for n in self._tensors}

        def addresses() -> Tensor:
            rows = ((bases[span.tensor], span.start) for span in self._spans)
            return host_tensor([base + start * dtype.itemsize if base else 0 for base, start in rows])

        table = self._table.get((bases, dtype), addresses, self._device)
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
    """Return the entries of a tensor without gaps as a vector that shares its memory."""
    return span_of(tensor, 0, tensor.numel())


def span_of(tensor: Tensor, start: int, numel: int) -> Tensor:
    """Return some of these entries: `in_memory_order(tensor)[start : start + numel]` in one operation."""
    return tensor.as_strided((numel,), (1,), tensor.storage_offset() + start)


def mean_of_ranks(received: Tensor, kernels: Kernels, out: Tensor | None = None) -> Tensor:
    """Return the mean of (ranks, entries) contiguous over ranks, in `out`, (entries,), or new memory."""
    if out is None:
        out = received.new_empty(received.shape[1:])
    if kernels == "triton":
        from quintic.kernels.spans import mean_of_ranks_

        return mean_of_ranks_(received, out)
    return mean_in_order(received.unbind(), out)


def mean_in_order(tensors: Iterable[Tensor], out: Tensor) -> Tensor:
    """Write the mean of tensors of one shape to `out`, and return it; an iterator may make them one at a time."""
    tensors = iter(tensors)
    total, count = next(tensors).to(torch.promote_types(out.dtype, torch.float32), copy=True), 1
    for tensor in tensors:
        total += tensor
        count += 1
    # A number would become its reciprocal on GPUs, and the quotient be rounded twice.
    return out.copy_(total.div_(torch.full((), count, dtype=total.dtype, device=total.device)))
