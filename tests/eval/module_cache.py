"""A folder for the code of exports, which transformers copies and imports."""

import sys
from pathlib import Path

import pytest

__all__ = ["copy_modules_to"]


def copy_modules_to(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let transformers copy code to a folder, and import it from nowhere else: not from the user's or other tests'."""
    from transformers import dynamic_module_utils

    others = [entry for entry in sys.path if entry != dynamic_module_utils.HF_MODULES_CACHE]
    patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
    patch.setattr(sys, "path", others)  # transformers appends the folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        patch.delitem(sys.modules, name)
