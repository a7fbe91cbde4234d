"""The collectives that run in process groups: the only code that talks to other ranks."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from quintic.versions import all_gather_single

__all__ = [
    "Pending",
    "ProcessGroup",
    "all_agree_",
    "all_gather_uneven",
    "all_gather_values",
    "connects",
    "default_group",
    "group_ranks",
    "has_process_group",
    "hosts_of",
    "new_group",
    "num_ranks",
    "start_all_gather",
    "start_all_max",
    "start_all_to_all",
    "start_broadcasts",
    "start_sum",
    "this_rank",
    "warm_up",
]


ProcessGroup: TypeAlias = dist.ProcessGroup

_all_gather = all_gather_single()


class Pending:
    """A message under way: its works, which have `wait`, what is there afterwards, and what is read until then.

    The memory of both must not be freed before the message has arrived.
    """

    def __init__(self, works: Sequence[Any], received: Tensor, *sent: Tensor) -> None:
        self._works = works
        self._received: Tensor | None = received
        self._sent: tuple[Tensor, ...] | None = sent

    def wait(self) -> Tensor:
        """Return the tensor that was received; on CUDA devices the current stream waits, not the host."""
        assert self._received is not None, "waited for twice"
        for work in self._works:
            work.wait()
        received, self._received, self._sent, self._works = self._received, None, None, ()
        return received


def start_all_to_all(send: Tensor, sends: Sequence[int], receives: Sequence[int], group: ProcessGroup) -> Pending:
    """Start to send each rank so many of the entries of a contiguous tensor, in order. All ranks must call it.

    What is received are so many entries of each rank, in the order of the ranks.
    """
    received = send.new_empty(sum(receives))
    send = send.reshape(-1)
    work = dist.all_to_all_single(received, send, list(receives), list(sends), group=group, async_op=True)
    return Pending([work], received, send)


def start_all_gather(send: Tensor, num_ranks: int, group: ProcessGroup, out: Tensor | None = None) -> Pending:
    """Start to collect a contiguous tensor of one shape from every rank, along its first dimension.

    All ranks must call it. It is received in `out`, of which this rank's own part may be sent, or in new memory.
    """
    received = send.new_empty((num_ranks * send.shape[0], *send.shape[1:])) if out is None else out
    work = _all_gather(received, send, group=group, async_op=True)
    return Pending([work], received, send)


def start_all_max(values: Tensor, group: ProcessGroup) -> Pending:
    """Start to replace a tensor, which must hold no NaN, by all ranks' largest entries. All ranks must call it."""
    return Pending([dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=True)], values)


def start_sum(values: Tensor, group: ProcessGroup) -> Pending:
    """Start to replace a tensor by the sum of all ranks' ones. All ranks of the group must call it."""
    return Pending([dist.all_reduce(values, group=group, async_op=True)], values)


def all_gather_uneven(send: Tensor, sizes: Sequence[int], group: ProcessGroup) -> list[Tensor]:
    """Return each rank's tensor, of so many entries, in the order of the ranks. All ranks of the group must call it.

    This rank's tensor is (size,) of any dtype, the same on all ranks, and is not modified.
    """
    most = max(sizes)
    padded = send.new_zeros(most)
    padded[: send.numel()] = send
    # As bytes: backends do not know every dtype.
    received = start_all_gather(padded.view(torch.uint8), len(sizes), group).wait().view(send.dtype)
    return [part[:size] for part, size in zip(received.view(len(sizes), most), sizes, strict=True)]


def all_gather_values(value: Any, group: ProcessGroup | None) -> list[Any]:
    """Return the value of each rank, anything that can be pickled; waits. All ranks of the group must call it.

    None stands for the group of all ranks; without process groups there is only this one.
    """
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def has_process_group() -> bool:
    """Return whether this process is one of a group, if need be the only one."""
    return dist.is_initialized()


def start_broadcasts(rows: Tensor, counts: Sequence[int], group: ProcessGroup) -> Pending:
    """Start to give every rank all rows of a contiguous tensor, of which each rank in turn has so many.

    All ranks must call it. Rows are right where they are a rank's own, and filled in elsewhere.
    """
    works = []
    for owner, (part, count) in enumerate(zip(rows.split(list(counts)), counts, strict=True)):
        if count:
            source = dist.get_global_rank(group, owner)
            works.append(dist.broadcast(part, source, group=group, async_op=True))
    return Pending(works, rows)


def this_rank() -> int:
    """Return the global rank of this process, 0 without process groups."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Return the number of processes, 1 without process groups."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_agree_(flags: Tensor, group: ProcessGroup | None) -> None:
    """Make int32 flags, of any shape, the smallest of all ranks', in place. All ranks must call it."""
    dist.all_reduce(flags, dist.ReduceOp.MIN, group=group)


def group_ranks(process_group: ProcessGroup | None) -> tuple[int, ...]:
    """Return the global ranks of a process group, of the default one for None."""
    return tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))


def default_group() -> ProcessGroup | None:
    """Return the process group of all ranks."""
    return dist.group.WORLD


def new_group(ranks: tuple[int, ...]) -> ProcessGroup:
    """Return a new process group of these global ranks. All of them must call it."""
    group: ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group


def warm_up(group: ProcessGroup, device: torch.device) -> None:
    """Run collectives of every kind on a device. All ranks of the group must call it."""
    size = dist.get_world_size(group)
    one = torch.ones(size, device=device)
    dist.all_to_all_single(torch.empty_like(one), one, group=group)
    _all_gather(torch.empty(size * size, device=device), one, group=group)
    dist.all_reduce(one, group=group)
    dist.broadcast(one, dist.get_global_rank(group, 0), group=group)


def host_name() -> str:
    """Return the host's name and boot identifier: the same text for all processes of one host, and for no other."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text().strip() if boot.exists() else "")


def hosts_of(group: ProcessGroup) -> tuple[int, ...]:
    """Return a number for each rank, equal for ranks of one host; waits. All ranks of the group must call it."""
    names = all_gather_values(host_name(), group)
    return tuple(map(names.index, names))


def connects(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether a process group can send tensors of a device: NCCL, for one, knows GPUs alone."""
    return any(known.type == device.type for known in group._device_types)
