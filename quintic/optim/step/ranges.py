"""Named ranges in PyTorch's profiler for the phases of a step: `quintic.step/bucket 3 muon 12x768x768/orthogonalize`.

They are made only while a profiler runs (`torch.profiler`, or `torch.autograd.profiler.emit_nvtx` for Nsight).
Otherwise a phase enters a context that does nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

from quintic.optim.plan.bucket import Bucket, Sharded

__all__ = ["NO_RANGES", "Ranges", "is_profiled", "range_of", "ranges_of"]

Ranges = Mapping[str, AbstractContextManager[object]]
"""For each phase the context in which it runs."""

# A lookup is cheaper than a call, and every phase of every step makes one.
NO_RANGES: Ranges = defaultdict(nullcontext[None])

is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Return whether a profiler runs in this thread."""

_PREFIX = "quintic.step"


class _BucketRanges(dict[str, AbstractContextManager[object]]):
    def __init__(self, label: str) -> None:
        self._label = label

    # A new range at each entry: `record_function` contexts are used once, and so are never stored.
    def __missing__(self, phase: str) -> AbstractContextManager[object]:
        return record_function(f"{_PREFIX}/{self._label}/{phase}")


def range_of(phase: str) -> AbstractContextManager[object]:
    """Return the context of a phase that belongs to no bucket."""
    return record_function(f"{_PREFIX}/{phase}") if is_profiled() else nullcontext()


def ranges_of(number: int, bucket: Bucket) -> Ranges:
    """Return the ranges of a bucket, which has this number in the plan."""
    # The label names what is computed together, by number and shape.
    if bucket.shape is not None:
        m, n = bucket.shape
        return _BucketRanges(f"bucket {number} muon {bucket.num_matrices}x{m}x{n}")
    if bucket.rule.orthogonalizes:
        return _BucketRanges(f"bucket {number} muon {bucket.num_matrices} matrices")
    kind = "parts" if isinstance(bucket, Sharded) else "parameters"
    return _BucketRanges(f"bucket {number} adamw {bucket.num_pieces} {kind}")
