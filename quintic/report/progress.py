"""`Progress` shows the progress of a run: a live display on a terminal, plain lines in a log file.

It measures only the time of this process; all other numbers come from the records of the metrics log.
"""

import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from rich.console import Console, Group

__all__ = ["Progress"]

# Plain output has one line for this number of training steps, and at most one line in this number of seconds.
_STEPS_PER_LINE = 10
_LEAST_SECONDS = 1.0

# Plain output announces an activity again if it took at least this time before.
_LONG_SECONDS = 2.0

_SEPARATOR = " · "

_STOPPING = "stopping when this step is made and saved; Ctrl-C again stops at once, without it"


class Progress:
    """Shows progress as a live display on a terminal, as plain lines on any other output; a context manager.

    Leaving the context, also by Ctrl-C or an error, restores the terminal and passes the exception on.

    Args:
        total_steps: the step at which the run ends.
        start_step: the step from which the run continues; 0 for a new run.
        output: output for plain lines, by default standard output; ignored if ``console`` is given.
        console: a rich console to draw on; by default one on ``output`` if that is a terminal.
        clock: function that returns seconds since an arbitrary start.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        output: TextIO | None = None,
        console: "Console | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.step = start_step
        self._output = sys.stdout if output is None else output
        self._clock = clock
        self._start = clock()
        self._last_line: float | None = None
        # (step, time) from which the time left is estimated: after the first step, which includes compilation.
        self._anchor: tuple[int, float] | None = None
        self._train: Mapping[str, Any] = {}
        self._evaluation: Mapping[str, Any] = {}
        self._busy: str | None = None
        self._is_stopping = False
        # Seconds that each activity took the last time.
        self._waits: dict[str, float] = {}
        # The display is drawn by another thread, which must not see an incomplete update.
        self._lock = threading.Lock()
        self._live: Any = self._start_live(console)

    def _start_live(self, console: "Console | None") -> Any:
        """Start and return the live display; None if the output is not a terminal."""
        if console is None and not self._output.isatty():
            return None
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._output) if console is None else console
        if not console.is_terminal or console.is_dumb_terminal:
            self._output = console.file
            return None
        live = Live(console=console, get_renderable=lambda: self._render(console.width), refresh_per_second=4)
        live.start()
        return live

    def message(self, text: str) -> None:
        """Print a line; on a terminal it appears above the display."""
        if self._live is None:
            self._write(lambda: print(text, file=self._output, flush=True))
        else:
            console = self._live.console
            self._write(lambda: console.print(text, markup=False, highlight=False))

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
        if self._live is not None:
            self._show_busy(activity)
        elif self._waits.get(activity, _LONG_SECONDS) >= _LONG_SECONDS:
            self.message(f"step {self.step:,}/{self.total_steps:,}  {activity} ...")
        try:
            yield
        finally:
            self._waits[activity] = self._clock() - start
            self._show_busy(None)

    def _show_busy(self, activity: str | None) -> None:
        with self._lock:
            self._busy = activity
        if self._live is not None:
            # Refreshed here, since the activity may not let the drawing thread run.
            self._write(self._live.refresh)

    def train(self, record: Mapping[str, Any]) -> None:
        """Show the record of a training step."""
        step, now = int(record["step"]), self._clock()
        with self._lock:
            first = self._anchor is None
            if self._anchor is None:
                self._anchor = (step, now)
            self.step, self._train = step, record
        if self._live is None and self._is_line_due(step, now, first):
            self._last_line = now
            figures = [*_losses(record), *_rate_lines(record), _speed(record), *_machine(record), self._times()]
            self.message("  ".join([f"step {step:,}/{self.total_steps:,} ({self._percent()})", *figures]))
        if record.get("spike") is not None:
            self.message(
                f"step {step:,}/{self.total_steps:,}  spike: loss {_number(record.get('loss'), 3)} is "
                f"{_number(record['spike'], 1)} standard deviations above the mean of the last ones"
                f"{'; its update is left out' if record.get('on_spike') == 'skip' else ''}"
            )

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Show the record of an evaluation on the validation text."""
        with self._lock:
            self._evaluation = record
        self.message(
            f"step {int(record['step']):,}/{self.total_steps:,}  validation: "
            f"loss {_number(record.get('loss'), 3)}, {_number(record.get('bpb'), 4)} bits per byte"
        )

    def close(self) -> None:
        """Draw the display a last time and release the terminal; may be called twice."""
        live, self._live = self._live, None
        if live is not None:
            self._write(live.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _is_line_due(self, step: int, now: float, first: bool) -> bool:
        """Return whether to print a plain line: always for the first and the last step, regularly in between."""
        if first or step >= self.total_steps:
            return True
        rested = self._last_line is None or now - self._last_line >= _LEAST_SECONDS
        return step % _STEPS_PER_LINE == 0 and rested

    def _render(self, width: int) -> "Group":
        """Return the current live display: two lines, the second one with as many numbers as fit."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            bar = Table.grid(padding=(0, 1), expand=True)
            bar.add_column(no_wrap=True)
            bar.add_column(ratio=1)
            bar.add_column(no_wrap=True, justify="right")
            bar.add_row(
                f"step {self.step:,}/{self.total_steps:,}",
                ProgressBar(total=max(1, self.total_steps), completed=self.step),
                self._percent(),
            )
            # (priority, text): the highest numbers are left out first. A wrapped line would leave traces on the screen
            # when the window changes.
            if self._busy is not None:
                figures = [(0, f"{self._busy} ..."), (1, self._times())]
            else:
                loss, *gradient = _losses(self._train)
                loss, _, mean = loss.partition(" (")
                score = f"validation {_number(self._evaluation.get('bpb'), 4)} bits per byte"
                figures = [(0, loss), *([(3, f"({mean}")] if mean else []), *((6, text) for text in gradient)]
                figures += [*([(2, score)] if self._evaluation else []), (4, _speed(self._train))]
                figures += [(7, text) for text in _rate_lines(self._train)]
                figures += [*((5, text) for text in _machine(self._train)), (1, self._times())]
            # Of equal priorities the later one is left out first.
            while len(figures) > 1 and len(_line(figures)) > width:
                figures.pop(max(range(len(figures)), key=lambda place: (figures[place][0], place)))
            if self._is_stopping:
                figures = [(0, _STOPPING)]
            line = Text(_line(figures), style="dim", no_wrap=True, overflow="ellipsis")
        return Group(bar, line)

    def _percent(self) -> str:
        return f"{100 * self.step / max(1, self.total_steps):.1f} %"

    def _times(self) -> str:
        """Return the time since the start of this process, and the estimated time left."""
        now = self._clock()
        elapsed = f"{_clock_time(now - self._start)} elapsed"
        if self.step >= self.total_steps:
            return elapsed
        if self._anchor is None or self.step <= self._anchor[0]:
            return f"{elapsed}, time left not known yet"
        anchor_step, anchor_time = self._anchor
        # At the mean speed since the anchor.
        left = (now - anchor_time) / (self.step - anchor_step) * (self.total_steps - self.step)
        return f"{elapsed}, {_clock_time(left)} left"


def _line(figures: Sequence[tuple[int, str]]) -> str:
    return _SEPARATOR.join(text for _, text in figures).replace(f"{_SEPARATOR}(", " (")


def _number(value: Any, digits: int) -> str:
    """A number with so many decimals; a dash where there is none (yet, or because it was not finite)."""
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "-"


def _losses(record: Mapping[str, Any]) -> list[str]:
    """The loss of the step, with the smoothed and the gradient's size where they are known."""
    smoothed, norm = record.get("smoothed_loss"), record.get("grad_norm")
    mean = f" (mean {_number(smoothed, 3)})" if smoothed is not None else ""
    return [f"loss {_number(record.get('loss'), 3)}{mean}", *([] if norm is None else [f"gradient {norm:.2g}"])]


def _rate_lines(record: Mapping[str, Any]) -> list[str]:
    """The schedule's factor on all learning rates."""
    factor = record.get("lr_multiplier")
    return [] if factor is None else [f"rates x {_number(factor, 3)}"]


def _machine(record: Mapping[str, Any]) -> list[str]:
    """MFU, memory and the epoch of the text."""
    figures = []
    if (mfu := record.get("mfu")) is not None:
        figures.append(f"MFU {100 * mfu:.1f} %")
    if (peak := record.get("peak_memory_bytes")) is not None:
        figures.append(f"{peak / 2**30:.1f} GiB")
    if record.get("epoch"):
        figures.append(f"epoch {record['epoch']}")
    return figures


def _speed(record: Mapping[str, Any]) -> str:
    value = record.get("tokens_per_second")
    return f"{value:,.0f} tokens/s" if isinstance(value, (int, float)) else "- tokens/s"


def _clock_time(seconds: float) -> str:
    """Hours, minutes and seconds as a clock shows them: 0:05, 12:34, 1:02:03."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
