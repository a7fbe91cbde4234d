"""Agreements of ranks: before the first step on their plans, at each step on the parameters that are stepped."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from quintic.optim.comms.collectives import Pending, ProcessGroup, group_ranks, start_sum, this_rank
from quintic.optim.comms.communicators import Communicators
from quintic.optim.comms.comparing import Place, described, difference
from quintic.optim.comms.connected import Connected, gather_rank_info, local_rank_info
from quintic.optim.comms.sharing import AVERAGING
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import Layout, is_dtensor
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.order import Orders
from quintic.optim.plan.replicas import ReplicaChoice
from quintic.optim.rules.device import HostCopy, host_tensor, is_capturing, upload
from quintic.optim.step.partial_gradients import PartialGradients

__all__ = ["RankConsensus"]

_Parts = TypeVar("_Parts")

_Selected: TypeAlias = list[tuple[tuple[int, ...], Tensor, Tensor]]


class RankConsensus:
    """That ranks have the same plan, and which of the parameters that they share are stepped.

    Ranks may disagree about which gradients are missing: an expert that got no token has none on some ranks. Nobody may
    wait for a collective that the others skip, so collectives always run; what becomes of their results follows from
    how many ranks have a gradient, which they count first. No host waits for a device.

    Where a gradient is that of all ranks already, a parameter is stepped if every rank has one. Where the optimizer
    averages gradients, or sums are still to be made (`partial_gradients.py`), it is if any rank has one; a missing one
    counts as zeros.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        layouts: Sequence[Sequence[Layout | None]],
        gathered: Sequence[Sequence[Layout | None]],
        choices: Mapping[tuple[int, ...], ReplicaChoice],
        communicators: Communicators,
        orders: Orders,
    ) -> None:
        self._groups, self._communicators, self._orders = groups, communicators, orders
        self._layouts, self._gathered, self._choices = layouts, gathered, choices
        self.plans_validated = False
        """Whether ranks have compared their plans."""
        self.partial = PartialGradients()
        """Which gradients are sums still to be made."""
        self.connected = Connected({this_rank(): local_rank_info(groups, layouts)}, groups, communicators)
        """The ranks that decide together; this one alone until ranks have compared their plans."""
        self._presence: dict[tuple[int, ...], _GradientPresence] = {}
        self._partial_params: list[tuple[Tensor, int]] = []
        """Parameters whose gradients may be sums, and their groups."""
        self._partial_presence: list[_GradientPresence] = []
        """The counted ones among which some gradients are sums."""
        self._places: dict[Place, tuple[tuple[int, ...], int]] = {}
        """Shared parameter -> (sharing ranks, index in their count vector)."""
        self._selections: dict[int, tuple[object, int, _Selected]] = {}

    @property
    def is_single_rank(self) -> bool:
        """Return whether ranks have agreed, and this one has no other to agree with in a step."""
        return self.plans_validated and not self._presence and self.connected.is_single_rank

    def validate_plans(self) -> None:
        """Compare plans before the first step. All ranks that share parameters must call it.

        Raises:
            RuntimeError: ranks that are connected with this one were given different parameters or options.
        """
        if self.plans_validated:
            return
        self._communicators.connect(self._groups, self._layouts)
        self._partial_params, self._partial_presence = [], []
        problem = None
        for ranks, shared in described(self._groups, self._layouts).items():
            process_group, places = self._communicators[ranks], [place for place, _ in shared]
            params = [self._groups[group].params[index] for group, index in places]
            names = [self._groups[group].param_names[index] for group, index in places]
            watched = {param: name for param, name in zip(params, names, strict=True) if is_dtensor(param)}
            strategy = self._choices[ranks].strategy if ranks in self._choices else None
            everything = [*(text for _, text in shared), str(self._orders), f"replicas={strategy}"]
            differs = difference(everything, ranks, process_group)
            if differs is None and watched:
                differs = self.partial.exchange(watched, process_group)
            if differs is not None:
                problem = problem or differs
                continue
            needed = [1 if self._groups[group].comms in AVERAGING else len(ranks) for group, _ in places]
            self._partial_params += [
                (param, group) for param, (group, _) in zip(params, places, strict=True) if param in watched
            ]
            self._presence[ranks] = _GradientPresence(params, needed, process_group, self.partial)
            if any(map(self.partial.is_partial, params)):
                self._partial_presence.append(self._presence[ranks])
            self._places |= {place: (ranks, number) for number, place in enumerate(places)}
        infos = gather_rank_info(local_rank_info(self._groups, self._layouts, problem), self._communicators)
        for rank, info in sorted(infos.items()):
            if info.problem is not None:
                # Also on ranks that do not share these parameters, and would wait for those that do.
                raise RuntimeError(problem or f"on rank {rank}: {info.problem}")
        self._communicators.connect(self._groups, self._gathered)
        self.connected = Connected(infos, self._groups, self._communicators)
        self.connected.connect()
        self.plans_validated = True

    def check_partial(self, steps_until_due: Sequence[int]) -> None:
        """Check for a step, before anything is sent, what `PartialGradients.check` does.

        In the first one all is well: ranks tell each other then.
        """
        if self.plans_validated and self._partial_params:
            self.partial.check(self._due_partial(steps_until_due))

    @contextmanager
    def of_step(self, steps_until_due: Sequence[int]) -> Iterator[None]:
        """Begin to count the ranks that have a gradient; meanwhile sums still to be made stand in `p.grad`.

        All ranks that share parameters must call it.

        Raises:
            RuntimeError: as `validate_plans`; on all ranks, if a gradient is Partial on some and not on others. The
                parameter stays as it was; the error comes at the end of the step, or on CUDA devices of the next.
        """
        if not self.plans_validated:
            self.validate_plans()
        for presence in self._partial_presence:
            presence.check(wait=True)
        for presence in self._presence.values():
            presence.start()
        summed = self.partial.reduced(self._due_partial(steps_until_due)) if self._partial_presence else nullcontext()
        with summed:
            yield
        for presence in self._partial_presence:
            presence.check(wait=False)

    def reduce_partial_gradients(self, numbers: Iterable[int]) -> None:
        """Make sums of some groups' gradients before the step, and put them in `p.grad`, also where this rank has none.

        All ranks that share parameters must call it; errors are those of `validate_plans` and `check_partial`.
        """
        self.validate_plans()
        wanted = set(numbers)
        params = [param for param, group in self._partial_params if group in wanted]
        self.partial.check(params)
        self.partial.replace(params)

    def _due_partial(self, steps_until_due: Sequence[int]) -> list[Tensor]:
        """Return the parameters stepped now whose gradients may be sums, in one order on all ranks."""
        return [param for param, group in self._partial_params if steps_until_due[group] == 0]

    def any_present(self) -> Iterator[Tensor]:
        """Yield () bool on a device for each group of ranks that share parameters: whether one has any gradient.

        Of the step that was just made; nothing is communicated, and no host waits.
        """
        return (presence.any_present() for presence in self._presence.values())

    def step_mask(
        self, number: int, bucket: Bucket, parts: _Parts, indices_of: Callable[[_Parts], Iterable[int]]
    ) -> Tensor | None:
        """Return (parameters,) int32 on the device: 1 for those that are stepped, else 0; None if ranks share none.

        `indices_of` returns the positions of the parts' parameters in the group; it is called only if these are not the
        parts of the last step.
        """
        key, size, selected = self._selections.get(number, (None, 0, []))
        if key != parts:
            places = [(bucket.group, index) for index in indices_of(parts)]
            size, selected = len(places), self._select(places, bucket.device)
            self._selections[number] = parts, size, selected
        result: Tensor | None = None
        for ranks, positions, numbers in selected:
            presence = self._presence[ranks]
            of_these = (presence.last_mask if presence.pending is None else presence.has_required_grads())[numbers]
            if len(numbers) == size:
                return of_these
            if result is None:
                result = torch.ones(size, dtype=torch.int32, device=of_these.device)
            result[positions] = of_these
        return result

    def _select(self, places: Sequence[Place], device: torch.device) -> "_Selected":
        """Return for the ranks that share some of these parameters which they are, here and among those counted."""
        by_ranks: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
        for position, place in enumerate(places):
            if place in self._places:
                ranks, number = self._places[place]
                positions, numbers = by_ranks.setdefault(ranks, ([], []))
                positions.append(position)
                numbers.append(number)
        return [
            (ranks, upload(host_tensor(positions), device), upload(host_tensor(numbers), device))
            for ranks, (positions, numbers) in by_ranks.items()
        ]


