"""Measurements while a run trains: sizes of gradients and updates, the loss and its spikes, times without the start.

Sizes by kind of layer are the two numbers that show a wrong learning rate first.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quintic.optim.layout.layouts import is_dtensor

__all__ = ["LossWatch", "RmsMeter", "StepTimes", "layer_kind"]

_KINDS = (
    ("value_embeddings.", "value embeddings"),
    ("embedding.", "embedding"),
    ("head.", "head"),
    (".attention.", "attention"),
    (".mlp.", "MLP"),
)

_SMOOTHING = 0.9
_DEVIATIONS = 0.99
_FEWEST_DEVIATIONS = 20
_UNSTEADY_STEPS = 10
_LEAST_STD = 1e-12  # so that the log gets a number


def layer_kind(name: str) -> str:
    """Return the kind of layer a parameter of `quintic.model.GPT` belongs to, in words for a chart."""
    if "gate" in name:
        return "scalars and gates"
    return next((kind for part, kind in _KINDS if part in name), "scalars and gates")


class RmsMeter:
    """Root mean squares over all parameters of a kind; `before` a step copies the weights, `after` compares.

    Where ranks have parts of parameters, all ranks must call both.

    Args:
        model: its parameters.
        mean_gradient: returns a gradient as the optimizer will see it.
    """

    def __init__(self, model: nn.Module, *, mean_gradient: Callable[[Tensor], Tensor] = lambda grad: grad) -> None:
        self._mean_gradient = mean_gradient
        self._params = [(layer_kind(name), param) for name, param in model.named_parameters() if param.requires_grad]
        self._before: list[Tensor] = []
        self.grad_norm = math.nan
        """Euclidean norm of all gradients together, of the last `before`."""

    @torch.no_grad()
    def before(self) -> dict[str, float]:
        """Remember the weights and return the RMS of the gradients by kind."""
        self._before = [param.detach().clone() for _, param in self._params]
        gradients = [None if param.grad is None else self._mean_gradient(param.grad) for _, param in self._params]
        rms, counts = self._rms(gradients)
        self.grad_norm = math.sqrt(sum(counts[kind] * value**2 for kind, value in rms.items()))
        return rms

    @torch.no_grad()
    def after(self) -> dict[str, float]:
        """Return the RMS of the change of the weights since `before` by kind, and forget them."""
        changes: list[Tensor | None] = [param - old for (_, param), old in zip(self._params, self._before, strict=True)]
        self._before = []
        return self._rms(changes)[0]

    def _rms(self, tensors: list[Tensor | None]) -> tuple[dict[str, float], dict[str, int]]:
        """Return by kind the RMS of the tensors that are there, and the number of their elements."""
        squares: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        for (kind, _), tensor in zip(self._params, tensors, strict=True):
            if tensor is not None:
                square = tensor.float().square().sum()
                square = square.full_tensor() if is_dtensor(square) else square
                squares[kind] = squares[kind] + square if kind in squares else square
                counts[kind] = counts.get(kind, 0) + tensor.numel()
        return {kind: float((square / counts[kind]).sqrt()) for kind, square in squares.items()}, counts


@dataclass(kw_only=True)
class LossWatch:
    """The smoothed loss of a run, its least, and its spikes; all of it is saved, so that a resumed run sees the same.

    A spike is a loss more than `sigmas` standard deviations above the smoothed loss before it. The deviation is that
    of the losses from the smoothed loss at their time, over the last hundred steps or so; a spike counts there as one
    of `sigmas`, so that one does not hide the next.
    """

    sigmas: float
    steps: int = 0
    mean: float = 0.0
    """Sum of losses with weights 0.1 x 0.9^age; `smoothed` divides by the sum of the weights."""
    square: float = 0.0
    """The same for squared deviations, with weights 0.01 x 0.99^age."""
    least: float = math.inf
    """Least smoothed loss."""
    rollbacks: int = 0
    """Number of times that the run went back to its last checkpoint."""

    @property
    def smoothed(self) -> float:
        """Return the mean of the losses with weights 0.9^age."""
        return self.mean / (1 - _SMOOTHING**self.steps) if self.steps else math.nan

    def add(self, loss: float) -> float | None:
        """Take the loss of a step; return how many standard deviations high it is if it is a spike."""
        if not math.isfinite(loss):
            return None  # the run stops for another reason
        above = None
        if self.steps:
            deviation = loss - self.smoothed
            known = self.steps - 1  # deviations so far
            std = math.sqrt(self.square / (1 - _DEVIATIONS**known)) if known else math.inf
            if known >= _FEWEST_DEVIATIONS and deviation > self.sigmas * std:
                above = deviation / max(std, _LEAST_STD)
                deviation = self.sigmas * std
            self.square = _DEVIATIONS * self.square + (1 - _DEVIATIONS) * deviation**2
        self.steps += 1
        self.mean = _SMOOTHING * self.mean + (1 - _SMOOTHING) * loss
        self.least = min(self.least, self.smoothed)
        return above

    def state_dict(self) -> dict[str, Any]:
        """Return everything but `sigmas`, fit for JSON."""
        state = {**dataclasses.asdict(self), "least": self.least if self.steps else None}
        del state["sigmas"]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`."""
        for name, value in state.items():
            setattr(self, name, math.inf if value is None else value)


@dataclass(kw_only=True)
class StepTimes:
    """Seconds of a run's steps: the first one, and the others without the first ten of each process that trained it."""

    count: int = 0
    """Steps of this process."""
    first: float | None = None
    steady_count: int = 0
    steady: float = 0.0
    possible_flops: float = 0.0
    """Floating-point operations that the devices could have done in the steady seconds, at their measured rates."""

    def add(self, seconds: float, *, rate: float) -> None:
        """Take the time of a step, and the operations per second that all devices could have done."""
        self.count += 1
        if self.first is None:
            self.first = seconds
        if self.count > _UNSTEADY_STEPS:
            self.steady_count += 1
            self.steady += seconds
            self.possible_flops += seconds * rate

    def speed(self, *, batch_tokens: int, flops_per_token: int) -> dict[str, float]:
        """Return `tokens_per_second`, `mfu` and `first_step_extra_seconds`; nothing before there are steady steps."""
        if self.first is None or not self.steady_count:
            return {}
        tokens = self.steady_count * batch_tokens
        return {
            "tokens_per_second": tokens / self.steady,
            "mfu": tokens * flops_per_token / self.possible_flops,
            "first_step_extra_seconds": max(0.0, self.first - self.steady / self.steady_count),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything but `count`, fit for JSON."""
        state = dataclasses.asdict(self)
        del state["count"]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`, in the process that goes on with the run."""
        for name, value in state.items():
            setattr(self, name, value)
