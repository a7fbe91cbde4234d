"""A background thread of rank 0, which writes checkpoints while the run trains."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

from quintic.train.distributed import Ranks

__all__ = ["Background"]


class Background:
    """Runs one function at a time in a background thread of rank 0.

    All ranks must call `start` and `wait` in the same order.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._work: Future[None] | None = None

    @property
    def has_failed(self) -> bool:
        """True on rank 0 if the function failed; the next `wait` raises its error."""
        return self._work is not None and self._work.done() and self._work.exception() is not None

    def start(self, work: Callable[[], None]) -> None:
        """Wait for the function in progress, then start the next one and return.

        Raises:
            Exception: as `wait`; `work` is then not started.
        """
        self.wait()
        if not self._ranks.is_first:
            return
        started = Future[None]()

        def run() -> None:
            try:
                work()
                started.set_result(None)
            except BaseException as error:
                started.set_exception(error)

        # A daemon, unlike the threads of executors: a second Ctrl-C ends the process without waiting for it.
        threading.Thread(target=run, name="quintic-background", daemon=True).start()
        self._work = started  # only now: nobody waits for a thread that could not start

    def wait(self) -> None:
        """Wait until the function in progress has ended.

        Raises:
            Exception: the function raised this exception, on rank 0.
            OtherRankError: the same on other ranks.
        """
        self._ranks.from_rank0(self._finish)

    def _finish(self) -> None:
        ended, self._work = self._work, None
        if ended is not None:
            ended.result()

    def close(self) -> None:
        """Wait until the function in progress has ended, and print its error.

        For after an exception: ranks may be at different points in the code, so no collective is called here.
        """
        if self._work is not None and (error := self._work.exception()) is not None:
            print(f"quintic: error: {error}", file=sys.stderr)
