"""When the optimizer averages gradients over ranks, and which: in the step, or before it for their norm."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from quintic.kernels.dispatch import choose_kernels
from quintic.optim.comms.channels import Channel
from quintic.optim.comms.collectives import this_rank
from quintic.optim.comms.communicators import Communicators
from quintic.optim.comms.sharing import AVERAGING, ranks_of
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import Layout
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.schedule import run_overlapping
from quintic.optim.step.averages.averaging import Averaging
from quintic.optim.step.averages.divided import ShardedMemory, start_mean
from quintic.optim.step.averages.early_averages import EarlyAverages, OfGroup
from quintic.optim.step.operands import BucketMemory, dense_gradient

__all__ = ["GradientAverages"]


class GradientAverages:
    """Averages the gradients of one plan's groups.

    With `comms="replicated"` whole gradients are averaged in place, before the buckets are stepped. Where state is
    divided, buckets average on the way to the owners; here this is done if it must be done before the step.

    Args:
        buckets: of the plan.
        memories: of the buckets.
        groups: parameter groups.
        layouts: of their parameters, from `layouts_of`.
        communicators: of the optimizer.
        early: what is averaged before the step; outlives the plan.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        memories: Sequence[BucketMemory],
        groups: Sequence[Group],
        layouts: Sequence[Sequence[Layout | None]],
        communicators: Communicators,
        early: EarlyAverages,
    ) -> None:
        self._groups, self._communicators, self._early = groups, communicators, early
        self._sharded = [
            (bucket, memory)
            for bucket, memory in zip(buckets, memories, strict=True)
            if isinstance(memory, ShardedMemory)
        ]
        self._ranks = {
            number: ranks_of(found)
            for number, (group, found) in enumerate(zip(groups, layouts, strict=True))
            if group.comms in AVERAGING and any(found)
        }
        """Of the groups whose gradients differ among ranks."""
        self._lent: list[Tensor] = []
        """Parameters that have a gradient only until the step is over, because other ranks have one."""
        self._of_step: Mapping[int, OfGroup] = {}
        self._averagings: dict[object, Averaging] = {}
        for number in self._ranks:
            if groups[number].comms == "replicated":
                # Most gradients have the dtype of their parameter.
                self._averagings_of(number, groups[number].params)

    @property
    def is_needed(self) -> bool:
        """Whether there are gradients to average."""
        return bool(self._ranks)

    @property
    def workspace_bytes(self) -> int:
        """Return an upper bound of the temporary bytes of averaging whole gradients."""
        return max((found.workspace_bytes for found in self._averagings.values()), default=0)

    @contextmanager
    def of_step(self, pending_steps: Sequence[int]) -> Iterator[None]:
        """Let gradients be averages where a step needs whole ones. All ranks that share parameters must call it.

        Args:
            pending_steps: for each group how many steps it waits for after this one; 0 if it is stepped now.

        Raises:
            ValueError: a gradient is sparse.
        """
        self._of_step = self._early.fresh()
        try:
            for number in self._ranks:
                if self._groups[number].comms != "replicated" or pending_steps[number]:
                    continue
                if number not in self._of_step:
                    self._average(number)
                    continue
                for param, average in self._of_step[number].lent.items():
                    param.grad = average
                    self._lent.append(param)
            yield
        finally:
            self._take_back()
            self._of_step = {}
        self._early.forget(number for number, pending in enumerate(pending_steps) if pending == 0)

    def of_bucket(self, bucket: Bucket) -> Tensor | None:
        """Return the averages of the parts of a bucket that this rank owns, if they were made before the step."""
        found = self._of_step.get(bucket.group)
        return None if found is None else found.of_bucket(bucket)

    def make_early(self, numbers: Iterable[int]) -> Mapping[int, OfGroup]:
        """Average gradients before the next step, see `Runner.average_early`."""
        found = self._early.fresh()
        due = [number for number in numbers if number in self._ranks]
        for number in due:
            if number in found:
                continue
            params = self._groups[number].params
            if self._groups[number].comms == "replicated":
                try:
                    self._average(number)
                    lent = {param: param.grad for param in self._lent if param.grad is not None}
                finally:
                    self._take_back()
                found[number] = OfGroup(params, lent)
                continue
            buckets = [(bucket, memory) for bucket, memory in self._sharded if bucket.group == number]
            numels = [0] * len(params)
            for part in chain.from_iterable(memory.sharding.owned for _, memory in buckets):
                numels[part.index] += part.numel
            own = {param: param.new_zeros(numel) for param, numel in zip(params, numels, strict=True)}
            found[number] = OfGroup(params, {}, own)
            run_overlapping([self._average_bucket(bucket, memory, found[number]) for bucket, memory in buckets])
        self._early.keep(found)
        return {number: found[number] for number in due}

    def _average_bucket(self, bucket: Bucket, memory: ShardedMemory, averages: OfGroup) -> Iterator[None]:
        channel = self._channel(bucket.group, memory.sharding.ranks, bucket.device)
        wait_for_mean = start_mean(bucket, memory, memory.local_operands(), channel)
        yield
        mean = wait_for_mean()
        del wait_for_mean  # and what was sent
        averages.keep_bucket(bucket, mean)
        yield

    def _channel(self, number: int, ranks: tuple[int, ...], device: torch.device) -> Channel:
        return self._communicators.channel(ranks, self._groups[number].transport, device)

    def _average(self, number: int) -> None:
        """Average the whole gradients of one group, in place."""
        group, gradients = self._groups[number], []
        for param, name in zip(group.params, group.param_names, strict=True):
            gradient = param.grad
            if gradient is None:
                param.grad = gradient = torch.zeros_like(param)
                self._lent.append(param)
            dense = dense_gradient(param, gradient, name)
            if dense is not gradient:
                param.grad = dense
            gradients.append(dense)
        channel = self._channel(number, self._ranks[number], gradients[0].device)
        for averaging, indices in self._averagings_of(number, gradients):
            averaging.average_([gradients[index] for index in indices], channel)

    def _averagings_of(self, number: int, tensors: Sequence[Tensor]) -> list[tuple[Averaging, list[int]]]:
        """Return what averages a group's gradients, and which of them; `tensors` are like these, one per parameter."""
        group, ranks = self._groups[number], self._ranks[number]
        together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(tensors):
            together.setdefault((tensor.dtype, tensor.device), []).append(index)
        found = []
        for (dtype, _), indices in together.items():
            key = number, dtype, tuple(indices)
            if key not in self._averagings:
                alike = [tensors[index] for index in indices]
                self._averagings[key] = Averaging(
                    alike,
                    len(ranks),
                    ranks.index(this_rank()),
                    choose_kernels(group.kernels, alike[0]),
                    group.max_workspace_bytes,
                    elsewhere=group.transport == "copy_engines",
                )
            found.append((self._averagings[key], indices))
        return found

    def _take_back(self) -> None:
        for param in self._lent:
            param.grad = None
        self._lent = []
