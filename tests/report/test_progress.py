"""The display on a terminal and the plain lines elsewhere."""

import errno
import io
import os
import re
import threading
from typing import Any

import pytest

from quintic.report.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def record(step: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 3.21987, "tokens_per_second": 123456.7, **fields}


def plain(**options: Any) -> tuple[Progress, io.StringIO, Clock]:
    output, clock = io.StringIO(), Clock()
    return Progress(1000, output=output, clock=clock, **options), output, clock


def test_plain_lines_say_everything() -> None:
    progress, output, clock = plain()
    with progress:
        progress.message("run folder: [runs]")
        for step in range(1, 11):
            clock.now += 60.0 if step == 1 else 2.0  # the first step compiles
            progress.train(record(step))
        progress.evaluation({"step": 10, "loss": 3.0, "bpb": 1.23456})
        clock.now += 7200
        progress.train(record(1000))
    assert output.getvalue().splitlines() == [
        "run folder: [runs]",
        "step 1/1,000 (0.1 %)  loss 3.220  123,457 tokens/s  1:00 elapsed, time left not known yet",
        # 990 steps of 2 seconds: the slow first step is not counted.
        "step 10/1,000 (1.0 %)  loss 3.220  123,457 tokens/s  1:18 elapsed, 33:00 left",
        "step 10/1,000  validation: loss 3.000, 1.2346 bits per byte",
        "step 1,000/1,000 (100.0 %)  loss 3.220  123,457 tokens/s  2:01:18 elapsed",
    ]


def test_plain_lines_are_rate_limited_but_not_evaluations() -> None:
    progress, output, clock = plain()
    for step in range(1, 102):
        clock.now += 1 / 16  # ten steps take less than a second, twenty more
        progress.train(record(step))
        if step == 55:
            progress.evaluation({"step": step, "loss": None, "bpb": None})
    shown = output.getvalue().splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in shown] == [1, 20, 40, 55, 60, 80, 100]
    assert "loss -, - bits per byte" in shown[3]


def test_the_last_step_has_a_line_whenever_it_comes() -> None:
    output, clock = io.StringIO(), Clock()
    progress = Progress(17, output=output, clock=clock)
    for step in (1, 16, 17):
        progress.train(record(step))
    assert [line.split()[1] for line in output.getvalue().splitlines()] == ["1/17", "17/17"]


def test_a_resumed_run_estimates_from_its_own_steps() -> None:
    progress, output, clock = plain(start_step=500)
    for step in range(501, 601):
        clock.now += 1.0
        progress.train(record(step, loss=float("nan"), tokens_per_second=None))
    assert output.getvalue().splitlines()[-1] == (
        "step 600/1,000 (60.0 %)  loss nan  - tokens/s  1:40 elapsed, 6:40 left"
    )


