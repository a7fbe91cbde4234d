"""The process groups of an optimizer, and how messages travel in them.

Ranks that share parameters need a process group. One that exists is used (of a mesh's dimension, the user's, the
default one), else one is made; either way collectives of every kind run once at construction, because the first ones
of a job connect the ranks, and doing that in the middle of a step is known to deadlock large jobs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from quintic.optim.channels import Channel
from quintic.optim.comms import ProcessGroup, group_ranks, new_group, this_rank, warmed_up
from quintic.optim.copy_engines import CopyEngines
from quintic.optim.layouts import Layout

__all__ = ["Communicators", "Transport", "check_transport"]

Transport = Literal["collectives", "copy_engines"]
"""How the large messages of a step travel."""


def check_transport(transport: str, devices: Iterable[torch.device]) -> None:
    """Reject a way to travel that does not exist, or not for these devices.

    Raises:
        ValueError: there is none of this name, or a device is no GPU that CUDA drives.
    """
    if transport not in get_args(Transport):
        raise ValueError(f"transport={transport!r}: choose one of {', '.join(map(repr, get_args(Transport)))}")
    if transport == "copy_engines":
        found = sorted({device.type for device in devices} - {"cuda", "meta"})
        if found or torch.version.hip is not None:
            raise ValueError(
                f"transport='copy_engines' is for parameters on NVIDIA GPUs, and some are on "
                f"{', '.join(found) or 'other ones'}; use transport='collectives'"
            )


class Communicators:
    """The process groups of one optimizer, by their ranks.

    Args:
        transport: how large messages travel in them.
    """

    def __init__(self, transport: Transport = "collectives") -> None:
        self.transport = transport
        self._channels: dict[tuple[int, ...], Channel] = {}
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._groups_of_marks: dict[tuple[int, ...], ProcessGroup] = {}

    def connect(self, groups: Iterable[Mapping[str, Any]], layouts: Iterable[Sequence[Layout | None]]) -> None:
        """Find or make a process group for every layout, and warm it up. All ranks that share parameters must call it.

        Args:
            groups: parameter groups.
            layouts: of their parameters.
        """
        for group, found in zip(groups, layouts, strict=True):
            for param, layout in zip(group["params"], found, strict=True):
                if layout is None or this_rank() not in layout.ranks:
                    continue
                ranks = tuple(sorted(layout.ranks))
                if ranks not in self._groups:
                    self._groups[ranks] = warmed_up(_group_of(ranks, param, group), param.device)
                if group["comms"] == "sharded_sparse" and ranks not in self._groups_of_marks:
                    self._groups_of_marks[ranks] = warmed_up(new_group(ranks), param.device)

    def __getitem__(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Return the process group of these global ranks, in ascending order."""
        return self._groups[ranks]

    def channel(self, ranks: tuple[int, ...], device: torch.device) -> Channel:
        """Return what sends large messages among these ranks.

        Args:
            ranks: in ascending order.
            device: of all messages among them.
        """
        if ranks not in self._channels:
            copies = self.transport == "copy_engines"
            group = self._groups[ranks]
            self._channels[ranks] = CopyEngines(group, device) if copies else Channel(group)
        return self._channels[ranks]

    @contextmanager
    def messages(self) -> Iterator[None]:
        """Let the messages of a step be sent within. All ranks must enter it.

        Raises:
            RuntimeError: as `CopyEngines.messages`.
        """
        with ExitStack() as stack:
            # In one order everywhere: ranks wait for each other.
            for _, channel in sorted(self._channels.items()):
                stack.enter_context(channel.messages())
            yield

    def of_marks(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Return the process group of these ranks that nothing but `sparse_rows.py` uses."""
        return self._groups_of_marks[ranks]


def _group_of(ranks: tuple[int, ...], param: Tensor, group: Mapping[str, Any]) -> ProcessGroup:
    """Return a process group of these ranks: the user's, the default one, one of the parameter's mesh, or a new one."""
    for found in _candidates(param, group):
        if found is not None and group_ranks(found) == ranks:
            return found
    return new_group(ranks)


def _candidates(param: Tensor, group: Mapping[str, Any]) -> Iterable[ProcessGroup | None]:
    yield group["process_group"]
    yield dist.group.WORLD
    mesh = getattr(param, "device_mesh", None)
    if mesh is not None and mesh.get_coordinate() is not None:
        yield from mesh.get_all_groups()
