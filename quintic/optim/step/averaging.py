"""Averages of gradients that differ among ranks: each entry has an owner, who averages it and may give it back to all.

Averages are sums in the order of the ranks, in float32, divided and rounded once: the same on all ranks and in every
layout, whatever a library's own reduction would do. Gradients travel to the owners as in a reduce-scatter; where state
is divided, owners step their entries and send back weights; with `comms="replicated"` they send back the averages.

With sharded state a bucket averages by way of its `ShardedCache`, within the step; or earlier, for the norm of the
gradients, and then the step takes what `PrecomputedAverages` has.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels
from quintic.optim.comms.collectives import ProcessGroup, start_all_gather, start_all_to_all, start_broadcasts
from quintic.optim.groups.group import Group
from quintic.optim.layout.packing import MemorySpan, Packing, in_memory_order, mean_of_ranks, span_of
from quintic.optim.plan.bucket import Bucket, Sharded
from quintic.optim.plan.members import BucketMember
from quintic.optim.state.shards import state_of_shard, view_as_shard
from quintic.optim.step.operands import GRADIENT, BucketCache, Operands, State, are_contiguous
from quintic.optim.step.sparse_rows import Table

__all__ = ["Entries", "GroupAverages", "PrecomputedAverages", "ReduceScatterPlan", "ShardedCache", "messages_of"]

# Tensors with at least so many entries travel from where they are and back; smaller ones together, as a copy.
_LEAST_DIRECT = 2**24

# Entries that travel together, at most: while some are added up, others are under way.
_MOST_TOGETHER = 2**25

# Ranks begin at multiples of so many entries of what travels together, which every kernel likes.
_MULTIPLE = 64

Entries = tuple[int, int, int]
"""(Number of the tensor, start, stop): a range of its entries in the order of memory."""


class ReduceScatterPlan:
    """One message of gradients to the owners of their entries, and one of the owners' entries to all ranks.

    Args:
        owned: for each rank the entries that it owns, of tensors that are dense.
        is_direct: whether the entries are one whole tensor, in order: then it travels from where it is, and back.
    """

    def __init__(
        self,
        owned: Sequence[Sequence[Entries]],
        position: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        *,
        is_direct: bool = False,
    ) -> None:
        self._dtype, self._device, self._kernels, self._is_direct = dtype, device, kernels, is_direct
        self._position = position
        self.counts = [sum(stop - start for _, start, stop in entries) for entries in owned]
        """The number of entries that each rank owns."""
        self.most = max(self.counts)
        """The number of entries of the rank that owns most."""
        counts = self.counts
        self._own = slice(sum(counts[:position]), sum(counts[: position + 1]))

        def packing(owners: Iterable[int], starts: Sequence[int]) -> Packing:
            spans = []
            for owner in owners:
                place = starts[owner]
                for tensor, start, stop in owned[owner]:
                    spans.append(MemorySpan(tensor, start, stop, place))
                    place += stop - start
            return Packing(spans, kernels, device)

        all_ranks = range(len(counts))
        self._to_owners = packing(all_ranks, list(accumulate(counts, initial=0)))
        self._of_own = packing([position], [0] * len(counts))
        self._of_others = packing([rank for rank in all_ranks if rank != position], [r * self.most for r in all_ranks])

    def start_mean(
        self, gradients: Sequence[Tensor | None], group: ProcessGroup, out: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """Send gradients, None standing for zeros, to the owners. All ranks must call it.

        The function returned waits for the mean of this rank's entries, (entries,), in `out`, contiguous, or new.
        """
        dtypes = {gradient.dtype for gradient in gradients if gradient is not None}
        if len(dtypes) > 1:
            gradients = [None if gradient is None else gradient.to(self._dtype) for gradient in gradients]
        if self._is_direct and gradients[0] is not None:
            send = in_memory_order(gradients[0]).to(self._dtype)
        else:
            send = torch.empty(sum(self.counts), dtype=self._dtype, device=self._device)
            self._to_owners.pack(gradients, send)
        counts, own = self.counts, self.counts[self._position]
        pending = start_all_to_all(send, counts, [own] * len(counts), group)
        del send  # once it has arrived it is not needed

        return lambda: mean_of_ranks(pending.wait().view(len(counts), own), self._kernels, out)

    def start_all_gather(
        self, tensors: Sequence[Tensor], group: ProcessGroup, own: Tensor | None = None
    ) -> Callable[[], None]:
        """Send this rank's entries to all ranks; the function returned waits until the others' entries are there.

        All ranks must call it. `own`, (entries,), is put into the tensors and sent; without it, and where one tensor
        travels from where it is, what the tensors have is sent.
        """
        num_ranks = len(self.counts)
        if self._is_direct:
            whole = in_memory_order(tensors[0])
            if min(self.counts) == self.most:
                pending = start_all_gather(whole[self._own], num_ranks, group, whole)
            else:
                pending = start_broadcasts(whole, self.counts, group)
        else:
            if own is None:
                own = torch.empty(self.most, dtype=self._dtype, device=self._device)
                self._of_own.pack(tensors, own)
            else:
                self._of_own.unpack(own, tensors)
                if len(own) < self.most:
                    own = torch.nn.functional.pad(own, (0, self.most - len(own)))
            pending = start_all_gather(own, num_ranks, group)

        def finish() -> None:
            received = pending.wait()
            if not self._is_direct:
                self._of_others.unpack(received, tensors)

        return finish

    def average(self, tensors: Sequence[Tensor], group: ProcessGroup) -> Iterator[None]:
        """Replace tensors by their means; yields twice, while a message is under way. All ranks must call it."""
        own = in_memory_order(tensors[0])[self._own] if self._is_direct else None
        wait_for_mean = self.start_mean(tensors, group, own)
        yield
        mean = wait_for_mean()
        del wait_for_mean  # and what was sent
        wait_for_others = self.start_all_gather(tensors, group, mean)
        del mean
        yield
        wait_for_others()


class ShardedCache(BucketCache):
    """Memory of a bucket with sharded state between steps, besides state; with a table if only touched rows travel."""

    def __init__(self, bucket: Sharded, params: Sequence[Tensor], table: Table | None) -> None:
        super().__init__()
        self.sparse_table = table
        self.bucket = bucket
        names = {shard.index: shard.name for shard in bucket.shards}
        places = {index: place for place, index in enumerate(names)}
        self.params = [params[index] for index in names]
        """The parameters that have shards in the bucket."""
        members = tuple(BucketMember(name=name, index=index) for index, name in names.items())
        self._local = Operands(members, self.params, [], [{}] * len(members), bucket.num_matrices)
        self._contiguous = all(param.is_contiguous() for param in self.params)
        self.reduce_scatter = ReduceScatterPlan(
            [[(places[p.index], p.start, p.stop) for p in bucket.shards[owned]] for owned in bucket.of_owners],
            bucket.position,
            bucket.dtype,
            bucket.device,
            bucket.kernels,
            is_direct=bucket.is_direct,
        )

    def operands(self, bucket: Bucket, group: Group, state: State) -> Operands:
        """Return the parameters with shards in the bucket that have a gradient on this rank, not averaged yet."""
        local = self.local_operands()
        if self.sparse_table is not None:
            self.sparse_table.pin_gradient(next(iter(local.gradients), None))
        return local

    def local_operands(self) -> Operands:
        """Return the same, which follows from nothing else."""
        gradients = list(map(GRADIENT, self.params))
        if self._contiguous and are_contiguous(gradients):
            return self._local._replace(gradients=gradients)
        return self._local.present(gradients)

    def start_mean(self, local: Operands, group: ProcessGroup) -> Callable[[], Tensor]:
        """See `ReduceScatterPlan.start_mean`; `local` are the operands that have a gradient on this rank."""
        gradients: Sequence[Tensor | None] = local.gradients
        if local.missing:
            by_param = dict(zip(local.params, local.gradients, strict=True))
            gradients = [by_param.get(param) for param in self.params]
        return self.reduce_scatter.start_mean(gradients, group)

    def owned_operands(self, group: Group, state: State, mean: Tensor) -> Operands:
        """Return the shards that this rank owns, given the mean of their gradients, (entries,)."""

        def make() -> tuple[Operands, list[tuple[torch.Size, tuple[int, ...], int]]]:
            owned = [(shard, group.params[shard.index]) for shard in self.bucket.local]
            pieces = [
                view_as_shard(span_of(param.detach(), shard.start, shard.numel), shard, param) for shard, param in owned
            ]
            states: list[Mapping[str, Tensor]] = [state_of_shard(state[param], shard, param) for shard, param in owned]
            starts = accumulate((shard.numel for shard, _ in owned), initial=0)
            spans = [(p.shape, p.stride(), start) for p, start in zip(pieces, starts, strict=False)]
            return Operands(self.bucket.members, pieces, [], states, len(owned)), spans

        operands, spans = self.cached("owned", None, make)
        first = mean.storage_offset()
        return operands._replace(gradients=[mean.as_strided(shape, stride, first + at) for shape, stride, at in spans])


class GroupAverages:
    """The averages of one parameter group's gradients.

    Whole averages stand in `p.grad`, which holds zeros until then where this rank has no gradient. Where state is
    sharded, `local` holds for each parameter the averages of this rank's shards, laid out as its state is.
    """

    def __init__(
        self, params: Sequence[Tensor], zero_filled: Mapping[Tensor, Tensor], own: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        self.zero_filled, self.local = zero_filled, own
        self._params = params
        self._seen: list[tuple[Tensor | None, int]] = []
        self.accept_gradients()

    def copy_from(self, other: "GroupAverages") -> None:
        """Take the averages of the same group's other gradients, in place, where `p.grad` does not hold them."""
        mine, theirs = (self.zero_filled, other.zero_filled) if self.local is None else (self.local, other.local or {})
        if theirs:
            torch._foreach_copy_([mine[param] for param in theirs], list(theirs.values()))

    @property
    def is_fresh(self) -> bool:
        """Return whether the gradients are untouched since."""
        rows = zip(self._seen, self._gradients(), strict=True)
        return all(before is now and seen == version for (before, seen), (now, version) in rows)

    def accept_gradients(self) -> None:
        """Take gradients as they are now for those that the averages belong to."""
        self._seen = self._gradients()

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        """Return the gradients, and how often each was changed in place."""
        gradients = [param.grad for param in self._params]
        return [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]

    def tensors(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield each parameter and its average: the whole, or what this rank owns of it; None for frozen ones."""
        if self.local is not None:
            yield from self.local.items()
            return
        for param in self._params:
            yield param, self.zero_filled.get(param) if param.grad is None else param.grad

    def of_bucket(self, bucket: Sharded) -> Tensor:
        """Return the averages of the shards of a bucket that this rank owns, one after the other, (entries,)."""
        return torch.cat([torch.empty(0, dtype=bucket.dtype, device=bucket.device), *self._runs(bucket)])

    def keep_bucket(self, bucket: Sharded, mean: Tensor) -> None:
        """Keep what `of_bucket` then returns."""
        runs = list(self._runs(bucket))
        for run, shard in zip(runs, mean.split([run.numel() for run in runs]), strict=True):
            run.copy_(shard)

    def _runs(self, bucket: Sharded) -> Iterator[Tensor]:
        assert self.local is not None
        for shard in bucket.local:
            yield self.local[self._params[shard.index]][shard.offset : shard.offset + shard.numel]


class PrecomputedAverages:
    """The averages that one optimizer has made for its next step, by the position of the parameter group."""

    def __init__(self) -> None:
        self.groups: dict[int, GroupAverages] = {}
        """The averages that were not forgotten, be it of gradients that were touched since."""
        self.of_step: Mapping[int, GroupAverages] = {}
        """The averages that the running step takes as they are."""

    def of_bucket(self, bucket: Sharded) -> Tensor | None:
        """Return the averages of the shards of a bucket that this rank owns, if the step takes them as they are."""
        averages = self.of_step.get(bucket.group)
        return None if averages is None else averages.of_bucket(bucket)

    def fresh(self) -> dict[int, GroupAverages]:
        """Return the averages that hold.

        Where gradients of one group were touched, none do: a rank that has no gradients in that group cannot see it.
        """
        if self.groups and not all(averages.is_fresh for averages in self.groups.values()):
            self.groups = {}
        return dict(self.groups)

    def keep(self, groups: Mapping[int, GroupAverages]) -> None:
        """Keep averages for the next step, for gradients as they are now."""
        self.groups = dict(groups)
        self.accept_gradients()

    def accept_gradients(self) -> None:
        """Take gradients as they are now for those that the averages belong to."""
        for averages in self.groups.values():
            averages.accept_gradients()

    def invalidate(self, numbers: Iterable[int]) -> None:
        """Note that all ranks touch gradients of some groups, which a rank that has none of them cannot see."""
        if not self.groups.keys().isdisjoint(numbers):
            self.groups = {}

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget those of some groups."""
        for number in numbers:
            self.groups.pop(number, None)


def messages_of(
    numels: Sequence[int], num_ranks: int, limit: int | None
) -> Iterator[tuple[list[int], list[list[Entries]], bool]]:
    """Yield (tensors that travel together, each rank's entries of them, whether it is one that travels from its place).

    At most `limit` entries travel together, None for any number; a single tensor may exceed it.
    """
    limit = _MOST_TOGETHER if limit is None else max(1, min(limit, _MOST_TOGETHER))
    direct = [n for n, numel in enumerate(numels) if numel >= _LEAST_DIRECT and numel % num_ranks == 0]
    for number in direct:
        yield [number], _evenly_divided([numels[number]], num_ranks, 1), True
    for numbers in _chunks(sorted({*range(len(numels))} - {*direct}), numels, limit):
        yield numbers, _evenly_divided([numels[number] for number in numbers], num_ranks, _MULTIPLE), False


def _chunks(numbers: Sequence[int], numels: Sequence[int], limit: int) -> Iterator[list[int]]:
    chunk: list[int] = []
    entries = 0
    for number in numbers:
        if chunk and entries + numels[number] > limit:
            yield chunk
            chunk, entries = [], 0
        chunk.append(number)
        entries += numels[number]
    if entries:
        yield chunk


def _evenly_divided(numels: Sequence[int], num_ranks: int, multiple: int) -> list[list[Entries]]:
    """Return the entries that each rank owns of some tensors, one after the other.

    Every rank has a multiple of so many entries; the last ranks have what is left.
    """
    size = -(-sum(numels) // (num_ranks * multiple)) * multiple
    starts = list(accumulate(numels, initial=0))

    def between(first: int, last: int) -> Iterator[Entries]:
        for number, (start, stop) in enumerate(pairwise(starts)):
            if max(start, first) < min(stop, last):
                yield number, max(start, first) - start, min(stop, last) - start

    return [list(between(rank * size, (rank + 1) * size)) for rank in range(num_ranks)]
