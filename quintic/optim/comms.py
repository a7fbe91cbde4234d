"""Process groups, and what ranks must agree on before and during a step.

Ranks that share parameters need a process group. One that exists is used (of a mesh's dimension, the user's, the
default one), else one is made; either way collectives of every kind run once at construction, because the first ones
of a job connect the ranks, and doing that in the middle of a step is known to deadlock large jobs.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from quintic.optim.device_memory import upload
from quintic.optim.layouts import Layout, layout_of, replicated_layout

__all__ = [
    "Agreement",
    "Communicators",
    "Pending",
    "ProcessGroup",
    "all_agree_",
    "check_same_plan",
    "describe",
    "layouts_of",
    "start_all_gather",
    "start_all_to_all",
    "this_rank",
]


ProcessGroup: TypeAlias = dist.ProcessGroup

# Renamed in PyTorch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """A collective under way, and the memory it reads and writes, which must not be freed before it has ended."""

    def __init__(self, work: Any, received: Tensor, *sent: Tensor) -> None:
        self._work = work
        self._received: Tensor | None = received
        self._sent: tuple[Tensor, ...] | None = sent

    def wait(self) -> Tensor:
        """Return what was received; on CUDA devices the current stream waits, not the host."""
        assert self._received is not None, "waited for twice"
        if self._work is not None:
            self._work.wait()
        received, self._received, self._sent, self._work = self._received, None, None, None
        return received


def start_all_to_all(send: Tensor, sends: Sequence[int], receives: Sequence[int], group: ProcessGroup) -> Pending:
    """Start to send a run of entries to each rank. All ranks of the group must call it.

    Args:
        send: contiguous, any shape; its entries are sent in order.
        sends: how many of them each rank gets.
        receives: how many entries each rank sends to this one; received in the order of the ranks.
        group: the process group.
    """
    received = send.new_empty(sum(receives))
    send = send.reshape(-1)
    work = dist.all_to_all_single(received, send, list(receives), list(sends), group=group, async_op=True)
    return Pending(work, received, send)


def start_all_gather(send: Tensor, num_ranks: int, group: ProcessGroup) -> Pending:
    """Start to collect a tensor of one shape from every rank, along its first dimension. All ranks must call it."""
    received = send.new_empty((num_ranks * send.shape[0], *send.shape[1:]))
    work = _all_gather(received, send, group=group, async_op=True)
    return Pending(work, received, send)


def this_rank() -> int:
    """Return the global rank of this process, 0 without process groups."""
    return dist.get_rank() if dist.is_initialized() else 0


def all_agree_(go: Tensor, group: ProcessGroup | None) -> None:
    """Make a () int32 flag the smallest of all ranks', in place. All ranks must call it."""
    dist.all_reduce(go, dist.ReduceOp.MIN, group=group)


def group_ranks(process_group: ProcessGroup | None) -> tuple[int, ...]:
    """Return the global ranks of a process group, of the default one for None."""
    return tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))


def layouts_of(number: int, group: Mapping[str, Any]) -> list[Layout | None]:
    """Return for each parameter of a group where it travels; None for those that this rank steps by itself.

    Args:
        number: position of the group, for messages.
        group: with `comms` and `process_group`.

    Raises:
        ValueError: a `DTensor` in a group whose `comms` is for plain tensors, or one with a layout that is unknown.
    """
    found: list[Layout | None] = []
    for name, param in zip(group["param_names"], group["params"], strict=True):
        layout = layout_of(name, param)
        if layout is not None and group["comms"] != "none":
            raise ValueError(
                f"{name}: a DTensor carries its own layout; leave comms='none' (parameter group {number} has "
                f"comms={group['comms']!r})"
            )
        if group["comms"] == "averaged" and dist.is_initialized():
            layout = replicated_layout(param.shape, group_ranks(group["process_group"]))
            if len(layout.ranks) == 1:
                layout = None
        elif layout is not None and layout.is_replicated:
            layout = None
        found.append(layout if group["algorithm"] == "muon" else None)
    return found


class Communicators:
    """The process groups of one optimizer, by their ranks."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}

    def connect(self, groups: Iterable[Mapping[str, Any]], layouts: Iterable[Sequence[Layout | None]]) -> None:
        """Find or make a process group for every layout, and warm it up. All ranks that share parameters must call it.

        Args:
            groups: parameter groups.
            layouts: of their parameters.
        """
        for group, found in zip(groups, layouts, strict=True):
            for param, layout in zip(group["params"], found, strict=True):
                if layout is not None and dist.get_rank() in layout.ranks:
                    self._connect(tuple(sorted(layout.ranks)), _candidates(param, group), param.device)

    def __getitem__(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Return the process group of these global ranks, in ascending order."""
        return self._groups[ranks]

    def _connect(self, ranks: tuple[int, ...], candidates: Iterable[ProcessGroup | None], device: torch.device) -> None:
        if ranks in self._groups:
            return
        group = next((found for found in candidates if found is not None and group_ranks(found) == ranks), None)
        if group is None:
            group = dist.new_group(list(ranks), use_local_synchronization=True)
        self._groups[ranks] = group
        _warm_up(group, len(ranks), device)


