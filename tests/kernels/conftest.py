"""A quicker interpreter of Triton's language.

With every call of a function the interpreter goes through all that the language has. That is half of the time of the
cases in triton_*.py. The answers are the same: only what is built in interests it, and what is built in does not
change.
"""

import functools
import inspect
import os
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def _builtin_names(place: Any) -> list[str]:
        """Return the names of what is built in, as they are before the interpreter has put anything in its place."""
        return [name for name, member in inspect.getmembers(place) if is_builtin(member)]

    class _QuickInspect:
        """`inspect`, for the interpreter's module alone."""

        def __getattr__(self, name: str) -> Any:
            return getattr(inspect, name)

        def getmembers(self, place: Any) -> list[tuple[str, Any]]:
            return [(name, getattr(place, name)) for name in _builtin_names(place)]

    interpreter.inspect = _QuickInspect()
