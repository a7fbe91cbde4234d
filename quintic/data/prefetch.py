"""`Prefetcher` calls a function ahead of time in a background thread, and returns the results in order."""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Prefetcher"]

T = TypeVar("T")

# Longest time after which a waiting thread notices that it should stop.
_POLL_SECONDS = 0.05


class Prefetcher(Generic[T]):
    """Calls a function ahead of time; `get` returns the results one by one, or raises the function's exception."""

    def __init__(self, produce: Callable[[], T], depth: int) -> None:
        """Start the thread.

        Args:
            produce: called repeatedly in the thread. It must not hold a reference to the owner of this object, because
                then neither would ever be collected.
            depth: number of results to produce ahead, at least 1.
        """
        self._results: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=_produce_all, args=(produce, self._results, self._stop), name="quintic-prefetch", daemon=True
        )
        self._thread.start()
        # Stops the thread if the owner is collected without `close`, and before the interpreter shuts down.
        self._finalizer = weakref.finalize(self, _stop_thread, self._stop, self._thread)

    def get(self) -> T:
        """Return the next result; waits for it.

        Raises:
            BaseException: the function's exception, in its place in the order, and again on every later call.
        """
        if self._error is not None:
            raise self._error
        result, self._error = self._results.get()
        if self._error is not None:
            raise self._error
        return result  # type: ignore[return-value]  # None only with an error, or if T allows it

    def close(self) -> None:
        """Stop the thread and wait for its end; results that were not taken are lost. May be called twice."""
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
    # Garbage collection can run in any thread, including this one, and a thread cannot join itself.
    if thread is not threading.current_thread():
        thread.join()
