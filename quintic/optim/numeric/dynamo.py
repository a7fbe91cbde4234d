"""Keeps `torch.compile` out of functions: it calls them without tracing.

A step finds its tensors by their addresses, talks to other processes, and runs kernels of its own. In a compiled
training loop there would be nothing to fuse, and much to trace again whenever a number changes. The compiler is only
imported at the first call of such a function, as by PyTorch's own optimizers, and not by `import quintic`.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch._compile import _disable_dynamo as disable_dynamo
from torch.optim import Optimizer

__all__ = ["disable_dynamo", "disable_dynamo_with_hooks", "unwrap_hooks"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def disable_dynamo_with_hooks(step: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return an optimizer's `step`, wrapped in PyTorch's calls of hooks, which the compiler does not trace either."""
    hooked = Optimizer.profile_hook_step(step)
    # PyTorch would otherwise wrap it once more, outside of `disable_dynamo`.
    hooked.hooked = True  # type: ignore[attr-defined]
    return disable_dynamo(hooked)


def unwrap_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside a class's `step`, without the wrappers that call hooks."""
    while hasattr(step, "hooked"):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step
