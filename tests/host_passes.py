"""A stand-in for the CUDA graphs of passes, on the host: what is captured is made when it is replayed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quintic.kernels import graphs

SEGMENTS = [
    {"segment_pool_id": (0, 0), "total_size": 1 << 21, "allocated_size": 1 << 20},
    {"segment_pool_id": (0, 1), "total_size": 1 << 22, "allocated_size": 0},
    {"segment_pool_id": (0, 0), "total_size": 1 << 21, "allocated_size": 0},
]
"""What the allocator has: all but 1 MiB of the graphs' 4 MiB is idle."""


class HostPass:
    """Stands for the CUDA graph of a pass: makes it when it is replayed, and not when it is captured."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make, self.loss = make, torch.zeros(())

    def replay(self) -> None:
        self.loss.copy_(self.make())

    def reset(self) -> None:
        self.make = None


def capture_on_the_host(monkeypatch: pytest.MonkeyPatch) -> list[HostPass]:
    """Let `CapturedPasses` work without a GPU; returns the list of what it will have captured."""
    captured: list[HostPass] = []

    def capture(make: Callable[[], Tensor], pool: object) -> tuple[HostPass, Tensor]:
        captured.append(HostPass(make))
        return captured[-1], captured[-1].loss

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: SEGMENTS)
    return captured
