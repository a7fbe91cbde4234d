"""Processes that tests start import the package that the tests import."""

import os
import site
import subprocess
import sys
from pathlib import Path

from processes import search_path

import quintic


def test_other_processes_find_the_package_in_any_folder(tmp_path):
    command = [sys.executable, "-c", "import quintic; print(quintic.__file__)"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(found).samefile(quintic.__file__)


def test_the_search_path_of_other_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "checkout" / "quintic" / "__init__.py"
    here = os.pathsep.join
    assert search_path(str(package), "") == str(tmp_path / "checkout")
    assert search_path(str(package), here(["/a", "b"])) == here([str(tmp_path / "checkout"), "/a", str(tmp_path / "b")])
    assert search_path(str(package), here(["/a", "checkout"])) == here(["/a", str(tmp_path / "checkout")])
    installed = Path(site.getsitepackages()[0]) / "quintic" / "__init__.py"
    assert search_path(str(installed), "/a") == "/a"
    assert search_path(None, "b") == str(tmp_path / "b")
