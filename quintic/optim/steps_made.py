"""What one optimizer knows of the steps that it has made."""

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from quintic.optim.first_gradients import FirstGradients
from quintic.optim.step.runner import Done
from quintic.optim.step.telemetry import Counts, StepReport, report_of

__all__ = ["StepsMade"]


class StepsMade:
    """Counts of steps, and the report of the last one."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.first_gradients: FirstGradients | None = FirstGradients()
        """None when there is nothing to find out any more."""
        self._counts: list[Counts] = []
        self._waiting = self._clipped_layers = 0
        self._go: Tensor | None = None
        """() int32 on a device: 0 if non-finite gradients stopped the last step; None if it asked nobody."""
        self._skipped: Tensor | None = None
        """() int64 on a device: steps stopped."""

    def count(self, done: Done, *, waiting: int, clipped_layers: int, is_replayed: bool = False) -> None:
        """Note a step; the host waits for nothing. A CUDA graph that is replayed has captured `count_skips`."""
        self.num_steps += 1
        self._go = done.go if done.asks else None
        if self._go is not None and not is_replayed:
            self.count_skips(done)
        self._counts, self._waiting, self._clipped_layers = done.counts, waiting, clipped_layers

    def count_skips(self, done: Done) -> None:
        """Count on the device whether non-finite gradients stopped a step."""
        if done.go is None or not done.asks:
            return
        if self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.int64, device=done.go.device)
        self._skipped += 1 - done.go

    def report(self) -> StepReport:
        """Return what the last step did; waits for the device."""
        skipped_steps = int(self._skipped) if self._skipped is not None else 0
        return replace(
            report_of(self._counts),
            waiting=self._waiting,
            clipped_layers=self._clipped_layers,
            skipped=self._go is not None and not bool(self._go),
            skipped_steps=skipped_steps,
        )

    def copy(self) -> "StepsMade":
        """Return what is known now, which later steps do not change."""
        found = copy(self)
        found._skipped = None if self._skipped is None else self._skipped.clone()
        return found

    def restore(self, kept: "StepsMade") -> None:
        """Take back what was known when `copy` was called."""
        skipped = self._skipped
        vars(self).update(vars(kept))
        if skipped is not None and kept._skipped is not None:
            self._skipped = skipped.copy_(kept._skipped)  # a CUDA graph may count there
