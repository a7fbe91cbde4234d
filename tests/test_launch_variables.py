"""The commands that hints name: those that exist for the person who started the program."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from quintic import launch
from quintic.cli import _COMMANDS
from quintic.launch import hint, install_command, program, with_program

ROOT = Path(launch.__file__).parents[1]


def script(folder: Path) -> Path:
    """Write what an installed `quintic` is: a program that calls `main`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "quintic"
    path.write_text(f"#!{sys.executable}\nimport sys\nfrom quintic.cli import main\nsys.exit(main())\n")
    path.chmod(0o755)
    return path


def told(command: list[str], folder: Path, **environment: str) -> str:
    """Run a command that must fail, and return the command that its message names."""
    settings = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=100, check=False)
    found = re.fullmatch(r"quintic: error: runs holds no run yet; start one with: (.+)\n", done.stderr)
    assert found, done.stderr
    return found[1]


needs_scripts = pytest.mark.skipif(os.name == "nt", reason="scripts of POSIX shells")


@pytest.mark.slow
@needs_scripts
def test_a_script_in_the_folder_is_named_by_its_path(tmp_path: Path) -> None:
    path = script(tmp_path / ".venv" / "bin")
    assert told([".venv/bin/quintic", "train", "--resume"], tmp_path) == ".venv/bin/quintic train"
    assert told([str(path), "train", "--resume"], tmp_path) == ".venv/bin/quintic train"
    other = tmp_path / "a b"
    other.mkdir()
    assert told([str(path), "train", "--resume"], other) == f"{path} train"
    outside = script(tmp_path / "c d")
    assert shlex.split(told([str(outside), "sample"], other)) == [str(outside), "train"]


@needs_scripts
def test_a_script_on_the_path_is_named_by_its_name(tmp_path: Path) -> None:
    folder = script(tmp_path / "bin").parent
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    assert told(["quintic", "train", "--resume"], tmp_path, PATH=path) == "quintic train"


@pytest.mark.slow
@needs_scripts
def test_a_module_is_named_with_its_python(tmp_path: Path) -> None:
    bare = str(tmp_path)  # no python on this path
    assert (
        told([sys.executable, "-m", "quintic", "sample"], tmp_path, PATH=bare) == f"{sys.executable} -m quintic train"
    )
    (tmp_path / "python").symlink_to(sys.executable)
    # The same program, but another name: a Python of another environment may be a link to this one.
    assert (
        told([sys.executable, "-m", "quintic", "sample"], tmp_path, PATH=bare) == f"{sys.executable} -m quintic train"
    )
    path = str(Path(sys.executable).parent)
    name = "python" if Path(sys.executable).with_name("python").exists() else "python3"
    running = str(Path(sys.executable).with_name(name))
    assert told([running, "-m", "quintic", "sample"], tmp_path, PATH=path) == f"{name} -m quintic train"


def test_other_programs_speak_of_quintic() -> None:
    assert program() == "quintic"  # this is pytest
    assert hint("train", ["--run", "a b"]) == "quintic train --run 'a b'"


def test_make_is_told_to_continue_with_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTIC_STARTED_BY", "make")
    monkeypatch.setattr(sys, "argv", [".venv/bin/quintic", "train"])
    monkeypatch.setenv("PATH", os.devnull)  # which may have the environment's commands
    assert hint("train") == "make train"
    assert hint("train", ["--resume", "--run", "20260102-d4"]) == 'make train ARGS="--resume --run 20260102-d4"'
    assert hint("compare", ["--depth", "3"]) == 'make compare ARGS="--depth 3"'
    # What make has no target for, and what make or the shell would read in a way of its own.
    assert hint("sample", ["--tokens", "3"]) == ".venv/bin/quintic sample --tokens 3"
    for odd in ("a b", "$HOME", "a'b", 'a"b', "a#b", "a;b", "`a`", "é"):
        assert shlex.split(hint("train", ["--run", odd])) == [".venv/bin/quintic", "train", "--run", odd]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["train", "compare"])
def test_the_makefile_says_that_it_is_make(target: str) -> None:
    arguments = shlex.split(hint("train", ["--resume", "--run", "x"]))[2:]
    made = ["make", "--no-print-directory", "-n", target, f"ARGS={' '.join(arguments)}"]
    done = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == f"QUINTIC_STARTED_BY=make .venv/bin/quintic {target} {' '.join(arguments)}"


def test_messages_name_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/x y/quintic", "train"])
    named = "'/opt/x y/quintic'"
    assert with_program("run `quintic prepare` first") == f"run `{named} prepare` first"
    for command in _COMMANDS:
        assert with_program(f"quintic {command} --help lists") == f"{named} {command} --help lists"
    for kept in (
        "torchrun ... -m quintic train --resume",
        "runs/quintic train",
        ".venv/bin/quintic train",
        "quintic trains",
        "the package quintic",
        "my_quintic train",
    ):
        assert with_program(kept) == kept


def test_packages_are_installed_from_this_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for extra in ("train", "wandb", "tensorboard"):
        assert extra in extras
        monkeypatch.chdir(ROOT)
        assert shlex.split(install_command(extra))[-4:] == ["pip", "install", "--editable", f".[{extra}]"]
        monkeypatch.chdir(tmp_path)
        assert shlex.split(install_command(extra))[-1] == f"{ROOT}[{extra}]"


def test_packages_are_named_where_there_is_no_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    asked = [f'{need}; extra == "{extra}"' for extra, needs in extras.items() for need in needs if ";" not in need]
    monkeypatch.setattr(launch.importlib.metadata, "requires", lambda name: ["torch>=2.11", *asked])
    monkeypatch.setattr(launch, "__file__", str(tmp_path / "site-packages" / "quintic" / "launch.py"))
    for extra in ("train", "wandb", "tensorboard"):
        command = shlex.split(install_command(extra))
        assert command[1:4] == ["-m", "pip", "install"]
        assert command[4:] == extras[extra]
