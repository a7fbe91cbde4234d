"""Memory allocated by a function, by PyTorch's own account, on CPUs and GPUs."""

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from quintic.optim.polar import cpu_orthogonalize

__all__ = ["peak_bytes"]


def peak_bytes(function: Callable[[], Any], device_type: str = "cpu") -> int:
    """Return the most bytes that were allocated at one time on top of what there was before the call.

    Memory that threads keep from call to call on CPUs counts as allocated in this one.
    """
    if device_type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated() - before
    with (
        mock.patch.object(cpu_orthogonalize, "_KEPT", threading.local()),
        mock.patch.object(cpu_orthogonalize, "_MAX_KEPT", 0),
        # Not `torch.profiler.profile`: without `acc_events` PyTorch 2.11 warns of cycles that begin anew; with it all
        # events become Python's objects, which takes ten times as long as the work.
        torch.autograd.profiler.profile(profile_memory=True) as profile,
    ):
        result = function()
    del result
    level = peak = 0
    for event in profile.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak
