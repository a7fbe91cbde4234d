"""What travels where state is divided: gradients to their owners, who average them, and weights back to everybody."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from quintic.optim.comms.channels import Channel, Route
from quintic.optim.groups.options import Group
from quintic.optim.layout.packing import Packing, Run, in_memory_order, run_of
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.members import Member
from quintic.optim.rules.means import mean_of_ranks
from quintic.optim.state.parts import shaped, state_of_part
from quintic.optim.step.operands import Operands, State, are_contiguous
from quintic.optim.step.sparse_rows import Table
from quintic.optim.step.travel_step import TravelMemory

__all__ = ["ShardedMemory", "start_mean", "start_weights"]


class ShardedMemory(TravelMemory):
    """What a bucket with divided state keeps between steps, besides state.

    Args:
        bucket: of the plan.
        params: of its group.
        table: if only touched rows need to travel, what is known of them.
    """

    def __init__(self, bucket: Bucket, params: Sequence[Tensor], table: Table | None) -> None:
        super().__init__()
        self.sparse_table = table
        assert bucket.sharding is not None
        self.sharding = sharding = bucket.sharding
        indices = list(dict.fromkeys(part.index for part in sharding.parts))
        places = {index: place for place, index in enumerate(indices)}
        self.params = [params[index] for index in indices]
        """The parameters that have parts in the bucket."""
        names = dict.fromkeys(part.name for part in sharding.parts)
        members = tuple(Member(name=name, index=index) for name, index in zip(names, indices, strict=True))
        self._local = Operands(members, self.params, [], [{}] * len(members), bucket.num_matrices)
        self._contiguous = all(param.is_contiguous() for param in self.params)

        def packing(owners: Iterable[int], width: int | None) -> Packing:
            """Pack the parts of some owners, without gaps or so many entries for each owner."""
            runs, end = [], 0
            for owner in owners:
                start = end if width is None else owner * width
                for part in sharding.parts[sharding.of_owners[owner]]:
                    runs.append(Run(places[part.index], part.start, part.stop, start))
                    start += part.numel
                end = start
            return Packing(runs, bucket.kernels, bucket.device)

        everybody, own = range(len(sharding.ranks)), sharding.position
        self.gradients, self.own_weights = packing(everybody, None), packing([own], None)
        self.weights = packing([owner for owner in everybody if owner != own], max(sharding.entries))
        """What the others own, as they send it."""
        self.route = Route(len(sharding.ranks), sharding.position, lambda _, owner: sharding.entries[owner])
        """Of gradients to their owners."""
        self._owned: Operands | None = None
        self._spans: list[tuple[torch.Size, tuple[int, ...], int]] = []
        self.elsewhere: tuple[list[Tensor], Tensor] | None = None
        """Counts of steps of parameters that only other ranks update, and where their first parts stand."""

    def renew(self) -> None:
        """Forget where weights and state are."""
        super().renew()
        self._owned = self.elsewhere = None

    def operands(self, bucket: Bucket, group: Group, state: State) -> Operands:
        """Return the parameters with parts in the bucket that have a gradient on this rank, not averaged yet."""
        local = self.local_operands()
        if self.sparse_table is not None:
            self.sparse_table.hold(next(iter(local.gradients), None))
        return local

    def local_operands(self) -> Operands:
        """Return the same, which follows from nothing else.

        Raises:
            ValueError: a gradient is sparse; the message names the parameter.
        """
        gradients = [param.grad for param in self.params]
        if self._contiguous and are_contiguous(gradients):
            return self._local._replace(gradients=gradients)
        return self._local.present(gradients)

    def owned_operands(self, bucket: Bucket, group: Group, state: State, mean: Tensor) -> Operands:
        """Return the parts that this rank owns.

        Args:
            bucket: of the plan.
            group: its parameter group.
            state: of all parameters.
            mean: (entries,) of their gradients.
        """
        if self._owned is None:
            owned = [(part, group.params[part.index]) for part in self.sharding.owned]
            pieces = [shaped(run_of(param.detach(), part.start, part.numel), part, param) for part, param in owned]
            states: list[Mapping[str, Tensor]] = [state_of_part(state[param], part, param) for part, param in owned]
            self._owned = Operands(bucket.members, pieces, [], states, len(owned))
            starts = accumulate((part.numel for part, _ in owned), initial=0)
            self._spans = [(p.shape, p.stride(), start) for p, start in zip(pieces, starts, strict=False)]
        first = mean.storage_offset()
        gradients = [mean.as_strided(shape, stride, first + start) for shape, stride, start in self._spans]
        return self._owned._replace(gradients=gradients)


def start_mean(bucket: Bucket, memory: ShardedMemory, local: Operands, channel: Channel) -> Callable[[], Tensor]:
    """Send gradients to the owners of their parts; the function returned waits for the mean of this rank's parts.

    Args:
        bucket: of the plan.
        memory: the bucket's own.
        local: the parameters that have a gradient on this rank, from `ShardedMemory.operands`.
        channel: of the ranks.
    """
    sharding = memory.sharding
    gradients: Sequence[Tensor | None] = local.gradients
    if len({gradient.dtype for gradient in local.gradients}) > 1:
        gradients = [gradient.to(bucket.dtype) for gradient in local.gradients]
    if local.missing:
        found = dict(zip(local.params, gradients, strict=True))
        gradients = [found.get(param) for param in memory.params]
    mine, num_ranks = sharding.entries[sharding.position], len(sharding.ranks)
    if sharding.is_direct and gradients[0] is not None:
        send = in_memory_order(gradients[0]).to(bucket.dtype)
    else:
        send = torch.empty(sum(sharding.entries), dtype=bucket.dtype, device=bucket.device)
        memory.gradients.pack(gradients, send)
    pending = channel.all_to_all(send, memory.route, own=False)
    own = None
    if pending.lacks_own:
        first = sum(sharding.entries[: sharding.position])
        own = sharding.position, send.view(-1)[first : first + mine]

    def finish() -> Tensor:
        mean = mean_of_ranks(pending.wait().view(num_ranks, mine), bucket.kernels, own=own)
        pending.release()
        return mean

    return finish


def start_weights(bucket: Bucket, memory: ShardedMemory, channel: Channel) -> Callable[[], None]:
    """Send this rank's weights to everybody; the function returned waits for those of the others."""
    sharding = memory.sharding
    entries = sharding.entries
    most = max(entries)
    if sharding.is_direct:
        whole = in_memory_order(memory.params[0].detach())
        if min(entries) == most:
            own = whole[sharding.position * most :][:most]
            pending = channel.all_gather(own, out=whole)
        else:
            pending = channel.broadcasts(whole, entries)
    else:
        weights = torch.empty(most, dtype=bucket.dtype, device=bucket.device)
        memory.own_weights.pack(memory.params, weights)
        pending = channel.all_gather(weights, own=False)

    def finish() -> None:
        received = pending.wait()
        if not sharding.is_direct:
            memory.weights.unpack(received, memory.params)
        pending.release()

    return finish
