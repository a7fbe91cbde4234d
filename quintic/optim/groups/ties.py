"""Tied parameters: a parameter that is the copy of another one, or of its transpose.

An embedding (vocabulary, width) and an output head stored as (width, vocabulary) are two tensors with one value. While
they are tied, a step has three phases:

1. the embedding's gradient is added to the head's (`add_gradient`);
2. the head is averaged over ranks and stepped, the embedding is not;
3. the head's new weights are written to the embedding (`write`).

The idea, and untying the two later, come from the modded-nanogpt speedrun.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from quintic.optim.groups.group import Group, find_parameter
from quintic.optim.layout.layouts import gradient_dtype, is_dtensor, reject_sparse, writable_gradient
from quintic.optim.rules.device import is_capturing

__all__ = ["Tie", "check_shapes", "ties_of"]


class Tie:
    """A copy, the only parameter of its group, and the head, which it equals or is the transpose of."""

    def __init__(self, group: Group, head_group: Group, index: int, *, transposed: bool) -> None:
        self.copy, self.copy_name = group.params[0], group.param_names[0]
        self.head, self.head_name = head_group.params[index], head_group.param_names[index]
        self.head_group, self._transposed = head_group.number, transposed
        self._moved: tuple[weakref.ref[Tensor], int] | None = None
        """The copy's gradient that was moved last for the next step, with its version at that time."""

    def add_gradient(self) -> None:
        """Move the copy's gradient to the head's, unless it was moved for this step and has not changed since.

        Both gradients must be dense.
        """
        gradient, total = writable_gradient(self.copy), writable_gradient(self.head)
        if gradient is None:
            return
        # `clip_grad_norm_` moves gradients before the step does; adding one twice would double it.
        if self._moved is not None and not is_capturing(gradient.device):
            moved, version = self._moved
            if moved() is gradient and gradient._version == version:
                return
        for name, one in ((self.copy_name, gradient), (self.head_name, total)):
            if one is not None:
                reject_sparse(name, one)
        if total is None:
            self.head.grad = torch.empty_like(self.head, dtype=gradient_dtype(self.head))
            self._write(self.head.grad, gradient)
        elif self._transposed:  # (vocabulary, width) is added to (width, vocabulary)
            from quintic.kernels.linear.transpose import transpose_add_

            transpose_add_(total, gradient)
        else:
            total.add_(gradient)
        # The gradient of the next backward pass accumulates here, and must not contain this one.
        gradient.zero_()
        self._moved = weakref.ref(gradient), gradient._version

    def end_step(self) -> None:
        """Forget that the gradient was moved."""
        # A CUDA graph writes the next gradient into the same tensor and leaves its version unchanged.
        self._moved = None

    def write(self) -> None:
        """Write the head's weights to the copy."""
        self._write(self.copy.detach(), self.head.detach())

    def _write(self, target: Tensor, source: Tensor) -> None:
        if self._transposed:
            from quintic.kernels.linear.transpose import transpose_copy_

            transpose_copy_(target, source)
        else:
            target.copy_(source)


def ties_of(groups: Sequence[Group]) -> list[Tie]:
    """Return the ties of parameter groups (`Muon.tie`); a ValueError names two that cannot be tied."""
    return [_tie_of(group, groups) for group in groups if group.tied_to is not None]


def check_shapes(what: str, param: Tensor, other: Tensor, *, transposed: bool) -> None:
    """Reject two shapes that are not equal, or not transposes of each other; the ValueError begins with `what`."""
    shape, other_shape = tuple(param.shape), tuple(other.shape)
    if transposed and len(shape) != 2:
        raise ValueError(f"{what} transposed: it has {len(shape)} dimensions, and must have two")
    if other_shape != (shape[::-1] if transposed else shape):
        how = " transposed" if transposed else ""
        raise ValueError(f"{what}{how}: the shapes are {shape} and {other_shape}")


def _tie_of(group: Group, groups: Sequence[Group]) -> Tie:
    assert group.tied_to is not None
    wanted, transposed = group.tied_to
    name = group.param_names[0] if group.params else f"parameter group {group.number}"
    if len(group.params) != 1:
        raise ValueError(
            f"{name}: its group has {len(group.params)} parameters, and one that is tied to another waits with its "
            f"whole group; give it a group of its own"
        )
    head_group, index = find_parameter(groups, wanted, f"{name} is tied to")
    param, head = group.params[0], head_group.params[index]
    what = f"{name} cannot be tied to {head_group.param_names[index]}"
    if head_group.tied_to is not None or head_group is group:
        raise ValueError(f"{what}, which is tied itself: tie both to the parameter that is stepped")
    if is_dtensor(param) or is_dtensor(head):
        raise ValueError(
            f"{what}: a DTensor has its pieces, and those of its transpose are on other ranks; leave both plain "
            f"tensors, with comms='sharded' to shard their state"
        )
    check_shapes(what, param, head, transposed=transposed)
    if (param.dtype, param.device) != (head.dtype, head.device):
        raise ValueError(
            f"{what}: one is {param.dtype} on {param.device}, the other {head.dtype} on {head.device}; they must be "
            f"alike"
        )
    if "sharded_sparse" in (group.comms, head_group.comms):
        raise ValueError(f"{what}: all rows of their sum are touched; use comms='sharded', not 'sharded_sparse'")
    for option in ("comms", "process_group", "step_every"):
        mine, theirs = getattr(group, option), getattr(head_group, option)
        if mine != theirs:
            raise ValueError(f"{what}: their groups have {option}={mine!r} and {theirs!r}, and must have the same")
    return Tie(group, head_group, index, transposed=transposed)
