"""`Prefetcher` calls a function ahead of time in a background thread, and returns the results in order."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

__all__ = ["Prefetcher"]

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Calls a function ahead of time; `get` returns the results one by one, or raises the function's exception."""

    def __init__(self, produce: Callable[[], T], depth: int) -> None:
        """Start the thread, which produces `depth` results ahead; it ends with `close`, or with this object.

        `produce` must not hold a reference to the owner of this object, because then neither would ever be collected.
        """
        self._produce = produce
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quintic-prefetch")
        self._results = deque(self._thread.submit(produce) for _ in range(depth))

    def get(self) -> T:
        """Return the next result; waits for it.

        Raises:
            BaseException: the function's exception, in its place in the order, and again on every later call.
        """
        result = self._results[0].result()
        self._results.popleft()
        self._results.append(self._thread.submit(self._produce))
        return result

    def close(self) -> None:
        """Stop the thread and wait for its end; results that were not taken are lost. May be called twice."""
        self._thread.shutdown(cancel_futures=True)
