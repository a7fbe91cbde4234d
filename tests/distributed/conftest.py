"""Marks every test of this folder `distributed`, long ones and those of more than two ranks `slow`."""

import math
import re
from pathlib import Path

import pytest
from harness import DEVICE, TIME_FACTOR

_HERE = Path(__file__).parent

# Half a minute and more each.
_SLOW = {"checkpoints", "clip_averages", "offload_layouts", "partial_gradients", "qk_layouts", "reference_layouts"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.distributed)
            if DEVICE == "cpu" and (_num_ranks(item) > 2 or item.path.stem.removeprefix("test_") in _SLOW):
                item.add_marker(pytest.mark.slow)
            if TIME_FACTOR != 1:
                item.add_marker(pytest.mark.timeout(float(config.getini("timeout")) * TIME_FACTOR))


def _num_ranks(item: pytest.Item) -> int:
    """Return the most ranks that a test's parameters name: a world size, or what stands at the end as in "hsdp-2x2"."""
    found = [0]
    for key, value in getattr(getattr(item, "callspec", None), "params", {}).items():
        if key == "world_size":
            found.append(value)
        elif isinstance(value, str) and (match := re.search(r"-(\d+(?:x\d+)*)$", value)):
            found.append(math.prod(map(int, match[1].split("x"))))
    return max(found)
