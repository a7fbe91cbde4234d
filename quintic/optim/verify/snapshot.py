"""Snapshots in host memory of everything that a step changes, which `verify` restores bit for bit.

Besides weights and state these are the groups' countdowns and options that `verify` sets for its two steps, the step
history, averages that clipping made ahead of the step, and gradients that the step averages in place.
"""

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from quintic.optim.first_gradients import FirstGradients
from quintic.optim.layout.layouts import local_tensor
from quintic.optim.muon import Muon

__all__ = ["StepSnapshot", "Values", "local_values", "named_parameters", "snapshot"]

Values: TypeAlias = dict[Tensor, dict[str, Tensor]]
"""Parameter -> {"weight" or name of a state: this rank's piece of it}."""


def local_values(states: Mapping[Tensor, Mapping[str, Tensor]], param: Tensor) -> dict[str, Tensor]:
    """Return this rank's pieces of a parameter's `"weight"` and state, by name; they share its memory."""
    state = {key: local_tensor(value) for key, value in states.get(param, {}).items()}
    return {"weight": local_tensor(param.detach()), **state}


def snapshot(optimizer: Muon) -> Values:
    """Return copies in host memory of this rank's pieces of all weights and state."""
    states = optimizer.state
    return {
        param: {key: value.to("cpu", copy=True) for key, value in local_values(states, param).items()}
        for _, param in named_parameters(optimizer)
    }


class StepSnapshot:
    """A snapshot of everything that a step changes, taken when it is made; tensors are copied to host memory."""

    # Options of groups that a step, or `make_due`, changes.
    _CHANGED = ("pending_steps", "telemetry_every", "qk_clip")

    def __init__(self, optimizer: Muon) -> None:
        self._optimizer = optimizer
        self.values = snapshot(optimizer)
        self._options = [{key: group[key] for key in self._CHANGED} for group in optimizer.param_groups]
        self._step_history = optimizer._step_history.copy()
        # Filled by `keep_gradients`, since random gradients may be set first.
        self._gradients: dict[Tensor, Tensor | None] = {}
        # Averages that `clip_grad_norm_` made ahead of the step, and whether ranks have compared their plans.
        self._plans_validated = optimizer._plans.planned().consensus.plans_validated
        self._averages = optimizer._plans.reduction.valid()
        self._release_gradients = optimizer._plans.release_gradients

    def keep_gradients(self) -> None:
        """Add the gradients that a step changes to the snapshot."""
        self._gradients = {
            param: None if param.grad is None else param.grad.to("cpu", copy=True)
            for group in self._optimizer.param_groups
            for param in group["params"]
            if group["comms"] == "replicated"  # the step averages these in place
        }

    def make_due(self) -> None:
        """Make all groups due at the next step, without telemetry and QK-clip; the step leaves gradients alone."""
        self._optimizer._plans.release_gradients = False
        # A new object, so that the steps of `verify` do not use up the check of training's first step.
        self._optimizer._step_history.first_gradients = FirstGradients()
        for group in self._optimizer.param_groups:
            group.update(pending_steps=group["step_every"] - 1, telemetry_every=None, qk_clip=None)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything in place, so that tensors keep their addresses; may be called again."""
        optimizer = self._optimizer
        states = optimizer.state
        for param, values in self.values.items():
            # Into this rank's pieces, from host memory.
            for key, target in local_values(states, param).items():
                target.copy_(values[key])
        # A gradient that the step made (of zeros, where only other ranks had one) is removed again.
        for param, gradient in self._gradients.items():
            if gradient is None:
                param.grad = None
            elif param.grad is not None:
                param.grad.copy_(gradient)
        optimizer._plans.reduction.keep(self._averages)
        optimizer._plans.release_gradients = self._release_gradients
        if not self._plans_validated:
            # Ranks must exchange again before the first real step, since random gradients do not tell which gradients
            # are Partial in training.
            optimizer._plans.planned().consensus.plans_validated = False
        for group, options in zip(optimizer.param_groups, self._options, strict=True):
            group.update(options)
        optimizer._step_history.restore(self._step_history)


def named_parameters(optimizer: Muon) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each parameter."""
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)
