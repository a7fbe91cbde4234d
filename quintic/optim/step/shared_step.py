"""The steps of buckets that this rank shares with others, in three parts with a message under way between them.

`GatheredStep`, where matrices lie on several ranks:

    1. momentum and directions of this rank's pieces       -> they start for the owners
    2. the owner orthogonalises, and advances the neurons  -> updates, and factors, start for the pieces
    3. weights of this rank's pieces

`DividedStep`, where state lies with owners:

    1. gradients                                           -> they start for the owners
    2. the owner averages them, and steps its parts        -> weights start for all ranks
    3. they have arrived

`run_overlapping` lets buckets overtake each other's waiting: while one is worked on, the next is being gathered and the
one before scattered. Owners work on units: each holds one matrix of each kind, those of one kind are orthogonalised
together, and their factors spread over the units again.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, reduce
from math import prod

import torch
from torch import Tensor

from quintic.optim.layout.layouts import Box, gradient_dtype
from quintic.optim.layout.packing import Packing, Run
from quintic.optim.plan.bucket import Divided, DividedMatrices, Gathered, ParameterUnit, Units
from quintic.optim.plan.members import update_dtype
from quintic.optim.rules.device_memory import host_tensor, upload
from quintic.optim.rules.rule import EXP_AVG, STEP
from quintic.optim.rules.table import NEURON_MOMENT
from quintic.optim.rules.update import second_moment_shape
from quintic.optim.state.state import second_moments
from quintic.optim.step.averaging import DividedMemory
from quintic.optim.step.bucket_step import BucketStep
from quintic.optim.step.operands import BucketMemory, Operands
from quintic.optim.step.sparse_rows import Table, start_mean_of_rows

__all__ = ["DividedMatricesStep", "DividedStep", "GatheredMemory", "GatheredStep"]


class UnitsStep(BucketStep):
    """Steps a bucket of units, each of which one of the ranks orthogonalises."""

    bucket: Gathered | DividedMatrices

    @cached_property
    def _update_dtypes(self) -> list[torch.dtype]:
        """For each kind the dtype of updates."""
        return [update_dtype(kind.form, self.bucket.dtype) for kind in self.bucket.units.kinds]

    def moments(self) -> list[list[Tensor]]:
        """Return for each kind the second moments of all units, each (1, m, 1) or (1, 1, n), sharing memory."""

        def make() -> list[list[Tensor]]:
            moments: list[list[Tensor]] = [[] for _ in self.bucket.units.kinds]
            for unit in self.bucket.units.everywhere:
                param = self.group.params[unit.index]
                state = self._common.state[param][NEURON_MOMENT]
                blocks = second_moments(state, param.shape, self.group.view)
                for kind, (block, matrix) in enumerate(unit.unit.matrices):
                    moments[kind].append(blocks[block][matrix : matrix + 1])
            return moments

        return self.memory.once("moments", None, make)

    def scales(self) -> Tensor:
        """Return the learning-rate scale times the own multiplier of each matrix of each unit, (units, kinds)."""
        units = self.bucket.units
        return self.memory.scales(self.bucket, self.group, units.everywhere, units.shapes, _numbers_of)

    def orthogonalized(self, directions: Tensor, scales: Tensor, go: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Return updates, (owned, *unit shape), and for each kind of matrix factors, (owned, m or 1, n or 1).

        Neurons are advanced. Directions are (owned, *unit shape) contiguous; scales, (units of all ranks, kinds), and
        flags, (units of all ranks,) int32 on the device, those of all units. Where a flag is zero the unit stays.
        """
        bucket, units = self.bucket, self.bucket.units
        owned, normalizes = units.owned, self.group.normalize is not None
        scales, go = scales[owned], None if go is None else go[owned]
        moments = [of_kind[owned] for of_kind in self.moments()] if normalizes else None
        updates, factors = [], []
        for number, (kind, block) in enumerate(zip(units.kinds, _blocks(directions, units), strict=True)):
            matrices = block.flatten(1, 2)
            if bucket.kernels == "torch":
                matrices = matrices.contiguous()
            factor = scales[:, number].view(-1, 1, 1)
            if len(matrices):
                of_kind = None if moments is None else moments[number]
                members = units.own_matrices[number]
                update, factor = self.updated(members, matrices, kind.form, factor, of_kind, go, number)
            else:
                # Not a part of the directions, which it would keep alive.
                update = torch.empty_like(matrices, dtype=self._update_dtypes[number])
                if normalizes:
                    factor = scales.new_empty((0, *second_moment_shape(*kind.shape)))
            updates.append(update)
            factors.append(factor)
        return _joined(updates, units), factors


