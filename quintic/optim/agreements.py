"""What ranks agree on: before the first step what they are about to do, at each step which parameters are stepped."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from quintic.optim.comms import Pending, ProcessGroup, all_gather_values, start_sum, this_rank
from quintic.optim.communicators import Communicators
from quintic.optim.device_memory import host_tensor, upload
from quintic.optim.layouts import Layout
from quintic.optim.plan import Bucket
from quintic.optim.schedule import Orders
from quintic.optim.sharing import AVERAGING

__all__ = ["Agreements"]

Place: TypeAlias = tuple[int, int]
"""Position of a parameter's group, and its own in it."""


class Agreements:
    """That ranks have the same plan, and which of the parameters that they share are stepped.

    Ranks may disagree about which gradients are missing: an expert that got no token has none on some ranks. Nobody may
    wait for a collective that the others skip, so collectives always run; what becomes of their results follows from
    how many ranks have a gradient, which they count first. No host waits for a device.

    Where a gradient is that of all ranks already, a parameter is stepped if every rank has one. Where the optimizer
    averages gradients, it is if any rank has one; a missing one counts as zeros.

    Args:
        groups: parameter groups.
        layouts: of their parameters, from `layouts_of`.
        communicators: of the optimizer.
        orders: which buckets the user wants to come first.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        layouts: Sequence[Sequence[Layout | None]],
        communicators: Communicators,
        orders: Orders,
    ) -> None:
        self._groups, self._layouts, self._communicators, self._orders = groups, layouts, communicators, orders
        self.has_agreed = False
        """Whether ranks have compared their plans."""
        self._counted: dict[tuple[int, ...], _Counted] = {}
        self._places: dict[Place, tuple[tuple[int, ...], int]] = {}
        """Of each parameter that ranks share which ones, and its number among those that they share."""
        self._selections: dict[int, tuple[object, _Selection | None]] = {}

    def agree(self) -> None:
        """Compare plans before the first step. All ranks that share parameters must call it.

        Raises:
            RuntimeError: they were given different parameters or options.
        """
        if self.has_agreed:
            return
        self._communicators.connect(self._groups, self._layouts)
        for ranks, found in _describe(self._groups, self._layouts).items():
            descriptions = [description for _, description in found]
            _check_same_plan([*descriptions, str(self._orders)], ranks, self._communicators[ranks])
            params = [self._groups[group]["params"][index] for (group, index), _ in found]
            needed = [1 if self._groups[group]["comms"] in AVERAGING else len(ranks) for (group, _), _ in found]
            self._counted[ranks] = _Counted(params, upload(host_tensor(needed, torch.int32), params[0].device))
            self._places |= {place: (ranks, number) for number, (place, _) in enumerate(found)}
        self.has_agreed = True

    def start(self) -> None:
        """Begin to count the ranks that have a gradient. All ranks that share parameters must call it.

        Raises:
            RuntimeError: as `agree`.
        """
        self.agree()
        for ranks, counted in self._counted.items():
            counted.start(self._communicators[ranks])

    def stepped(self, number: int, bucket: Bucket, parts: object, indices: Iterable[int]) -> Tensor | None:
        """Return (parameters,) int32 on the device: 1 for those that are stepped, else 0; None if nobody shares any.

        Args:
            number: of the bucket in the plan.
            bucket: that the parameters belong to.
            parts: what `indices` follow from: they are looked at only if it differs from the last step's.
            indices: positions of the parameters in their group.
        """
        key, selection = self._selections.get(number, (None, None))
        if key != parts:
            selection = self._select([(bucket.group, index) for index in indices], bucket.device)
            self._selections[number] = parts, selection
        if selection is None:
            return None
        result: Tensor | None = None
        for ranks, positions, numbers in selection.parts:
            of_these = self._counted[ranks].enough()[numbers]
            if len(numbers) == selection.size:
                return of_these
            if result is None:
                result = torch.ones(selection.size, dtype=torch.int32, device=of_these.device)
            result[positions] = of_these
        return result

    def _select(self, places: Sequence[Place], device: torch.device) -> "_Selection | None":
        """Return where parameters stand among those counted; None if nobody shares any of them."""
        found: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
        for position, place in enumerate(places):
            if place in self._places:
                ranks, number = self._places[place]
                positions, numbers = found.setdefault(ranks, ([], []))
                positions.append(position)
                numbers.append(number)
        parts = tuple(
            (ranks, upload(host_tensor(positions), device), upload(host_tensor(numbers), device))
            for ranks, (positions, numbers) in found.items()
        )
        return _Selection(len(places), parts) if parts else None


class _Counted:
    """The parameters that some ranks share, and how many of these have gradients."""

    def __init__(self, params: Sequence[Tensor], needed: Tensor) -> None:
        self._params, self._needed = params, needed
        self._present: list[bool] | None = None
        self._flags = self._enough = torch.empty(0)
        self._pending: Pending | None = None

    def start(self, group: ProcessGroup) -> None:
        present = [param.grad is not None for param in self._params]
        if present != self._present:
            self._flags = upload(host_tensor(present, torch.int32), self._needed.device)
            self._present = present
        self._pending = start_sum(self._flags.clone(), group)

    def enough(self) -> Tensor:
        """Return (parameters,) int32: 1 for those of which as many ranks as are needed have a gradient."""
        if self._pending is not None:
            self._enough = (self._pending.wait() >= self._needed).int()
            self._pending = None
        return self._enough


class _Selection(NamedTuple):
    """Some parameters among those that are counted."""

    size: int
    parts: tuple[tuple[tuple[int, ...], Tensor, Tensor], ...]
    """Ranks, places among the selected, places among the counted."""


# Options that decide which collectives run, and of which sizes.
_COLLECTIVE_OPTIONS = (
    "algorithm",
    "comms",
    "transport",
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


def _describe(
    groups: Sequence[Mapping[str, Any]], layouts: Sequence[Sequence[Layout | None]]
) -> dict[tuple[int, ...], list[tuple[Place, str]]]:
    """Return by the ranks that share them: (group, index) and a description of each parameter."""
    found: dict[tuple[int, ...], list[tuple[Place, str]]] = {}
    for number, (group, of_group) in enumerate(zip(groups, layouts, strict=True)):
        options = ", ".join(f"{key}={_text(group[key])}" for key in _COLLECTIVE_OPTIONS)
        for index, layout in enumerate(of_group):
            if layout is not None and this_rank() in layout.ranks:
                name, param = group["param_names"][index], group["params"][index]
                order = "" if param.is_contiguous() else ", not contiguous"
                text = f"{name} of shape {layout.shape}, {param.dtype}{order}, on ranks {layout.ranks} with {options}"
                found.setdefault(tuple(sorted(layout.ranks)), []).append(((number, index), text))
    return dict(sorted(found.items()))


def _text(option: object) -> str:
    """Return an option as all ranks write it: a function's address is its own on each."""
    return getattr(option, "__qualname__", type(option).__qualname__) if callable(option) else str(option)


def _check_same_plan(descriptions: Sequence[str], ranks: tuple[int, ...], group: ProcessGroup) -> None:
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
