"""Tables of addresses and programs on a device, uploaded when they change."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quintic.optim.rules.device_memory import is_capturing, upload

if TYPE_CHECKING:  # needs Triton
    from quintic.kernels.programs import TilePrograms

__all__ = ["ALIGNMENT", "AddressTable", "upload_programs"]

ALIGNMENT = 16
"""Bytes: kernels load faster where all addresses are multiples of it."""


class AddressTable:
    """An int64 table of addresses on the device, uploaded when it changes."""

    def __init__(self) -> None:
        self._key: object = None
        self._table = torch.empty(0)
        self._spare: Tensor | None = None
        self._captured: list[Tensor] = []
        self.aligned = False

    def get(self, key: object, build: Callable[[], Tensor], device: torch.device) -> Tensor:
        """Return the table for `key` on the device; `build` makes it on the host when the key is not the last one."""
        if key == self._key:
            return self._table
        addresses = build()
        self.aligned = not bool((addresses % ALIGNMENT).any())
        if is_capturing(device):
            # Pinned memory cannot be allocated during a capture, and the graph reads it again at every replay.
            if self._spare is None or self._spare.shape != addresses.shape:
                raise RuntimeError("make one step with the same gradients present before the capture of a CUDA graph")
            self._captured.append(self._spare.copy_(addresses))
            self._table = torch.empty_like(addresses, device=device)
            self._table.copy_(self._spare, non_blocking=True)
            self._spare = None
        else:
            self._table = upload(addresses, device)
            if device.type == "cuda" and (self._spare is None or self._spare.shape != addresses.shape):
                self._spare = torch.empty_like(addresses).pin_memory()
        self._key = key
        return self._table


def upload_programs(programs: "TilePrograms", device: torch.device) -> "TilePrograms":
    """Return how programs are divided, on a device."""
    return replace(
        programs,
        tensor_of_program=upload(programs.tensor_of_program, device),
        tile_of_program=upload(programs.tile_of_program, device),
    )
