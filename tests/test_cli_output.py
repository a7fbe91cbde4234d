"""Where the command line writes to: closed, full, or without most characters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import tiny_options

from quintic.cli import main
from quintic.data.dataset import Dataset
from quintic.train.checkpoint import checkpoints

pytestmark = [
    pytest.mark.usefixtures("same_threads", "elsewhere"),
    pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell"),
]


def shell(
    arguments: list[str], redirection: str, folder: Path, **environment: str
) -> "subprocess.CompletedProcess[bytes]":
    command = f'exec "$@" {redirection}'
    return subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, "-m", "quintic", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        timeout=200,
    )


@pytest.mark.slow
def test_training_without_output(tiny_dataset: Dataset, elsewhere: Path) -> None:
    options = tiny_options(tiny_dataset, elsewhere / "runs", run="run")
    done = shell(["train", *options], "<&- >&- 2>&-", elsewhere)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert len(checkpoints(elsewhere / "runs" / "run")) == 2
    assert main(["sample", "--tokens", "1"]) == 0


def test_an_error_without_anywhere_to_write_it(elsewhere: Path) -> None:
    done = shell(["report"], "2>&-", elsewhere)
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")


def test_a_terminal_that_knows_ascii_alone(mine: Path) -> None:
    arguments = ["sample", "--runs-dir", str(mine.parent), "--prompts", "résumé", "--tokens", "1"]
    done = shell(arguments, "", mine, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(rb"r\xe9sum\xe9")


def test_names_that_are_no_text(elsewhere: Path) -> None:
    done = shell(["prepare", "--data", os.fsdecode(b"caf\xe9")], "", elsewhere, PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert done.stderr.startswith(b"quintic: error: ")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", [["--help"], pytest.param(["--version"], marks=pytest.mark.slow), ["plan"]])
def test_an_output_that_is_full(arguments: list[str], elsewhere: Path) -> None:
    done = shell(arguments, ">/dev/full", elsewhere)
    assert done.returncode == 2
    assert done.stderr.startswith(b"quintic: error: No space left on device")
    assert done.stderr.count(b"\n") == 1
