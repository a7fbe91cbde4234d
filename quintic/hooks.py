"""Calls from a package to one that it must not import, because that one is built on it.

`quintic/__init__.py`, which knows all packages, sets them before anything else can be imported. Nothing is loaded until
a call is made.
"""

from collections.abc import Callable
from typing import Any

load_classifier: Callable[[], Any]
"""Imports the `Classifier` (`optim/groups/assignment.py`) of `quintic/grouping`."""
