"""Checks that ranks built the same plan, and decides in each step which shared parameters are stepped.

    once        ranks compare descriptions of their shared parameters, exchange which gradients are Partial, and learn
                which ranks they are connected with; a difference is an error on all connected ranks
    each step   ranks that share parameters count, in one all-reduce, how many of them have a gradient of each

The count stays on the device. The host waits for it only to raise errors about Partial gradients.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor

from quintic.optim.comms.collectives import Pending, ProcessGroup, group_ranks, start_sum, this_rank
from quintic.optim.comms.communicators import Communicators
from quintic.optim.comms.comparing import Place, described, difference
from quintic.optim.comms.connected import Connected, gather_rank_info, local_rank_info
from quintic.optim.comms.sharing import AVERAGING
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Layout, is_dtensor
from quintic.optim.layout.pieces import Piece
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.order import Orders
from quintic.optim.plan.replicas import ReplicaChoice
from quintic.optim.rules.device import HostCopy, host_tensor, is_capturing, upload
from quintic.optim.step.partial_gradients import PartialGradients

__all__ = ["RankConsensus"]

_Selected: TypeAlias = list[tuple[tuple[int, ...], Tensor, Tensor]]


class RankConsensus:
    """Compares the plans of ranks once, and counts in each step which of their shared parameters have a gradient.

    Ranks may disagree about which gradients are missing: an expert that got no token has none on some ranks. Every rank
    runs every collective, so that none can deadlock; the count of ranks with a gradient then decides whether the result
    is used. A parameter is stepped if

        the gradient is the same on all ranks      every rank has one
        the optimizer averages gradients           any rank has one; missing ones count as zeros
        the gradient is Partial                    any rank has one, unless addends have copies (`PartialSpec`)

    Args:
        groups: the parameter groups.
        layouts: for each group and parameter how ranks hold it; None for this rank only.
        gathered: the same for parameters whose matrices come together on one of several ranks.
        choices: the strategies that `replicas="auto"` chose, by the ranks that share parameters.
        communicators: the process groups.
        orders: the user's orders of parameters, which must be the same on all ranks.
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
        self.is_single_rank = False
        """Whether plans are compared, and a step of this rank depends on no other rank."""
        self.partial = PartialGradients()
        """The gradients that ranks know to be Partial."""
        self.connected = Connected({this_rank(): local_rank_info(groups, layouts)}, groups, communicators)
        """The ranks that decide together; only this one until ranks have compared their plans."""
        self._presence: dict[tuple[int, ...], _GradientPresence] = {}
        self._partial_params: list[tuple[Tensor, int]] = []
        """`DTensor`s that ranks share, whose gradients may be Partial, each with the position of its group."""
        self._partial_presence: list[_GradientPresence] = []
        """The entries of `_presence` with a parameter whose gradient is Partial."""
        self._places: dict[Place, tuple[tuple[int, ...], int]] = {}
        """Shared parameter -> (sharing ranks, index in their count vector)."""
        self._selections: dict[int, tuple[object, int, _Selected]] = {}
        """Index of a bucket -> (its pieces, the number of flags, where their counts are), as of the last step."""

    def validate_plans(self) -> None:
        """Compare plans before the first step. All ranks that share parameters must call it.

        Raises:
            RuntimeError: ranks that are connected with this one were given different parameters or options.
        """
        if self.plans_validated:
            return
        # Process groups are made and used once here: collectives of every kind, before the first step needs them.
        self._communicators.connect(self._groups, self._layouts)
        self._partial_params, self._partial_presence = [], []
        problem = None
        # One set of ranks after the other, in the same order everywhere: ranks in two of them wait for both. A problem
        # is raised at the end, since ranks of other sets wait for this rank before that.
        for ranks, shared in described(self._groups, self._layouts).items():
            differs = self._compare(ranks, shared)
            problem = problem or differs
        # Now every rank hears of the ranks that it shares parameters with through other ranks, and of their problems.
        infos = gather_rank_info(local_rank_info(self._groups, self._layouts, problem), self._communicators)
        for rank, info in sorted(infos.items()):
            if info.problem is not None:
                # Connected ranks raise, too, even if they do not share these parameters: they would wait forever.
                raise RuntimeError(problem or f"on rank {rank}: {info.problem}")
        # The ranks that orthogonalise together, which may be some of the ranks that share the parameters.
        self._communicators.connect(self._groups, self._gathered)
        self.connected = Connected(infos, self._groups, self._communicators)
        self.connected.connect()
        self.plans_validated = True
        self.is_single_rank = not self._presence and self.connected.is_single_rank

    def _compare(self, ranks: tuple[int, ...], shared: Sequence[tuple[Place, str]]) -> str | None:
        """Compare the parameters that some ranks share, and prepare to count their gradients; return any error message.

        Args:
            ranks: all of them must call it.
            shared: each parameter, and its description.
        """
        process_group, places = self._communicators[ranks], [place for place, _ in shared]
        params = [self._groups[group].params[index] for group, index in places]
        names = [self._groups[group].param_names[index] for group, index in places]
        # Only gradients of `DTensor`s can be Partial.
        watched = {param: name for param, name in zip(params, names, strict=True) if is_dtensor(param)}
        strategy = self._choices[ranks].strategy if ranks in self._choices else None
        everything = [*(text for _, text in shared), str(self._orders), f"replicas={strategy}"]
        differs = difference(everything, ranks, process_group)
        if differs is None and watched:
            differs = self.partial.exchange(watched, process_group)
        if differs is not None:
            return differs
        # Where the optimizer averages, one rank's gradient is enough: the missing ones count as zeros.
        needed = [1 if self._groups[group].comms in AVERAGING else len(ranks) for group, _ in places]
        self._partial_params += [
            (param, group) for param, (group, _) in zip(params, places, strict=True) if param in watched
        ]
        self._presence[ranks] = _GradientPresence(params, needed, process_group, self.partial)
        if any(map(self.partial.is_partial, params)):
            self._partial_presence.append(self._presence[ranks])
        self._places |= {place: (ranks, number) for number, place in enumerate(places)}
        return None

    def check_partial(self, steps_waited: Sequence[int]) -> None:
        """Check, before a step sends anything, that ranks know every Partial gradient.

        Before the first step any gradient may be Partial: ranks then exchange which ones are.

        Raises:
            RuntimeError: as `PartialGradients.check`.
        """
        if self.plans_validated and self._partial_params:
            self.partial.check(self._due_partial(steps_waited))

    @contextmanager
    def of_step(self, steps_waited: Sequence[int]) -> Iterator[None]:
        """Start to count the ranks that have a gradient, and let `p.grad` of Partial ones be their sums within a step.

        All ranks that share parameters must call it.

        Raises:
            RuntimeError: as `validate_plans`; on all ranks, if a gradient is Partial on some and not on others. The
                parameter stays as it was; the error comes at the end of the step, or on CUDA devices of the next.
        """
        if not self.plans_validated:
            self.validate_plans()
        # An error that the last step found on the device, if the host did not know of it by the end of that step.
        for presence in self._partial_presence:
            presence.check(wait=True)
        # The counts are under way while gradients are summed and averaged.
        for presence in self._presence.values():
            presence.start()
        summed = self.partial.reduced(self._due_partial(steps_waited)) if self._partial_presence else nullcontext()
        with summed:
            yield
        for presence in self._partial_presence:
            presence.check(wait=False)

    def reduce_partial_gradients(self, numbers: Iterable[int]) -> None:
        """Sum the Partial gradients of some groups before the step, and put the sums in `p.grad`, for clipping.

        This rank gets a sum even if it has no gradient. All ranks that share parameters must call it.

        Raises:
            RuntimeError: as `validate_plans` and `check_partial`.
        """
        self.validate_plans()
        wanted = set(numbers)
        params = [param for param, group in self._partial_params if group in wanted]
        self.partial.check(params)
        self.partial.replace(params)

    def _due_partial(self, steps_waited: Sequence[int]) -> list[Tensor]:
        """Return the parameters stepped now whose gradients may be Partial, in the same order on all ranks."""
        return [param for param, group in self._partial_params if steps_waited[group] == 0]

    def any_present(self) -> Iterator[Tensor]:
        """Yield for each set of ranks that share parameters whether any had any gradient in the last step: () bool.

        They are on the device. Nothing is communicated, and the host does not wait.
        """
        return (presence.any_present() for presence in self._presence.values())

    def step_mask(self, number: int, bucket: Bucket, pieces: Sequence[Piece]) -> Tensor | None:
        """Return (flags,) int32 on the device, 1 where pieces are stepped, else 0; None if no other rank has any.

        A box has one flag, and so has each matrix of a piece that has whole matrices.

        Args:
            number: the index of the bucket.
            bucket: whose pieces they are.
            pieces: the pieces that have flags, in order.
        """
        # The parameters of a bucket hardly ever change: their indices are uploaded once.
        key, size, selected = self._selections.get(number, (None, 0, []))
        if key != pieces:
            places = [(bucket.group, piece.index) for piece in pieces for _ in range(piece.batch_size)]
            size, selected = len(places), self._select(places, bucket.device)
            self._selections[number] = pieces, size, selected
        result: Tensor | None = None
        for ranks, positions, numbers in selected:
            presence = self._presence[ranks]
            of_these = (presence.last_mask if presence.pending is None else presence.has_required_grads())[numbers]
            # (flags of the parameters that these ranks share,); mostly all of them.
            if len(numbers) == size:
                return of_these
            if result is None:
                # Parameters that no other rank has are stepped if this one has a gradient: 1.
                result = torch.ones(size, dtype=torch.int32, device=of_these.device)
            result[positions] = of_these
        return result

    def _select(self, places: Sequence[Place], device: torch.device) -> "_Selected":
        """Return, for each set of ranks that shares some of the parameters, their positions here and in its counts."""
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


