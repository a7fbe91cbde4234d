"""The old path of `quintic.interchange`; importing a name from here warns."""

import warnings
from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Return a name of `quintic.interchange`, with a DeprecationWarning."""
    value = getattr(import_module("quintic.interchange"), name)
    message = f"quintic.optim.interchange.{name} is now quintic.interchange.{name}; the old path will go"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return value
