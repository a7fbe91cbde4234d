"""Steps a bucket that this rank has whole: momentum, orthogonalisation, neuron factors, weights; or AdamW."""

from collections.abc import Iterator

from torch import Tensor

from quintic.optim.step.bucket_step import BucketStep
from quintic.optim.step.updates import Moments, make_updates

__all__ = ["LocalStep"]


class LocalStep(BucketStep):
    """See `BucketStep`."""

    def run(self, go: Tensor | None) -> Iterator[None]:
        """Step the bucket; nothing travels."""
        members = self.active.members
        if self.bucket.algorithm == "muon":
            indices = (member.index for member in members for _ in range(member.num_matrices))
            self._step_matrices(self.stepped(go, members, indices))
        else:
            self.step_vectors(self.active, self.stepped(go, members, (member.index for member in members)))
        return iter(())

    def _step_matrices(self, go: Tensor | None) -> None:
        bucket, group, active, memory = self.bucket, self.group, self.active, self.memory
        assert bucket.shape is not None
        passes = self.passes(active, go)
        directions = passes.directions()
        numbers = ((member.first_matrix + i,) for member in active.members for i in range(member.num_matrices))
        scales = memory.scales(bucket, group, [bucket.shape], active.num_matrices, numbers).view(-1, 1, 1)
        moments = None
        if group.normalize is not None:
            tensors = memory.moments(group.view, active)
            table = memory.neuron_table(bucket, tensors, (member.name for member in active.members))
            moments = Moments(tensors, table)
        update, factors = make_updates(directions, bucket.form, bucket, group, scales, moments, go)
        observer = self.observer()
        if observer is not None:
            observer(active.members, directions, update, factors, go)
        del directions
        passes.apply(update, factors)
