"""Averages of gradients over ranks: made in the step, or ahead of it by clipping, which needs their norm.

Which rank owns an entry. Every entry of a gradient has one owner, which averages it (`reduce_scatter.py`):

    comms         owner of an entry                              the average comes to
    replicated    all ranks in turn, each equally many entries   all ranks, in `p.grad`
    sharded       the rank that has the entry's state            its owner, who sends weights to all ranks instead

Which messages go when. All ranks that share parameters start the same messages in the same order, with zeros in place
of missing gradients.

    replicated    before the buckets run: groups of the same ranks share messages, which overlap (`_average`)
    sharded       with each bucket: its first message has the gradients, its second the weights (`transports.Shard`)
    clipping      the same messages of gradients for the groups that it clips (`precompute`); the step then sends none

How long an average made ahead of the step stays valid. It belongs to its gradients, and the step that uses it forgets
it. All such averages are dropped at once, so that all ranks decide alike, if

    `p.grad` of any of them is another tensor, or was changed in place, which PyTorch counts (`valid`)
    all ranks reset the gradients of one of these groups (`invalidate`), which a rank without any would not see
    all ranks change `comms` of one of these groups (`use_plan`)

Clipping scales gradients and averages by the same factor, and then calls `accept_gradients`. A new plan keeps averages,
since one rank may make a new plan while others do not.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels, choose_kernels
from quintic.optim.comms.collectives import this_rank
from quintic.optim.comms.communicators import Communicators
from quintic.optim.comms.sharing import AVERAGING, ranks_of
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Layout, gradient_dtype, writable_gradient
from quintic.optim.plan.schedule import overlapping_bytes, prefetch_one_schedule
from quintic.optim.plan.workspace.buckets import averaged_entries, averaging_phase_bytes
from quintic.optim.step.bucket_step import run_overlapping
from quintic.optim.step.operands import dense_gradient
from quintic.optim.step.ranges import range_of
from quintic.optim.step.reduce_scatter import ReduceScatter, evenly_owned
from quintic.optim.step.transports import Shard

__all__ = ["Averages", "Reduction"]

Averages: TypeAlias = dict[Tensor, Tensor | None]
"""Parameter of a group -> its average: whole, or where state is sharded this rank's entries, (n,); None if frozen."""

# Messages that overlap, each with the positions of its gradients in the list of all that are averaged.
_Overlapping: TypeAlias = list[tuple[ReduceScatter, list[int]]]

# For each parameter its gradient, and how often that was changed in place.
_Versions: TypeAlias = list[tuple[Tensor | None, int]]


