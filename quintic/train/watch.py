"""Measurements of a run: RMS of gradients and updates, the smoothed loss and its spikes, and a summary of the log.

The RMS of gradients and of updates by kind of layer are the first values to show a wrong learning rate.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, harmonic_mean
from typing import Any

import torch
from torch import Tensor, nn

from quintic.optim.layout.layouts import is_dtensor

__all__ = ["LossWatch", "RmsMeter", "layer_kind", "summarize_log"]

_KINDS = (
    # The first match counts: "value_embeddings." before "embedding.".
    ("value_embeddings.", "value embeddings"),
    ("embedding.", "embedding"),
    ("head.", "head"),
    (".attention.", "attention"),
    (".mlp.", "MLP"),
)

_SMOOTHING = 0.9  # decay of the smoothed loss, per step
_DEVIATIONS = 0.99  # decay of the squared deviations, per step
_FEWEST_DEVIATIONS = 20  # observed before a loss can be a spike
_UNSTEADY_STEPS = 10  # compiling and warming up, not counted for the speed
_LEAST_STD = 1e-12  # avoids a division by zero where the loss was constant


def layer_kind(name: str) -> str:
    """Return the kind of layer that a parameter of `quintic.model.GPT` belongs to, as a chart's label."""
    if "gate" in name:
        return "scalars and gates"
    return next((kind for part, kind in _KINDS if part in name), "scalars and gates")


class RmsMeter:
    """Measures the RMS of gradients and of updates over the parameters of each kind of layer.

    Call `before` and `after` around an optimizer step; with several ranks, all of them must call both.

    Args:
        model: its parameters are measured.
        mean_gradient: returns a gradient averaged over ranks, as the optimizer will see it.
    """

    def __init__(self, model: nn.Module, *, mean_gradient: Callable[[Tensor], Tensor] = lambda grad: grad) -> None:
        self._mean_gradient = mean_gradient
        self._params = [(layer_kind(name), param) for name, param in model.named_parameters() if param.requires_grad]
        self._before: list[Tensor] = []
        self.grad_norm = math.nan
        """Euclidean norm of all gradients, measured by the last call of `before`."""

    @torch.no_grad()
    def before(self) -> dict[str, float]:
        """Copy the weights and return the RMS of the gradients by kind of layer."""
        self._before = [param.detach().clone() for _, param in self._params]
        # Averaged one after the other, so that one gradient is held twice, not all.
        rms, counts = self._rms(
            None if param.grad is None else self._mean_gradient(param.grad) for _, param in self._params
        )
        self.grad_norm = math.sqrt(sum(counts[kind] * value**2 for kind, value in rms.items()))
        return rms

    @torch.no_grad()
    def after(self) -> dict[str, float]:
        """Return the RMS of the weights' change since `before` by kind of layer, and drop the copies."""
        # The change of the weights, not the optimizer's direction: it includes decay and the learning rate.
        changes = (param - old for (_, param), old in zip(self._params, self._before, strict=True))
        rms, _ = self._rms(changes)
        self._before = []
        return rms

    def _rms(self, tensors: Iterable[Tensor | None]) -> tuple[dict[str, float], dict[str, int]]:
        """Return RMS and element count per kind of layer; missing tensors are skipped."""
        squares: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        for (kind, _), tensor in zip(self._params, tensors, strict=True):
            if tensor is not None:
                # For a DTensor, `sum` is partial on each rank, and `full_tensor` adds up the ranks' sums.
                square = tensor.float().square().sum()
                square = square.full_tensor() if is_dtensor(square) else square
                squares[kind] = squares[kind] + square if kind in squares else square
                counts[kind] = counts.get(kind, 0) + tensor.numel()
        return {kind: float((square / counts[kind]).sqrt()) for kind, square in squares.items()}, counts


@dataclass(kw_only=True)
class LossWatch:
    """Tracks the smoothed loss of a run, its minimum and its spikes; checkpoints save it, so that resuming is exact.

    A spike is a loss more than `sigmas` standard deviations above the smoothed loss of the steps before it. The
    deviations of losses from the smoothed loss before them are averaged over roughly the last hundred steps. A spike
    enters this average clipped to `sigmas` deviations, so that it does not hide the next one.
    """

    sigmas: float
    steps: int = 0
    mean: float = 0.0
    """Sum of losses with weights 0.1 x 0.9^age; `smoothed` divides it by the sum of the weights."""
    square: float = 0.0
    """Sum of squared deviations with weights 0.01 x 0.99^age."""
    least: float = math.inf
    """Minimum of the smoothed loss."""
    rollbacks: int = 0
    """Number of times that the run went back to a checkpoint."""

    @property
    def smoothed(self) -> float:
        """Return the mean of the losses with weights 0.9^age."""
        return self.mean / (1 - _SMOOTHING**self.steps) if self.steps else math.nan

    def add(self, loss: float) -> float | None:
        """Add the loss of a step; return its height in standard deviations if it is a spike, else None."""
        if not math.isfinite(loss):
            return None  # `loop.train` stops the run with DivergedError
        above = None
        if self.steps:
            deviation = loss - self.smoothed
            known = self.steps - 1  # deviations so far
            # The weights sum to 1 - decay^n, so dividing by that corrects for the start at zero, as Adam does.
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
        """Return all fields except `sigmas`."""
        return {name: value for name, value in vars(self).items() if name != "sigmas"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`."""
        vars(self).update(state)


def summarize_log(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of the final record that follow from a run's log.

    Speeds are means over steady steps, which are all but the first ten of each process; without any, they are missing.
    """
    peaks = [record["peak_memory_bytes"] for record in records if record.get("peak_memory_bytes")]
    evals = [record for record in records if record.get("kind") == "eval" and record.get("bpb") is not None]
    steps: list[Mapping[str, Any]] = []
    steady: list[Mapping[str, Any]] = []
    made = 0  # steps of this process
    for record in records:
        if record.get("kind") in ("run", "resume"):
            made = 0
        elif record.get("kind") == "train" and record.get("times_ms"):  # which a log that was edited may lack
            made += 1
            steps.append(record)
            if made > _UNSTEADY_STEPS and record.get("mfu") and record.get("tokens_per_second"):
                steady.append(record)
    phases = {
        phase: sum(record["times_ms"].get(phase) or 0.0 for record in steps)
        for phase in ("data", "forward_backward", "optimizer")
    }
    total = sum(phases.values()) or 1.0
    summary: dict[str, Any] = {
        "peak_memory_bytes": max(peaks, default=None),
        "breakdown": {f"{phase}_frac": milliseconds / total for phase, milliseconds in phases.items()},
    }
    if evals:
        summary["least_bpb"], summary["least_bpb_step"] = min((record["bpb"], record["step"]) for record in evals)
    if steady:
        # Means over time: a slow step counts for as long as it took.
        for field in ("tokens_per_second", "mfu"):
            summary[field] = harmonic_mean([record[field] for record in steady])
        first, *others = (sum(filter(None, record["times_ms"].values())) / 1000 for record in (steps[0], *steady))
        summary["first_step_extra_seconds"] = max(0.0, first - fmean(others))
    return summary
