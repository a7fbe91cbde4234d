"""A record of the source that trained a run, for its log and its folder.

<run>/source.json has the version and the commit of this package, and the hash of each of its files. If the package lies
in a git checkout with changes, <run>/source.diff has the difference from the commit, for tracked files of the package;
source.json lists the untracked files by name. If a run is resumed with different source, another pair of files is
written, with the step in its names.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import quintic
from quintic.durable import json_object, write_atomically
from quintic.report.history import SOURCE_FILE
from quintic.versions import torch_version

__all__ = ["code_facts", "git_state", "keep_source", "package_versions", "source_files"]

_PACKAGE = Path(quintic.__file__).parent
_GIT_SECONDS = 10


def code_facts() -> dict[str, Any]:
    """Return git state, hash of this package's source files and package versions, for the log."""
    return {"git": git_state(), "code": _hash_of(_file_hashes(_PACKAGE)), "versions": package_versions()}


def git_state(package: Path = _PACKAGE) -> dict[str, Any]:
    """Return `commit`, and as `dirty` whether tracked files of the package differ from it; {} outside of a checkout."""
    commit = _git(package, "rev-parse", "HEAD")
    # A package in a virtual environment inside a checkout is not tracked, and so does not belong to the checkout.
    if commit is None or _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return {}
    changes = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return {"commit": commit.strip(), "dirty": bool(changes)}


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    versions = {"python": platform.python_version(), "torch": torch_version() or ""}
    for package in ("quintic", "triton", "numpy", "tokenizers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def source_files(package: Path = _PACKAGE) -> dict[str, str]:
    """Return name -> content of the files that describe a package's source: `source.json` and possibly a diff."""
    hashes = _file_hashes(package)
    state = git_state(package) or _installed_commit()
    facts: dict[str, Any] = {"version": package_versions().get("quintic"), **state, "code": _hash_of(hashes)}
    files = {}
    if "dirty" in state:  # in a checkout
        facts["untracked"] = (_git(package, "ls-files", "--others", "--exclude-standard", "--", ".") or "").splitlines()
        options = ("--no-ext-diff", "--no-textconv", "--no-color", "--relative")
        if diff := _git(package, "diff", *options, "HEAD", "--", "."):
            facts["diff_bytes"] = len(diff.encode())
            files[Path(SOURCE_FILE).with_suffix(".diff").name] = diff
    return {SOURCE_FILE: json.dumps({**facts, "files": hashes}, indent=1) + "\n", **files}


def keep_source(run_dir: Path, step: int, package: Path = _PACKAGE) -> bool:
    """Record the source with which a run continues after a step, unless the newest record has the same source.

    Returns:
        True if the source has changed, so that the run's folder now has more than one record.
    """
    kept = max(run_dir.glob(f"{Path(SOURCE_FILE).stem}*.json"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if kept is not None and json_object(kept).get("code") == _hash_of(_file_hashes(package)):
        return False
    # The diff first: source.json marks the record as complete.
    for name, content in reversed(source_files(package).items()):
        path = Path(name)
        write_atomically(run_dir / f"{path.stem}-from-step-{step:06d}{path.suffix}", content)
    return kept is not None


def _file_hashes(package: Path) -> dict[str, str]:
    """Return path within the package -> SHA-256, for each of its source files."""
    paths = {path.relative_to(package).as_posix(): path for path in sorted(package.rglob("*.py"))}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}


def _hash_of(hashes: dict[str, str]) -> str:
    return hashlib.sha256("".join(f"{value}  {name}\n" for name, value in hashes.items()).encode()).hexdigest()


def _installed_commit() -> dict[str, Any]:
    """Return `commit` if pip installed the package from a repository, else {}."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        origin = importlib.metadata.distribution("quintic").read_text("direct_url.json")
        return {"commit": str(json.loads(origin or "")["vcs_info"]["commit_id"])}
    return {}


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command in a folder; None if it fails or git is missing."""
    try:
        return subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=folder,
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        ).stdout.decode(errors="replace")  # text mode would convert line ends
    except (OSError, subprocess.SubprocessError):
        return None
