"""`make release` refuses what is not ready; what it builds is tried by tests/test_package.py, too."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

sys.path.append(str(ROOT / "scripts"))

import release  # noqa: E402

FILES = ("pyproject.toml", "CITATION.cff", "CHANGELOG.md", "quintic/__init__.py")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the files that the checks read, all committed and dated."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(changelog.read_text("utf-8").replace("(unreleased)", "(2026-12-01)"), "utf-8")
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    return tmp_path


def test_a_dated_and_committed_tree_is_ready(checkout: Path) -> None:
    assert release.problems(draft=False) == []


@pytest.mark.parametrize(
    ("name", "pattern", "new", "message"),
    [
        (
            "quintic/__init__.py",
            r'__version__ = ".*"',
            '__version__ = "9.9.9"',
            "__init__.py has version 9.9.9",
        ),
        ("CITATION.cff", r"(?m)^version: .*", "version: 9.9.9", "CITATION.cff has version 9.9.9"),
        ("CHANGELOG.md", r"\(2026-12-01\)", "(unreleased)", "write the date in place of `unreleased`"),
        ("CHANGELOG.md", r"(?m)^## .*", "## nothing", "has no part"),
    ],
)
def test_what_is_not_ready_is_named(checkout: Path, name: str, pattern: str, new: str, message: str) -> None:
    path = checkout / name
    path.write_text(re.sub(pattern, new, path.read_text("utf-8"), count=1), "utf-8")
    found = release.problems(draft=False)
    assert any(message in problem for problem in found), found
    assert any("uncommitted changes" in problem and name in problem for problem in found)


def test_a_draft_needs_neither_a_date_nor_a_commit(checkout: Path) -> None:
    path = checkout / "CHANGELOG.md"
    path.write_text(path.read_text("utf-8").replace("(2026-12-01)", "(unreleased)"), "utf-8")
    assert release.problems(draft=True) == []
