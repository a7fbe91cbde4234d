"""The tensors that a step changes, kept in host memory by `verify`, and put back bit for bit."""

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from quintic.optim.first_gradients import FirstGradients
from quintic.optim.layout.layouts import local_tensor
from quintic.optim.muon import Muon

__all__ = ["StepSnapshot", "Values", "local_values", "named_parameters", "snapshot"]

Values: TypeAlias = dict[Tensor, dict[str, Tensor]]
"""The weight and state of each parameter, as this rank holds them."""


def local_values(states: Mapping[Tensor, Mapping[str, Tensor]], param: Tensor) -> dict[str, Tensor]:
    """Return the `"weight"` and state that this rank holds of a parameter, sharing memory."""
    state = {key: local_tensor(value) for key, value in states.get(param, {}).items()}
    return {"weight": local_tensor(param.detach()), **state}


def snapshot(optimizer: Muon) -> Values:
    """Return copies in host memory of what this rank holds of all weights and state."""
    states = optimizer.state
    return {
        param: {key: value.to("cpu", copy=True) for key, value in local_values(states, param).items()}
        for _, param in named_parameters(optimizer)
    }


class StepSnapshot:
    """Everything that a step changes, as it is now: weights and state are copied to host memory."""

    _CHANGED = ("pending_steps", "telemetry_every", "qk_clip")

    def __init__(self, optimizer: Muon) -> None:
        self._optimizer = optimizer
        self.values = snapshot(optimizer)
        self._options = [{key: group[key] for key in self._CHANGED} for group in optimizer.param_groups]
        self._step_history = optimizer._step_history.copy()
        self._gradients: dict[Tensor, Tensor | None] = {}
        self._plans_validated = optimizer._plans.planned().consensus.plans_validated
        self._precomputed = optimizer._plans.precomputed.fresh()

    def keep_gradients(self) -> None:
        """Keep the gradients that a step changes."""
        self._gradients = {
            param: None if param.grad is None else param.grad.to("cpu", copy=True)
            for group in self._optimizer.param_groups
            for param in group["params"]
            if group["comms"] == "replicated"  # averaged in place
        }

    def make_due(self) -> None:
        """Let every group step next time, whatever its `step_every`, and measure nothing."""
        self._optimizer._step_history.first_gradients = FirstGradients()
        for group in self._optimizer.param_groups:
            group.update(pending_steps=group["step_every"] - 1, telemetry_every=None, qk_clip=None)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, in place."""
        optimizer = self._optimizer
        states = optimizer.state
        for param, values in self.values.items():
            for key, target in local_values(states, param).items():
                target.copy_(values[key])
        for param, gradient in self._gradients.items():
            if gradient is None:
                param.grad = None
            elif param.grad is not None:
                param.grad.copy_(gradient)
        optimizer._plans.precomputed.keep(self._precomputed)
        if not self._plans_validated:
            # Ranks ask each other before the first step of training, not before one with gradients that were made up.
            optimizer._plans.planned().consensus.plans_validated = False
        for group, options in zip(optimizer.param_groups, self._options, strict=True):
            group.update(options)
        optimizer._step_history.restore(self._step_history)


def named_parameters(optimizer: Muon) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each parameter."""
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)
