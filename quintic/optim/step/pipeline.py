"""Runs one bucket of the plan: momentum, orthogonalisation, neuron factors, weights; or AdamW.

What is computed stands in `update.py` and `orthogonalize.py`. Here is which tensors it is computed on, and in what
order. The passes over gradients, momentum and weights have two implementations: plain PyTorch in this file, Triton in
`device_passes.py`. Between the passes both hand over the same things: directions (b, m, n), updates (b, m, n) and
factors (b, m or 1, n or 1). Where matrices lie on several ranks, `travel_step.py` stands between the passes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from quintic.optim.groups.options import Group
from quintic.optim.layout.views import as_block
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.members import Member, adamw_entries, block_of, direction_dtype
from quintic.optim.polar.forms import Form
from quintic.optim.polar.orthogonalize import apply_form
from quintic.optim.rules.update import adamw_, apply_, momentum_, neuron_factors_
from quintic.optim.step.operands import BucketMemory, Operands

__all__ = [
    "Observer",
    "Passes",
    "PlainPasses",
    "advance_neurons_",
    "orthogonalized",
    "step_adamw",
    "step_matrices",
]

# Called where telemetry is sampled, with members of a bucket, their directions, updates and factors, and flags, () or
# (matrices,) int32, that are zero for matrices which are not stepped; None if all are.
Observer = Callable[[Sequence[Member], Tensor, Tensor, Tensor, Tensor | None], None]


class Passes(Protocol):
    """The two passes over a bucket's own tensors, before and after its matrices are orthogonalised."""

    def directions(self) -> Tensor:
        """Advance the momentum; return the update directions, (b, m, n), rounded to `plan.direction_dtype`."""
        ...

    def apply(self, update: Tensor, factors: Tensor) -> None:
        """Step the weights against updates (b, m, n), times factors (b, m or 1, n or 1) and the learning rate."""
        ...


class PlainPasses:
    """The passes in plain PyTorch.

    Args:
        bucket: the bucket.
        group: its parameter group.
        active: its members, at least one.
        present: for each whether it is stepped; None for all. The others keep weights and state, and have zeros for
            a direction.
    """

    def __init__(self, bucket: Bucket, group: Group, active: Operands, present: Sequence[bool] | None = None) -> None:
        self._bucket, self._group, self._active = bucket, group, active
        self._present = [True] * len(active.members) if present is None else present

    def _blocks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        rows = zip(tensors, self._active.members, self._present, strict=True)
        return [block_of(tensor, member, self._group.view) for tensor, member, present in rows if present]

    def directions(self) -> Tensor:
        """Advance the momentum; return the directions (b, m, n)."""
        group, active = self._group, self._active
        dtype = direction_dtype(self._bucket.form, self._bucket.dtype)
        # Where matrices travel, these are pieces of them.
        every = [
            block_of(param, member, group.view) for param, member in zip(active.params, active.members, strict=True)
        ]
        shape = every[0].shape
        new = torch.empty if all(self._present) else torch.zeros
        counts = [block.shape[0] for block in every]
        found = new((sum(counts), shape[1:3].numel(), shape[3:].numel()), dtype=dtype, device=self._bucket.device)
        parts = [as_block(part, block.shape) for part, block in zip(found.split(counts), every, strict=True)]
        momentum_(
            self._blocks([state["momentum_buffer"] for state in active.states]),
            self._blocks(active.gradients),
            mu=float(group.momentum),
            nesterov=group.nesterov,
            out=[part for part, present in zip(parts, self._present, strict=True) if present],
        )
        return found

    def apply(self, update: Tensor, factors: Tensor) -> None:
        """Step the weights."""
        if not any(self._present):
            return
        group = self._group
        weights = self._blocks(self._active.params)
        whole = self._active.masters()
        masters: Sequence[Tensor | None] = [None] * len(weights) if whole is None else self._blocks(whole)
        counts = [member.num_matrices for member in self._active.members]
        updates = [part for part, present in zip(update.split(counts), self._present, strict=True) if present]
        scales = [part for part, present in zip(factors.split(counts), self._present, strict=True) if present]
        apply_(
            weights,
            masters,
            [as_block(u, w.shape) for u, w in zip(updates, weights, strict=True)],
            [_like_blocks(f, w.shape) for f, w in zip(scales, weights, strict=True)],
            lr=float(group.lr),
            weight_decay=float(group.weight_decay),
            decay_coupling=group.decay_coupling,
            cautious=group.cautious,
        )


