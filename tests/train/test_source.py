"""The source that ran, as a run's folder keeps it."""

import hashlib
import importlib.metadata
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from quintic.train.source import git_state, keep_source, source_files


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    command = ["git", *names, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in a checkout with one commit, and a file with a secret beside the package."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "checkout" / "package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("one = 1\n")
    (folder.parent / "settings.py").write_text("none\n")
    git(folder.parent, "init", "-q")
    git(folder.parent, "add", ".")
    git(folder.parent, "commit", "-qm", "first")
    return folder


def facts_of(package: Path) -> dict:
    return json.loads(source_files(package)["source.json"])


def test_a_clean_checkout_has_its_commit_and_no_diff(package: Path) -> None:
    files = source_files(package)
    assert files.keys() == {"source.json"}
    facts = json.loads(files["source.json"])
    assert facts["commit"] == git(package, "rev-parse", "HEAD")
    assert (facts["dirty"], facts["untracked"], facts["version"]) == (False, [], importlib.metadata.version("quintic"))
    assert facts["files"] == {"__init__.py": hashlib.sha256(b"one = 1\n").hexdigest()}


def test_a_diff_makes_the_files_that_ran_of_the_commit(package: Path, tmp_path: Path) -> None:
    (package / "__init__.py").write_text("two = 2\r\nthree = 'é'\n", newline="")
    (package / "new.py").write_text("staged\n")
    git(package, "add", "new.py")
    files = source_files(package)
    facts = json.loads(files["source.json"])
    assert facts["dirty"] is True
    assert facts["diff_bytes"] == len(files["source.diff"].encode())
    git(tmp_path, "clone", "-q", str(package.parent), "clone")
    patch = tmp_path / "source.diff"
    patch.write_text(files["source.diff"], newline="")
    git(tmp_path / "clone" / "package", "apply", "--directory=package", str(patch))
    for path in package.iterdir():
        assert (tmp_path / "clone" / "package" / path.name).read_bytes() == path.read_bytes()


def test_what_is_not_the_packages_or_not_tracked_is_not_read(package: Path) -> None:
    (package.parent / "settings.py").write_text("password = 'hunter2'\n")
    (package.parent / ".env").write_text("TOKEN=hunter2\n")
    (package / "private.txt").write_text("hunter2\n")
    assert facts_of(package)["dirty"] is False  # of the package
    (package / "__init__.py").write_text("two = 2\n")
    files = source_files(package)
    assert json.loads(files["source.json"])["untracked"] == ["private.txt"]
    assert "hunter2" not in "".join(files.values())
    assert "two = 2" in files["source.diff"]


def test_no_program_of_the_users_settings_runs(package: Path, tmp_path: Path) -> None:
    git(package, "config", "diff.external", f"touch {tmp_path / 'ran'};")
    git(package, "config", "color.ui", "always")
    (package / "__init__.py").write_text("two = 2\n")
    assert "\n+two = 2\n" in source_files(package)["source.diff"]
    assert not (tmp_path / "ran").exists()


def test_a_package_that_is_installed_has_version_and_hashes(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also below a checkout of something else, and where git is missing."""
    installed = package.parent / ".venv" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("one = 1\n")
    (package.parent / ".gitignore").write_text(".venv\n")
    assert git_state(installed) == {}
    assert git_state(tmp_path) == {}
    before = facts_of(installed)
    assert {"commit", "dirty", "untracked"}.isdisjoint(before)
    assert before["code"] == facts_of(package)["code"]
    (installed / "__init__.py").write_text("one = 2\n")
    assert facts_of(installed)["code"] != before["code"]

    origin = {"url": "https://me:hunter2@host/q.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}
    found = SimpleNamespace(
        version="1", read_text=lambda name: json.dumps(origin) if name == "direct_url.json" else None
    )
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)
    assert facts_of(installed)["commit"] == "c0ffee"
    assert "hunter2" not in source_files(installed)["source.json"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(package) == {}


def test_a_resumed_run_keeps_the_source_that_it_goes_on_with(package: Path, tmp_path: Path) -> None:
    for name, content in source_files(package).items():
        (tmp_path / name).write_text(content)
    assert keep_source(tmp_path, 4, package) is False
    (package / "__init__.py").write_text("two = 2\n")
    assert keep_source(tmp_path, 6, package) is True
    assert keep_source(tmp_path, 8, package) is False
    names = ["source-from-step-000006.diff", "source-from-step-000006.json", "source.json"]
    assert sorted(path.name for path in tmp_path.glob("source*")) == names
    assert "+two = 2" in (tmp_path / names[0]).read_text()
    (tmp_path / "old").mkdir()  # made by a version that kept nothing
    assert keep_source(tmp_path / "old", 5, package) is False
    assert (tmp_path / "old" / "source-from-step-000005.json").exists()
