"""Ends a process whose device waits for a rank that is lost: as PyTorch's watchdog does where collectives wait.

A device that waits for another one's flag waits for ever, and whoever waits for the device with it. Each step leaves a
mark in host memory when the device is done with it. A thread looks whether marks come in time; it asks the driver for
nothing, which a CUDA graph being captured would not survive.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from quintic.optim.comms.collectives import ProcessGroup

__all__ = ["LostRanks", "timeout_of"]

# PyTorch's watchdog, if it waits for a collective behind, shall tell of it first.
_GRACE_SECONDS = 5.0

_DEFAULT_SECONDS = 600.0


class LostRanks:
    """The marks of one device, and a thread that looks at them once there are any to come.

    Args:
        marks: (1,) int32 in host memory: the number of the last step that the device is done with.
        seconds: in which a step must end.
        text: says who waits for whom.
        end: is called when one does not, with what to say.
        pause: seconds between two looks.
    """

    def __init__(
        self,
        marks: Tensor,
        seconds: float,
        text: str,
        end: Callable[[str], None] | None = None,
        pause: float = 1.0,
    ) -> None:
        # Read without PyTorch: from another thread, at any time.
        self._marks: Any = marks.numpy()
        self._seconds, self._text, self._end, self._pause = seconds, text, end or _end_process, pause
        self._begun: list[float] = []
        self._ended = 0
        self._lock = threading.Lock()
        self._is_watched = False

    def expect(self) -> int:
        """Note that a step was started, and return its number, from 1 on."""
        with self._lock:
            self._begun.append(time.monotonic())
            number = self._ended + len(self._begun)
            if not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name="quintic-lost-ranks", daemon=True).start()
        return number

    def is_overdue(self, now: float) -> bool:
        """Return whether a step has not ended in time."""
        with self._lock:
            done = max(0, int(self._marks[0]) - self._ended)
            self._begun = self._begun[done:]
            self._ended += done
            return bool(self._begun) and now - self._begun[0] > self._seconds

    def _watch(self) -> None:
        while True:
            time.sleep(self._pause)
            if self.is_overdue(time.monotonic()):
                self._end(self._text)
            with self._lock:
                if not self._begun:
                    # Until the next step: nobody has to end a thread that looks at nothing.
                    self._is_watched = False
                    return


def timeout_of(group: ProcessGroup, device: torch.device) -> float:
    """Return after how many seconds collectives of a process group are given up."""
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return _DEFAULT_SECONDS
    return timeout.total_seconds() if isinstance(timeout, timedelta) else _DEFAULT_SECONDS


def _end_process(text: str) -> None:
    """End the process with a message: no call that waits for the device would return."""
    time.sleep(_GRACE_SECONDS)
    sys.stderr.write(f"quintic: {text}\n")
    sys.stderr.flush()
    os.abort()
