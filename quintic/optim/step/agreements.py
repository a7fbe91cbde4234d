"""What ranks agree on: before the first step what they are about to do, at each step which parameters are stepped."""

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from quintic.kernels.dispatch import cpu_multiplies_bfloat16
from quintic.optim.comms.collectives import Pending, ProcessGroup, all_gather_values, start_sum, this_rank
from quintic.optim.comms.communicators import Communicators
from quintic.optim.comms.connected import Connected, exchanged, facts_of
from quintic.optim.comms.replicas import ReplicaChoice
from quintic.optim.comms.sharing import AVERAGING
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import Layout
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.order import Orders
from quintic.optim.rules.device_memory import host_tensor, upload
from quintic.optim.step.partial_gradients import PartialGradients

__all__ = ["Agreements"]

_Parts = TypeVar("_Parts")

Place: TypeAlias = tuple[int, int]
"""Position of a parameter's group, and its own in it."""


class Agreements:
    """That ranks have the same plan, and which of the parameters that they share are stepped.

    Ranks may disagree about which gradients are missing: an expert that got no token has none on some ranks. Nobody may
    wait for a collective that the others skip, so collectives always run; what becomes of their results follows from
    how many ranks have a gradient, which they count first. No host waits for a device.

    Where a gradient is that of all ranks already, a parameter is stepped if every rank has one. Where the optimizer
    averages gradients, or sums are still to be made (`partial_gradients.py`), it is if any rank has one; a missing one
    counts as zeros.

    Args:
        groups: parameter groups.
        layouts: of their parameters, from `layouts_of`.
        travels: of those whose matrices travel, from `divided_layouts`.
        choices: which ranks divide the work.
        communicators: of the optimizer.
        orders: which buckets the user wants to come first.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        layouts: Sequence[Sequence[Layout | None]],
        travels: Sequence[Sequence[Layout | None]],
        choices: Mapping[tuple[int, ...], ReplicaChoice],
        communicators: Communicators,
        orders: Orders,
    ) -> None:
        self._groups, self._communicators, self._orders = groups, communicators, orders
        self._layouts, self._travels, self._choices = layouts, travels, choices
        self.has_agreed = False
        """Whether ranks have compared their plans."""
        self.partial = PartialGradients()
        """Which gradients are sums still to be made."""
        self.connected = Connected({this_rank(): facts_of(groups, layouts)}, groups, communicators)
        """The ranks that decide together; this one alone until ranks have compared their plans."""
        self._counted: dict[tuple[int, ...], _Counted] = {}
        self._places: dict[Place, tuple[tuple[int, ...], int]] = {}
        """Shared parameter -> (sharing ranks, index in their count vector)."""
        self._selections: dict[int, tuple[object, _Selection | None]] = {}

    @property
    def is_alone(self) -> bool:
        """Return whether ranks have agreed, and this one has nobody to agree with in a step."""
        return self.has_agreed and not self._counted and self.connected.is_alone

    def agree(self) -> None:
        """Compare plans before the first step. All ranks that share parameters must call it.

        Raises:
            RuntimeError: ranks that are connected with this one were given different parameters or options.
        """
        if self.has_agreed:
            return
        self._communicators.connect(self._groups, self._layouts)
        problem = None
        for ranks, found in _describe(self._groups, self._layouts).items():
            descriptions = [description for _, description in found]
            way = self._choices[ranks].way if ranks in self._choices else None
            everything = [*descriptions, str(self._orders), f"replicas={way}"]
            differs = _difference(everything, ranks, self._communicators[ranks])
            if differs is not None:
                problem = problem or differs
                continue
            params = [self._groups[group].params[index] for (group, index), _ in found]
            names = [self._groups[group].param_names[index] for (group, index), _ in found]
            needed = [1 if self._groups[group].comms in AVERAGING else len(ranks) for (group, _), _ in found]
            self.partial.watch(names, params)
            watched = [param for param in params if self.partial.is_watched(param)]
            differs = self.partial.exchange(watched, self._communicators[ranks]) if watched else None
            if differs is not None:
                problem = problem or differs
                continue
            groups = [group for (group, _), _ in found]
            self._counted[ranks] = _Counted(params, groups, needed, self._communicators[ranks], self.partial)
            self._places |= {place: (ranks, number) for number, (place, _) in enumerate(found)}
        facts = exchanged(facts_of(self._groups, self._layouts, problem), self._communicators)
        for rank, theirs in sorted(facts.items()):
            if theirs.problem is not None:
                # Also on ranks that do not share these parameters, and would wait for those that do.
                raise RuntimeError(problem or f"on rank {rank}: {theirs.problem}")
        self._communicators.connect(self._groups, self._travels)
        self.connected = Connected(facts, self._groups, self._communicators)
        self.connected.connect()
        self.has_agreed = True

    def check_sums(self, pending_steps: Sequence[int]) -> None:
        """Check that this rank's gradients are no other sums than all ranks know of; nothing is communicated.

        For the beginning of a step, before anything is sent. In the first one all is well: ranks tell each other then.

        Args:
            pending_steps: for each group how many steps it waits for after this one; 0 if it is stepped now.

        Raises:
            RuntimeError: one is; on the ranks that have such a gradient, and on no others.
        """
        if self.has_agreed:
            self.partial.check(self._watched(_due(pending_steps)))

    @contextmanager
    def of_step(self, pending_steps: Sequence[int]) -> Iterator[None]:
        """Begin to count the ranks that have a gradient; meanwhile sums still to be made stand in `p.grad`.

        All ranks that share parameters must call it.

        Args:
            pending_steps: for each group how many steps it waits for after this one; 0 if it is stepped now.

        Raises:
            RuntimeError: as `agree`.
        """
        self.agree()
        for counted in self._counted.values():
            counted.start()
        with self.partial.summed(self._watched(_due(pending_steps))):
            yield

    def sum_early(self, numbers: Iterable[int]) -> None:
        """Make sums of gradients before the step, and put them in `p.grad`, also where this rank has none.

        All ranks that share parameters must call it.

        Args:
            numbers: of the groups.

        Raises:
            RuntimeError: as `agree` and `check_sums`.
        """
        self.agree()
        params = self._watched(numbers)
        self.partial.check(params)
        self.partial.replace(params)

    def _watched(self, numbers: Iterable[int]) -> list[Tensor]:
        """Return the parameters of some groups whose gradients may be sums, in one order on all ranks."""
        wanted = set(numbers)
        found: list[Tensor] = []
        for counted in self._counted.values():
            found += counted.watched(wanted)
        return found

    def any_present(self) -> Iterator[Tensor]:
        """Yield () bool on a device for each group of ranks that share parameters: whether one has any gradient.

        Of the step that was just made; nothing is communicated, and no host waits.
        """
        return (counted.any_present() for counted in self._counted.values())

    def stepped(
        self, number: int, bucket: Bucket, parts: _Parts, indices_of: Callable[[_Parts], Iterable[int]]
    ) -> Tensor | None:
        """Return (parameters,) int32 on the device: 1 for those that are stepped, else 0; None if nobody shares any.

        Args:
            number: of the bucket in the plan.
            bucket: that the parameters belong to.
            parts: of the bucket.
            indices_of: returns the positions of their parameters in the group; called only if `parts` are not those of
                the last step.
        """
        key, selection = self._selections.get(number, (None, None))
        if key != parts:
            selection = self._select([(bucket.group, index) for index in indices_of(parts)], bucket.device)
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
    """The parameters that some ranks share, and how many of these have gradients.

    Args:
        params: the parameters.
        groups: the number of each one's group.
        needed: of how many ranks each needs a gradient to be stepped.
        process_group: of the ranks.
        partial: which gradients are sums still to be made.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        groups: Sequence[int],
        needed: Sequence[int],
        process_group: ProcessGroup,
        partial: PartialGradients,
    ) -> None:
        self._params, self._group_numbers = params, groups
        self._group, self._partial = process_group, partial
        self._present: list[int] | None = None
        self._flags = self._enough = self._counts = torch.empty(0)
        self._pending: Pending | None = None
        self._watched = [number for number, param in enumerate(params) if partial.is_watched(param)]
        needed = [
            1 if partial.may_lack_addends(param) else number for param, number in zip(params, needed, strict=True)
        ]
        self._needed = upload(host_tensor(needed, torch.int32), params[0].device)

    def start(self) -> None:
        """Begin to count."""
        present = [int(param.grad is not None) for param in self._params]
        if self._partial.has_stand_ins:
            for number in self._watched:
                present[number] -= self._partial.is_stand_in(self._params[number])
        if present != self._present:
            self._flags = upload(host_tensor(present, torch.int32), self._needed.device)
            self._present = present
        self._pending = start_sum(self._flags.clone(), self._group)

    def watched(self, numbers: Container[int]) -> list[Tensor]:
        """Return the parameters of some groups whose gradients may be sums."""
        return [self._params[number] for number in self._watched if self._group_numbers[number] in numbers]

    def enough(self) -> Tensor:
        """Return (parameters,) int32: 1 for those of which as many ranks as are needed have a gradient."""
        if self._pending is not None:
            counts, self._pending = self._pending.wait(), None
            self._counts, self._enough = counts, (counts >= self._needed).int()
        return self._enough

    def any_present(self) -> Tensor:
        """Return () bool: whether any rank has any of the gradients in this step."""
        self.enough()
        return self._counts.any()


