"""Ctrl-C, SIGTERM and SIGHUP as requests to stop, which a loop honours between steps."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["StopRequests"]

# A SIGTERM within this time after another signal belongs to the same request.
_SAME_REQUEST_SECONDS = 1.0


class StopRequests:
    """Turns the first Ctrl-C or SIGTERM into a request that a loop honours between steps; the second one raises.

    A SIGTERM soon after the first signal is not counted: `timeout` sends it to the process and again to its group, and
    torchrun sends it after a Ctrl-C that its processes have already received. SIGHUP, for a closed terminal, is also a
    request; a second one is ignored, because both the shell and the system may send it. A process that was started
    with SIGHUP ignored (`nohup`) keeps ignoring it.

    Args:
        heard: called in the signal handler at the first Ctrl-C, which may be long before the loop honours it. The
            handler interrupts the main thread anywhere, so it must neither take a lock nor write to a buffered stream.
    """

    def __init__(self, heard: Callable[[], None] = lambda: None) -> None:
        self._heard = heard
        self._is_stopped = self._raises = False
        self._interrupted_at: float | None = None
        self._hangup = getattr(signal, "SIGHUP", None)  # Windows has none
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._previous: dict[signal.Signals, Any] = {}

    def is_stopped(self) -> bool:
        """Return whether a request was received."""
        return self._is_stopped

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at the first request within the block, or at once after an earlier request."""
        if self._is_stopped:
            raise KeyboardInterrupt
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def __enter__(self) -> Self:
        with contextlib.suppress(ValueError):  # Python only sets handlers in the main thread
            for number in (signal.SIGINT, signal.SIGTERM, self._hangup):
                if number is not None and (number != self._hangup or signal.getsignal(number) != signal.SIG_IGN):
                    self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._is_stopped = True
        if number == self._hangup:
            _silence_closed(self._terminals)
        elif self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            if number == signal.SIGINT and not self._raises:
                self._heard()
        elif number == signal.SIGINT or time.monotonic() - self._interrupted_at > _SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt
        if self._raises:
            self._raises = False  # only once, because torchrun repeats the signal
            raise KeyboardInterrupt


def _silence_closed(terminals: Sequence[int]) -> None:
    """Redirect output to closed terminals to nowhere, so that printing does not fail before the run is saved."""
    for descriptor in terminals:
        if not os.isatty(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
