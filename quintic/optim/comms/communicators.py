"""The process groups of an optimizer.

Ranks that share parameters need a process group. One that exists is used (of a mesh's dimension, the user's, the
default one), else one is made; either way collectives of every kind run once before the first step, because the first
ones of a job connect the ranks, and doing that in the middle of a step is known to deadlock large jobs. Models are
often moved after construction: then that is done again for the devices they are on, before the next step.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quintic.optim.comms.collectives import (
    ProcessGroup,
    connects,
    default_group,
    group_ranks,
    hosts_of,
    new_group,
    this_rank,
    warm_up,
)
from quintic.optim.comms.sharing import user_linked_ranks
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Layout

__all__ = ["Communicators"]


class Communicators:
    """The process groups of one optimizer, by their ranks."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._sparse_groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._warm: set[tuple[ProcessGroup, str]] = set()
        """Process groups whose ranks are connected, with the type of device."""
        self.hosts: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Ranks that are connected, in ascending order -> a number for each, equal for ranks of one host."""

    def connect(self, groups: Iterable[Group], layouts: Iterable[Sequence[Layout | None]]) -> None:
        """Find or make a process group for every layout, and warm it up.

        All ranks that share parameters must call it.
        """
        for group, of_group in zip(groups, layouts, strict=True):
            bound = user_linked_ranks(group)
            if bound:
                self._find(bound, group.params[0].device, _candidates(group.params[0], group))
            for param, layout in zip(group.params, of_group, strict=True):
                if layout is None or this_rank() not in layout.ranks:
                    continue
                ranks = tuple(sorted(layout.ranks))
                self._find(ranks, param.device, _candidates(param, group))
                if group.comms == "sharded_sparse":
                    if ranks not in self._sparse_groups:
                        self._sparse_groups[ranks] = new_group(ranks)
                    self._warm_up(self._sparse_groups[ranks], param.device)

    def _find(
        self, ranks: tuple[int, ...], device: torch.device, candidates: Iterable[ProcessGroup | None]
    ) -> ProcessGroup:
        """Return the process group of ranks: the first candidate that has these ranks, or else a new one."""
        if ranks not in self._groups:
            fitting = (one for one in candidates if one is not None and group_ranks(one) == ranks)
            self._groups[ranks] = next(fitting, None) or new_group(ranks)
        self._warm_up(self._groups[ranks], device)
        return self._groups[ranks]

    def _warm_up(self, group: ProcessGroup, device: torch.device) -> None:
        """Connect ranks for a device, if the process group knows its type. All ranks of the group must call it."""
        key = group, device.type
        if key not in self._warm and connects(group, device):
            warm_up(group, device)
            self._warm.add(key)
            ranks = group_ranks(group)
            if ranks not in self.hosts:
                self.hosts[ranks] = hosts_of(group)

    def __getitem__(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Return the process group of these global ranks, in ascending order."""
        return self._groups[ranks]

    def spanning(self, ranks: tuple[int, ...], device: torch.device) -> ProcessGroup:
        """Return a process group of ranks that need not share a parameter; the first time all of them must call it.

        They are global ones, in ascending order, and send from the device.
        """
        return self._find(ranks, device, [default_group()])

    def sparse_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Return the process group of these ranks that nothing but `sparse_rows.py` uses."""
        return self._sparse_groups[ranks]


def _candidates(param: Tensor, group: Group) -> Iterable[ProcessGroup | None]:
    """Yield the user's process group, the default one, and those of the parameter's mesh."""
    yield group.process_group
    yield default_group()
    mesh = getattr(param, "device_mesh", None)
    if mesh is not None and mesh.get_coordinate() is not None:
        yield from mesh.get_all_groups()
