"""Test files whose packages are not installed are skipped and say what to install; other files that fail, fail."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def packages() -> set[str]:
    """The packages of the extra `train`, but for those that every test needs."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    names = {re.split(r"[<>=]", need)[0] for need in extras["train"]} - {"numpy", "torch"}
    return {name.replace("pyyaml", "yaml") for name in names} | {"transformers", "triton"}


def collected(tmp_path: Path, blocked: set[str], *paths: str) -> subprocess.CompletedProcess[str]:
    """Collect tests where packages cannot be imported."""
    (tmp_path / "blocked.py").write_text(BLOCK.format(blocked=blocked))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "blocked",
        "-p",
        "no:cacheprovider",
        "--collect-only",
        "-q",
        *paths,
    ]
    environment.pop("PYTEST_ADDOPTS", None)  # options of this run, which change what is printed
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_file_that_needs_a_package_of_an_extra_is_skipped(tmp_path):
    answer = collected(tmp_path, {"zstandard"}, "tests/data/test_open_source.py", "tests/data/test_packing.py")
    assert answer.returncode == 0, answer.stdout
    assert "zstandard is not installed: pip install 'quintic[train]'" in answer.stdout
    assert "test_packing.py::" in answer.stdout
    assert "test_open_source.py::" not in answer.stdout


@pytest.mark.slow
def test_a_file_that_needs_something_else_is_an_error(tmp_path):
    """A mistake in a name, a module that is missing in a package that is there, and another error at the import."""
    written = {
        "package": "import zstandard",
        "typo": "import zstandrad",
        "part": "import numpy.no_such_part",
        "error": "raise ValueError('broken')",
    }
    for name, line in written.items():
        (tmp_path / f"test_{name}.py").write_text(f"{line}\n\ndef test_nothing(): pass\n")
    # These lie elsewhere: the rules of this folder are asked for by name.
    answer = collected(tmp_path, {"zstandard"}, "-p", "conftest", "-c", "pyproject.toml", str(tmp_path))
    assert answer.returncode != 0
    summary = answer.stdout.partition("short test summary")[2]
    assert {name: bool(re.search(rf"^ERROR \S*test_{name}\.py", summary, re.MULTILINE)) for name in written} == (
        dict.fromkeys(written, True) | {"package": False}
    )
    assert re.search(r"^SKIPPED .*zstandard is not installed", summary, re.MULTILINE)


@pytest.mark.slow
def test_all_files_can_be_collected_without_the_packages_of_training(tmp_path):
    answer = collected(tmp_path, packages(), "tests")
    assert answer.returncode == 0, answer.stdout[-3000:]
    skipped = re.findall(
        r"^SKIPPED \[\d+\] tests/conftest\.py:\d+: (\w+) is not installed", answer.stdout, re.MULTILINE
    )
    assert {"pyarrow", "safetensors"} <= set(skipped)