def _due(pending_steps: Sequence[int]) -> list[int]:
    """Return the numbers of the groups that are stepped now."""
    return [number for number, pending in enumerate(pending_steps) if pending == 0]


class _Selection(NamedTuple):
    """Some parameters among those that are counted."""

    size: int
    parts: tuple[tuple[tuple[int, ...], Tensor, Tensor], ...]
    """Ranks, places among the selected, places among the counted."""


# Options that decide which collectives run, and of which sizes.
_COLLECTIVE_OPTIONS = (
    "algorithm",
    "comms",
    "replicas",
    "transport",
    "view",
    "orthogonalizer",
    "compute_dtype",
    "normalize",
    "max_workspace_bytes",
    "offload",
    "master",
    "state_dtype",
    "cautious",
    "decay_coupling",
    "scale_decay",
    "step_every",
    "qk_clip",
    "on_nonfinite",
    "tied_to",
)


def _describe(
    groups: Sequence[Group], layouts: Sequence[Sequence[Layout | None]]
) -> dict[tuple[int, ...], list[tuple[Place, str]]]:
    """Return by the ranks that share them: (group, index) and a description of each parameter."""
    found: dict[tuple[int, ...], list[tuple[Place, str]]] = {}
    # Which dtype is the fast one decides of what size updates travel, and processors differ.
    processor = "" if cpu_multiplies_bfloat16() else " without bfloat16 products"
    for number, (group, of_group) in enumerate(zip(groups, layouts, strict=True)):
        options = ", ".join(f"{key}={_text(getattr(group, key))}" for key in _COLLECTIVE_OPTIONS)
        for index, layout in enumerate(of_group):
            if layout is not None and this_rank() in layout.ranks:
                name, param = group.param_names[index], group.params[index]
                order = "" if param.is_contiguous() else ", not contiguous"
                kind = f"{param.device.type}{processor if param.device.type == 'cpu' else ''}"
                text = (
                    f"{name} of shape {layout.shape}, {param.dtype}{order}, on ranks {layout.ranks} ({kind}) with "
                    f"{options}"
                )
                found.setdefault(tuple(sorted(layout.ranks)), []).append(((number, index), text))
    return dict(sorted(found.items()))


