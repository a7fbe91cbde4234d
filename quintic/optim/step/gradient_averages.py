"""Averages gradients across ranks, in the step or ahead of it, when clipping needs their norm.

    comms          in the step                                  ahead of it, for clipping
    replicated     whole gradients, in place in `p.grad`        the same
    sharded        on the way to the owners (`transports.py`)   each rank keeps the averages of its own pieces;
                                                                `p.grad` keeps this rank's gradient

The next step uses averages made ahead of it, so that no gradient travels twice. They are valid until someone touches
`p.grad`: after a backward pass, another tensor, a change in place or `zero_grad` the step averages again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels, choose_kernels
from quintic.optim.comms.collectives import this_rank
from quintic.optim.comms.communicators import Communicators
from quintic.optim.comms.sharing import AVERAGING, ranks_of
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Layout, gradient_dtype, writable_gradient
from quintic.optim.plan.schedule import overlapping_bytes, prefetch_one_schedule
from quintic.optim.plan.workspace.buckets import averaged_entries, averaging_stages
from quintic.optim.step.averaging import GroupAverages, PrecomputedAverages, ReduceScatterPlan, messages_of
from quintic.optim.step.bucket_step import run_overlapping
from quintic.optim.step.operands import dense_gradient
from quintic.optim.step.ranges import range_of
from quintic.optim.step.transports import Shard

__all__ = ["GradientAverages"]


class GradientAverages:
    """Averages the gradients of one plan's groups.

    Args:
        shards: the transports of buckets with sharded state.
        groups: the parameter groups.
        layouts: for each group and parameter how ranks hold it; None for this rank only.
        communicators: the process groups.
        precomputed: averages made ahead of the step, which outlive the plan.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        groups: Sequence[Group],
        layouts: Sequence[Sequence[Layout | None]],
        communicators: Communicators,
        precomputed: PrecomputedAverages,
    ) -> None:
        self._groups, self._communicators, self._precomputed = groups, communicators, precomputed
        self._shards = shards
        # The ranks of each group whose gradients differ among ranks; empty where there is nothing to average.
        self.ranks = {
            number: ranks_of(of_group)
            for number, (group, of_group) in enumerate(zip(groups, layouts, strict=True))
            if group.comms in AVERAGING and any(of_group)
        }
        # Parameters without a gradient of this rank, which have one until the step is over, because other ranks do.
        self._zero_filled: list[Tensor] = []
        self._reduce_scatters: dict[object, list[list[tuple[ReduceScatterPlan, list[int]]]]] = {}
        # Upper bound of the temporary bytes of averaging whole gradients.
        self.workspace_bytes = 0
        # Groups whose averages stand in `p.grad`.
        self._whole = [number for number in self.ranks if groups[number].comms == "replicated"]
        self.has_whole = bool(self._whole)
        for together in self._of_same_ranks(self._whole):
            # Most gradients have the dtype of their parameter.
            self._reduce_scatters_of(together, [param for number in together for _, param in _stepped(groups[number])])

    @contextmanager
    def of_step(self, steps_waited: Sequence[int]) -> Iterator[None]:
        """Put whole averages in `p.grad` while a step runs. All ranks that share parameters must call it."""
        # Averages made ahead of the step take the place of messages, if no gradient was touched since.
        self._precomputed.of_step = of_step = self._precomputed.fresh()
        try:
            due = [number for number in self._whole if steps_waited[number] == 0]
            self._average([number for number in due if number not in of_step])
            # `p.grad` of parameters without a gradient on this rank is None between clipping and the step.
            for param, average in chain.from_iterable(of_step[n].zero_filled.items() for n in due if n in of_step):
                param.grad = average
                self._zero_filled.append(param)
            yield
        finally:
            self._drop_zero_filled()
            self._precomputed.of_step = {}

    def precompute(self, numbers: Iterable[int]) -> Mapping[int, GroupAverages]:
        """Average gradients before the next step, see `Runner.precompute_averages`."""
        averages = self._precomputed.fresh()
        due = [number for number in numbers if number in self.ranks]
        missing = [number for number in due if number not in averages]
        # replicated: the averages stay in `p.grad`
        whole = [number for number in missing if number in self._whole]
        try:
            self._average(whole)
            zero_filled = {param: param.grad for param in self._zero_filled if param.grad is not None}
        finally:
            self._drop_zero_filled()
        for number in whole:
            params = self._groups[number].params
            averages[number] = GroupAverages(
                params, {param: zero_filled[param] for param in params if param in zero_filled}
            )
        # sharded: this rank's entries of each average, flat
        for number in [number for number in missing if number not in whole]:
            params = self._groups[number].params
            for param in params:
                writable_gradient(param)  # PyTorch counts changes in place only of such gradients
            shards = [shard for shard in self._shards if shard.bucket.group == number]
            numels = [0] * len(params)
            for shard in chain.from_iterable(shard.bucket.members for shard in shards):
                numels[shard.index] += shard.numel
            own = {param: param.new_zeros(numel) for param, numel in zip(params, numels, strict=True)}
            averages[number] = GroupAverages(params, {}, own)
            run_overlapping([_average_bucket(shard, averages[number]) for shard in shards])
        self._precomputed.keep(averages)
        return {number: averages[number] for number in due}

    def _average(self, numbers: Sequence[int]) -> None:
        """Average the whole gradients of some groups in place; groups of the same ranks share messages."""
        for together in self._of_same_ranks(numbers):
            groups = [self._groups[number] for number in together]
            gradients = [self._dense(param, name) for group in groups for name, param in _stepped(group)]
            process_group = self._communicators[self.ranks[together[0]]]
            for reduce_scatters in self._reduce_scatters_of(together, gradients):
                with range_of("average gradients"):
                    run_overlapping(
                        [one.average([gradients[n] for n in each], process_group) for one, each in reduce_scatters]
                    )

    def _of_same_ranks(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the groups of equal ranks together, in the order of the first group of each set."""
        by_ranks: dict[tuple[int, ...], list[int]] = {}
        for number in numbers:
            by_ranks.setdefault(self.ranks[number], []).append(number)
        return list(by_ranks.values())

    def _dense(self, param: Tensor, name: str) -> Tensor:
        """Give `p.grad` a dense gradient, zeros until the step is over where this rank has none, and return it."""
        gradient = writable_gradient(param)
        if gradient is None:
            # It has the dtype of other ranks' gradients, because messages must be equally long.
            param.grad = gradient = torch.zeros_like(param, dtype=gradient_dtype(param))
            self._zero_filled.append(param)
        # Messages pack memory as it lies: the gradient needs the strides that the parameter has on all ranks.
        dense = dense_gradient(param, gradient, name)
        if dense is not gradient:
            param.grad = dense
        return dense

    def _reduce_scatters_of(
        self, numbers: Sequence[int], tensors: Sequence[Tensor]
    ) -> list[list[tuple[ReduceScatterPlan, list[int]]]]:
        """Return the messages of groups of equal ranks, each with the numbers of its gradients.

        There is a list for each dtype, device, kernels and limit. The tensors are like the gradients of all parameters
        that are stepped, in the order of the groups.
        """
        # Gradients may have another dtype than in the step before.
        key = tuple(numbers), tuple([tensor.dtype for tensor in tensors])
        if key not in self._reduce_scatters:
            members = [(self._groups[n], param) for n in numbers for _, param in _stepped(self._groups[n])]
            together: dict[tuple[torch.dtype, torch.device, Kernels, int | None], list[int]] = {}
            # One message has one dtype and device, and the limit of its group's workspace.
            for n, ((group, param), tensor) in enumerate(zip(members, tensors, strict=True)):
                kernels, limit = choose_kernels(group.kernels, param), averaged_entries(group, tensor.dtype)
                together.setdefault((tensor.dtype, tensor.device, kernels, limit), []).append(n)
            self._reduce_scatters[key] = [
                self._new_reduce_scatters(self.ranks[numbers[0]], *alike, {n: members[n][1].numel() for n in chosen})
                for alike, chosen in together.items()
            ]
        return self._reduce_scatters[key]

    def _new_reduce_scatters(
        self,
        ranks: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        limit: int | None,
        numels: Mapping[int, int],
    ) -> list[tuple[ReduceScatterPlan, list[int]]]:
        chosen, reduce_scatters, stages = list(numels), [], []
        for places, owned, is_direct in messages_of(list(numels.values()), len(ranks), limit):
            reduce_scatter = ReduceScatterPlan(
                owned, ranks.index(this_rank()), dtype, device, kernels, is_direct=is_direct
            )
            reduce_scatters.append((reduce_scatter, [chosen[place] for place in places]))
            counts, most = reduce_scatter.counts, reduce_scatter.most
            stages.append(averaging_stages(counts, most, dtype, kernels, is_direct=is_direct, is_in_place=is_direct))
        # Messages of one call overlap, calls come one after the other.
        self.workspace_bytes = max(
            self.workspace_bytes, overlapping_bytes(stages, prefetch_one_schedule(len(stages)), 0)
        )
        return reduce_scatters

    def _drop_zero_filled(self) -> None:
        for param in self._zero_filled:
            param.grad = None
        self._zero_filled = []


def _average_bucket(shard: Shard, averages: GroupAverages) -> Iterator[None]:
    wait_for_mean = shard.start_mean(shard.local_operands())
    yield
    mean = wait_for_mean()
    del wait_for_mean  # and the gradients that were sent
    # Copied into the flat averages: the memory of the mean is free again.
    averages.keep_bucket(shard.bucket, mean)
    yield


def _stepped(group: Group) -> list[tuple[str, Tensor]]:
    """Return the name and tensor of each parameter of a group that is not idle."""
    rows = zip(group.param_names, group.params, strict=True)
    return [row for index, row in enumerate(rows) if index not in group.idle]
