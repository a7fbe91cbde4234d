"""Wrappers: weights that a library stores in a format of its own, as subclasses of `torch.Tensor`.

A wrapper has the operations that its library wrote. When its group is added, a trial on a copy decides how it is
stepped:

    directly    all operations of a step work: torchao's weights for 8-bit matrix products keep an ordinary tensor
    opened      operations are missing, or return copies so that updates would be lost: torchao's 8-bit weights. A step
                works on an ordinary tensor of the same shape and dtype (`OPENED`), read from the wrapper before the
                step (`open_for_step`) and written back after it (`close`), rounded as the library rounds
    refused     reading and writing whole does not work either, or an option forbids it: an error names the way out
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from quintic.optim.layout.views import View

__all__ = ["OPENED", "check_wrapper", "close", "is_opened", "is_wrapper", "open_for_step", "opened"]

# Weak keys: a wrapper that is no longer used frees its ordinary tensor.
OPENED = WeakTensorKeyDictionary()
"""Opened wrapper -> the ordinary tensor of its shape and dtype that steps work on."""

# Writing values to a wrapper and reading them again may change an entry by at most this fraction of the largest one.
# The steps of 8 bits are 1/127 of the largest entry.
_ROUNDING = 1 / 64


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor's class keeps its data in inner tensors; this is true of a `DTensor`, too."""
    return bool(is_traceable_wrapper_subclass(tensor))


def opened(tensor: Tensor) -> Tensor:
    """Return the tensor that steps work on: the ordinary stand-in of an opened wrapper, else the tensor itself."""
    plain: Tensor = OPENED.get(tensor, tensor) if is_wrapper(tensor) else tensor
    return plain


def is_opened(tensor: Tensor) -> bool:
    """Return whether a tensor is an opened wrapper, which is written back after a step."""
    return bool(OPENED) and tensor in OPENED


def check_wrapper(name: str, tensor: Tensor, view: View | None, *, may_open: str | None) -> None:
    """Decide by trial whether a wrapper is stepped directly or opened; raise a TypeError if neither works.

    The trial works on a copy, waits for the device, and needs the memory of three copies. Tensors that are no wrappers
    return at once.

    Args:
        name: the parameter's name, for the error.
        tensor: the parameter, not a `DTensor`.
        view: its matrices; None if it is stepped entry by entry.
        may_open: the reason for which the options of its group forbid opening; None if they allow it.
    """
    if not is_wrapper(tensor):
        return
    # First choice: step it directly.
    try:
        problem = _problem(tensor, view)
    except Exception as error:  # libraries raise different errors for operations that they lack
        problem = _first_line(error)
    if problem is None:
        OPENED.pop(tensor, None)
        return
    # Second choice: open it.
    try:
        obstacle = may_open or _copy_problem(tensor)
    except Exception as error:
        obstacle = _first_line(error)
    if obstacle is None:
        # One that an earlier check made is kept if it still fits the wrapper.
        plain = opened(tensor)
        if plain is tensor or (plain.dtype, plain.device, plain.shape) != (tensor.dtype, tensor.device, tensor.shape):
            plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            OPENED[tensor] = plain.copy_(tensor.detach())
        return
    kind = type(tensor)
    raise TypeError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which lacks operations of an ordinary tensor "
        f"({problem}), and cannot be stepped by way of a copy ({obstacle}). Train the weight in float32 or bfloat16 "
        f"and convert it in the forward pass or after training, leave it frozen, or give it to an optimizer of its "
        f"library"
    )


@torch.no_grad()
def open_for_step(tensor: Tensor) -> None:
    """Read an opened wrapper into its ordinary tensor before a step; other tensors are left alone."""
    plain = opened(tensor)
    if plain is not tensor:
        plain.copy_(tensor)


@torch.no_grad()
def close(tensor: Tensor) -> None:
    """Write the ordinary tensor of an opened wrapper back to it after a step; other tensors are left alone."""
    plain = opened(tensor)
    if plain is not tensor:
        tensor.copy_(plain)


def _first_line(error: Exception) -> str:
    # The rest of a library's message may be a list of all its operations.
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"


@torch.no_grad()
def _copy_problem(tensor: Tensor) -> str | None:
    """Return why a wrapper cannot be read and written whole, tried on a copy; None if it can."""
    copy = tensor.detach().clone()
    if copy.is_meta:  # no values to compare
        return None
    # Write the values that it has, and compare up to the library's rounding.
    before = _as_float32(copy)
    copy.copy_(before.to(copy.dtype))
    error, largest = (_as_float32(copy) - before).abs().max(), before.abs().max()
    return None if bool(error <= largest * _ROUNDING) else "values written to it are not the values read from it"


@torch.no_grad()
def _problem(tensor: Tensor, view: View | None) -> str | None:
    """Return which operation of a step fails on a copy of the tensor; None if all work.

    Operations that a library did not write raise errors of their own.
    """
    copy = tensor.detach().clone()
    # The operations of a step, with a result that is known: 0, then 1, then 2.
    copy.mul_(0)
    copy.add_(torch.ones(copy.shape, dtype=copy.dtype, device=copy.device))
    copy.copy_(copy.to(torch.float32) * 2)
    if copy.is_meta:
        return None
    if not bool((_as_float32(copy) == 2).all()):
        return "values written to it are not the values read from it"
    # Every block of the view must share the wrapper's memory: doubling all blocks doubles every entry.
    for block in () if view is None else view.blocks(copy):
        block.mul_(2)
    if view is not None and not bool((_as_float32(copy) == 4).all()):
        return "its views do not share its memory"
    return None


def _as_float32(tensor: Tensor) -> Tensor:
    """Return the values of a wrapper as an ordinary float32 tensor."""
    # Copied, because `to` could return another wrapper.
    plain = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
    return plain.copy_(tensor)
