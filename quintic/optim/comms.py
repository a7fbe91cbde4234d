"""Process groups, and what ranks must agree on before and during a step.

Ranks that share parameters need a process group. One that exists is used (of a mesh's dimension, the user's, the
default one), else one is made; either way collectives of every kind run once at construction, because the first ones
of a job connect the ranks, and doing that in the middle of a step is known to deadlock large jobs.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from quintic.optim.device_memory import host_tensor, upload
from quintic.optim.layouts import Layout, layout_of, replicated_layout

__all__ = [
    "AVERAGING",
    "DIVIDING",
    "Agreements",
    "Communicators",
    "Pending",
    "Place",
    "ProcessGroup",
    "Selection",
    "all_agree_",
    "all_gather_uneven",
    "all_gather_values",
    "check_same_plan",
    "describe",
    "dividing_ranks",
    "has_process_group",
    "layouts_of",
    "ranks_of",
    "start_all_gather",
    "start_all_max",
    "start_all_to_all",
    "start_broadcasts",
    "sum_over_ranks",
    "this_rank",
    "travelling",
]


ProcessGroup: TypeAlias = dist.ProcessGroup

Place: TypeAlias = tuple[int, int]
"""Position of a parameter's group, and its own in it."""

DIVIDING = ("sharded", "sharded_sparse")
"""Values of `comms` with which state is divided among ranks."""

AVERAGING = ("replicated", *DIVIDING)
"""Values of `comms` with which the optimizer averages gradients over ranks."""

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


def start_all_gather(send: Tensor, num_ranks: int, group: ProcessGroup, out: Tensor | None = None) -> Pending:
    """Start to collect a tensor of one shape from every rank, along its first dimension. All ranks must call it.

    Args:
        send: contiguous; may be this rank's own part of `out`.
        num_ranks: of the group.
        group: the process group.
        out: (num_ranks * first size, ...) contiguous, where everything is received; None for new memory.
    """
    received = send.new_empty((num_ranks * send.shape[0], *send.shape[1:])) if out is None else out
    work = _all_gather(received, send, group=group, async_op=True)
    return Pending(work, received, send)


def start_all_max(values: Tensor, group: ProcessGroup) -> Pending:
    """Start to replace a tensor, which must hold no NaN, by all ranks' largest entries. All ranks must call it."""
    return Pending(dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=True), values)


