"""Captures work on a CUDA device as a graph, which replays all of its launches at once."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["capture"]

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
