"""Finds or makes the process groups of an optimizer, and connects their ranks before the first step.

Ranks that share parameters need a process group. An existing one is taken if it has exactly these ranks (the user's,
the default one, one of a mesh); otherwise one is made. Then one collective of every kind runs in it: the first
collectives of a job connect its ranks, which is known to deadlock large jobs in the middle of a step. After a model was
moved to another type of device, they run again, on that device, before the next step.

Invariant: ranks find and make groups in the same order, that of the parameters, since both are collective.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quintic.optim.comms.collectives import (
    ProcessGroup,
    default_group,
    group_ranks,
    hosts_of,
    new_group,
    supports_device,
    this_rank,
    warm_up,
)
from quintic.optim.comms.sharing import user_linked_ranks
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Layout

__all__ = ["Communicators"]


class Communicators:
    """The process groups of one optimizer, by their global ranks in ascending order."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        # Second groups of the same ranks, for the row masks of `sparse_rows.py`, whose collectives run concurrently.
        self._sparse_groups: dict[tuple[int, ...], ProcessGroup] = {}
        # (process group, device type) whose ranks are connected.
        self._warm: set[tuple[ProcessGroup, str]] = set()
        # Ranks of a group -> a number for each of them, equal for ranks on the same host.
        self.hosts: dict[tuple[int, ...], tuple[int, ...]] = {}

    def connect(self, groups: Iterable[Group], layouts: Iterable[Sequence[Layout | None]]) -> None:
        """Find or make a process group for the ranks of every layout, and connect them.

        `layouts` has one entry per parameter of each group. All ranks that share parameters must call it.
        """
        for group, of_group in zip(groups, layouts, strict=True):
            # Ranks that the user links although they share no parameter.
            linked = user_linked_ranks(group)
            if linked:
                self._find(linked, group.params[0].device, _candidates(group.params[0], group))
            for param, layout in zip(group.params, of_group, strict=True):
                # Only this rank has the parameter, or only others do.
                if layout is None or this_rank() not in layout.ranks:
                    continue
                ranks = tuple(sorted(layout.ranks))
                self._find(ranks, param.device, _candidates(param, group))
                # Sparse tables need a second group, see above.
                if group.comms == "sharded_sparse":
                    if ranks not in self._sparse_groups:
                        self._sparse_groups[ranks] = new_group(ranks)
                    self._warm_up(self._sparse_groups[ranks], param.device)

    def _find(
        self, ranks: tuple[int, ...], device: torch.device, candidates: Iterable[ProcessGroup | None]
    ) -> ProcessGroup:
        """Return the connected process group of `ranks`: the first candidate with these ranks, or else a new one."""
        # A group, once chosen, is kept: all collectives of the same ranks run in it, in one order.
        if ranks not in self._groups:
            fitting = (one for one in candidates if one is not None and group_ranks(one) == ranks)
            self._groups[ranks] = next(fitting, None) or new_group(ranks)
        self._warm_up(self._groups[ranks], device)
        return self._groups[ranks]

    def _warm_up(self, group: ProcessGroup, device: torch.device) -> None:
        """Connect the ranks of a group for a type of device, once. All ranks of the group must call it."""
        key = group, device.type
        # A backend may not know the device (NCCL the CPU): the model will be moved before its first step.
        if key not in self._warm and supports_device(group, device):
            warm_up(group, device)
            self._warm.add(key)
            ranks = group_ranks(group)
            if ranks not in self.hosts:
                self.hosts[ranks] = hosts_of(group)

    def __getitem__(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Return the process group of these global ranks, given in ascending order."""
        return self._groups[ranks]

    def spanning(self, ranks: tuple[int, ...], device: torch.device) -> ProcessGroup:
        """Return a process group of global `ranks`, in ascending order, that need not share a parameter.

        They send from `device`. The first time all of them must call it.
        """
        return self._find(ranks, device, [default_group()])

    def sparse_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Return the process group of these ranks that only `sparse_rows.py` uses."""
        return self._sparse_groups[ranks]


def _candidates(param: Tensor, group: Group) -> Iterable[ProcessGroup | None]:
    """Yield the user's process group, the default one, and the groups of the mesh that the parameter is on."""
    yield group.process_group
    yield default_group()
    mesh = getattr(param, "device_mesh", None)
    if mesh is not None and mesh.get_coordinate() is not None:
        yield from mesh.get_all_groups()
