"""Memory that processes on CPUs share, in place of `quintic.optim.comms.peer_memory.PeerMemory`, which is for GPUs."""

import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import ON_GPUS
from torch import Tensor

from quintic.optim import current
from quintic.optim.comms import communicators
from quintic.optim.comms.copy_engines import CopyEngines
from quintic.optim.comms.peer_memory import MOST_MESSAGES

__all__ = ["SharedMemory", "copy_engines"]


class SharedMemory:
    """A file of each rank that all have open. What is started is over when the call returns."""

    def __init__(self, num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.num_bytes, self._group = num_bytes, group
        folder = tempfile.TemporaryDirectory(prefix="quintic-memory-")
        weakref.finalize(self, folder.cleanup)
        paths: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(paths, str(Path(folder.name, "memory")), group=group)
        own = dist.get_rank(group)
        opened = {own: torch.from_file(paths[own], shared=True, size=num_bytes, dtype=torch.uint8)}
        opened[own].fill_(0xFF)  # bfloat16 and float32 that are no numbers
        dist.barrier(group)
        for rank, path in enumerate(paths):
            if rank != own:
                opened[rank] = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        self._opened, self._own = opened, own
        self.is_closed = False

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        return self._opened[self._own][start : start + numel * dtype.itemsize].view(dtype)

    def follow(self) -> None:
        assert not self.is_closed

    def join(self) -> None:
        pass

    def mark_end(self) -> None:
        pass

    def write(self, rank: int, start: int, first: int, num_bytes: int, send: Tensor) -> None:
        source = send.detach().view(-1).view(torch.uint8)[first : first + num_bytes]
        assert source.numel() == num_bytes
        self._opened[rank][start : start + num_bytes] = source

    def meet(self, which: int) -> None:
        dist.barrier(self._group)

    def tell(self, rank: int, message: int) -> None:
        assert message < MOST_MESSAGES

    def arrival(self, message: int) -> Callable[[], None]:
        return partial(dist.barrier, self._group)

    def reset(self) -> None:
        dist.barrier(self._group)

    def close(self) -> None:
        dist.barrier(self._group)
        self.is_closed = True


@contextmanager
def copy_engines() -> Iterator[None]:
    """Let `transport="copy_engines"` work on CPUs, too."""
    with ExitStack() as stack:
        if not ON_GPUS:
            on_cpus = partial(CopyEngines, open_memory=SharedMemory)
            stack.enter_context(mock.patch.object(communicators, "CopyEngines", on_cpus))
            stack.enter_context(mock.patch.object(current, "check_transport"))
        yield
