"""The owner's work on units: they came in pieces (`gathered_step.py`), or it has their state (`divided_step.py`).

A unit holds one matrix of each kind: those of one kind are orthogonalised together, and their factors spread over the
units again.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from quintic.optim.layout.layouts import Box
from quintic.optim.plan.bucket import DividedMatrices, Gathered, ParameterUnit, Units
from quintic.optim.plan.members import Kind, update_dtype
from quintic.optim.state.state import second_moments
from quintic.optim.step.bucket_step import BucketStep

__all__ = ["UnitsStep", "as_rows", "beside_decay", "factor_shape", "factors_of_units", "factors_over"]


class UnitsStep(BucketStep):
    """Steps a bucket of units, each of which one of the ranks orthogonalises."""

    bucket: Gathered | DividedMatrices
    _moments: list[list[Tensor]] | None = None

    def renew(self) -> None:
        """See `BucketStep`."""
        super().renew()
        self._moments = None

    def moments(self) -> list[list[Tensor]]:
        """Return for each kind the second moments of all units, each (1, m, 1) or (1, 1, n), sharing memory."""
        if self._moments is None:
            moments: list[list[Tensor]] = [[] for _ in self.bucket.units.kinds]
            for unit in self.bucket.units.everywhere:
                param = self.group.params[unit.index]
                state = self._common.state[param]["second_momentum_buffer"]
                blocks = second_moments(state, param.shape, self.group.view)
                for kind, (block, matrix) in enumerate(unit.unit.matrices):
                    moments[kind].append(blocks[block][matrix : matrix + 1])
            self._moments = moments
        return self._moments

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
                update = torch.empty_like(matrices, dtype=update_dtype(kind.form, bucket.dtype))
                if normalizes:
                    factor = scales.new_empty((0, *factor_shape(kind)))
            updates.append(update)
            factors.append(factor)
        return _joined(updates, units), factors


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


def factor_shape(kind: Kind) -> tuple[int, int]:
    """Return (m, 1) or (1, n): the shape of NorMuon's factors and second moments of one matrix."""
    m, n = kind.shape
    return (m, 1) if m >= n else (1, n)


def factors_of_units(vectors: Tensor, units: Units) -> list[Tensor]:
    """Return the factors (units, m or 1, n or 1) of each kind from (units, entries) of all kinds side by side."""
    shapes = [factor_shape(kind) for kind in units.kinds]
    parts = vectors.split([m * n for m, n in shapes], dim=1)
    return [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]


def beside_decay(factors: Sequence[Tensor], scales: Tensor) -> list[Tensor]:
    """Return for each kind the factors of updates, then those of decay: (2 units, m or 1, n or 1).

    They are given as (units, m or 1, n or 1) for each kind, and (units, kinds).
    """
    columns = scales.view(*scales.shape, 1, 1).unbind(1)
    return [torch.cat([factor, scale.expand_as(factor)]) for factor, scale in zip(factors, columns, strict=True)]


def factors_over(factors: Sequence[Tensor], units: Units, piece: Box | None) -> Tensor:
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
    return as_rows(values if piece is None else values[(slice(None), *(slice(start, stop) for start, stop in piece))])


def as_rows(pieces: Tensor) -> Tensor:
    """Return (count, *piece shape) as (count, rows, columns)."""
    return pieces if pieces.ndim == 3 else pieces.flatten(3).flatten(1, 2)
