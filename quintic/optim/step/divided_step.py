"""Runs a bucket with divided state: gradients to their owners, the owners' step, weights to all ranks."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quintic.optim.plan.bucket import Divided, DividedMatrices
from quintic.optim.rules.device_memory import host_tensor, upload
from quintic.optim.step.averages.divided_memory import DividedMemory
from quintic.optim.step.bucket_step import BucketStep
from quintic.optim.step.operands import Operands
from quintic.optim.step.sparse_rows import Table, start_mean_of_rows
from quintic.optim.step.units import UnitsStep, as_rows, beside_decay, factors_over

__all__ = ["DividedMatricesStep", "DividedStep"]


class DividedStep(BucketStep):
    """Steps a bucket of parts of AdamW parameters, see `BucketStep`."""

    bucket: Divided
    memory: DividedMemory

    def run(self, go: Tensor | None) -> Iterator[None]:
        """Step the bucket; yields twice, while a message is under way."""
        bucket, memory, process_group = self.bucket, self.memory, self.process_group
        table, wait_for_mean = self._start_mean()
        yield
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
        wait_for_weights = memory.averaging.start_giving(memory.params, process_group)
        yield
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
            self.step_vectors(owned, stepped[self.bucket.owned])
        self._count_elsewhere(stepped)

    def _count_elsewhere(self, stepped: Tensor) -> None:
        """Count the steps of parameters of which only other ranks have state, so that all ranks save the same."""
        bucket, memory, params, state = self.bucket, self.memory, self.group.params, self._common.state
        if memory.elsewhere is None:
            # A parameter's parts may be in several buckets: it is counted with its first one.
            rows = [(number, state[params[part.index]]) for number, part in enumerate(bucket.parts) if part.start == 0]
            others = [(number, values["step"]) for number, values in rows if not values["exp_avg"].numel()]
            numbers = upload(host_tensor([number for number, _ in others], torch.int64), bucket.device)
            memory.elsewhere = [step for _, step in others], numbers
        steps, numbers = memory.elsewhere
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
        directions = passes.directions().contiguous().view(len(owned.params), *bucket.units.shape)
        scales = self.scales()
        updates, factors = self.orthogonalized(directions, scales, stepped)
        if self.group.scale_decay:
            factors = beside_decay(factors, scales[bucket.units.owned])
        passes.apply(as_rows(updates), factors_over(factors, bucket.units, None))
