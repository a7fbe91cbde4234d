"""Tensors that wrap others: weights that a library stores in its own format, as subclasses of `torch.Tensor`.

Such a tensor has the operations that its library wrote. Some have all that a step needs:
torchao's weights for 8-bit matrix products keep an ordinary tensor inside. Others lack operations, or return copies
where a step would write to memory, so that the update would be lost: torchao's weights of 8 bits do both. Those are
opened for a step: it works on an ordinary copy, which is written back at the end, rounded as the library rounds.
Each is tried when its group is added. A wrapper that can be neither stepped nor opened is an error.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from quintic.optim.layout.views import View

__all__ = ["OPENED", "check_wrapper", "close", "is_wrapper", "open_for_step", "opened"]

OPENED = WeakTensorKeyDictionary()
"""Opened wrapper -> the ordinary tensor of its shape and dtype that steps work on."""

# How much reading and writing back may change an entry, as a fraction of the largest one. 8 bits round to 1/127.
_ROUNDING = 1 / 64


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor is of a class that keeps its memory in tensors of its own; so is a `DTensor`."""
    return bool(is_traceable_wrapper_subclass(tensor))


def opened(tensor: Tensor) -> Tensor:
    """Return the tensor that steps work on in place of a plain one: itself, unless it is a wrapper that is opened."""
    plain: Tensor = OPENED.get(tensor, tensor) if is_wrapper(tensor) else tensor
    return plain


def check_wrapper(name: str, tensor: Tensor, view: View | None, *, may_open: str | None) -> None:
    """Find out whether a wrapper can be stepped as an ordinary tensor, or opened; else a TypeError names the way out.

    Tries the operations of a step on a copy; waits for the device, and needs the memory of three copies. Other tensors
    are not looked at.

    Args:
        name: of the parameter.
        tensor: the parameter; a `DTensor` is no wrapper.
        view: of its matrices; None where it is stepped entry by entry.
        may_open: why the options of its group forbid that it is opened; None if they do not.
    """
    if not is_wrapper(tensor):
        return
    try:
        problem = _problem(tensor, view)
    except Exception as error:  # libraries raise different errors for operations that they lack
        problem = _first_line(error)
    if problem is None:
        OPENED.pop(tensor, None)
        return
    try:
        obstacle = may_open or _obstacle(tensor)
    except Exception as error:
        obstacle = _first_line(error)
    if obstacle is None:
        plain = opened(tensor)
        if plain is tensor or (plain.dtype, plain.device, plain.shape) != (tensor.dtype, tensor.device, tensor.shape):
            plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            OPENED[tensor] = plain.copy_(tensor.detach())
        return
    kind = type(tensor)
    raise TypeError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which has not all operations of an ordinary tensor "
        f"({problem}), and cannot be stepped by way of a copy ({obstacle}). Train the weight in float32 or bfloat16 "
        f"and convert it in the forward pass or after training, leave it frozen, or give it to an optimizer of its "
        f"library"
    )


@torch.no_grad()
def open_for_step(tensor: Tensor) -> None:
    """Give the ordinary tensor of a wrapper the values of the wrapper, if it is one that is opened."""
    plain = opened(tensor)
    if plain is not tensor:
        plain.copy_(tensor)


@torch.no_grad()
def close(tensor: Tensor) -> None:
    """Write the stepped copy of a wrapper back to it, if it was opened."""
    plain = opened(tensor)
    if plain is not tensor:
        tensor.copy_(plain)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"


@torch.no_grad()
def _obstacle(tensor: Tensor) -> str | None:
    """Return why a wrapper cannot be read and written as a whole; None if it can."""
    copy = tensor.detach().clone()
    if copy.is_meta:
        return None
    before = _plain(copy)
    copy.copy_(before.to(copy.dtype))
    error, largest = (_plain(copy) - before).abs().max(), before.abs().max()
    return None if bool(error <= largest * _ROUNDING) else "what is written to it is not what is read"


@torch.no_grad()
def _problem(tensor: Tensor, view: View | None) -> str | None:
    """Return which operation of a step fails on a copy of the tensor; None if all work."""
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
