"""When the optimizer averages gradients over ranks, and which: in the step, or before it for their norm.

With `comms="replicated"` averages made before the step stand in `p.grad`, where the step would have put them. With
divided state no rank has a whole average: each rank keeps that of the parts it owns, and `p.grad` stays what it was.
Either way the next step takes them as they are, so that nothing travels twice. They hold as long as no one touches
`p.grad`: after a backward pass, another tensor, a change in place or `zero_grad` the step averages again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from quintic.kernels.dispatch import choose_kernels
from quintic.optim.comms.collectives import this_rank
from quintic.optim.comms.communicators import Communicators
from quintic.optim.comms.sharing import AVERAGING, ranks_of
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import Layout, gradient_dtype
from quintic.optim.plan.bucket import Divided
from quintic.optim.plan.memory.buckets import averaged_entries, averaging_stages
from quintic.optim.plan.schedule import one_ahead, overlapping_bytes, run_overlapping
from quintic.optim.step.averages.averaging import Averaging, messages_of
from quintic.optim.step.averages.divided_memory import DividedMemory
from quintic.optim.step.operands import dense_gradient

__all__ = ["EarlyAverages", "GradientAverages", "OfGroup"]


class OfGroup:
    """The averages of one parameter group's gradients.

    Whole ones stand in `p.grad`, or are lent where this rank has no gradient. Where state is divided, `own` has of each
    parameter the average of the parts that this rank owns, as its state is kept.
    """

    def __init__(
        self, params: Sequence[Tensor], lent: Mapping[Tensor, Tensor], own: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        self.lent, self.own = lent, own
        self._params = params
        self._seen: list[tuple[Tensor | None, int]] = []
        self.renew()

    @property
    def is_fresh(self) -> bool:
        """Return whether the gradients are untouched since."""
        rows = zip(self._seen, self._gradients(), strict=True)
        return all(before is now and seen == version for (before, seen), (now, version) in rows)

    def renew(self) -> None:
        """Take gradients as they are now for those that the averages belong to."""
        self._seen = self._gradients()

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        """Return the gradients, and how often each was changed in place."""
        gradients = [param.grad for param in self._params]
        return [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]

    def tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter and its average: the whole, or what this rank owns of it."""
        if self.own is not None:
            yield from self.own.items()
            return
        for param in self._params:
            yield param, self.lent[param] if param.grad is None else param.grad

    def of_bucket(self, bucket: Divided) -> Tensor:
        """Return the averages of the parts of a bucket that this rank owns, one after the other, (entries,)."""
        return torch.cat([torch.empty(0, dtype=bucket.dtype, device=bucket.device), *self._runs(bucket)])

    def keep_bucket(self, bucket: Divided, mean: Tensor) -> None:
        """Keep what `of_bucket` then returns."""
        runs = list(self._runs(bucket))
        for run, part in zip(runs, mean.split([run.numel() for run in runs]), strict=True):
            run.copy_(part)

    def _runs(self, bucket: Divided) -> Iterator[Tensor]:
        assert self.own is not None
        for part in bucket.own:
            yield self.own[self._params[part.index]][part.offset : part.offset + part.numel]


