"""The history of an optimizer's steps: how many there were, how many were skipped, and the report of the last one."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from quintic.optim.first_gradients import FirstGradients
from quintic.optim.step.runner import StepOutcome
from quintic.optim.step.telemetry import StepReport, report_of

__all__ = ["StepHistory"]


class StepHistory:
    """Counts the steps of one optimizer, and reports the last one."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.first_gradients: FirstGradients | None = FirstGradients()
        """The check of the first step's gradients; None once it has its answer."""
        self.rejected_steps: Sequence[int] | None = None
        """The counts of a step that raised an error for non-finite gradients, until these are mended or reset."""
        self._last = StepOutcome([], None, False)
        self._waiting = self._qk_layers = 0
        self._skipped: Tensor | None = None
        """() int64 on the device: how many steps non-finite gradients have stopped."""

    def record(self, outcome: StepOutcome, *, waiting: int, qk_layers: int, is_replayed: bool = False) -> None:
        """Record a step without waiting for the device.

        Args:
            outcome: of the step.
            waiting: number of parameters in groups that were between two of their steps (`step_every`).
            qk_layers: number of attention layers with logits for QK-clip.
            is_replayed: whether a CUDA graph was replayed, which has counted skips itself: `count_skips` is captured.
        """
        self.num_steps += 1
        self._last, self._waiting, self._qk_layers = outcome, waiting, qk_layers
        if outcome.guards_nonfinite and not is_replayed:
            self.count_skips(outcome)

    def count_skips(self, outcome: StepOutcome) -> None:
        """Count on the device whether non-finite gradients stopped a step, also inside a CUDA graph's capture."""
        if outcome.apply_mask is None or not outcome.guards_nonfinite:
            return
        if self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.int64, device=outcome.apply_mask.device)
        self._skipped += 1 - outcome.apply_mask

    def report(self) -> StepReport:
        """Return the report of the last step; waits for the device."""
        counts, apply_mask, guards_nonfinite = self._last
        return replace(
            report_of(counts),
            waiting=self._waiting,
            qk_layers=self._qk_layers,
            skipped=guards_nonfinite and apply_mask is not None and not bool(apply_mask),
            skipped_steps=0 if self._skipped is None else int(self._skipped),
        )

    def copy(self) -> "StepHistory":
        """Return a copy that later steps do not change."""
        copied = copy(self)
        copied._skipped = None if self._skipped is None else self._skipped.clone()
        return copied

    def restore(self, kept: "StepHistory") -> None:
        """Go back to the values that a copy has kept."""
        skipped = self._skipped
        vars(self).update(vars(kept))
        if skipped is not None and kept._skipped is not None:
            # In place: a CUDA graph may have captured this address.
            self._skipped = skipped.copy_(kept._skipped)
