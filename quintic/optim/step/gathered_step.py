"""Runs a bucket whose matrices lie on several ranks, in three parts with a collective under way between them.

    1. momentum and directions of this rank's pieces      -> they start for the owners
    2. the owner orthogonalises, and advances the neurons  -> updates, and factors, start for the pieces
    3. weights of this rank's pieces

`run_overlapping` of `schedule.py` lets buckets overtake each other's waiting: while one is orthogonalised, the next is
being gathered and the one before scattered.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from quintic.optim.layout.layouts import gradient_dtype
from quintic.optim.layout.packing import Packing, Run
from quintic.optim.plan.bucket import Gathered
from quintic.optim.step.operands import BucketMemory, Operands
from quintic.optim.step.units import (
    UnitsStep,
    as_rows,
    beside_decay,
    factor_shape,
    factors_of_units,
    factors_over,
)

__all__ = ["GatheredMemory", "GatheredStep"]


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
    _packing: Packing | None = None

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
            pieces = passes.directions()
        wait_for_units = exchange.start_gather(pieces.contiguous(), process_group)
        del pieces
        yield
        scales = self.scales()
        updates, factors = self.orthogonalized(wait_for_units(), scales, stepped)
        del wait_for_units
        wait_for_pieces = exchange.start_scatter(updates, process_group)
        wait_for_neurons = None if group.normalize is None else self._start_neurons(factors)
        del updates, factors
        yield
        received = wait_for_pieces()
        if wait_for_neurons is None:
            factors = [scales[:, number].view(-1, 1, 1) for number in range(len(units.kinds))]
        else:
            factors = wait_for_neurons()
        if passes is not None:
            if group.scale_decay:
                factors = beside_decay(factors, scales)
            passes.apply(as_rows(received), factors_over(factors, units, exchange.piece))

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
                self._moments_packing().unpack(vectors.view(-1), [moment for of_kind in moments for moment in of_kind])
            return factors_of_units(vectors.chunk(2, dim=1)[0], units)

        return finish

    def _moments_packing(self) -> Packing:
        """Return the copy plan that unpacks gathered second moments, kind by kind."""
        if self._packing is None:
            bucket = self.bucket
            numels = [prod(factor_shape(kind)) for kind in bucket.units.kinds]
            half = sum(numels)
            runs: list[Run] = []
            for number, numel in enumerate(numels):
                for unit in range(len(bucket.units.everywhere)):
                    place = (2 * unit + 1) * half + sum(numels[:number])
                    runs.append(Run(len(runs), 0, numel, place))
            self._packing = Packing(runs, bucket.kernels, bucket.device)
        return self._packing