def _text(option: object) -> str:
    """Return an option as all ranks write it: a function's address is its own on each."""
    return getattr(option, "__qualname__", type(option).__qualname__) if callable(option) else str(option)


def _difference(descriptions: Sequence[str], ranks: tuple[int, ...], group: ProcessGroup) -> str | None:
    """Compare what the ranks of a group are about to do; all of them must call it.

    Args:
        descriptions: one per parameter, which are equal on all ranks if their plans are.
        ranks: of the group.
        group: the process group.

    Returns:
        None if they are equal, else a message with the first parameter that differs, and the ranks.
    """
    digest = hashlib.sha256("\n".join(descriptions).encode()).hexdigest()
    if len(set(all_gather_values(digest, group))) == 1:
        return None
    everything = all_gather_values(list(descriptions), group)
    first = everything[0]
    for rank, theirs in zip(ranks, everything, strict=True):
        for number in range(max(len(first), len(theirs))):
            mine = first[number] if number < len(first) else "nothing"
            other = theirs[number] if number < len(theirs) else "nothing"
            if mine != other:
                return (
                    f"ranks {ranks[0]} and {rank} were given different parameters or options, and would wait for each "
                    f"other forever: rank {ranks[0]} has {mine}, rank {rank} has {other}; build the model, its groups "
                    f"and the optimizer in the same order on all ranks"
                )
    return None
