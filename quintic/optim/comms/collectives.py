"""The collectives of the optimizer: the only file that uses `torch.distributed` to talk to other ranks.

`start_...` functions return a `Pending` at once and let work go on until its `wait`; the others wait themselves. Every
function here except the queries must be called by all ranks of its group, in the same order. Messages are contiguous
tensors on a device that the group's backend knows (`supports_device`).
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
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
    "supports_device",
    "this_rank",
    "warm_up",
]


ProcessGroup: TypeAlias = dist.ProcessGroup

_all_gather = all_gather_single()


@dataclass(slots=True)
class Pending:
    """A collective in flight: its work handles, the tensor that it fills, and the tensors that it reads.

    It keeps all of them alive: their memory must not be reused before the collective is over.
    """

    works: Sequence[Any]
    received: Tensor | None
    sent: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the filled tensor, once; on CUDA devices the current stream waits, not the host."""
        assert self.received is not None, "waited for twice"
        for work in self.works:
            work.wait()
        # The inputs are released here, so that their memory is free while the caller uses the result.
        received, self.received, self.sent, self.works = self.received, None, None, ()
        return received


def start_all_to_all(send: Tensor, sends: Sequence[int], receives: Sequence[int], group: ProcessGroup) -> Pending:
    """Start to send consecutive entries of a contiguous tensor to each rank. All ranks must call it.

    Args:
        send: sum(sends) entries, first those for rank 0 of the group.
        sends: the number of entries for each rank, which may be zero.
        receives: the number of entries from each rank.
        group: the ranks.

    Returns:
        The pending (sum(receives),): first the entries from rank 0, then those from rank 1, and so on.
    """
    received = send.new_empty(sum(receives))
    send = send.reshape(-1)  # a view, since it is contiguous
    work = dist.all_to_all_single(received, send, list(receives), list(sends), group=group, async_op=True)
    return Pending([work], received, send)


def start_all_gather(send: Tensor, num_ranks: int, group: ProcessGroup, out: Tensor | None = None) -> Pending:
    """Start to concatenate all ranks' contiguous tensors of one shape along their first dimension.

    All ranks must call it. The result is written to `out`, or to new memory; `send` may be this rank's place in `out`.
    """
    # (n, ...) from each rank becomes (num_ranks * n, ...).
    received = send.new_empty((num_ranks * send.shape[0], *send.shape[1:])) if out is None else out
    work = _all_gather(received, send, group=group, async_op=True)
    return Pending([work], received, send)


def start_all_max(values: Tensor, group: ProcessGroup) -> Pending:
    """Start to replace each entry of a tensor by the largest of all ranks, in place. All ranks must call it."""
    # Without NaN: backends differ in the maximum of NaN and a number.
    return Pending([dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=True)], values)


def start_sum(values: Tensor, group: ProcessGroup) -> Pending:
    """Start to replace a tensor by its sum over the ranks of the group, in place. All of them must call it."""
    return Pending([dist.all_reduce(values, group=group, async_op=True)], values)


def all_gather_uneven(send: Tensor, sizes: Sequence[int], group: ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks, in rank order; `sizes` are their lengths. All ranks of the group must call it.

    `send` is this rank's (size,) tensor, of one dtype on all ranks; it is not modified.
    """
    # Pad to the longest, (most,), as an all-gather needs equal sizes.
    most = max(sizes)
    padded = send.new_zeros(most)
    padded[: send.numel()] = send
    # Sent as bytes, because backends do not support every dtype (gloo no uint16).
    received = start_all_gather(padded.view(torch.uint8), len(sizes), group).wait().view(send.dtype)
    return [part[:size] for part, size in zip(received.view(len(sizes), most), sizes, strict=True)]


def all_gather_values(value: Any, group: ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks, in rank order; waits. All ranks of the group must call it.

    A value is anything that can be pickled. `group` None is the group of all ranks.
    """
    # A program without process groups has one rank.
    if not dist.is_initialized():
        return [value]
    # Pickled, and gathered through the device of the group's backend.
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def has_process_group() -> bool:
    """Return whether process groups exist, even if they have only one rank."""
    return dist.is_initialized()


def start_broadcasts(rows: Tensor, counts: Sequence[int], group: ProcessGroup) -> Pending:
    """Start to fill in the rows of other ranks: rank r of the group owns the next `counts[r]` rows. All must call it.

    `rows` is contiguous, of one shape on all ranks; each rank's own rows are sent, the others are overwritten.
    """
    # One broadcast from each rank that owns any rows: counts may differ, which an all-gather does not allow.
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
    """Replace int32 flags, of any shape, by their minimum over ranks, in place: 1 if all agree. All must call it."""
    dist.all_reduce(flags, dist.ReduceOp.MIN, group=group)


def group_ranks(process_group: ProcessGroup | None) -> tuple[int, ...]:
    """Return the global ranks of a process group; None is the default group."""
    return tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))


def default_group() -> ProcessGroup | None:
    """Return the process group of all ranks."""
    return dist.group.WORLD


def new_group(ranks: tuple[int, ...]) -> ProcessGroup:
    """Return a new process group of these global ranks. All of them must call it, and only they."""
    # Local synchronisation: otherwise every rank of the job would have to call it.
    group: ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group


def warm_up(group: ProcessGroup, device: torch.device) -> None:
    """Run one small collective of every kind on a device, which connects the ranks. All of the group must call it."""
    size = dist.get_world_size(group)
    one = torch.ones(size, device=device)
    # In this order on all ranks: all-to-all, all-gather, all-reduce, broadcast.
    dist.all_to_all_single(torch.empty_like(one), one, group=group)
    _all_gather(torch.empty(size * size, device=device), one, group=group)
    dist.all_reduce(one, group=group)
    dist.broadcast(one, dist.get_global_rank(group, 0), group=group)


def host_name() -> str:
    """Return the host's name and boot identifier: the same text for all processes of a host, different on others."""
    # The boot identifier distinguishes hosts of one name, for instance containers on several machines.
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text().strip() if boot.exists() else "")


def hosts_of(group: ProcessGroup) -> tuple[int, ...]:
    """Return a number for each rank, equal for ranks on the same host; waits. All ranks of the group must call it."""
    names = all_gather_values(host_name(), group)
    # The number is the position in the group of the first rank on that host.
    return tuple(map(names.index, names))


def supports_device(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether a process group can send tensors of a device type: NCCL, for instance, only those on GPUs."""
    # A private attribute of PyTorch's: the device types that the group's backends serve.
    return any(known.type == device.type for known in group._device_types)