# What a gradient counts besides that is none, where all ranks know it as a sum. More than there are ranks.
_NOT_PARTIAL_BIAS = 2**16


class _GradientPresence:
    """The parameters that some ranks share, each needing the gradients of so many of them to be stepped."""

    def __init__(
        self,
        params: Sequence[Tensor],
        needed: Sequence[int],
        process_group: ProcessGroup,
        partial: PartialGradients,
    ) -> None:
        self._params, self._group, self._partial = params, process_group, partial
        self._present: list[int] | None = None
        self._flags = self._counts = torch.empty(0)
        self.last_mask = torch.empty(0)
        """(parameters,) int32: 1 for those with the required gradients, once the count is no longer pending."""
        self.pending: Pending | None = None
        needed = [
            1 if partial.may_lack_addends(param) else number for param, number in zip(params, needed, strict=True)
        ]
        self._needed = upload(host_tensor(needed, torch.int32), params[0].device)
        self._partial_params = [number for number, param in enumerate(params) if partial.is_partial(param)]
        self._num_ranks = len(group_ranks(process_group))
        self._mixed: HostCopy | None = None
        """(parameters,) bool: sums on some ranks, and none on others."""

    def start(self) -> None:
        """Begin to count."""
        present = [int(param.grad is not None) for param in self._params]
        for number in self._partial_params:
            param = self._params[number]
            present[number] += _NOT_PARTIAL_BIAS * self._partial.is_reduced(param) - self._partial.is_stand_in(param)
        if present != self._present:
            self._flags = upload(host_tensor(present, torch.int32), self._needed.device)
            self._present = present
        self.pending = start_sum(self._flags.clone(), self._group)

    def has_required_grads(self) -> Tensor:
        """Return (parameters,) int32: 1 for those of which as many ranks as are needed have a gradient."""
        if self.pending is not None:
            counts, self.pending = self.pending.wait(), None
            has_required = (
                counts % _NOT_PARTIAL_BIAS >= self._needed if self._partial_params else counts >= self._needed
            )
            if self._partial_params:
                num_not_partial = counts // _NOT_PARTIAL_BIAS
                mixed = (num_not_partial > 0) & (num_not_partial < self._num_ranks)
                has_required &= ~mixed
                self._mixed = None if is_capturing(counts.device) else HostCopy(mixed)
            self._counts, self.last_mask = counts, has_required.int()
        return self.last_mask

    def check(self, *, wait: bool) -> None:
        """Raise a RuntimeError on all ranks if a gradient of the last step was a sum on some and none on others.

        That is, as far as it is known: without `wait` the host does not wait for the device, and counts of this step
        are asked for, too.
        """
        if not wait:
            self.has_required_grads()
        if self._mixed is None or not (wait or self._mixed.is_there):
            return
        flags, self._mixed = self._mixed.read(), None
        if any(flags):
            raise RuntimeError(self._partial.partial_mismatch_message(self._params[flags.index(True)]))

    def any_present(self) -> Tensor:
        """Return () bool: whether any rank has any of the gradients in this step."""
        self.has_required_grads()
        return self._counts.any()
