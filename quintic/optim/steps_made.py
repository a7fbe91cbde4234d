"""The record of the steps that one optimizer has made."""

import warnings
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from quintic.optim.groups.options import Group
from quintic.optim.rules.device_memory import HostCopy
from quintic.optim.step.runner import Done
from quintic.optim.step.telemetry import Counts, StepReport, report_of

__all__ = ["FirstGradients", "StepsMade"]


class FirstGradients:
    """Warns where the first step finds no gradient at all: the model may have other parameters than the optimizer.

    `to_empty`, `fully_shard` and PEFT give a model new parameters. An optimizer made before steps the old ones, which
    never get a gradient, and nothing is trained without a word. A rank may well have no gradient where others do (a
    batch that was skipped, experts without a token): of ranks that share parameters all must lack all gradients.
    """

    def __init__(self) -> None:
        self._is_over = False
        self._suspect = ""
        """The warning, while it is not known whether other ranks have gradients."""
        self._present: list[HostCopy] | None = None

    def look(self, groups: Sequence[Group], *, may_lack: bool) -> None:
        """Look whether this rank has a gradient, before the first step; warn if it is known by now that none has.

        Where it may lack them for a reason, the next step counts as the first one. A gradient on the meta device is a
        ValueError.
        """
        self._warn()
        if self._is_over or may_lack:
            return
        rows = [row for group in groups for row in zip(group.param_names, group.params, strict=True)]
        for name, param in rows:
            if param.is_meta and param.grad is not None:
                raise ValueError(
                    f"{name} is on the meta device, where it has no values to step; materialise the model (to_empty, "
                    f"or a checkpoint loaded with assign=True), then make the optimizer"
                )
        self._is_over = True
        if any(param.grad is not None for _, param in rows):
            return
        wanting = [name for name, param in rows if param.requires_grad]
        if wanting:
            others = f" and {len(wanting) - 1} others" if len(wanting) > 1 else ""
            self._suspect = (
                f"the first step found no gradient at all, also none of {wanting[0]}{others} with requires_grad=True; "
                f"if the model got other parameters after the optimizer was made (to_empty, fully_shard, PEFT), this "
                f"optimizer has the old ones: make it afterwards; quintic.verify(model, optimizer) names them"
            )

    def ask_others(self, present: Iterable[Tensor]) -> bool:
        """Begin to find out whether other ranks have gradients, after the step. Return whether nothing is left to do.

        What is `present` is () on a device each: whether any rank of those that share parameters has a gradient.
        """
        if self._suspect and self._present is None:
            self._present = list(map(HostCopy, present))
            self._warn()
        return self._is_over and not self._suspect

    def _warn(self) -> None:
        """Warn, as soon as all answers are there; the host waits for none of them."""
        if not self._suspect or self._present is None or not all(answer.is_there for answer in self._present):
            return
        message, self._suspect = self._suspect, ""
        if not any(answer.read() for answer in self._present):
            warnings.warn(message, UserWarning, stacklevel=2)


class StepsMade:
    """Counts of steps, and the report of the last one."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.first_gradients: FirstGradients | None = FirstGradients()
        """None when there is nothing to find out any more."""
        self._counts: list[Counts] = []
        self._waiting = self._clipped_layers = 0
        self._go: Tensor | None = None
        """() int32 on a device: 0 if non-finite gradients stopped the last step; None if it did not look for them."""
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
        """Return the report of the last step; waits for the device."""
        skipped_steps = int(self._skipped) if self._skipped is not None else 0
        return replace(
            report_of(self._counts),
            waiting=self._waiting,
            clipped_layers=self._clipped_layers,
            skipped=self._go is not None and not bool(self._go),
            skipped_steps=skipped_steps,
        )

    def copy(self) -> "StepsMade":
        """Return a copy that later steps do not change."""
        twin = copy(self)
        twin._skipped = None if self._skipped is None else self._skipped.clone()
        return twin

    def restore(self, kept: "StepsMade") -> None:
        """Take back what was known when `copy` was called."""
        skipped = self._skipped
        vars(self).update(vars(kept))
        if skipped is not None and kept._skipped is not None:
            self._skipped = skipped.copy_(kept._skipped)  # a CUDA graph may count there
