"""Ctrl-C, SIGTERM and SIGHUP as requests to stop, which a loop honours when it can."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["StopRequests"]

# Until then a SIGTERM belongs to the signal before it.
_SAME_REQUEST_SECONDS = 1.0


class StopRequests:
    """Turns the first Ctrl-C or SIGTERM into a request that the loop honours between steps; the second one kills.

    A SIGTERM soon after the first signal is none of its own: `timeout` sends one to the process and to its group, and
    torchrun one for the Ctrl-C that its processes have got already. SIGHUP, a terminal that was closed, is a request
    too. It may come from the shell and from the system, so a second one does not kill. A process that was started to
    ignore it (`nohup`) goes on ignoring it.
    """

    def __init__(self) -> None:
        self._is_stopped = self._raises = False
        self._interrupted_at: float | None = None
        self._hangup = getattr(signal, "SIGHUP", None)  # Windows has none
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._previous: dict[signal.Signals, Any] = {}

    def is_stopped(self) -> bool:
        """Return whether there was a request."""
        return self._is_stopped

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at the first request within, or now if there was one: nothing would be lost."""
        if self._is_stopped:
            raise KeyboardInterrupt
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def __enter__(self) -> Self:
        with contextlib.suppress(ValueError):  # handlers can only be set in the main thread
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
        elif number == signal.SIGINT or time.monotonic() - self._interrupted_at > _SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt
        if self._raises:
            self._raises = False  # once: torchrun repeats it
            raise KeyboardInterrupt


def _silence_closed(terminals: Sequence[int]) -> None:
    """Discard output to terminals that are gone: each print would be an error, before the run is saved."""
    for descriptor in terminals:
        if not os.isatty(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
