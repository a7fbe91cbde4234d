"""Producing items ahead of their use, in one background thread, in order."""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Prefetcher"]

T = TypeVar("T")

# Longest time in which a waiting thread notices that it is no longer wanted.
_POLL_SECONDS = 0.05


class Prefetcher(Generic[T]):
    """Calls a function ahead of time; `get` returns the results one by one, or raises the function's exception."""

    def __init__(self, produce: Callable[[], T], depth: int) -> None:
        """Start the thread.

        Args:
            produce: called again and again in the thread; must not hold a reference to the owner of this object,
                or neither is ever collected.
            depth: results that may wait, at least 1.
        """
        self._results: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=_produce_all, args=(produce, self._results, self._stop), name="quintic-prefetch", daemon=True
        )
        self._thread.start()
        # Also when the owner forgets to close, and before the interpreter shuts down under the thread.
        self._finalizer = weakref.finalize(self, _stop_thread, self._stop, self._thread)

    def get(self) -> T:
        """Return the next result; waits for it.

        Raises:
            BaseException: what the function raised, in its place in the order, and again on every later call.
        """
        if self._error is not None:
            raise self._error
        result, self._error = self._results.get()
        if self._error is not None:
            raise self._error
        return result  # type: ignore[return-value]  # None only beside an error, or when T allows it

    def close(self) -> None:
        """Stop the thread and wait for it; results not taken are lost. May be called twice."""
        self._finalizer()


def _produce_all(
    produce: Callable[[], T], results: "queue.Queue[tuple[T | None, BaseException | None]]", stop: threading.Event
) -> None:
    error: BaseException | None = None
    while error is None and not stop.is_set():
        item: tuple[T | None, BaseException | None]
        try:
            item = (produce(), None)
        except BaseException as raised:
            error = raised
            item = (None, raised)
        while not stop.is_set():
            try:
                results.put(item, timeout=_POLL_SECONDS)
                break
            except queue.Full:
                continue


def _stop_thread(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    # A collection can run in any thread, this one included.
    if thread is not threading.current_thread():
        thread.join()