def sum_over_ranks(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Return for each tensor the sum of all ranks' ones. All ranks of the group must call it.

    Args:
        tensors: of one device, the same shapes and dtypes on all ranks; not modified.
        group: the process group.
    """
    result: list[Tensor] = [torch.empty(0)] * len(tensors)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(number)
    for numbers in by_dtype.values():
        flat = torch.cat([tensors[number].flatten() for number in numbers])
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensors[number].numel() for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            result[number] = part.view(tensors[number].shape)
    return result


def all_gather_uneven(send: Tensor, sizes: Sequence[int], group: ProcessGroup) -> list[Tensor]:
    """Return what each rank sends, in the order of the ranks. All ranks of the group must call it.

    Args:
        send: (size,) of any dtype, the same on all ranks; not modified.
        sizes: of each rank's tensor.
        group: the process group.
    """
    most = max(sizes)
    padded = send.new_zeros(most)
    padded[: send.numel()] = send
    # As bytes: backends do not know every dtype.
    received = start_all_gather(padded.view(torch.uint8), len(sizes), group).wait().view(send.dtype)
    return [part[:size] for part, size in zip(received.view(len(sizes), most), sizes, strict=True)]


def all_gather_values(value: Any, group: ProcessGroup | None) -> list[Any]:
    """Return what each rank gives, anything that can be pickled; waits. All ranks of the group must call it.

    Args:
        value: of this rank.
        group: None for all ranks; without process groups there is only this one.
    """
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def has_process_group() -> bool:
    """Return whether this process is one of a group, if need be the only one."""
    return dist.is_initialized()


def start_broadcasts(rows: Tensor, counts: Sequence[int], group: ProcessGroup) -> Pending:
    """Start to give every rank the rows of a tensor that each rank has. All ranks of the group must call it.

    Args:
        rows: contiguous; of each rank in turn its rows, right where they are its own, filled in elsewhere.
        counts: how many rows each rank has.
        group: the process group.
    """
    works = []
    for owner, (part, count) in enumerate(zip(rows.split(list(counts)), counts, strict=True)):
        if count:
            source = dist.get_global_rank(group, owner)
            works.append(dist.broadcast(part, source, group=group, async_op=True))
    return Pending(_All(works), rows)


class _All:
    """Several collectives waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


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
    """Return for each parameter of a group where its pieces are; None where no other rank has a part in it.

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
        if group["comms"] != "none" and dist.is_initialized():
            layout = replicated_layout(param.shape, group_ranks(group["process_group"]))
        found.append(None if layout is None or len(layout.ranks) == 1 else layout)
    return found


def ranks_of(layouts: Sequence[Layout | None]) -> tuple[int, ...]:
    """Return the ranks that share the plain parameters of a group with `comms`; none if there is one rank."""
    return next((tuple(sorted(layout.ranks)) for layout in layouts if layout is not None), ())


def dividing_ranks(group: Mapping[str, Any], layouts: Sequence[Layout | None]) -> tuple[int, ...]:
    """Return the ranks among which a group's state is divided (`DIVIDING`); none where each rank has it whole.

    Args:
        group: the parameter group.
        layouts: of its parameters, from `layouts_of`.
    """
    return ranks_of(layouts) if group["comms"] in DIVIDING else ()


def travelling(group: Mapping[str, Any], layouts: Sequence[Layout | None]) -> list[Layout | None]:
    """Return of a group's layouts those of parameters whose matrices come together on one of several ranks.

    The others are stepped where they are: AdamW's, those that every rank of a mesh holds whole, and those of which
    `comms` brings gradients together instead.
    """
    moves = group["algorithm"] == "muon" and group["comms"] in ("none", "averaged")
    divides = group["comms"] == "averaged"
    return [
        layout if moves and layout is not None and (divides or not layout.is_replicated) else None for layout in layouts
    ]


class Communicators:
    """The process groups of one optimizer, by their ranks."""

    def __init__(self) -> None:
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
                if layout is not None and this_rank() in layout.ranks:
                    ranks = tuple(sorted(layout.ranks))
                    self._connect(ranks, _candidates(param, group), param.device)
                    if group["comms"] == "sharded_sparse" and ranks not in self._groups_of_marks:
                        self._groups_of_marks[ranks] = _new_group(ranks, param.device)

    def __getitem__(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Return the process group of these global ranks, in ascending order."""
        return self._groups[ranks]

    def of_marks(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Return the process group of these ranks that nothing but `sparse_rows.py` uses."""
        return self._groups_of_marks[ranks]

    def _connect(self, ranks: tuple[int, ...], candidates: Iterable[ProcessGroup | None], device: torch.device) -> None:
        if ranks in self._groups:
            return
        group = next((found for found in candidates if found is not None and group_ranks(found) == ranks), None)
        if group is None:
            self._groups[ranks] = _new_group(ranks, device)
            return
        self._groups[ranks] = group
        _warm_up(group, len(ranks), device)


def _new_group(ranks: tuple[int, ...], device: torch.device) -> ProcessGroup:
    group: ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    _warm_up(group, len(ranks), device)
    return group


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


class Agreements:
    """Which of the parameters that ranks share are stepped: ranks may disagree about which gradients are missing.

    An expert that got no token has no gradient on some ranks. Nobody may wait for a collective that the others skip, so
    collectives always run; what becomes of their results follows from how many ranks have a gradient, which they
    count first. No host waits for a device.

    Where a gradient is that of all ranks already, a parameter is stepped if every rank has one. Where the optimizer
    averages gradients, it is if any rank has one; a missing one counts as zeros.

    Args:
        groups: parameter groups.
        layouts: of their parameters, from `layouts_of`.
        communicators: connected.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        layouts: Sequence[Sequence[Layout | None]],
        communicators: "Communicators",
    ) -> None:
        self._groups, self._communicators = groups, communicators
        self._counted: dict[tuple[int, ...], _Counted] = {}
        self._ranks: dict[Place, tuple[int, ...]] = {}
        for ranks, found in describe(groups, layouts).items():
            places = [place for place, _ in found]
            device = groups[places[0][0]]["params"][places[0][1]].device
            needed = [1 if groups[group]["comms"] in AVERAGING else len(ranks) for group, _ in places]
            self._counted[ranks] = _Counted(tuple(places), upload(host_tensor(needed, torch.int32), device))
            self._ranks |= dict.fromkeys(places, ranks)

    def start(self) -> None:
        """Begin to count. All ranks that share parameters must call it."""
        for ranks, counted in self._counted.items():
            present = [self._groups[group]["params"][index].grad is not None for group, index in counted.places]
            if present != counted.present:
                counted.flags = upload(host_tensor(present, torch.int32), counted.needed.device)
                counted.present = present
            counts = counted.flags.clone()
            counted.pending = Pending(dist.all_reduce(counts, group=self._communicators[ranks], async_op=True), counts)

    def select(self, places: Iterable["Place"], device: torch.device) -> "Selection | None":
        """Return where parameters stand among those counted, for `stepped`; None if nobody shares any of them."""
        found: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
        size = 0
        for place in places:
            ranks = self._ranks.get(place)
            if ranks is not None:
                positions, numbers = found.setdefault(ranks, ([], []))
                positions.append(size)
                numbers.append(self._counted[ranks].places.index(place))
            size += 1
        if not found:
            return None
        parts = tuple(
            (ranks, upload(host_tensor(positions), device), upload(host_tensor(numbers), device))
            for ranks, (positions, numbers) in found.items()
        )
        return Selection(size, parts)

    def stepped(self, selection: "Selection") -> Tensor:
        """Return (parameters,) int32 on the device: 1 for those that are stepped, else 0.

        Args:
            selection: from `select`.
        """
        result: Tensor | None = None
        for ranks, positions, numbers in selection.parts:
            counted = self._counted[ranks]
            if counted.pending is not None:
                counted.enough = (counted.pending.wait() >= counted.needed).int()
                counted.pending = None
            of_these = counted.enough[numbers]
            if result is None and len(numbers) == selection.size:
                return of_these
            if result is None:
                result = torch.ones(selection.size, dtype=torch.int32, device=of_these.device)
            result[positions] = of_these
        assert result is not None
        return result


class _Counted:
    """The parameters that some ranks share, and how many of these have gradients."""

    def __init__(self, places: "tuple[Place, ...]", needed: Tensor) -> None:
        self.places, self.needed = places, needed
        self.present: list[bool] | None = None
        self.flags = self.enough = torch.empty(0)
        self.pending: Pending | None = None


class Selection(NamedTuple):
    """Some parameters among those that are counted."""

    size: int
    parts: tuple[tuple[tuple[int, ...], Tensor, Tensor], ...]
    """Ranks, places among the selected, places among the counted."""


# Options that decide which collectives run, and of which sizes.
_COLLECTIVE_OPTIONS = (
    "algorithm",
    "comms",
    "view",
    "orthogonalizer",
    "compute_dtype",
    "normalize",
    "max_workspace_bytes",
    "offload",
    "master",
    "step_every",
    "qk_clip",
)


def describe(
    groups: Sequence[Mapping[str, Any]], layouts: Sequence[Sequence[Layout | None]]
) -> dict[tuple[int, ...], list[tuple[tuple[int, int], str]]]:
    """Return by the ranks that share them: (group, index) and a description of each parameter."""
    found: dict[tuple[int, ...], list[tuple[tuple[int, int], str]]] = {}
    for number, (group, of_group) in enumerate(zip(groups, layouts, strict=True)):
        options = ", ".join(f"{key}={_text(group[key])}" for key in _COLLECTIVE_OPTIONS)
        for index, layout in enumerate(of_group):
            if layout is not None and this_rank() in layout.ranks:
                name, param = group["param_names"][index], group["params"][index]
                text = f"{name} of shape {layout.shape}, {param.dtype}, on ranks {layout.ranks} with {options}"
                found.setdefault(tuple(sorted(layout.ranks)), []).append(((number, index), text))
    return dict(sorted(found.items()))


def _text(option: object) -> str:
    """Return an option as all ranks write it: a function's address is its own on each."""
    return getattr(option, "__qualname__", type(option).__qualname__) if callable(option) else str(option)


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
    if len(set(all_gather_values(digest, group))) == 1:
        return
    everything = all_gather_values(list(descriptions), group)
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
