"""`quintic sample`: from a kept step, in pieces as the text grows, and from lines of standard input."""

import fcntl
import io
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from tiny_runs import error_of

from quintic.cli import main
from quintic.report.history import METRICS_FILE, RunHistory

pytestmark = pytest.mark.usefixtures("same_threads")


class Interrupting(io.StringIO):
    """Standard output; Ctrl-C comes when it has a number of pieces."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self.pieces = pieces

    def write(self, text: str) -> int:
        self.pieces -= bool(text)
        if self.pieces == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def read_from(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Give the command a standard input that is no terminal."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_a_kept_step_can_be_taken(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ["--runs-dir", str(trained.parent)]
    scores = {int(record["step"]): record["bpb"] for record in RunHistory.load(trained).evals}
    for step in (4, 6):
        assert main(["eval", *runs, "--tokens", "512", "--step", str(step)]) == 0
        assert capsys.readouterr().out.startswith(f"{scores[step]:.4f} bits per byte")
    assert f"{scores[4]:.4f}" != f"{scores[6]:.4f}"
    texts = []
    for option in ([], ["--step", "6"], ["--step", "4"]):
        assert main(["sample", *runs, "--tokens", "40", "--top-k", "None", *option]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    pytest.importorskip("safetensors")
    for step in (4, 6):
        assert main(["export", "run", *runs, "--step", str(step), "--out", str(tmp_path / str(step))]) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("4", "6")]
    assert weights[0] != weights[1]
    # The run may have been stopped, or be going on: each command says so.
    unfinished = tmp_path / "runs" / "run"
    shutil.copytree(trained, unfinished)
    log = unfinished / METRICS_FILE
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"kind":"final"' not in line))
    for command in ("sample", "eval", "export"):
        capsys.readouterr()
        assert main([command, "--runs-dir", str(unfinished.parent), "--step", "4"]) == 0
        assert capsys.readouterr().err == f"Model: {unfinished} after step 4 of 6 (the run is not finished)\n"
        assert error_of(capsys, command, *runs, "--step", "3") == (
            f"--step 3: {trained} has no checkpoint of that step; it has kept 4, 6"
        )


def test_lines_of_a_pipe_are_prompts(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["sample", "--runs-dir", str(trained.parent), "--tokens", "20", "--temperature", "1", "--seed", "3"]
    assert main([*options, "--prompts", "def model", "", "résumé"]) == 0
    expected = capsys.readouterr().out
    read_from(monkeypatch, "def model\n\r\nrésumé".encode())
    assert main([*options, "--interactive"]) == 0
    found = capsys.readouterr()
    assert found.out == expected
    assert found.err == f"Model: {trained} after step 6 of 6 (the run is finished)\n"
    read_from(monkeypatch, b"")
    assert main([*options, "--interactive"]) == 0
    assert capsys.readouterr().out == ""


def test_a_line_that_cannot_be_used_stops_nothing(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["sample", "--runs-dir", str(trained.parent), "--tokens", "2", "--interactive"]
    read_from(monkeypatch, b"a\xff\n" + b"ab" * 10_000 + b"\nreturn\n")
    assert main(options) == 0
    found = capsys.readouterr()
    assert found.out.startswith("return")
    assert re.findall(r"^quintic: error: --prompts .*?(not UTF-8|at most 16,384)", found.err, re.MULTILINE) == [
        "not UTF-8",
        "at most 16,384",
    ]
    assert error_of(capsys, *options, "--prompts", "a") == (
        "--prompts: --interactive reads beginnings from standard input; leave one of the two out"
    )
    read_from(monkeypatch, b"a\nb\n")
    assert error_of(capsys, *options, "--temperature", "-1").startswith("--temperature -1.0: must be at least 0")


def test_ctrl_c_stops_the_text_and_not_the_program(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["sample", "--runs-dir", str(trained.parent), "--tokens", "30", "--temperature", "0"]
    whole, stopped = io.StringIO(), Interrupting(4)  # the prompt and three tokens
    for stream, lines in ((whole, b"return\n"), (stopped, b"def model\nreturn\n")):
        read_from(monkeypatch, lines)
        monkeypatch.setattr(sys, "stdout", stream)
        assert main([*options, "--interactive"]) == 0
    first, rest = stopped.getvalue().split("\n\n", 1)
    assert first.startswith("def model")
    assert rest == whole.getvalue()


@pytest.mark.slow
def test_text_comes_before_the_input_ends(trained: Path) -> None:
    command = [sys.executable, "-m", "quintic", "sample", "--runs-dir", str(trained.parent), "--tokens", "5"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "--interactive"], stdin=pipe, stdout=pipe, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for prompt in (b"def model", b"return"):
                process.stdin.write(prompt + b"\n")
                process.stdin.flush()
                text = b""
                while not text.endswith(b"\n\n"):
                    assert select.select([process.stdout], [], [], 60)[0]
                    text += os.read(process.stdout.fileno(), 1000)
                assert text.startswith(prompt)
            process.stdin.close()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()  # leaving the block waits for it


@pytest.mark.slow
def test_a_terminal_is_asked_until_ctrl_d(trained: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "quintic", "sample", "--runs-dir", str(trained.parent), "--tokens", "5"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}
    shown = b""

    def is_shown(text: bytes, seconds: float = 30.0) -> bool:
        nonlocal shown
        while text not in shown:
            if not select.select([ours], [], [], seconds)[0]:
                return False
            shown += os.read(ours, 1000)
        shown = shown.partition(text)[2]
        return True

    def wait_for(text: bytes) -> None:
        assert is_shown(text), shown

    # A session of its own, whose terminal it is: Ctrl-C reaches it.
    process = subprocess.Popen(
        [*command, "--interactive"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        wait_for(b"Ctrl-C stops a text, Ctrl-D ends.")
        wait_for(b"> ")
        # Python's input loses a Ctrl-C between the prompt and its waiting, and sees it at the next key.
        for _ in range(30):
            os.write(ours, b"\x03")
            if is_shown(b"(Ctrl-D ends)", seconds=1.0):
                break
        wait_for(b"> ")
        os.write(ours, b"def model\n")
        wait_for(b"def model\r\n")  # the echo
        wait_for(b"def model")
        wait_for(b"\r\n\r\n> ")
        os.write(ours, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_threads_can_be_chosen(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ["--runs-dir", str(trained.parent), "--tokens", "2"]
    for command in ("sample", "eval"):
        for threads in (2, 1):
            torch.set_num_threads(3 - threads)
            assert main([command, *runs, "--threads", str(threads)]) == 0
            assert torch.get_num_threads() == threads
        assert error_of(capsys, command, *runs, "--threads", "0") == "--threads 0: must be at least 1"
