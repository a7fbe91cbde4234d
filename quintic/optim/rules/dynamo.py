"""Functions that `torch.compile` calls without looking into them.

A step finds its tensors by their addresses, asks processes and devices, and runs kernels of its own: in a compiled
training loop there is nothing to fuse, and much to trace again when a number changes. The compiler itself is imported
at the first call of such a function, as by PyTorch's own optimizers, and not with `quintic`.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch._compile import _disable_dynamo as disable_dynamo
from torch.optim import Optimizer

__all__ = ["disable_dynamo", "disable_dynamo_with_hooks", "unwrap_hooks"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def disable_dynamo_with_hooks(step: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return an optimizer's `step` that is opaque together with the hooks that PyTorch wraps around it."""
    hooked = Optimizer.profile_hook_step(step)
    hooked.hooked = True  # type: ignore[attr-defined]  # so that PyTorch does not do it again
    return disable_dynamo(hooked)


def unwrap_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a class's `step` inside of what calls hooks."""
    while hasattr(step, "hooked"):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step
