"""Marks every test of this folder `distributed`, and keeps them on one worker of xdist.

They start several processes each: on all workers at once, they would only take each other's time.
"""

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


# Before xdist's own hook, which reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.distributed)
            if config.pluginmanager.hasplugin("xdist"):
                item.add_marker(pytest.mark.xdist_group("distributed"))
