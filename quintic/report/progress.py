"""`Progress` shows the progress of a run: a live display on a terminal, plain lines in a log file.

It measures only the time of this process; all other numbers come from the records of the metrics log.
"""

import contextlib
import errno
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

__all__ = ["Progress"]

# Plain output has one line for this number of training steps, and at most one line in this number of seconds.
_STEPS_PER_LINE = 10
_LEAST_SECONDS = 1.0

# Plain output announces an activity again if it took at least this time before.
_LONG_SECONDS = 2.0

_STOPPING = "stopping when this step is made and saved; Ctrl-C again stops at once, without it"


class Progress:
    """Shows progress as a live display on a terminal, as plain lines on any other output; a context manager.

    Leaving the context, also by Ctrl-C or an error, restores the terminal and passes the exception on.

    Args:
        total_steps: the step at which the run ends.
        start_step: the step from which the run continues; 0 for a new run.
        output: the terminal or other output, by default standard output.
        clock: function that returns seconds since an arbitrary start.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        output: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.step = start_step
        self._output = sys.stdout if output is None else output
        self._clock = clock
        self._start = clock()
        self._last_line = -math.inf
        # (step, time) from which the time left is estimated: after the first step, which includes compilation.
        self._anchor: tuple[int, float] | None = None
        self._train: Mapping[str, Any] = {}
        self._bpb = ""
        self._busy: str | None = None
        self._is_stopping = False
        # Seconds that each activity took the last time.
        self._waits: dict[str, float] = {}
        self._print: Callable[[str], None] = partial(print, file=self._output, flush=True)
        # The display; None if the output is not a terminal that can show it. Another thread draws it, four times a
        # second, and so may show the figures of two steps beside each other for that long.
        self._live: Live | None = None
        console = Console(file=self._output)
        if self._output.isatty() and console.is_terminal and not console.is_dumb_terminal:
            self._print = partial(console.print, markup=False, highlight=False)
            self._live = Live(console=console, get_renderable=lambda: self._render(console.width), refresh_per_second=4)
            self._live.start()

    def message(self, text: str) -> None:
        """Print a line; on a terminal it appears above the display."""
        self._write(lambda: self._print(text))

    def stopping(self) -> None:
        """Show that Ctrl-C was heard; may be called by a signal handler."""
        self._is_stopping = True  # the drawing thread shows it
        if self._live is None:
            with contextlib.suppress(OSError, ValueError):  # an output without a descriptor
                os.write(self._output.fileno(), f"\n{_STOPPING}\n".encode())

    def _write(self, write: Callable[[], object]) -> None:
        """Write, and ignore the error of a closed terminal: SIGHUP ends the run, which is saved first."""
        try:
            write()
        except OSError as error:
            if error.errno != errno.EIO:
                raise

    @contextlib.contextmanager
    def busy(self, activity: str) -> Iterator[None]:
        """Announce an activity while the `with` block runs: in the display, or as a line of plain output.

        Plain output gets the line the first time, and again if the activity took two seconds or more before.
        """
        start = self._clock()
        if self._live is None and self._waits.get(activity, _LONG_SECONDS) >= _LONG_SECONDS:
            self.message(f"{self._steps()}  {activity} ...")
        self._show_busy(activity)
        try:
            yield
        finally:
            self._waits[activity] = self._clock() - start
            self._show_busy(None)

    def _show_busy(self, activity: str | None) -> None:
        self._busy = activity
        if self._live is not None:
            # Refreshed here, since the activity may not let the drawing thread run.
            self._write(self._live.refresh)

    def train(self, record: Mapping[str, Any]) -> None:
        """Show the record of a training step."""
        step, now = int(record["step"]), self._clock()
        is_first = self._anchor is None
        self._anchor = self._anchor or (step, now)
        self.step, self._train = step, record
        # Plain output: the first and the last step, and regular ones in between.
        is_due = step % _STEPS_PER_LINE == 0 and now - self._last_line >= _LEAST_SECONDS
        if self._live is None and (is_first or is_due or step >= self.total_steps):
            self._last_line = now
            texts = [self._steps(), f"({self._percent()})", *(text for _, text in _figures(record)), self._times()]
            self.message("  ".join(texts).replace("  (", " ("))
        if record.get("spike") is not None:
            left_out = "; its update is left out" if record.get("on_spike") == "skip" else ""
            above = f"{record['spike']:.1f} standard deviations above the mean of the last ones"
            self.message(f"{self._steps()}  spike: loss {_number(record.get('loss'), '.3f')} is {above}{left_out}")

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Show the record of an evaluation on the validation text."""
        self._bpb = f"{_number(record.get('bpb'), '.4f')} bits per byte"
        self.message(f"{self._steps()}  validation: loss {_number(record.get('loss'), '.3f')}, {self._bpb}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._write(self._live.stop)  # draws it a last time

    def _render(self, width: int) -> Group:
        """Return the current live display: two lines, the second one with as many numbers as fit."""
        columns = (Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True, justify="right"))
        bar = Table.grid(*columns, padding=(0, 1), expand=True)
        bar.add_row(self._steps(), ProgressBar(max(1, self.total_steps), self.step), self._percent())
        busy = self._busy
        figures = _figures(self._train) if busy is None else [(0, f"{busy} ...")]
        if busy is None and self._bpb:
            figures.append((2, f"validation {self._bpb}"))
        figures.append((1, self._times()))
        if self._is_stopping:
            figures = [(0, _STOPPING)]

        def line() -> str:
            return " · ".join(text for _, text in figures).replace(" · (", " (")

        # The highest numbers are left out first, of equal ones the later one. A wrapped line would leave traces on the
        # screen when the window changes.
        while len(figures) > 1 and len(line()) > width:
            figures.pop(max(range(len(figures)), key=lambda place: (figures[place][0], place)))
        return Group(bar, Text(line(), style="dim", no_wrap=True, overflow="ellipsis"))

    def _steps(self) -> str:
        return f"step {self.step:,}/{self.total_steps:,}"

    def _percent(self) -> str:
        return f"{100 * self.step / max(1, self.total_steps):.1f} %"

    def _times(self) -> str:
        """Return the time since the start of this process, and the estimated time left."""
        now, step = self._clock(), self.step
        elapsed = f"{_clock_time(now - self._start)} elapsed"
        if step >= self.total_steps:
            return elapsed
        if self._anchor is None or step <= self._anchor[0]:
            return f"{elapsed}, time left not known yet"
        anchor_step, anchor_time = self._anchor
        # At the mean speed since the anchor.
        left = (now - anchor_time) / (step - anchor_step) * (self.total_steps - step)
        return f"{elapsed}, {_clock_time(left)} left"


