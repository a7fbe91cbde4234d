"""Shares of the cases in triton_*.py, and a quicker interpreter of Triton's language for them.

With every call of a function the interpreter goes through all that the language has. That is half of the time of the
cases. The answers are the same: only built-in functions matter to it, and these do not change.
"""

import functools
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
from case_shares import cases_of_share


@pytest.fixture
def own_triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of Triton's: what is compiled is compiled here."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the share of cases that test_triton.py asks this process for, as "number/shares"."""
    if share := os.environ.get("QUINTIC_TEST_SHARE"):
        number, shares = map(int, share.split("/"))
        kept = set(cases_of_share([item.nodeid for item in items], number, shares))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]


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
