"""Passes of the model as CUDA graphs, because a GPU computes a chunk faster than the host launches its kernels."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quintic.kernels.graphs import capture
from quintic.speedrun.stages import StepSettings
from quintic.speedrun.stream import FlatBatch

__all__ = ["CapturedPasses"]


class CapturedPasses:
    """Replays forward and backward passes as CUDA graphs.

    For each kind (shapes, windows, document length) the first pass runs eagerly, the second is captured, later ones are
    replayed. Weights, gradients and rotary tables must keep their memory, which the graphs read and write.

    Args:
        make: runs a pass from a batch, loss weights and settings, and returns the detached loss.
    """

    def __init__(self, make: Callable[[FlatBatch, Tensor, StepSettings], Tensor]) -> None:
        self._make = make
        self._recorded: dict[object, tuple[Any, tuple[Tensor, ...], Tensor] | None] = {}
        """Kind -> (graph, its input tensors, its loss); None after the first pass."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: FlatBatch, weights: Tensor, settings: StepSettings) -> Tensor:
        """Run a pass and return its loss, a tensor that the next pass overwrites."""
        given = (batch.inputs, batch.targets, batch.document_starts, weights)
        kind = (*map(len, given), settings.windows, settings.document_tokens)
        if kind not in self._recorded:
            self._recorded[kind] = None
            return self._make(batch, weights, settings)
        recorded = self._recorded[kind]
        if recorded is None:
            kept = tuple(tensor.clone() for tensor in given)
            twin = replace(batch, inputs=kept[0], targets=kept[1], document_starts=kept[2])
            graph, loss = capture(lambda: self._make(twin, kept[3], settings), self._pool)
            self._recorded[kind] = recorded = graph, kept, loss
        graph, kept, loss = recorded
        for target, source in zip(kept, given, strict=True):
            target.copy_(source)
        graph.replay()
        return loss

    def close(self) -> None:
        """Free the graphs and their memory."""
        for recorded in filter(None, self._recorded.values()):
            recorded[0].reset()
        self._recorded.clear()
