"""Averages of gradients that are made before the step, because somebody asks for their norm.

With `comms="replicated"` they stand in `p.grad`, where the step would have put them. With divided state nobody has a
whole average: each rank keeps that of the parts it owns, and `p.grad` stays what it was. Either way the next step takes
them as they are, so that nothing travels twice. They hold as long as nobody touches `p.grad`: after a backward pass,
another tensor, a change in place or `zero_grad` the step averages again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from quintic.optim.plan.bucket import Divided

__all__ = ["EarlyAverages", "EarlyMeans", "OfGroup"]


class OfGroup:
    """The averages of one parameter group.

    Args:
        params: of the group.
        lent: averages of parameters that have no gradient on this rank; where whole ones are kept.
        own: where state is divided, of each parameter the average of the parts that this rank owns, as its state is
            kept; None where whole averages stand in `p.grad`.
    """

    def __init__(
        self, params: Sequence[Tensor], lent: Mapping[Tensor, Tensor], own: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        self.lent, self.own = lent, own
        self._params = params
        self._seen: list[tuple[Tensor | None, int]] = []
        self.renew()

    @property
    def is_fresh(self) -> bool:
        """Return whether nobody has touched the gradients since."""
        rows = zip(self._params, self._seen, strict=True)
        return all(param.grad is found and _version(found) == version for param, (found, version) in rows)

    def renew(self) -> None:
        """Take gradients as they are now for those that the averages belong to."""
        self._seen = [(param.grad, _version(param.grad)) for param in self._params]

    def tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter and its average: the whole, or what this rank owns of it."""
        if self.own is not None:
            yield from self.own.items()
            return
        for param in self._params:
            yield param, self.lent[param] if param.grad is None else param.grad

    def of_bucket(self, bucket: Divided) -> Tensor:
        """Return the averages of the parts of a bucket that this rank owns, one after the other, (entries,)."""
        return torch.cat([torch.empty(0, dtype=bucket.dtype, device=bucket.device), *self._runs(bucket)])

    def keep_bucket(self, bucket: Divided, mean: Tensor) -> None:
        """Keep what `of_bucket` then returns."""
        runs = list(self._runs(bucket))
        for run, part in zip(runs, mean.split([run.numel() for run in runs]), strict=True):
            run.copy_(part)

    def _runs(self, bucket: Divided) -> Iterator[Tensor]:
        assert self.own is not None
        for part in bucket.own:
            yield self.own[self._params[part.index]][part.offset : part.offset + part.numel]


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


class EarlyMeans:
    """The averages that a step takes as they are, by the position of the parameter group."""

    def __init__(self) -> None:
        self.of_groups: Mapping[int, OfGroup] = {}

    def of_bucket(self, bucket: Divided) -> Tensor | None:
        """Return the averages of the parts of a bucket that this rank owns, if they were made before the step."""
        found = self.of_groups.get(bucket.group)
        return None if found is None else found.of_bucket(bucket)


class EarlyAverages:
    """What one optimizer has averaged for its next step, by the position of the parameter group."""

    def __init__(self) -> None:
        self._groups: dict[int, OfGroup] = {}

    def fresh(self) -> dict[int, OfGroup]:
        """Return those that hold.

        Where gradients of one group were touched, none do: a rank that has no gradients in that group cannot see it.
        """
        if not all(found.is_fresh for found in self._groups.values()):
            self._groups = {}
        return dict(self._groups)

    def keep(self, groups: Mapping[int, OfGroup]) -> None:
        """Keep averages for the next step, for gradients as they are now."""
        self._groups = dict(groups)
        for found in groups.values():
            found.renew()

    def renew(self) -> None:
        """Take gradients as they are now for those that the averages belong to: who kept them has changed them."""
        for found in self._groups.values():
            found.renew()

    def forget(self, numbers: Iterable[int] | None = None) -> None:
        """Forget those of some groups, or all."""
        self._groups = {} if numbers is None else {n: g for n, g in self._groups.items() if n not in set(numbers)}