def _candidates(param: Tensor, group: Mapping[str, Any]) -> Iterable[ProcessGroup | None]:
    yield group["process_group"]
    yield dist.group.WORLD
    mesh = getattr(param, "device_mesh", None)
    if mesh is not None and mesh.get_coordinate() is not None:
        yield from mesh.get_all_groups()


def _warm_up(group: ProcessGroup, size: int, device: torch.device) -> None:
    if device.type == "meta":
        return
    one = torch.ones(size, device=device)
    dist.all_to_all_single(torch.empty_like(one), one, group=group)
    _all_gather(torch.empty(size * size, device=device), one, group=group)
    dist.all_reduce(one, group=group)


class Agreement:
    """How many ranks of a group have a gradient for each of their parameters, this step; no host waits for a device.

    Ranks may disagree: an expert that got no token has no gradient on some ranks. Nobody may wait for a collective that
    the others skip, so collectives always run, and what is done with their results follows from these numbers.

    Args:
        places: (group, index) of each parameter that the ranks share.
        num_ranks: how many they are.
        device: of the parameters.
    """

    def __init__(self, places: Sequence[tuple[int, int]], num_ranks: int, device: torch.device) -> None:
        self.places = tuple(places)
        self._numbers = {place: number for number, place in enumerate(self.places)}
        self._num_ranks, self._device = num_ranks, device
        self._present: list[bool] | None = None
        self._flags = torch.empty(0)
        self._work: Any = None
        self._counts = torch.empty(0)

    def start(self, present: list[bool], group: ProcessGroup) -> None:
        """Begin to count; all ranks of the group must call it.

        Args:
            present: for each parameter whether this rank has a gradient.
            group: of the ranks.
        """
        if present != self._present:
            self._flags = upload(torch.tensor(present, dtype=torch.int32), self._device)
            self._present = present
        self._counts = self._flags.clone()
        self._work = dist.all_reduce(self._counts, group=group, async_op=True)

    def numbers(self, places: Iterable[tuple[int, int]]) -> Tensor:
        """Return where parameters stand among those counted, int64 on the device."""
        return upload(torch.tensor([self._numbers[place] for place in places]), self._device)

    def stepped(self, numbers: Tensor) -> Tensor:
        """Return int32 on the device: 1 where all ranks have a gradient, else 0.

        Args:
            numbers: from `numbers`.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        return (self._counts[numbers] == self._num_ranks).int()


# Options that decide which collectives run, and of which sizes.
_COLLECTIVE_OPTIONS = ("view", "orthogonalizer", "compute_dtype", "normalize", "max_workspace_bytes", "step_every")


def describe(
    groups: Sequence[Mapping[str, Any]], layouts: Sequence[Sequence[Layout | None]]
) -> dict[tuple[int, ...], list[tuple[tuple[int, int], str]]]:
    """Return by the ranks that share them: (group, index) and a description of each parameter that travels."""
    found: dict[tuple[int, ...], list[tuple[tuple[int, int], str]]] = {}
    for number, (group, of_group) in enumerate(zip(groups, layouts, strict=True)):
        options = ", ".join(f"{key}={group[key]}" for key in _COLLECTIVE_OPTIONS)
        for index, layout in enumerate(of_group):
            if layout is not None and dist.get_rank() in layout.ranks:
                name, param = group["param_names"][index], group["params"][index]
                text = f"{name} of shape {layout.shape}, {param.dtype}, on ranks {layout.ranks} with {options}"
                found.setdefault(tuple(sorted(layout.ranks)), []).append(((number, index), text))
    return dict(sorted(found.items()))


def check_same_plan(descriptions: Sequence[str], ranks: tuple[int, ...], group: ProcessGroup) -> None:
    """Compare what the ranks of a group are about to do; all of them must call it.

    Args:
        descriptions: one per parameter, which are equal on all ranks if their plans are.
        ranks: of the group.
        group: the process group.

    Raises:
        RuntimeError: they differ; the message names the first parameter that does, and the ranks.
    """
    digest = hashlib.sha256("\n".join(descriptions).encode()).hexdigest()
    digests: list[Any] = [None] * len(ranks)
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) == 1:
        return
    everything: list[Any] = [None] * len(ranks)
    dist.all_gather_object(everything, list(descriptions), group=group)
    first = everything[0]
    for rank, theirs in zip(ranks, everything, strict=True):
        for number in range(max(len(first), len(theirs))):
            mine = first[number] if number < len(first) else "nothing"
            other = theirs[number] if number < len(theirs) else "nothing"
            if mine != other:
                raise RuntimeError(
                    f"ranks {ranks[0]} and {rank} were given different parameters or options, and would wait for each "
                    f"other forever: rank {ranks[0]} has {mine}, rank {rank} has {other}; build the model, its groups "
                    f"and the optimizer in the same order on all ranks"
                )
