"""The update of a batch of matrices, whoever calls: orthogonalisation, neuron factors, and telemetry.

Before and after it come the passes over gradients, momentum and weights: `plain_passes.py`, or `device_passes.py` as
kernels. Both hand over the same things: directions (b, m, n), updates (b, m, n) and factors (b, m or 1, n or 1).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quintic.optim.groups.options import Group
from quintic.optim.plan.bucket import Bucket
from quintic.optim.polar.forms import Form
from quintic.optim.polar.orthogonalize import apply_form
from quintic.optim.rules.update import neuron_factors_

__all__ = ["Passes", "make_updates", "orthogonalized"]


class Passes(Protocol):
    """The two passes over a bucket's own tensors, before and after its matrices are orthogonalised."""

    def directions(self) -> Tensor:
        """Advance the momentum; return the update directions, (b, m, n), rounded to `direction_dtype`."""
        ...

    def apply(self, update: Tensor, factors: Tensor) -> None:
        """Step the weights against updates (b, m, n), times factors and the learning rate.

        Factors are (b, m or 1, n or 1); with `scale_decay` twice as many, the others of decay.
        """
        ...


def make_updates(
    directions: Tensor,
    form: Form | None,
    bucket: Bucket,
    group: Group,
    scales: Tensor,
    moments: Sequence[Tensor] | None,
    table: Tensor | None,
    go: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return updates (b, m, n) in `update_dtype`, and what multiplies them besides the rate, (b, m or 1, n or 1).

    Directions are (b, m, n); without a form the group's function orthogonalises them. Scales, (b, 1, 1), are the
    learning-rate scale times the own multiplier. With `normalize="neuron"` second moments, (matrices, m, 1) or
    (matrices, 1, n) tensors that are together those of the batch, are advanced: by a kernel that finds each in a table,
    (b,) int64, or without one. Where `go`, () or (b,) int32 on the device, is zero they stay; None for nowhere.
    """
    update = orthogonalized(directions, form, bucket, group)
    if moments is None:
        return update, scales
    beta = float(group.normalize_beta)
    if table is not None:
        from quintic.kernels.update.neuron import advance_neuron_factors_

        return update, advance_neuron_factors_(update, table, scales, beta=beta, go=go)
    before = torch.cat(list(moments))
    after = before.clone()
    factors = neuron_factors_(update, after, beta=beta)
    if go is not None:
        after = torch.where(go.view(-1, 1, 1) != 0, after, before)
    torch._foreach_copy_(list(moments), list(after.split([moment.shape[0] for moment in moments])))
    return update, scales * factors


def orthogonalized(directions: Tensor, form: Form | None, bucket: Bucket, group: Group) -> Tensor:
    """Return the updates (b, m, n) of a bucket's directions: a new tensor, in `plan.update_dtype`."""
    if form is not None:
        return apply_form(directions, form, bucket.kernels)
    assert callable(group.orthogonalizer)
    update = group.orthogonalizer(directions)
    if update.shape != directions.shape:
        raise ValueError(
            f"{bucket.name}: the orthogonalizer returned shape {tuple(update.shape)} "
            f"for matrices of shape {tuple(directions.shape)}"
        )
    return update.to(directions.dtype)
