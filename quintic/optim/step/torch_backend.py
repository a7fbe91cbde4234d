"""The passes before and after an orthogonalisation: what they are, and how plain PyTorch makes them; AdamW's step, too.

`triton_backend.py` makes them with kernels. Either hands over the same things: directions (b, m, n), updates (b, m, n)
and factors (b, m or 1, n or 1).
"""

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from quintic.kernels.dispatch import is_dense
from quintic.optim.groups.group import Group
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.members import adamw_entries
from quintic.optim.rules.rule import EXP_AVG, EXP_AVG_SQ, MOMENTUM, STEP
from quintic.optim.rules.update import adamw_, decay_and_step_, in_pieces, momentum_
from quintic.optim.step.operands import BlockPlaces, Operands

__all__ = ["TorchBackend", "UpdateBackend", "step_adamw"]

_MOMENTUM, _DTYPE = itemgetter(MOMENTUM), attrgetter("dtype")


class UpdateBackend(Protocol):
    """The two passes over a bucket's own tensors, before and after its matrices are orthogonalised."""

    def directions(self) -> Tensor:
        """Advance the momentum; return the update directions, (b, m, n), rounded to `direction_dtype`."""
        ...

    def apply(self, update: Tensor, factors: Tensor) -> None:
        """Step the weights against updates (b, m, n), times factors and the learning rate.

        Factors are (b, m or 1, n or 1); with `scale_decay` twice as many, the others of decay.
        """
        ...


class TorchBackend:
    """The passes over at least one member of a bucket, see `UpdateBackend`, in plain PyTorch.

    Members that are not `present` keep weights and state, and have zeros for a direction; None if all are.
    """

    def __init__(
        self,
        bucket: Bucket,
        group: Group,
        active: Operands,
        present: Sequence[bool] | None = None,
        places: BlockPlaces | None = None,
    ) -> None:
        self._bucket, self._group, self._active = bucket, group, active
        self._present = None if present is None or all(present) else present
        self._places = BlockPlaces() if places is None else places

    def _only_present(self, *lists: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """Return each list without members that are not stepped."""
        assert self._present is not None
        return [
            [one for one, present in zip(of_members, self._present, strict=True) if present] for of_members in lists
        ]

    def directions(self) -> Tensor:
        """Advance the momentum; return the directions (b, m, n)."""
        group, active, bucket = self._group, self._active, self._bucket
        # For each member (b, g, r, n) views of its momentum and its gradient.
        averages = list(map(_MOMENTUM, active.states))
        momenta, gradients = self._places.blocks(active, group.view, averages, active.gradients)
        counts = list(map(len, momenta))
        shape = momenta[0].shape[1:]
        # Members that are left out have directions, too: zeros, whose updates are not applied.
        new = torch.empty if self._present is None else torch.zeros
        # (g, r, n) of one matrix -> (b of all members, m, n)
        size = (sum(counts), shape[:2].numel(), shape[2:].numel())
        directions = new(size, dtype=bucket.direction_dtype, device=bucket.device)
        parts: Sequence[Tensor] = directions.view(size[0], *shape).split(counts)
        if self._present is not None:
            momenta, gradients, parts = self._only_present(momenta, gradients, parts)
        momentum_(momenta, gradients, mu=float(group.momentum), nesterov=group.nesterov, out=parts)
        return directions

    def apply(self, update: Tensor, factors: Tensor) -> None:
        """Step the weights."""
        group, active = self._group, self._active
        whole = active.masters()
        blocks = self._places.blocks(
            active, group.view, *([active.params] if whole is None else [active.params, whole])
        )
        # Without masters both are the weights, and None is passed for each master below.
        weights, masters = blocks[0], blocks[-1]
        counts = list(map(len, weights))
        shape = weights[0].shape[1:]
        # (b, m, n) -> for each member (its b, g, r, n)
        updates: Sequence[Tensor] = update.view(len(update), *shape).split(counts)
        # 1 where factors do not vary.
        rows = shape[:2] if factors.shape[1] > 1 else (1, 1)
        columns = shape[2:] if factors.shape[2] > 1 else (1,) * len(shape[2:])
        # The first b factors are those of updates, the last b those of decay: the same ones without `scale_decay`.
        everything = factors.view(len(factors), *rows, *columns)
        scales: Sequence[Tensor] = everything[: len(update)].split(counts)
        decays: Sequence[Tensor] = everything[-len(update) :].split(counts)
        if self._present is not None:
            stepped = self._only_present(weights, updates, scales, decays, masters)
            weights, updates, scales, decays, masters = stepped
        decay_and_step_(
            weights,
            [None] * len(weights) if whole is None else masters,
            updates,
            scales,
            lr=float(group.lr),
            weight_decay=float(group.weight_decay),
            decay_coupling=group.decay_coupling,
            decay_factors=decays if group.scale_decay else None,
            cautious=group.cautious,
        )


def step_adamw(bucket: Bucket, group: Group, active: Operands) -> None:
    """Step a bucket of AdamW parameters in plain PyTorch, with its fused kernel where that does what is asked."""
    if not active.params:
        return
    lr, eps, weight_decay = group.effective_lr, float(group.eps), float(group.weight_decay)
    beta1, beta2 = map(float, group.betas)
    # The fused kernel would write into gaps between entries, which all parameters of the bucket have, or none.
    has_gaps = not (active.params[0].is_contiguous() or is_dense(active.params[0]))
    plain = not group.cautious and group.decay_coupling == "lr" and not has_gaps
    masters = active.masters()
    firsts = [*map(itemgetter(EXP_AVG), active.states)]
    # Nor for bfloat16 moments of bfloat16 weights, whose last bits the kernel rounds by where an entry lies.
    dtypes = {*map(_DTYPE, (*active.params, *active.gradients, *firsts))}
    if plain and masters is None and len(dtypes) == 1 and firsts[0].itemsize >= 4:
        torch_adamw(
            active.params,
            active.gradients,
            firsts,
            [*map(itemgetter(EXP_AVG_SQ), active.states)],
            [],
            [*map(itemgetter(STEP), active.states)],
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
    completing: Sequence[Tensor | None] = masters or [None] * len(firsts)
    rows = zip(active.params, completing, active.gradients, active.states, strict=True)
    for param, master, gradient, state in rows:
        tensors = [[tensor] for tensor in (param, master, gradient, state[EXP_AVG], state[EXP_AVG_SQ])]
        for piece, piece_master, piece_gradient, exp_avg, exp_avg_sq in in_pieces(*tensors, entries=entries):
            step = state[STEP].clone()  # counted once, after the last piece
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
        state[STEP] += 1
