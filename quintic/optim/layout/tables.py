"""Tables of tensors' addresses on a device, which kernels read to work on many tensors in one launch.

A table is uploaded when an address changes. Under CUDA graphs it must outlive the graph, which reads it at each replay.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quintic.optim.rules.device import is_capturing, upload

if TYPE_CHECKING:  # needs Triton
    from quintic.kernels.programs import TilePrograms

__all__ = ["ALIGNMENT", "MOST_GRAPHS", "AddressTable", "upload_programs"]

ALIGNMENT = 16
"""In bytes: kernels load faster if all addresses are multiples of it."""

MOST_GRAPHS = 8
"""The most CUDA graphs that may be captured of one optimizer's steps."""


class AddressTable:
    """An int64 table of addresses on the device, uploaded when it changes.

    A CUDA graph reads its table at every replay, so tables of captures are kept for good. A table that changes during
    a capture is copied, by a copy in the graph, from pinned memory of its own that was allocated before the capture.
    """

    def __init__(self) -> None:
        # The last table, the key that it was built for, and whether a capture made it.
        self._key: object = None
        self._is_captured = False
        self._table = torch.empty(0)
        # Pinned tables for captures to come, and everything that captured graphs read.
        self._spares: list[Tensor] = []
        self._captured: list[Tensor] = []
        # Whether all addresses of the last table are multiples of `ALIGNMENT`.
        self.aligned = False

    def get(self, key: object, build: Callable[[], Tensor], device: torch.device) -> Tensor:
        """Return the table for `key` on the device; `build` makes it, on the host, if the key is not the last one."""
        in_capture = is_capturing(device)
        # A table copied within a capture is filled only when the graph runs, so steps outside need another one.
        if key != self._key or (self._is_captured and not in_capture):
            addresses = build()
            self.aligned = not bool((addresses % ALIGNMENT).any())
            # Spare tables have the shape of the last one.
            if not self._spares or self._spares[0].shape != addresses.shape:
                self._spares = []
            # In a capture the copy becomes a node of the graph; otherwise upload, and allocate for captures to come.
            if in_capture:
                self._table = self._spare(addresses).to(device, non_blocking=True)
            else:
                self._table = upload(addresses, device)
                self._spares += _pinned((MOST_GRAPHS - len(self._spares), *addresses.shape), device)
            self._key, self._is_captured = key, in_capture
        if in_capture:
            self._captured.append(self._table)
        return self._table

    def _spare(self, addresses: Tensor) -> Tensor:
        """Return addresses in a spare pinned table; pinned memory cannot be allocated during a capture."""
        if not self._spares:
            raise RuntimeError("make one step with the same gradients present before the capture of a CUDA graph")
        self._captured.append(self._spares.pop().copy_(addresses))
        return self._captured[-1]


def _pinned(shape: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """Return shape[0] int64 tables in pinned memory, in one allocation; none if the device needs no such memory."""
    if device.type != "cuda" or not shape[0]:
        return []
    return list(torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True))


def upload_programs(programs: "TilePrograms", device: torch.device) -> "TilePrograms":
    """Return a launch's assignment of programs to tensors, with its tables on a device."""
    return replace(
        programs,
        tensor_of_program=upload(programs.tensor_of_program, device),
        tile_of_program=upload(programs.tile_of_program, device),
    )