class GatheredMemory(BucketMemory):
    """Memory of a bucket whose matrices come to owners, between steps and besides state."""

    def of_those(self, everything: Operands, gradients: Sequence[Tensor | None]) -> Operands:
        """Return all members, whatever this rank has: a gradient that is missing stands as zeros."""
        rows = list(zip(everything.members, everything.params, gradients, strict=True))
        whole = [
            torch.zeros_like(param, dtype=gradient_dtype(param)) if gradient is None else gradient
            for _, param, gradient in rows
        ]
        missing = tuple(member.index for member, _, gradient in rows if gradient is None)
        return everything.present(whole)._replace(missing=missing)


class GatheredStep(UnitsStep):
    """Steps a bucket whose matrices come to owners, see `BucketStep`."""

    bucket: Gathered

    def run(self, go: Tensor | None) -> Iterator[None]:
        """Step the bucket; yields twice, while a message is under way."""
        bucket, group, active = self.bucket, self.group, self.active
        units, exchange = bucket.units, bucket.exchange
        process_group = self.process_group
        stepped = self.stepped(go, units.everywhere)
        passes = self.passes(active, stepped) if active.params else None
        if passes is None:
            pieces = torch.empty((exchange.num_units, 0), dtype=bucket.direction_dtype, device=bucket.device)
        else:
            with self.ranges["momentum"]:
                pieces = passes.directions()
        with self.ranges["send directions"]:
            wait_for_units = exchange.start_gather(pieces.contiguous(), process_group)
        del pieces
        yield
        scales = self.scales()
        with self.ranges["receive directions"]:
            directions = wait_for_units()
        updates, factors = self.orthogonalized(directions, scales, stepped)
        del wait_for_units, directions
        with self.ranges["send updates"]:
            wait_for_pieces = exchange.start_scatter(updates, process_group)
            wait_for_neurons = None if group.normalize is None else self._start_neurons(factors)
        del updates, factors
        yield
        with self.ranges["receive updates"]:
            received = wait_for_pieces()
        if wait_for_neurons is None:
            factors = [scales[:, number].view(-1, 1, 1) for number in range(len(units.kinds))]
        else:
            factors = wait_for_neurons()
        if passes is not None:
            if group.scale_decay:
                factors = _beside_decay(factors, scales)
            with self.ranges["update weights"]:
                passes.apply(_as_rows(received), _factors_over(factors, units, exchange.piece))

    def _start_neurons(self, factors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Send NorMuon's factors and second moments from their owners to all ranks.

        The function returned waits for the factors of all units, for each kind (units, m or 1, n or 1), given those of
        the units that this rank owns; second moments are up to date then.
        """
        units, exchange = self.bucket.units, self.bucket.exchange
        moments = self.moments()
        parts = [factor.flatten(1) for factor in factors]
        # Nobody but the owner can advance them; a checkpoint, and the next plan, may be another rank's.
        for of_kind, factor in zip(moments, factors, strict=True):
            own = of_kind[units.owned]
            mine = torch.cat(own).flatten(1) if own else factor.flatten(1)
            parts.append(mine.to(factor.dtype))
        wait_for_vectors = exchange.start_all_gather(torch.cat(parts, dim=1), self.process_group)

        def finish() -> list[Tensor]:
            vectors = wait_for_vectors()
            if not exchange.is_local:
                self._moments_packing.unpack(vectors.view(-1), [moment for of_kind in moments for moment in of_kind])
            return _factors_of_units(vectors.chunk(2, dim=1)[0], units)

        return finish

    @cached_property
    def _moments_packing(self) -> Packing:
        """The copy plan that unpacks gathered second moments, kind by kind."""
        bucket = self.bucket
        numels = [prod(second_moment_shape(*kind.shape)) for kind in bucket.units.kinds]
        half = sum(numels)
        runs: list[Run] = []
        for number, numel in enumerate(numels):
            for unit in range(len(bucket.units.everywhere)):
                place = (2 * unit + 1) * half + sum(numels[:number])
                runs.append(Run(len(runs), 0, numel, place))
        return Packing(runs, bucket.kernels, bucket.device)


class DividedStep(BucketStep):
    """Steps a bucket of parts of AdamW parameters, see `BucketStep`."""

    bucket: Divided
    memory: DividedMemory

    def run(self, go: Tensor | None) -> Iterator[None]:
        """Step the bucket; yields twice, while a message is under way."""
        bucket, memory, process_group = self.bucket, self.memory, self.process_group
        with self.ranges["send gradients"]:
            table, wait_for_mean = self._start_mean()
        yield
        with self.ranges["receive gradients"]:
            gradients = wait_for_mean()
        del wait_for_mean  # and what was sent
        # The device waits for what ranks agree on: so this comes after the first messages have started.
        stepped = self.stepped(go, bucket.parts)
        assert stepped is not None
        if table is not None:
            stepped = table.guarded(stepped)
        owned = memory.owned_operands(self.group, self._common.state, gradients)
        del gradients
        self._step_parts(owned, stepped)
        del owned
        with self.ranges["send weights"]:
            wait_for_weights = memory.averaging.start_giving(memory.params, process_group)
        yield
        with self.ranges["receive weights"]:
            wait_for_weights()

    def _start_mean(self) -> tuple[Table | None, Callable[[], Tensor]]:
        """Return the table if only touched rows travel, and what waits for the mean of this rank's parts."""
        early_mean, table = self._common.early.of_bucket(self.bucket), self.memory.sparse_table
        if early_mean is not None:
            return None, lambda: early_mean
        if table is not None and table.is_sparse():
            return table, start_mean_of_rows(self.bucket, table, self.process_group)
        return None, self.memory.start_mean(self.active, self.process_group)

    def _step_parts(self, owned: Operands, stepped: Tensor) -> None:
        """Step the parts that this rank owns; `stepped` is (parts of all ranks,) int32."""
        if owned.params:
            with self.ranges["update"]:
                self.step_vectors(owned, stepped[self.bucket.owned])
        self._count_elsewhere(stepped)

    def _count_elsewhere(self, stepped: Tensor) -> None:
        """Count the steps of parameters of which only other ranks have state, so that all ranks save the same."""
        bucket, params, state = self.bucket, self.group.params, self._common.state

        def make() -> tuple[list[Tensor], Tensor]:
            # A parameter's parts may be in several buckets: it is counted with its first one.
            rows = [(number, state[params[part.index]]) for number, part in enumerate(bucket.parts) if part.start == 0]
            others = [(number, values[STEP]) for number, values in rows if not values[EXP_AVG].numel()]
            numbers = upload(host_tensor([number for number, _ in others], torch.int64), bucket.device)
            return [step for _, step in others], numbers

        steps, numbers = self.memory.once("elsewhere", None, make)
        if steps:
            torch._foreach_add_(steps, list(stepped[numbers].to(steps[0].dtype).unbind()))


class DividedMatricesStep(UnitsStep, DividedStep):
    """Steps a bucket of parts that are units of matrices."""

    bucket: DividedMatrices

    def _step_parts(self, owned: Operands, stepped: Tensor) -> None:
        bucket = self.bucket
        if not owned.params:
            return
        passes = self.passes(owned, stepped[bucket.owned])
        with self.ranges["momentum"]:
            directions = passes.directions().contiguous().view(len(owned.params), *bucket.units.shape)
        scales = self.scales()
        updates, factors = self.orthogonalized(directions, scales, stepped)
        if self.group.scale_decay:
            factors = _beside_decay(factors, scales[bucket.units.owned])
        with self.ranges["update weights"]:
            passes.apply(_as_rows(updates), _factors_over(factors, bucket.units, None))


def _numbers_of(units: Sequence[ParameterUnit]) -> list[tuple[int, ...]]:
    return [unit.first_matrices for unit in units]


def _blocks(values: Tensor, units: Units) -> list[Tensor]:
    """Return for each kind the matrices of (count, *unit shape) contiguous values, (count, g, r, n), sharing memory."""
    if units.is_plain:
        m, n = units.kinds[0].shape
        return [values.view(-1, 1, n, m).mT if units.is_transposed else values.view(-1, 1, m, n)]
    unit = torch.empty(units.shape, device="meta")
    return [
        values.as_strided(
            (values.shape[0], *matrix.shape),
            (unit.numel(), *matrix.stride()),
            values.storage_offset() + matrix.storage_offset(),
        )
        for block in units.view.blocks(unit)
        for matrix in block
    ]


def _joined(updates: Sequence[Tensor], units: Units) -> Tensor:
    """Return (count, *unit shape) from the updates (count, m, n) of each kind."""
    count = updates[0].shape[0]
    if units.is_plain:
        update = updates[0].mT if units.is_transposed else updates[0]
        return update.reshape(count, *units.shape)
    dtype = reduce(torch.promote_types, (update.dtype for update in updates))
    values = torch.empty((count, *units.shape), dtype=dtype, device=updates[0].device)
    for block, update in zip(_blocks(values, units), updates, strict=True):
        block.copy_(update.view(block.shape) if block.shape[1] == 1 else update.unflatten(1, block.shape[1:3]))
    return values


def _factors_of_units(vectors: Tensor, units: Units) -> list[Tensor]:
    """Return the factors (units, m or 1, n or 1) of each kind from (units, entries) of all kinds side by side."""
    shapes = [second_moment_shape(*kind.shape) for kind in units.kinds]
    parts = vectors.split([m * n for m, n in shapes], dim=1)
    return [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]


def _beside_decay(factors: Sequence[Tensor], scales: Tensor) -> list[Tensor]:
    """Return for each kind the factors of updates, then those of decay: (2 units, m or 1, n or 1).

    They are given as (units, m or 1, n or 1) for each kind, and (units, kinds).
    """
    columns = scales.view(*scales.shape, 1, 1).unbind(1)
    return [torch.cat([factor, scale.expand_as(factor)]) for factor, scale in zip(factors, columns, strict=True)]


def _factors_over(factors: Sequence[Tensor], units: Units, piece: Box | None) -> Tensor:
    """Return the factors of a piece of each unit, (units, rows or 1, columns or 1), from those of each kind.

    None stands for whole units; factors are given as (units, m or 1, n or 1).
    """
    if len(factors) == 1 and factors[0].shape[1:] == (1, 1):
        return factors[0]
    count = factors[0].shape[0]
    if units.is_plain:
        m, n = units.kinds[0].shape
        whole = factors[0].expand(count, m, n)
        whole = whole.mT if units.is_transposed else whole
        # Of two dimensions, or with leading ones: nothing is copied.
        values = whole.reshape(count, *units.shape)
    else:
        values = factors[0].new_empty((count, *units.shape))
        for block, factor in zip(_blocks(values, units), factors, strict=True):
            over = factor.unsqueeze(1) if factor.shape[1] == 1 else factor.unflatten(1, block.shape[1:3])
            block.copy_(over)
    return _as_rows(values if piece is None else values[(slice(None), *(slice(start, stop) for start, stop in piece))])


def _as_rows(pieces: Tensor) -> Tensor:
    """Return (count, *piece shape) as (count, rows, columns)."""
    return pieces if pieces.ndim == 3 else pieces.flatten(3).flatten(1, 2)
