"""Runs a bucket with divided state: gradients to their owners, the owners' step, weights to everybody."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quintic.optim.plan.bucket import Bucket, Sharding
from quintic.optim.rules.device_memory import host_tensor, upload
from quintic.optim.step.averages.divided import ShardedMemory, start_mean, start_weights
from quintic.optim.step.averages.gradient_averages import GradientAverages
from quintic.optim.step.bucket_step import BucketStep
from quintic.optim.step.operands import Operands, State
from quintic.optim.step.sparse_rows import start_mean_of_rows
from quintic.optim.step.travel_step import as_rows, factors_of_pieces, orthogonalized_units

__all__ = ["ShardedStep"]


class ShardedStep(BucketStep):
    """Steps a bucket of parts, whose memory is a `ShardedMemory`.

    Args:
        averages: of gradients, some of which may be made before the step.
        others: as for `BucketStep`.
    """

    def __init__(self, *others: Any, averages: GradientAverages) -> None:
        super().__init__(*others)
        self._averages = averages

    def run(self, go: Tensor | None) -> Iterator[None]:
        """Step the bucket; yields twice, while a message is under way."""
        bucket, memory, channel, state = self.bucket, self.memory, self.channel, self._common.state
        assert isinstance(memory, ShardedMemory)
        sharding = memory.sharding
        early_mean = self._averages.of_bucket(bucket)
        table = memory.sparse_table
        if table is not None and (early_mean is not None or not table.is_sparse()):
            table = None
        if table is not None:
            wait_for_mean = start_mean_of_rows(bucket, table, channel.group)
        elif early_mean is not None:
            wait_for_mean = partial(_given, early_mean)
        else:
            wait_for_mean = start_mean(bucket, memory, self.active, channel)
        del early_mean
        yield
        gradients = wait_for_mean()
        del wait_for_mean  # and what was sent
        # The device waits for what ranks agree on: so this comes after the first messages have started.
        stepped = self.stepped(go, sharding.parts, (part.index for part in sharding.parts))
        assert stepped is not None
        if table is not None:
            stepped = table.guarded(stepped)
        owned = memory.owned_operands(bucket, self.group, state, gradients)
        del gradients
        if bucket.travel is not None:
            self._step_matrices(owned, stepped)
        else:
            if owned.params:
                self.step_vectors(owned, stepped[sharding.of_owners[sharding.position]])
            _count_elsewhere(bucket, sharding, memory, self.group.params, state, stepped)
        del owned
        wait_for_weights = start_weights(bucket, memory, channel)
        yield
        wait_for_weights()

    def _step_matrices(self, owned: Operands, stepped: Tensor) -> None:
        bucket, group, memory, state = self.bucket, self.group, self.memory, self._common.state
        assert isinstance(memory, ShardedMemory)
        travel = bucket.travel
        assert travel is not None
        if not owned.params:
            return
        passes = self.passes(owned, stepped[memory.sharding.of_owners[memory.sharding.position]])
        directions = passes.directions()
        units = directions.contiguous().view(len(owned.params), *travel.exchange.unit_shape)
        updates, factors = orthogonalized_units(bucket, group, memory, state, units, stepped, self.observer())
        passes.apply(as_rows(updates), factors_of_pieces(factors, travel))


def _given(mean: Tensor) -> Tensor:
    return mean


def _count_elsewhere(
    bucket: Bucket, sharding: Sharding, memory: ShardedMemory, params: Sequence[Tensor], state: State, go: Tensor
) -> None:
    """Count the steps of AdamW parameters of which only other ranks have state, so that all ranks save the same."""
    if memory.elsewhere is None:
        # A parameter's parts may be in several buckets: it is counted with its first one.
        rows = [(number, state[params[part.index]]) for number, part in enumerate(sharding.parts) if part.start == 0]
        others = [(number, found["step"]) for number, found in rows if not found["exp_avg"].numel()]
        numbers = upload(host_tensor([number for number, _ in others], torch.int64), bucket.device)
        memory.elsewhere = [step for _, step in others], numbers
    steps, numbers = memory.elsewhere
    if steps:
        torch._foreach_add_(steps, list(go[numbers].to(steps[0].dtype).unbind()))
