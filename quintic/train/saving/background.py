"""A background thread on each rank, which writes checkpoints while the run trains."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Self

import torch

from quintic.errors import OtherRankError
from quintic.train.distributed import Ranks, host_group

__all__ = ["Background"]


class Background:
    """Runs one function at a time in a background thread, on every rank.

    A context manager: leaving it waits for the function to end. All ranks must construct it and call its methods in the
    same order.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = self._own_ranks = ranks
        if ranks.size > 1:
            # A separate group: two threads in one group could start their collectives in different orders on two ranks.
            self._own_ranks = replace(ranks, group=host_group())
        self._work: Future[None] | None = None

    @property
    def has_failed(self) -> bool:
        """True if the function failed on this rank; the next `wait` raises its error. Not a collective."""
        return self._work is not None and self._work.done() and self._work.exception() is not None

    def start(self, work: Callable[[Ranks], object]) -> None:
        """Wait for the function in progress, then start the next one and return.

        Args:
            work: called in the background with a `Ranks`; all ranks must call the same methods of it.

        Raises:
            Exception: as `wait`; `work` is then not started.
        """
        self.wait()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        started = Future[None]()

        def run() -> None:
            try:
                if device is not None:  # new threads start with device 0, which may belong to another rank
                    torch.cuda.set_device(device)
                work(self._own_ranks)
                started.set_result(None)
            except BaseException as error:
                started.set_exception(error)

        # A daemon, unlike the threads of executors: a second Ctrl-C ends the process without waiting for it.
        threading.Thread(target=run, name="quintic-background", daemon=True).start()
        self._work = started  # only now: nobody waits for a thread that could not start

    def wait(self) -> None:
        """Wait until the function in progress has ended.

        Raises:
            Exception: the function raised this exception on this rank, and on no lower one.
            OtherRankError: the function raised an exception on another rank.
        """
        if self._work is not None:
            self._work.exception()  # waits for the function to end
            ended, self._work = self._work, None
            self._ranks.run_on_all(ended.result)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        if kind is None:
            self.wait()
        elif self._work is not None:
            # After an exception, ranks may be at different points in the code, so no collective is called here.
            error = self._work.exception()  # waits as well
            if error is not None and not isinstance(error, OtherRankError):
                print(f"quintic: error: {error}", file=sys.stderr)
