"""Tables of addresses and programs on a device, uploaded when they change."""

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
"""Bytes: kernels load faster where all addresses are multiples of it."""

MOST_GRAPHS = 8
"""CUDA graphs of one optimizer's steps, captured one after another."""


class AddressTable:
    """An int64 table of addresses on the device, uploaded when it changes.

    A CUDA graph that is captured with a table reads it at every replay, so such a table is kept, and each that changes
    within a capture is copied from pinned memory of its own, made before.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._is_captured = False
        self._table = torch.empty(0)
        self._spares: list[Tensor] = []
        self._captured: list[Tensor] = []
        self.aligned = False

    def get(self, key: object, build: Callable[[], Tensor], device: torch.device) -> Tensor:
        """Return the table for `key` on the device; `build` makes it on the host when the key is not the last one."""
        in_capture = is_capturing(device)
        # What is copied within a capture is there when its graph has run: steps outside need a table of their own.
        if key != self._key or (self._is_captured and not in_capture):
            addresses = build()
            self.aligned = not bool((addresses % ALIGNMENT).any())
            if not self._spares or self._spares[0].shape != addresses.shape:
                self._spares = []
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
        """Return addresses in pinned memory, which cannot be allocated during a capture."""
        if not self._spares:
            raise RuntimeError("make one step with the same gradients present before the capture of a CUDA graph")
        self._captured.append(self._spares.pop().copy_(addresses))
        return self._captured[-1]


def _pinned(shape: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """Return tables in pinned memory, in one allocation."""
    if device.type != "cuda" or not shape[0]:
        return []
    return list(torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True))


def upload_programs(programs: "TilePrograms", device: torch.device) -> "TilePrograms":
    """Return the division of programs, on a device."""
    return replace(
        programs,
        tensor_of_program=upload(programs.tensor_of_program, device),
        tile_of_program=upload(programs.tile_of_program, device),
    )