class Reduction:
    """Averages gradients over ranks, and keeps averages made ahead of a step, also when the plan changes."""

    def __init__(self, communicators: Communicators) -> None:
        self._communicators = communicators
        self.cached: dict[int, tuple[Averages, _Versions]] = {}
        """Index of a group -> its averages for the next step, valid or not, and the gradients that they belong to."""
        self.ranks: dict[int, tuple[int, ...]] = {}
        """The ranks of each group whose gradients differ among ranks."""
        self.whole: list[int] = []
        """The groups whose averages stand in `p.grad`."""
        # Parameters without a gradient of this rank, which have one until the step is over, because other ranks do.
        self._zero_filled: list[Tensor] = []
        self.use_plan((), (), ())

    def use_plan(
        self, groups: Sequence[Group], layouts: Sequence[Sequence[Layout | None]], shards: Sequence[Shard]
    ) -> None:
        """Average for a new plan from now on; averages made ahead of the next step stay.

        Args:
            groups: the parameter groups.
            layouts: for each group and parameter how ranks hold it; None for this rank only.
            shards: the transports of buckets with sharded state.
        """
        before = {number: (self.ranks.get(number), number in self.whole) for number in self.cached}
        self._groups, self._shards = groups, shards
        self.ranks = {
            number: ranks_of(of_group)
            for number, (group, of_group) in enumerate(zip(groups, layouts, strict=True))
            if group.comms in AVERAGING and any(of_group)
        }
        self.whole = [number for number in self.ranks if groups[number].comms == "replicated"]
        # All ranks change `comms` of a group alike. Its averages are for other owners then.
        if any(before[number] != (self.ranks.get(number), number in self.whole) for number in before):
            self.cached = {}
        self._messages: dict[object, list[_Overlapping]] = {}
        self.workspace_bytes = 0
        """Upper bound of the temporary bytes of averaging whole gradients."""
        # Most gradients have the dtype of their parameter.
        for together in self._of_same_ranks(self.whole):
            self._messages_of(together, [param for number in together for _, param in _stepped(groups[number])])

    @contextmanager
    def of_step(self, steps_waited: Sequence[int]) -> Iterator[None]:
        """Provide averages while a step runs: whole ones in `p.grad`, those made ahead to the buckets' transports.

        All ranks that share parameters must call it.
        """
        valid = self.valid()
        try:
            due = [number for number in self.whole if steps_waited[number] == 0]
            self._average([number for number in due if number not in valid])
            if valid:
                self._fill_missing(valid[number] for number in due if number in valid)
            for shard in self._shards:
                shard.averages = valid.get(shard.bucket.group)
            # Else the averages stay in memory until the step is over, also with `release_gradients`.
            del valid
            yield
        finally:
            self._drop_zero_filled()
            for shard in self._shards:
                shard.averages = None

    # ------------------------------------------------------------------------------- averages made ahead of the step

    def precompute(self, numbers: Iterable[int]) -> dict[int, Averages]:
        """Return averages of some groups' gradients, by group index; the next step uses them and makes none.

        All ranks that share parameters must call it, after they have compared their plans. A second call makes averages
        anew only if gradients have changed. Groups whose gradients need no average have none.
        """
        averages = self.valid()
        due = [number for number in numbers if number in self.ranks]
        missing = [number for number in due if number not in averages]
        # replicated: the averages stay in `p.grad`
        whole = [number for number in missing if number in self.whole]
        try:
            self._average(whole)
            averages |= {number: {param: param.grad for param in self._groups[number].params} for number in whole}
        finally:
            self._drop_zero_filled()
        # sharded: this rank's entries of each average, flat
        for number in missing:
            if number not in whole:
                averages[number] = self._average_shards(number)
        self.keep(averages)
        return {number: averages[number] for number in due}

    def valid(self) -> dict[int, Averages]:
        """Return the averages that are still valid by the rules above, and drop all of them if any is not."""
        for averages, versions in self.cached.values():
            now = zip(versions, _versions(averages), strict=True)
            # The same tensor with the same version: PyTorch counts every change in place.
            if not all(a is b and version == other for (a, version), (b, other) in now):
                self.cached = {}
                break
        return {number: averages for number, (averages, _) in self.cached.items()}

    def keep(self, averages: Mapping[int, Averages]) -> None:
        """Keep averages for the next step, for gradients as they are now."""
        self.cached = {number: (of_group, _versions(of_group)) for number, of_group in averages.items()}

    def accept_gradients(self) -> None:
        """Note that the averages belong to the gradients as they are now."""
        self.keep({number: averages for number, (averages, _) in self.cached.items()})

    def invalidate(self, numbers: Iterable[int]) -> None:
        """Drop the averages: all ranks change gradients of these groups, which a rank without any cannot detect."""
        if not self.cached.keys().isdisjoint(numbers):
            self.cached = {}

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the averages of groups that were stepped."""
        for number in numbers:
            self.cached.pop(number, None)

    def _average_shards(self, number: int) -> Averages:
        """Return the averages of a group whose state is sharded, by the messages of its buckets."""
        params = self._groups[number].params
        for param in params:
            writable_gradient(param)  # PyTorch counts changes in place only of such gradients
        shards = [shard for shard in self._shards if shard.bucket.group == number]
        numels = [0] * len(params)
        for piece in chain.from_iterable(shard.bucket.members for shard in shards):
            numels[piece.index] += piece.numel
        averages: Averages = {param: param.new_zeros(numel) for param, numel in zip(params, numels, strict=True)}
        run_overlapping([shard.average(averages) for shard in shards])
        return averages

    # -------------------------------------------------------------------------------------------- whole gradients

    def _average(self, numbers: Sequence[int]) -> None:
        """Average the whole gradients of some groups in place; groups of the same ranks share messages."""
        for together in self._of_same_ranks(numbers):
            groups = [self._groups[number] for number in together]
            gradients = [self._dense(param, name) for group in groups for name, param in _stepped(group)]
            process_group = self._communicators[self.ranks[together[0]]]
            for messages in self._messages_of(together, gradients):
                with range_of("average gradients"):
                    run_overlapping(
                        [one.average([gradients[n] for n in each], process_group) for one, each in messages]
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

    def _messages_of(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> list[_Overlapping]:
        """Return the messages of groups of equal ranks: a list for each dtype, device, kernels and limit.

        The tensors are like the gradients of all parameters that are stepped, in the order of the groups.
        """
        # Gradients may have another dtype than in the step before.
        key = tuple(numbers), tuple([tensor.dtype for tensor in tensors])
        if key in self._messages:
            return self._messages[key]
        ranks = self.ranks[numbers[0]]
        members = [(self._groups[n], param) for n in numbers for _, param in _stepped(self._groups[n])]
        # One message has one dtype and device, and the limit of its group's workspace.
        alike: dict[tuple[torch.dtype, torch.device, Kernels, int | None], list[int]] = {}
        for n, ((group, param), tensor) in enumerate(zip(members, tensors, strict=True)):
            kernels, limit = choose_kernels(group.kernels, param), averaged_entries(group, tensor.dtype)
            alike.setdefault((tensor.dtype, tensor.device, kernels, limit), []).append(n)
        result = self._messages[key] = []
        for (dtype, device, kernels, limit), chosen in alike.items():
            each = [members[n][1].numel() for n in chosen]
            owners = len(ranks), ranks.index(this_rank())
            evenly = evenly_owned(each, *owners, dtype, device, kernels, limit=limit)
            messages = [(one, [chosen[place] for place in places]) for one, places in evenly]
            memory = [
                # The mean of a tensor that is not packed is written to the tensor itself.
                averaging_phase_bytes(
                    one.counts, one.most, dtype, kernels, is_direct=one.is_direct, is_in_place=one.is_direct
                )
                for one, _ in messages
            ]
            result.append(messages)
            # Messages of one list overlap, lists come one after the other.
            peak = overlapping_bytes(memory, prefetch_one_schedule(len(memory)), 0)
            self.workspace_bytes = max(self.workspace_bytes, peak)
        return result

    def _fill_missing(self, averages: Iterable[Averages]) -> None:
        """Put averages in `p.grad` where this rank has no gradient: there it is None between clipping and the step."""
        for param, average in chain.from_iterable(of_group.items() for of_group in averages):
            if param.grad is None and average is not None:
                param.grad = average
                self._zero_filled.append(param)

    def _drop_zero_filled(self) -> None:
        for param in self._zero_filled:
            param.grad = None
        self._zero_filled = []


def _versions(params: Iterable[Tensor]) -> _Versions:
    gradients = [param.grad for param in params]
    return [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]


def _stepped(group: Group) -> list[tuple[str, Tensor]]:
    """Return the name and tensor of each parameter of a group that is not idle."""
    rows = zip(group.param_names, group.params, strict=True)
    return [row for index, row in enumerate(rows) if index not in group.idle]
