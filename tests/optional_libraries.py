"""Libraries that few machines have, loaded where they are: tests that need them are skipped by name elsewhere."""

import importlib
import importlib.util
import re
import warnings
from pathlib import Path

import pytest
import torch

__all__ = ["load", "quietly"]

_kept = []


def load(name):
    """Import a library; skips the test, and says why, where it is not installed or does not load."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name.partition('.')[0]} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other libraries, on being imported
        _declare_operators_of_torchvision()
        try:
            return importlib.import_module(name)
        except Exception as error:
            pytest.skip(f"{name} does not load here: {error}")


def quietly(function, *arguments, **options):
    """Call a function of another library without the warnings that are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments, **options)


def _declare_operators_of_torchvision():
    """Declare what torchvision registers fakes of: a build of it for GPUs has no operators without them.

    No model here uses them, but timm imports torchvision.
    """
    spec = importlib.util.find_spec("torchvision")
    if _kept or spec is None or not spec.submodule_search_locations:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        registrations = Path(spec.submodule_search_locations[0]) / "_meta_registrations.py"
        names = re.findall(r'register_(?:fake|meta)\("(?:torchvision::)?(\w+)"\)', registrations.read_text("utf-8"))
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in set(names):
            library.define(f"{name}(Tensor x) -> Tensor")
        _kept.append(library)
