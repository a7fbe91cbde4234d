"""Memory of a bucket with divided state between steps: the places of its parameters' entries, and their messages."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from quintic.optim.comms.collectives import ProcessGroup
from quintic.optim.groups.options import Group
from quintic.optim.layout.packing import run_of
from quintic.optim.plan.bucket import Bucket, Divided
from quintic.optim.plan.members import Member
from quintic.optim.state.parts import shaped, state_of_part
from quintic.optim.step.averages.averaging import Averaging
from quintic.optim.step.operands import GRADIENT, BucketMemory, Operands, State, are_contiguous
from quintic.optim.step.sparse_rows import Table

__all__ = ["DividedMemory"]


class DividedMemory(BucketMemory):
    """Memory of a bucket with divided state between steps, besides state; with a table if only touched rows travel."""

    def __init__(self, bucket: Divided, params: Sequence[Tensor], table: Table | None) -> None:
        super().__init__()
        self.sparse_table = table
        self.bucket = bucket
        names = {part.index: part.name for part in bucket.parts}
        places = {index: place for place, index in enumerate(names)}
        self.params = [params[index] for index in names]
        """The parameters that have parts in the bucket."""
        members = tuple(Member(name=name, index=index) for index, name in names.items())
        self._local = Operands(members, self.params, [], [{}] * len(members), bucket.num_matrices)
        self._contiguous = all(param.is_contiguous() for param in self.params)
        self.averaging = Averaging(
            [[(places[p.index], p.start, p.stop) for p in bucket.parts[owned]] for owned in bucket.of_owners],
            bucket.position,
            bucket.dtype,
            bucket.device,
            bucket.kernels,
            is_direct=bucket.is_direct,
        )
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
        """Return the same, which follows from nothing else."""
        gradients = list(map(GRADIENT, self.params))
        if self._contiguous and are_contiguous(gradients):
            return self._local._replace(gradients=gradients)
        return self._local.present(gradients)

    def start_mean(self, local: Operands, group: ProcessGroup) -> Callable[[], Tensor]:
        """See `Averaging.start_mean`; `local` are the operands that have a gradient on this rank."""
        gradients: Sequence[Tensor | None] = local.gradients
        if local.missing:
            by_param = dict(zip(local.params, local.gradients, strict=True))
            gradients = [by_param.get(param) for param in self.params]
        return self.averaging.start_mean(gradients, group)

    def owned_operands(self, group: Group, state: State, mean: Tensor) -> Operands:
        """Return the parts that this rank owns, given the mean of their gradients, (entries,)."""
        if self._owned is None:
            owned = [(part, group.params[part.index]) for part in self.bucket.own]
            pieces = [shaped(run_of(param.detach(), part.start, part.numel), part, param) for part, param in owned]
            states: list[Mapping[str, Tensor]] = [state_of_part(state[param], part, param) for part, param in owned]
            self._owned = Operands(self.bucket.members, pieces, [], states, len(owned))
            starts = accumulate((part.numel for part, _ in owned), initial=0)
            self._spans = [(p.shape, p.stride(), start) for p, start in zip(pieces, starts, strict=False)]
        first = mean.storage_offset()
        gradients = [mean.as_strided(shape, stride, first + start) for shape, stride, start in self._spans]
        return self._owned._replace(gradients=gradients)
