"""Runs a bucket whose matrices lie on several ranks, in three parts with a collective under way between them.

    1. momentum and directions of this rank's pieces      -> they start for the owners
    2. the owner orthogonalises, and advances the neurons  -> updates, and factors, start for the pieces
    3. weights of this rank's pieces

`run_overlapping` of `schedule.py` lets buckets overtake each other's waiting: while one is orthogonalised, the next is
being gathered and the one before scattered.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from quintic.optim.plan.bucket import Gathered
from quintic.optim.step.bucket_step import BucketStep
from quintic.optim.step.operands import Operands
from quintic.optim.step.units import (
    UnitsMemory,
    as_rows,
    beside_decay,
    factors_of_units,
    factors_over,
    orthogonalized_units,
)

__all__ = ["GatheredMemory", "GatheredStep"]


class GatheredMemory(UnitsMemory):
    """What a bucket whose matrices come to owners keeps between steps, besides state."""

    def of_those(self, everything: Operands, gradients: Sequence[Tensor | None]) -> Operands:
        """Return all members, whatever this rank has: a gradient that is missing stands as zeros."""
        rows = list(zip(everything.members, everything.params, gradients, strict=True))
        whole = [torch.zeros_like(param) if gradient is None else gradient for _, param, gradient in rows]
        missing = tuple(member.index for member, _, gradient in rows if gradient is None)
        return everything.present(whole)._replace(missing=missing)


class GatheredStep(BucketStep):
    """Steps a bucket whose matrices come to owners, see `BucketStep`."""

    bucket: Gathered
    memory: GatheredMemory

    def runs_alone(self, host_go: bool) -> bool:
        """See `BucketStep`: nothing travels where owners hold their units whole."""
        return not self.bucket.travels and (host_go or self.group.on_nonfinite == "propagate")

    def run(self, go: Tensor | None) -> Iterator[None]:
        """Step the bucket; yields twice, while a message is under way."""
        bucket, group, memory, active = self.bucket, self.group, self.memory, self.active
        units, exchange, state = bucket.units, bucket.exchange, self._common.state
        process_group = self.process_group
        stepped = self.stepped(go, units.everywhere)
        passes = self.passes(active, stepped) if active.params else None
        pieces = _empty_pieces(bucket) if passes is None else passes.directions()
        gathered = exchange.gather(pieces.contiguous(), process_group)
        del pieces
        yield
        scales = memory.scales_of_units(bucket, group)
        updates, factors = orthogonalized_units(
            bucket, group, memory, state, exchange.assemble(gathered.wait()), scales, stepped, self.observer
        )
        scattered = exchange.scatter(updates, process_group)
        wait_for_neurons = None if group.normalize is None else self._start_neurons(factors)
        del updates, factors
        yield
        received = exchange.pieces_of(scattered.wait())
        if wait_for_neurons is None:
            factors = [scales[:, number].view(-1, 1, 1) for number in range(len(units.kinds))]
        else:
            factors = wait_for_neurons()
        if passes is not None:
            if group.scale_decay:
                factors = beside_decay(factors, scales)
            passes.apply(as_rows(received), factors_over(factors, units, exchange.piece))

    def _start_neurons(self, factors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Send NorMuon's factors and second moments from their owners to everybody.

        The function returned waits for the factors of all units, for each kind (units, m or 1, n or 1), given those of
        the units that this rank owns; second moments are up to date then.
        """
        units, exchange = self.bucket.units, self.bucket.exchange
        moments, packing = self.memory.moments_of_units(self.group, self._common.state), self.memory.moments_packing()
        parts = [found.flatten(1) for found in factors]
        # Nobody but the owner can advance them; a checkpoint, and the next plan, may be another rank's.
        for of_kind, found in zip(moments, factors, strict=True):
            own = of_kind[units.owned]
            mine = torch.cat(own).flatten(1) if own else found.flatten(1)
            parts.append(mine.to(found.dtype))
        pending = exchange.all_gather(torch.cat(parts, dim=1), self.process_group)

        def finish() -> list[Tensor]:
            vectors = exchange.in_order(pending.wait())
            if not exchange.is_local:
                packing.unpack(vectors.view(-1), [moment for of_kind in moments for moment in of_kind])
            return factors_of_units(vectors.chunk(2, dim=1)[0], units)

        return finish


def _empty_pieces(bucket: Gathered) -> Tensor:
    shape = (bucket.exchange.num_units, 0)
    return torch.empty(shape, dtype=bucket.direction_dtype, device=bucket.device)
