"""The passes over gradients, momentum and weights in plain PyTorch; `device_passes.py` has them as kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from quintic.optim.groups.options import Group
from quintic.optim.layout.views import as_block
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.members import adamw_entries, direction_dtype
from quintic.optim.rules.update import adamw_, apply_, in_pieces, momentum_
from quintic.optim.step.operands import BlockPlaces, Operands

__all__ = ["PlainPasses", "step_adamw"]


class PlainPasses:
    """The passes over a bucket, see `updates.Passes`, in plain PyTorch.

    Args:
        bucket: the bucket.
        group: its parameter group.
        active: its members, at least one.
        present: for each whether it is stepped; None for all. The others keep weights and state, and have zeros for
            a direction.
        places: where the members' matrices are, from step to step; None to look it up.
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
        self._weights: Sequence[Tensor] = self._places.blocks(active.params, active, group.view)

    def _those_stepped(self, *lists: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        assert self._present is not None
        return [[part for part, present in zip(parts, self._present, strict=True) if present] for parts in lists]

    def directions(self) -> Tensor:
        """Advance the momentum; return the directions (b, m, n)."""
        group, active = self._group, self._active
        weights = self._weights
        gradients: Sequence[Tensor] = self._places.blocks(active.gradients, active, group.view)
        momenta: Sequence[Tensor] = self._places.blocks(
            [state["momentum_buffer"] for state in active.states], active, group.view
        )
        counts = [weight.shape[0] for weight in weights]
        shape = weights[0].shape
        new = torch.empty if self._present is None else torch.zeros
        dtype = direction_dtype(self._bucket.form, self._bucket.dtype)
        size = (sum(counts), shape[1:3].numel(), shape[3:].numel())
        directions = new(size, dtype=dtype, device=self._bucket.device)
        parts = as_block(directions, (size[0], *shape[1:])).split(counts)
        if self._present is not None:
            momenta, gradients, parts = self._those_stepped(momenta, gradients, parts)
        momentum_(momenta, gradients, mu=float(group.momentum), nesterov=group.nesterov, out=parts)
        return directions

    def apply(self, update: Tensor, factors: Tensor) -> None:
        """Step the weights."""
        group, active = self._group, self._active
        weights, whole = self._weights, active.masters()
        counts = [member.num_matrices for member in active.members]
        shape = torch.Size((update.shape[0], *weights[0].shape[1:]))
        updates, scales = as_block(update, shape).split(counts), _like_blocks(factors, shape).split(counts)
        masters = weights if whole is None else self._places.blocks(whole, active, group.view)
        if self._present is not None:
            weights, updates, scales, masters = self._those_stepped(weights, updates, scales, masters)
        apply_(
            weights,
            [None] * len(weights) if whole is None else masters,
            updates,
            scales,
            lr=float(group.lr),
            weight_decay=float(group.weight_decay),
            decay_coupling=group.decay_coupling,
            cautious=group.cautious,
        )


def step_adamw(bucket: Bucket, group: Group, active: Operands) -> None:
    """Step a bucket of AdamW parameters in plain PyTorch, with its fused kernel where that does what is asked."""
    if not active.params:
        return
    lr, eps, weight_decay = group.learning_rate, float(group.eps), float(group.weight_decay)
    beta1, beta2 = (float(beta) for beta in group.betas)
    plain = not group.cautious and group.decay_coupling == "lr"
    masters = active.masters()
    firsts = [state["exp_avg"] for state in active.states]
    # Nor for bfloat16 moments of bfloat16 weights, whose last bits the kernel rounds by where an entry lies.
    dtypes = {tensor.dtype for tensor in (*active.params, *active.gradients, *firsts)}
    if plain and masters is None and len(dtypes) == 1 and firsts[0].itemsize >= 4:
        torch_adamw(
            active.params,
            active.gradients,
            firsts,
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
    completing: Sequence[Tensor | None] = masters or [None] * len(firsts)
    rows = zip(active.params, completing, active.gradients, active.states, strict=True)
    for param, master, gradient, state in rows:
        tensors = [[tensor] for tensor in (param, master, gradient, state["exp_avg"], state["exp_avg_sq"])]
        for piece, piece_master, piece_gradient, exp_avg, exp_avg_sq in in_pieces(*tensors, entries=entries):
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


def _like_blocks(factors: Tensor, shape: torch.Size) -> Tensor:
    """Return (b, m or 1, n or 1) factors in the shape of blocks, with 1 where they do not vary."""
    rows = shape[1:3] if factors.shape[1] > 1 else (1, 1)
    columns = shape[3:] if factors.shape[2] > 1 else (1,) * (len(shape) - 3)
    return as_block(factors, (shape[0], *rows, *columns))
