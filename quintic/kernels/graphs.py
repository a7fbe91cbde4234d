"""CUDA graphs: work that was launched once is launched again as a whole."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["capture"]

_R = TypeVar("_R")


def capture(work: Callable[[], _R], pool: Any = None) -> tuple[Any, _R]:
    """Capture a function on the current CUDA device; return the graph, which has not run yet, and its result.

    Everything compiled must have run before. Unlike `torch.cuda.graph`, this does not give cached memory back to the
    driver first, which can take seconds.

    Args:
        work: waits for nothing on the device.
        pool: of memory that graphs share which never run at the same time, as `torch.cuda.graph_pool_handle` returns;
            None for a new one.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # Other threads, as NCCL's watchdog, ask for events meanwhile.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
    return graph, result