def screen(text: str) -> str:
    """The text without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


class _Terminal(io.StringIO):
    """A terminal that loses what is written once `error` is the number of an error."""

    error: int | None = None

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.error is not None:
            raise OSError(self.error, "cannot write")
        return super().write(text)


class _File(_Terminal):
    def isatty(self) -> bool:
        return False


def live(width: int = 100, output: _Terminal | None = None, term: str = "xterm") -> tuple[Progress, _Terminal]:
    output = _Terminal() if output is None else output
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", term)
        patch.setenv("COLUMNS", str(width))
        return Progress(1000, output=output, clock=Clock()), output


def test_the_live_display_shows_the_newest_figures() -> None:
    progress, output = live()
    with progress:
        progress.message("a [message]")
        progress.train(record(249))
        progress.train(record(250))
        progress.evaluation({"step": 250, "loss": 3.0, "bpb": 1.23456})
    text = screen(output.getvalue())
    assert "a [message]" in text
    assert re.search(r"step 250/1,000 .*━.* 25\.0 %", text)
    assert "loss 3.220 · 123,457 tokens/s · validation 1.2346 bits per byte · 0:00 elapsed, 0:00 left" in text


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (30, "loss 3.220"),
        (40, "loss 3.220 · 0:00 elapsed, 0:00 left"),
        (60, "loss 3.220 · 0:00 elapsed, 0:00 left"),
        (80, "loss 3.220 · validation 1.2346 bits per byte · 0:00 elapsed, 0:00 left"),
        (
            120,
            "loss 3.220 (mean 3.500) · 123,457 tokens/s · MFU 34.6 % · validation 1.2346 bits per byte "
            "· 0:00 elapsed, 0:00 left",
        ),
    ],
)
def test_the_live_display_never_wraps(width: int, expected: str) -> None:
    progress, output = live(width=width)
    with progress:
        progress.train(record(249, **FIGURES))
        progress.train(record(250, **FIGURES))
        progress.evaluation({"step": 250, "loss": 3.0, "bpb": 1.23456})
        with progress.busy("compressing the validation text with xz, for comparison"):
            progress._live.refresh()
            busy = screen(output.getvalue()).rstrip().splitlines()[-2:]
    bar, line = screen(output.getvalue()).rstrip().splitlines()[-2:]
    assert line.strip() == expected
    assert re.match(r"step 250/1,000 .*25\.0 %$", bar.strip())
    assert busy[1].strip().startswith("compressing the validation"[: width - 1])
    assert all(len(text.rstrip()) <= width for text in (bar, line, *busy))
    # Two lines, whatever the width: nothing was wrapped, and nothing else is drawn over.
    assert progress._render(width).renderables[1].no_wrap


def test_what_is_waited_for_is_told_before() -> None:
    progress, output, clock = plain()
    with progress.busy("scoring the validation text"):
        assert output.getvalue() == "step 0/1,000  scoring the validation text ...\n"
        clock.now += 1.0
    with progress.busy("scoring the validation text"):  # which took a moment only
        clock.now += 3.0
    with progress.busy("scoring the validation text"):
        pass
    with progress.busy("writing samples"):
        pass
    assert output.getvalue().splitlines() == [
        "step 0/1,000  scoring the validation text ...",
        "step 0/1,000  scoring the validation text ...",
        "step 0/1,000  writing samples ...",
    ]


def test_a_terminal_says_what_is_waited_for_while_it_lasts() -> None:
    progress, output = live()
    with progress:
        progress.train(record(250))
        with progress.busy("writing samples"):
            assert screen(output.getvalue()).rstrip().splitlines()[-1].startswith("writing samples ... · 0:00 elapsed")
        progress.train(record(251))
    assert screen(output.getvalue()).rstrip().splitlines()[-1].startswith("loss 3.220")


def test_an_interrupt_passes_and_the_cursor_comes_back() -> None:
    progress, output = live()
    threads = threading.active_count()

    def train() -> None:
        with progress:
            progress.train(record(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert output.getvalue().rstrip().endswith("\x1b[?25h")
    assert threading.active_count() <= threads
    progress.message("afterwards")


def test_a_real_terminal_gets_the_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    pty = pytest.importorskip("pty")
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w", encoding="utf-8") as terminal:
        with Progress(10, output=terminal) as progress:
            progress.train(record(5))
        terminal.flush()
        text = ""
        while "\x1b[?25h" not in text:  # the cursor is shown again at the end; a read may return less than there is
            text += os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert "\x1b[?25l" in text
    assert "\x1b[?25h" in text
    assert "50.0 %" in screen(text)


def test_the_display_shows_that_ctrl_c_was_heard() -> None:
    progress, output = live()
    with progress:
        progress.train(record(1))
        progress.stopping()
    text = screen(output.getvalue())
    assert text.rstrip().endswith("stopping when this step is made and saved; Ctrl-C again stops at once, without it")
    assert "step 1/1,000" in text


def test_a_dumb_terminal_gets_plain_lines() -> None:
    progress, output = live(term="dumb")
    with progress:
        progress.train(record(1))
    assert output.getvalue().startswith("step 1/1,000 (0.1 %)  loss 3.220")
    assert "\x1b" not in output.getvalue()


FIGURES = {
    "lr_multiplier": 0.85,
    "smoothed_loss": 3.5,
    "grad_norm": 0.12345,
    "mfu": 0.3456,
    "peak_memory_bytes": 3 * 2**30,
    "epoch": 2,
}


def test_figures_of_model_and_machine_are_shown() -> None:
    progress, output, _ = plain()
    progress.train(record(1, **FIGURES))
    assert output.getvalue() == (
        "step 1/1,000 (0.1 %)  loss 3.220 (mean 3.500)  gradient 0.12  rates x 0.850  123,457 tokens/s  "
        "MFU 34.6 %  3.0 GiB  epoch 2  0:00 elapsed, time left not known yet\n"
    )
    progress, output = live(width=200)
    with progress:
        progress.train(record(250, **FIGURES))
    expected = "loss 3.220 (mean 3.500) · gradient 0.12 · rates x 0.850 · 123,457 tokens/s · MFU 34.6 % · 3.0 GiB"
    assert f"{expected} · epoch 2" in screen(output.getvalue())


@pytest.mark.parametrize(("action", "more"), [("warn", ""), ("rollback", ""), ("skip", "; its update is left out")])
def test_a_spike_is_told_whether_or_not_a_line_is_due(action: str, more: str) -> None:
    expected = f"step 7/1,000  spike: loss 3.220 is 8.3 standard deviations above the mean of the last ones{more}"
    progress, output, _ = plain()
    progress.train(record(1))
    progress.train(record(7, spike=8.26, on_spike=action))
    assert output.getvalue().splitlines()[1:] == [expected]
    progress, output = live(width=200)
    with progress:
        progress.train(record(7, spike=8.26, on_spike=action))
    assert expected in screen(output.getvalue())


def shown(text: str, width: int) -> list[str]:
    """The screen of a terminal of this width after such output: cursor movements, erased lines and wrapping happen."""
    lines, row, column = [""], 0, 0
    for code, move, char in re.findall(r"(\x1b\[([0-9;?]*[A-Za-z]))|(.)", text, re.DOTALL):
        if char == "\n":
            row, column = row + 1, 0
        elif char == "\r":
            column = 0
        elif char:
            if column == width:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row].ljust(column)[:column] + char + lines[row][column + 1 :]
            column += 1
        elif move == "2K":
            lines[row] = ""
        elif move.endswith("A"):
            row -= int(move[:-1] or 1)
        else:
            assert move.endswith("m") or move in ("?25l", "?25h"), code
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_nothing_is_smeared_over_the_screen(width: int) -> None:
    progress, output = live(width=width)
    with progress:
        with progress.busy("compiling the model, which takes a minute or more"):
            progress._live.refresh()
        for step in range(1, 8):
            progress.train(record(step, **FIGURES))
            progress._live.refresh()
            if step % 3 == 0:
                with progress.busy("scoring the validation text"):
                    progress._live.refresh()
                progress.evaluation({"step": step, "loss": 3.0, "bpb": step / 10})
    lines = shown(output.getvalue(), width)
    bars = [line for line in lines if "━" in line]
    assert len(bars) == 1
    assert bars[0].startswith("step 7/1,000")
    assert sum("elapsed" in line for line in lines) == 1
    assert not [line for line in lines if "..." in line]
    text = " ".join(" ".join(lines).split())
    for step in (3, 6):  # the evaluations stay
        assert f"step {step}/1,000 validation: loss 3.000, {step / 10:.4f} bits per byte" in text
    assert text.index("step 3/1,000 validation") < text.index("step 6/1,000 validation") < text.index("step 7/1,000")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the thread that draws
@pytest.mark.parametrize("kind", [_File, _Terminal])
def test_a_terminal_that_is_gone_does_not_stop_the_run(kind: type[_Terminal]) -> None:
    progress, output = live(output=kind())
    with progress:
        progress.message("seen")
        output.error = errno.EIO
        with progress.busy("scoring"):
            progress.message("lost")
    assert "seen" in output.getvalue()
    assert "lost" not in output.getvalue()


def test_a_full_disk_is_told() -> None:
    output = _File()
    progress = Progress(10, output=output)
    output.error = errno.ENOSPC
    with pytest.raises(OSError, match="cannot write"):
        progress.message("lost")