# Added to the count of a rank whose gradient is not Partial although the parameter's is known to be. Larger than any
# number of ranks, so that one sum carries both counts: sum % bias ranks have a gradient, sum // bias not a Partial one.
_NOT_PARTIAL_BIAS = 2**16


class _GradientPresence:
    """Counts over the ranks that share parameters how many have a gradient of each, once a step.

    Args:
        params: the parameters, in the same order on all of these ranks.
        needed: for each parameter how many ranks must have a gradient for it to be stepped.
        process_group: of these ranks.
        partial: the gradients that are known to be Partial.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        needed: Sequence[int],
        process_group: ProcessGroup,
        partial: PartialGradients,
    ) -> None:
        self._params, self._group, self._partial = params, process_group, partial
        self._present: list[int] | None = None
        """This rank's counts as they were uploaded last."""
        self._flags = self._counts = torch.empty(0)
        self.last_mask = torch.empty(0)
        """(parameters,) int32: 1 for those with the required gradients, once the count is no longer pending."""
        self.pending: Pending | None = None
        # A Partial gradient needs only one rank's addend, unless addends have copies.
        needed = [
            1 if partial.may_lack_addends(param) else number for param, number in zip(params, needed, strict=True)
        ]
        self._needed = upload(host_tensor(needed, torch.int32), params[0].device)
        self._partial_params = [number for number, param in enumerate(params) if partial.is_partial(param)]
        self._num_ranks = len(group_ranks(process_group))
        self._mixed: HostCopy | None = None
        """(parameters,) bool, on its way to the host: Partial on some ranks, and not on others."""

    def start(self) -> None:
        """Start the all-reduce that counts gradients. All of these ranks must call it, once a step."""
        present = [int(param.grad is not None) for param in self._params]
        for number in self._partial_params:
            param = self._params[number]
            # A sum that `replace` has put there counts for the ranks that had an addend, and not for this one.
            present[number] += _NOT_PARTIAL_BIAS * self._partial.is_reduced(param) - self._partial.is_stand_in(param)
        # Mostly the same gradients are there as in the last step: then nothing is uploaded.
        if present != self._present:
            self._flags = upload(host_tensor(present, torch.int32), self._needed.device)
            self._present = present
        # A copy, which becomes the sum in place.
        self.pending = start_sum(self._flags.clone(), self._group)

    def has_required_grads(self) -> Tensor:
        """Return (parameters,) int32 on the device: 1 where as many ranks have a gradient as the parameter needs."""
        if self.pending is not None:
            counts, self.pending = self.pending.wait(), None
            has_required = (
                counts % _NOT_PARTIAL_BIAS >= self._needed if self._partial_params else counts >= self._needed
            )
            if self._partial_params:
                # A parameter whose gradient is Partial on some of the ranks only is left as it is, on all of them.
                num_not_partial = counts // _NOT_PARTIAL_BIAS
                mixed = (num_not_partial > 0) & (num_not_partial < self._num_ranks)
                has_required &= ~mixed
                self._mixed = None if is_capturing(counts.device) else HostCopy(mixed)
            self._counts, self.last_mask = counts, has_required.int()
        return self.last_mask

    def check(self, *, wait: bool) -> None:
        """Raise a RuntimeError on all ranks if a gradient was Partial on some of them and not on others.

        Args:
            wait: whether the host waits for the counts of the last step. Otherwise it looks at the counts of this
                step, and raises only if they have arrived by now.
        """
        if not wait:
            self.has_required_grads()
        if self._mixed is None or not (wait or self._mixed.is_there):
            return
        flags, self._mixed = self._mixed.read(), None
        if any(flags):
            raise RuntimeError(self._partial.partial_mismatch_message(self._params[flags.index(True)]))

    def any_present(self) -> Tensor:
        """Return () bool on the device: whether any of these ranks has any of the gradients in this step."""
        self.has_required_grads()
        return self._counts.any()
