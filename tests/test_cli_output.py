"""Output of the command line to files that are closed, full, or without most characters."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import tiny_options

from quintic.cli import main
from quintic.data.dataset import Dataset
from quintic.streams import say
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


@pytest.mark.slow
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
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], pytest.param(["plan"], marks=pytest.mark.slow)])
def test_an_output_that_is_full(arguments: list[str], elsewhere: Path) -> None:
    done = shell(arguments, ">/dev/full", elsewhere)
    assert done.returncode == 2
    assert done.stderr.startswith(b"quintic: error: No space left on device")
    assert done.stderr.count(b"\n") == 1


# -- terminals --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_for_people_are_wrapped_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = "\nModel: depth 4, width 256, 4 heads, a-long-word-that-is-not-cut-although-it-does-not-fit-a-line and more"
    for stream, expected in (
        (io.StringIO(), text),
        (
            Terminal(),
            "\nModel: depth 4, width 256, 4 heads,\n"
            "    a-long-word-that-is-not-cut-although-it-does-not-fit-a-line\n    and more",
        ),
    ):
        monkeypatch.setattr(sys, "stdout", stream)
        say(text)
        assert stream.getvalue() == expected + "\n"


def test_help_on_a_terminal_fits_it_although_it_has_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    texts = []
    for stream in (_Utf8(), _Utf8Terminal()):
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["eval", "--help"]) == 0
        texts.append(stream.getvalue())
    assert "\x1b" in texts[1]
    assert re.sub(r"\x1b\[[0-9;]*m", "", texts[1]) == texts[0]
    assert max(map(len, texts[0].splitlines())) == 60


class _Utf8(io.StringIO):
    encoding = "utf-8"


class _Utf8Terminal(_Utf8, Terminal):
    pass


def test_waiting_is_told_on_a_terminal_alone(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--runs-dir", str(mine.parent), "--tokens", "1"]
    assert main(["sample", *runs]) == 0
    assert main(["eval", *runs]) == 0
    origin = f"Model: {mine} after step 6 of 6 (the run is finished)"
    assert capsys.readouterr().err == f"{origin}\n" * 2
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["sample", *runs]) == 0
    assert main(["eval", *runs]) == 0
    assert terminal.getvalue().splitlines() == [
        f"Loading the model of {mine} ...",
        origin,
        f"Loading the model of {mine} ...",
        "Scoring validation text ...",
        origin,
    ]


# Nouns that the program counts.
NUMBERED_ONE = r"(?<![\d.,x-])\b1 (threads|steps|heads|passes|parameters|matrices|documents|ranks|samples)\b"


def test_one_of_a_thing_is_one(tiny_dataset: Dataset, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = tiny_options(tiny_dataset, elsewhere / "runs", run="one", steps=1, depth=1, head_dim=64, threads=1)
    assert main(["plan", *options]) == 0
    assert main(["train", *options]) == 0
    assert main(["plan", "--model", "gpt2", "--mesh", "1"]) in (0, 2)  # 2 without transformers
    printed = capsys.readouterr().out
    for expected in (", 1 thread, ", "1 head, ", "Length: 1 step, ", "in 2 passes"):
        assert expected in printed
    assert re.findall(NUMBERED_ONE, printed) == []
