"""Fixtures of the tests of exports."""

from pathlib import Path

import pytest
from module_cache import copy_modules_to


@pytest.fixture
def own_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies the code of a folder; not to the user's cache."""
    copy_modules_to(tmp_path / "modules", monkeypatch)
