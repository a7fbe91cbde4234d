"""Marks every test of this folder `distributed`: `pytest -m "not distributed"` leaves them out; more time on GPUs."""

from pathlib import Path

import pytest
from harness import TIME_FACTOR

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.distributed)
            if TIME_FACTOR != 1:
                item.add_marker(pytest.mark.timeout(float(config.getini("timeout")) * TIME_FACTOR))
