"""CUDA graphs: captured work, whose launches are all replayed at once.

A GPU may compute a pass of a model faster than the host launches its kernels, so training replays passes.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from quintic.errors import ConfigError

__all__ = ["CapturedPasses", "capture"]

_R = TypeVar("_R")


def capture(work: Callable[[], _R], pool: Any = None) -> tuple[Any, _R]:
    """Capture a function on the current CUDA device and return the graph, which has not run yet, and its result.

    All kernels that `work` launches must have been compiled before. Unlike `torch.cuda.graph`, this function does not
    return cached memory to the driver first, which can take seconds.

    Args:
        work: the function to capture; it must not wait for the device.
        pool: memory pool from `torch.cuda.graph_pool_handle`; graphs that never run at the same time may use one
            pool. None for a new pool.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    # A capture needs a stream other than the default one, and must not begin while earlier work is running.
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # "thread_local" forbids unsafe calls in this thread only: NCCL's watchdog thread queries events at any time.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
    return graph, result


class CapturedPasses:
    """Replays forward and backward passes as CUDA graphs.

    For each kind (shapes of the tensors, and what `kind` says) the first pass runs eagerly, the second is captured,
    later ones are replayed. Weights, gradients and rotary tables must keep their memory, which the graphs read and
    write.

    Args:
        make: runs a pass from tensors and `kind`, and returns the detached loss.
    """

    def __init__(self, make: Callable[..., Tensor]) -> None:
        self._make = make
        self._recorded: dict[Hashable, tuple[Any, tuple[Tensor, ...], Tensor] | None] = {}
        """Kind -> (graph, its input tensors, its loss); None after the first pass."""
        self._pool = torch.cuda.graph_pool_handle()
        self.idle_bytes = 0
        """Memory that replays use and that the allocator counts as free, so its own peaks lack it."""

    def __call__(self, *tensors: Tensor, kind: Hashable = None) -> Tensor:
        """Run a pass and return its loss, a tensor that the next pass overwrites.

        Raises:
            ConfigError: something in the pass, such as an attention, waits for the device.
        """
        key = (*(tensor.shape for tensor in tensors), kind)
        if key not in self._recorded:
            self._recorded[key] = None
            return self._make(*tensors, kind=kind)
        recorded = self._recorded[key]
        if recorded is None:
            kept = tuple(tensor.clone() for tensor in tensors)
            torch.cuda.empty_cache()  # the graphs' pool needs the memory that eager passes have left
            try:
                graph, loss = capture(lambda: self._make(*kept, kind=kind), self._pool)
            except RuntimeError as error:
                # To end a capture that has failed raises another error.
                first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
                if isinstance(first, torch.OutOfMemoryError):
                    raise first from None
                reason = str(first).partition("\n")[0]
                raise ConfigError(
                    f"--capture: a pass cannot be captured as a CUDA graph ({reason}); give --no-capture"
                ) from first
            self._recorded[key] = recorded = graph, kept, loss
            self.idle_bytes = _idle_bytes(self._pool)
            torch.cuda.reset_peak_memory_stats()  # the capture held that memory
        graph, kept, loss = recorded
        for target, source in zip(kept, tensors, strict=True):
            target.copy_(source)
        graph.replay()
        return loss

    def close(self) -> None:
        """Free the graphs and their memory."""
        for recorded in filter(None, self._recorded.values()):
            recorded[0].reset()
        self._recorded.clear()
        self.idle_bytes = 0


def _idle_bytes(pool: tuple[int, int]) -> int:
    """Return the bytes of a pool of graphs that no tensor holds."""
    segments = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) == tuple(pool)]
    return sum(one["total_size"] - one["allocated_size"] for one in segments)
