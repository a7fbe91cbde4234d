"""Processes that tests start."""

import os
import site
from pathlib import Path


def search_path(package_file: str | None, inherited: str) -> str:
    """PYTHONPATH for the processes that tests start: they import the package that the tests import, in any folder.

    Args:
        package_file: of the package's `__init__.py`; None where it is not found.
        inherited: the PYTHONPATH so far, whose folders may be relative to this one.
    """
    folders = [os.path.abspath(folder) for folder in inherited.split(os.pathsep) if folder]
    if package_file is not None:
        folder = str(Path(package_file).resolve().parents[1])
        # Not the folder that all installed packages are in: it would come before the standard library.
        if folder not in folders and folder not in map(os.path.realpath, site.getsitepackages()):
            folders.insert(0, folder)
    return os.pathsep.join(folders)