def step_matrices(
    bucket: Bucket,
    group: Group,
    active: Operands,
    memory: BucketMemory,
    passes: Passes,
    go: Tensor | None,
    observer: Observer | None,
) -> None:
    """Step a bucket of matrices that this rank has whole.

    Args:
        bucket: of the plan.
        group: its parameter group.
        active: the members that have a gradient.
        memory: the bucket's own.
        passes: over these members.
        go: () or (matrices,) int32 on the device; where it is zero nothing changes. None for always.
        observer: see `Observer`, or None.
    """
    directions = passes.directions()
    update = orthogonalized(directions, bucket.form, bucket, group)
    factors = memory.base_factors(bucket, group, active)
    if group.normalize is not None:
        moments = memory.moments(group.view, active)
        table = memory.neuron_table(bucket, moments, (member.name for member in active.members))
        factors = advance_neurons_(update, moments, factors, group, go, table)
    if observer is not None:
        observer(active.members, directions, update, factors, go)
    passes.apply(update, factors)


def step_adamw(bucket: Bucket, group: Group, active: Operands) -> None:
    """Step a bucket of AdamW parameters in plain PyTorch, with its fused kernel where that does what is asked."""
    if not active.params:
        return
    lr, eps, weight_decay = group.learning_rate, float(group.eps), float(group.weight_decay)
    beta1, beta2 = (float(beta) for beta in group.betas)
    plain = not group.cautious and group.decay_coupling == "lr"
    masters: Sequence[Tensor | None] = active.masters() or [None] * len(active.params)
    rows = list(zip(active.params, masters, active.gradients, active.states, strict=True))
    # Not for bfloat16 moments of bfloat16 weights, either.
    plain &= all(g.dtype == p.dtype == s["exp_avg"].dtype and p.itemsize >= 4 for p, _, g, s in rows)
    if plain and all(master is None for _, master, _, _ in rows):
        torch_adamw(
            active.params,
            active.gradients,
            [state["exp_avg"] for state in active.states],
            [state["exp_avg_sq"] for state in active.states],
            [],
            [state["step"] for state in active.states],
            fused=bucket.device.type in ("cpu", "cuda"),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
        return
    entries = adamw_entries(group.max_workspace_bytes)
    for param, master, gradient, state in rows:
        moments = (state["exp_avg"], state["exp_avg_sq"])
        for piece, piece_master, piece_gradient, exp_avg, exp_avg_sq in _pieces(
            (param, master, gradient, *moments), entries
        ):
            step = state["step"].clone()  # counted once, after the last piece
            adamw_(
                piece,
                piece_master,
                piece_gradient,
                exp_avg,
                exp_avg_sq,
                step,
                lr=lr,
                betas=(beta1, beta2),
                eps=eps,
                weight_decay=weight_decay,
                decay_coupling=group.decay_coupling,
                cautious=group.cautious,
            )
        state["step"] += 1


def _pieces(tensors: Sequence[Tensor | None], entries: int | None) -> Iterator[tuple[Any, ...]]:
    """Yield the same runs of at most `entries` entries of tensors of one shape, sharing memory; whole ones if strided.

    `None` among the tensors stays None.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    numel = present[0].numel()
    if entries is None or numel <= entries or not all(tensor.is_contiguous() for tensor in present):
        yield tuple(tensors)
        return
    for start in range(0, numel, entries):
        yield tuple(None if t is None else t.view(-1)[start : start + entries] for t in tensors)


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


def advance_neurons_(
    update: Tensor,
    moments: Sequence[Tensor],
    scale: Tensor,
    group: Group,
    go: Tensor | None,
    table: Tensor | None,
) -> Tensor:
    """Advance NorMuon's second moments; return the factors that even out the neurons, times the learning-rate scale.

    Args:
        update: (b, m, n).
        moments: (matrices, m, 1) or (matrices, 1, n), together those of the update's matrices in order; changed.
        scale: (b, 1, 1), of the dtype of the moments.
        group: the parameter group.
        go: () or (b,) int32 on the device; where it is zero the second moments stay what they were. None for always.
        table: (b,) int64 on the device: where the kernels find each matrix' second moments; None for plain PyTorch.

    Returns:
        (b, m or 1, n or 1), float32 (float64 for float64 weights) on the device of the update.
    """
    beta = float(group.normalize_beta)
    if table is not None:
        from quintic.kernels.update.neuron import advance_neuron_factors_

        return advance_neuron_factors_(update, table, scale, beta=beta, go=go)
    before = torch.cat(list(moments))
    after = before.clone()
    factors = neuron_factors_(update, after, beta=beta)
    if go is not None:
        after = torch.where(go.view(-1, 1, 1) != 0, after, before)
    torch._foreach_copy_(list(moments), list(after.split([moment.shape[0] for moment in moments])))
    return scale * factors


def _like_blocks(factors: Tensor, shape: torch.Size) -> Tensor:
    """Return (b, m or 1, n or 1) factors in the shape of blocks, with 1 where they do not vary."""
    rows = shape[1:3] if factors.shape[1] > 1 else (1, 1)
    columns = shape[3:] if factors.shape[2] > 1 else (1,) * (len(shape) - 3)
    return as_block(factors, (shape[0], *rows, *columns))
