"""Old names of public methods, which work with a warning until they are removed."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["renamed_method"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def renamed_method(old: str, method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return `method` under its old name, with a warning that names the new one."""
    new = getattr(method, "__name__", str(method))

    @functools.wraps(method)
    def under_old_name(*args: _P.args, **options: _P.kwargs) -> _R:
        warnings.warn(f"{old} is called {new} now; the old name will go", DeprecationWarning, stacklevel=2)
        return method(*args, **options)

    under_old_name.__name__ = old
    return under_old_name
