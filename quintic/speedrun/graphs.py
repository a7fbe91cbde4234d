"""Passes of the model as CUDA graphs: a chunk is through sooner than the host could launch its thousand kernels."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintic.kernels.graphs import capture
from quintic.speedrun.stages import StepSettings
from quintic.speedrun.stream import FlatBatch

__all__ = ["CapturedPasses"]


class _RecordedPass(NamedTuple):
    graph: Any
    inputs: tuple[Tensor, ...]
    """The tensors that the graph reads: the batch and the weights of the losses."""
    loss: Tensor


class CapturedPasses:
    """Passes forward and backward, replayed where an equal one was made before.

    The first pass of a kind is made as usual, the second is captured. Weights, gradients and tables of positions must
    stay where they are.

    Args:
        make: makes a pass of a batch, the weights of its losses and settings; returns the loss, without a graph.
    """

    def __init__(self, make: Callable[[FlatBatch, Tensor, StepSettings], Tensor]) -> None:
        self._make = make
        self._recorded: dict[object, _RecordedPass | None] = {}
        self._pool: Any = None

    def __call__(self, batch: FlatBatch, weights: Tensor, settings: StepSettings) -> Tensor:
        """Make a pass; the loss returned is overwritten by the next one."""
        sizes = len(batch.inputs), len(batch.document_starts), len(weights)
        kind = (sizes, settings.windows, settings.document_tokens)
        if kind not in self._recorded:
            self._recorded[kind] = None
            return self._make(batch, weights, settings)
        recorded = self._recorded[kind] = self._recorded[kind] or self._record(batch, weights, settings)
        now = (batch.inputs, batch.targets, batch.document_starts, weights)
        for target, source in zip(recorded.inputs, now, strict=True):
            target.copy_(source)
        recorded.graph.replay()
        return recorded.loss

    def _record(self, batch: FlatBatch, weights: Tensor, settings: StepSettings) -> _RecordedPass:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        kept = FlatBatch(batch.inputs.clone(), batch.targets.clone(), batch.document_starts.clone())
        kept_weights = weights.clone()
        graph, loss = capture(lambda: self._make(kept, kept_weights, settings), self._pool)
        return _RecordedPass(graph, (kept.inputs, kept.targets, kept.document_starts, kept_weights), loss)

    def close(self) -> None:
        """Free the graphs and their memory."""
        for recorded in filter(None, self._recorded.values()):
            recorded.graph.reset()
        self._recorded.clear()
