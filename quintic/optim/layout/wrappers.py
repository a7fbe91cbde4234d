"""Tensors that wrap others: weights that a library stores in its own format, as subclasses of `torch.Tensor`.

Such a tensor computes with what it wraps, as far as its library wrote the operations. Some do all that a step needs:
torchao's weights for 8-bit matrix products keep an ordinary tensor inside. Others lack operations, or return copies
where a step would write to memory, so that the update would be lost. They are tried when a group is added.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quintic.optim.layout.views import View

__all__ = ["check_wrapper"]


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor is of a class that keeps its memory in tensors of its own; so is a `DTensor`."""
    return bool(is_traceable_wrapper_subclass(tensor))


def check_wrapper(name: str, tensor: Tensor, view: View | None) -> None:
    """Reject a wrapper that cannot be stepped as an ordinary tensor can; the TypeError names it and the way out.

    Tries the operations of a step on a copy; waits for the device, and needs the memory of two copies. Other tensors
    are not looked at.

    Args:
        name: of the parameter.
        tensor: what this rank holds of it; a `DTensor` is no wrapper.
        view: of its matrices; None where it is stepped entry by entry.
    """
    if not is_wrapper(tensor):
        return
    try:
        problem = _problem(tensor, view)
    except Exception as error:  # whatever a library raises for what it did not write
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"
    if problem is not None:
        kind = type(tensor)
        raise TypeError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which has not all operations of an ordinary tensor "
            f"({problem}), and cannot be optimized here. Train the weight in float32 or bfloat16 and convert it in "
            f"the forward pass or after training, leave it frozen, or give it to an optimizer of its library"
        )


@torch.no_grad()
def _problem(tensor: Tensor, view: View | None) -> str | None:
    """Return what goes wrong where a step would write to a copy of the tensor; None if nothing does."""
    copy = tensor.detach().clone()
    copy.mul_(0)
    copy.add_(torch.ones(copy.shape, dtype=copy.dtype, device=copy.device))
    copy.copy_(copy.to(torch.float32) * 2)
    if copy.is_meta:
        return None
    if not bool((_plain(copy) == 2).all()):
        return "what is written to it is not what is read"
    for block in () if view is None else view.blocks(copy):
        block.mul_(2)
    if view is not None and not bool((_plain(copy) == 4).all()):
        return "its views do not share its memory"
    return None


def _plain(tensor: Tensor) -> Tensor:
    """Return the values of a wrapper as an ordinary float32 tensor."""
    plain = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
    return plain.copy_(tensor)