class EarlyAverages:
    """The averages that one optimizer has made for its next step, by the position of the parameter group."""

    def __init__(self) -> None:
        self._groups: dict[int, OfGroup] = {}
        self.of_step: Mapping[int, OfGroup] = {}
        """The averages that the running step takes as they are."""

    def of_bucket(self, bucket: Divided) -> Tensor | None:
        """Return the averages of the parts of a bucket that this rank owns, if the step takes them as they are."""
        averages = self.of_step.get(bucket.group)
        return None if averages is None else averages.of_bucket(bucket)

    def fresh(self) -> dict[int, OfGroup]:
        """Return the averages that hold.

        Where gradients of one group were touched, none do: a rank that has no gradients in that group cannot see it.
        """
        if self._groups and not all(averages.is_fresh for averages in self._groups.values()):
            self._groups = {}
        return dict(self._groups)

    def keep(self, groups: Mapping[int, OfGroup]) -> None:
        """Keep averages for the next step, for gradients as they are now."""
        self._groups = dict(groups)
        self.renew()

    def renew(self) -> None:
        """Take gradients as they are now for those that the averages belong to."""
        for averages in self._groups.values():
            averages.renew()

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget those of some groups."""
        for number in numbers:
            self._groups.pop(number, None)


class GradientAverages:
    """Averages the gradients of one plan's groups.

    With `comms="replicated"` whole gradients are averaged in place, before the buckets are stepped. Where state is
    divided, buckets average on the way to the owners; here this is done if it must be done before the step.
    """

    def __init__(
        self,
        divided: Sequence[DividedMemory],
        groups: Sequence[Group],
        layouts: Sequence[Sequence[Layout | None]],
        communicators: Communicators,
        early: EarlyAverages,
    ) -> None:
        self._groups, self._communicators, self._early = groups, communicators, early
        self._divided = divided
        self._ranks = {
            number: ranks_of(of_group)
            for number, (group, of_group) in enumerate(zip(groups, layouts, strict=True))
            if group.comms in AVERAGING and any(of_group)
        }
        """The ranks of the groups whose gradients differ among ranks."""
        self._lent: list[Tensor] = []
        """Parameters that have a gradient only until the step is over, because other ranks have one."""
        self._averagings: dict[object, list[tuple[Averaging, list[int]]]] = {}
        self.workspace_bytes = 0
        """Upper bound of the temporary bytes of averaging whole gradients."""
        for number in self._ranks:
            if groups[number].comms == "replicated":
                # Most gradients have the dtype of their parameter.
                self._averagings_of(number, groups[number].params)

    @property
    def is_needed(self) -> bool:
        """Whether there are gradients to average."""
        return bool(self._ranks)

    @contextmanager
    def of_step(self, pending_steps: Sequence[int]) -> Iterator[None]:
        """Let gradients be averages where a step needs whole ones. All ranks that share parameters must call it."""
        self._early.of_step = of_step = self._early.fresh()
        try:
            for number in self._ranks:
                if self._groups[number].comms != "replicated" or pending_steps[number]:
                    continue
                if number not in of_step:
                    self._average(number)
                    continue
                for param, average in of_step[number].lent.items():
                    param.grad = average
                    self._lent.append(param)
            yield
        finally:
            self._take_back()
            self._early.of_step = {}
        self._early.forget(number for number, pending in enumerate(pending_steps) if pending == 0)

    def make_early(self, numbers: Iterable[int]) -> Mapping[int, OfGroup]:
        """Average gradients before the next step, see `Runner.average_early`."""
        averages = self._early.fresh()
        due = [number for number in numbers if number in self._ranks]
        for number in due:
            if number in averages:
                continue
            params = self._groups[number].params
            if self._groups[number].comms == "replicated":
                try:
                    self._average(number)
                    lent = {param: param.grad for param in self._lent if param.grad is not None}
                finally:
                    self._take_back()
                averages[number] = OfGroup(params, lent)
                continue
            memories = [memory for memory in self._divided if memory.bucket.group == number]
            numels = [0] * len(params)
            for part in chain.from_iterable(memory.bucket.own for memory in memories):
                numels[part.index] += part.numel
            own = {param: param.new_zeros(numel) for param, numel in zip(params, numels, strict=True)}
            averages[number] = OfGroup(params, {}, own)
            run_overlapping([self._average_bucket(memory, averages[number]) for memory in memories])
        self._early.keep(averages)
        return {number: averages[number] for number in due}

    def _average_bucket(self, memory: DividedMemory, averages: OfGroup) -> Iterator[None]:
        wait_for_mean = memory.start_mean(memory.local_operands(), self._communicators[memory.bucket.ranks])
        yield
        mean = wait_for_mean()
        del wait_for_mean  # and what was sent
        averages.keep_bucket(memory.bucket, mean)
        yield

    def _average(self, number: int) -> None:
        """Average the whole gradients of one group, in place."""
        group, gradients = self._groups[number], []
        for param, name in zip(group.params, group.param_names, strict=True):
            gradient = param.grad
            if gradient is None:
                # Of the dtype that other ranks' gradients have: messages must be equally long.
                param.grad = gradient = torch.zeros_like(param, dtype=gradient_dtype(param))
                self._lent.append(param)
            dense = dense_gradient(param, gradient, name)
            if dense is not gradient:
                param.grad = dense
            gradients.append(dense)
        process_group = self._communicators[self._ranks[number]]
        for of_dtype in self._averagings_of(number, gradients):
            run_overlapping(
                [averaging.average([gradients[n] for n in indices], process_group) for averaging, indices in of_dtype]
            )

    def _averagings_of(self, number: int, tensors: Sequence[Tensor]) -> list[list[tuple[Averaging, list[int]]]]:
        """Return for each dtype the averagings of a group's gradients, and their indices; `tensors` are like these."""
        together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(tensors):
            together.setdefault((tensor.dtype, tensor.device), []).append(index)
        averagings = []
        for (dtype, device), indices in together.items():
            key = number, dtype, tuple(indices)
            if key not in self._averagings:
                self._averagings[key] = self._new_averagings(number, indices, dtype, device)
            averagings.append(self._averagings[key])
        return averagings

    def _new_averagings(
        self, number: int, indices: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> list[tuple[Averaging, list[int]]]:
        group, ranks = self._groups[number], self._ranks[number]
        kernels, position = choose_kernels(group.kernels, group.params[indices[0]]), ranks.index(this_rank())
        numels = [group.params[index].numel() for index in indices]
        averagings, stages = [], []
        for places, owned, is_direct in messages_of(numels, len(ranks), averaged_entries(group, dtype)):
            averaging = Averaging(owned, position, dtype, device, kernels, is_direct=is_direct)
            averagings.append((averaging, [indices[place] for place in places]))
            counts, most = averaging.counts, averaging.most
            stages.append(averaging_stages(counts, most, dtype, kernels, is_direct=is_direct, is_in_place=is_direct))
        self.workspace_bytes = max(self.workspace_bytes, overlapping_bytes(stages, one_ahead(len(stages)), 0))
        return averagings

    def _take_back(self) -> None:
        for param in self._lent:
            param.grad = None
        self._lent = []
