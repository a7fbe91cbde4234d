"""Hooks through which a package calls another one that it must not import, because that one imports it.

`quintic/__init__.py` sets them before any other module can be imported. A hook imports its package only when it is
called.
"""

from collections.abc import Callable
from typing import Any

load_classifier: Callable[[], Any]
"""Imports the `Classifier` (`optim/groups/assignment.py`) of `quintic/grouping`."""