def _figures(record: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Return the numbers of a training step as (priority, text); a narrow terminal leaves out high numbers first."""
    figures = [(0, f"loss {_number(record.get('loss'), '.3f')}")]
    if record.get("smoothed_loss") is not None:
        figures.append((3, f"(mean {record['smoothed_loss']:.3f})"))
    if record.get("grad_norm") is not None:
        figures.append((6, f"gradient {record['grad_norm']:.2g}"))
    if record.get("lr_multiplier") is not None:
        figures.append((7, f"rates x {record['lr_multiplier']:.3f}"))
    figures.append((4, f"{_number(record.get('tokens_per_second'), ',.0f')} tokens/s"))
    if record.get("mfu") is not None:
        figures.append((5, f"MFU {100 * record['mfu']:.1f} %"))
    if record.get("peak_memory_bytes") is not None:
        figures.append((5, f"{record['peak_memory_bytes'] / 2**30:.1f} GiB"))
    if record.get("epoch"):
        figures.append((5, f"epoch {record['epoch']}"))
    return figures


def _number(value: float | None, form: str) -> str:
    """Format a number; None, for a number that is missing or was not finite, is a dash."""
    return "-" if value is None else format(value, form)


def _clock_time(seconds: float) -> str:
    """Hours, minutes and seconds as a clock shows them: 0:05, 12:34, 1:02:03."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
