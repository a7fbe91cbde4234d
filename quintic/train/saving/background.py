"""Work that goes on in a thread of its own while the run trains: writing a checkpoint, above all."""

import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

from quintic.errors import OtherRankError
from quintic.train.distributed import Ranks

__all__ = ["Background"]

_LONGEST_WAIT = timedelta(days=7)


class _RanksInBackground(Ranks):
    """Ranks that do not wait for the end of one that failed: it ends when its training thread takes notice."""

    def failed_elsewhere(self) -> OtherRankError:
        return OtherRankError("another rank has failed in the background")


class Background:
    """A thread beside the training thread, on every rank, with at most one piece of work at a time.

    A context manager: leaving it waits for the work. All ranks must make it and call its methods in the same order.

    Args:
        ranks: the processes that train the run.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = self._own_ranks = ranks
        if ranks.size > 1:
            # In one group, collectives of two threads would meet in another order on each rank.
            group = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)
            self._own_ranks = _RanksInBackground(
                **{field.name: getattr(ranks, field.name) for field in fields(Ranks)} | {"group": group}
            )
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """True if the work ended with an error on this rank, which the next `wait` raises. Ranks may ask alone."""
        return self._error is not None

    def start(self, work: Callable[[Ranks], object]) -> None:
        """Wait for the work in progress, then begin the next and return.

        Args:
            work: called in the background with ranks whose methods it may call, as all ranks do.

        Raises:
            QuinticError: as `wait`; nothing was begun.
        """
        self.wait()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def run() -> None:
            try:
                if device is not None:  # the first one in a new thread, which may be another rank's
                    torch.cuda.set_device(device)
                work(self._own_ranks)
            except BaseException as error:
                self._error = error

        # A process that is told to end at once, by a second Ctrl-C while it waits, does not wait for the thread.
        self._thread = threading.Thread(target=run, name="quintic-background", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the work in progress is done.

        Raises:
            QuinticError: the work raised it on this rank, and on no lower one. Other exceptions of the work, too.
            OtherRankError: the work raised an exception on another rank.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None

        def tell() -> None:
            if error is not None and not isinstance(error, OtherRankError):
                raise error

        self._ranks.run_on_all(tell)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:
            # Ranks that end with exceptions may be at different places: nothing is agreed upon.
            self._thread.join()
            if self._error is not None and not isinstance(self._error, OtherRankError):
                print(f"quintic: error: {self._error}", file=sys.stderr)
