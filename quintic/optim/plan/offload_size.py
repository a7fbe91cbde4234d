"""Sizes of the optimizer state in host memory, and of the part of it on the device at a time. Numbers only."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quintic.optim.groups.options import Group
from quintic.optim.rules.rule import MASTER_SPECS

__all__ = [
    "OFFLOAD_BYTES",
    "POOL_BUFFERS",
    "Offloaded",
    "buffer_bytes",
    "buffers",
    "offloaded_bytes",
    "offloaded_entries",
]

OFFLOAD_BYTES = 128 * 2**20
"""State that is brought from the host at a time (a single matrix may have more): little beside what offload saves, much
beside what a copy costs at least."""

POOL_BUFFERS = 3
"""Buffers that this state takes turns in: one is loaded, one used and one stored."""


class Offloaded(NamedTuple):
    """State of a bucket in host memory, in bytes."""

    num_bytes: int
    """Copied to the device at a step, and back."""
    directions: int
    """On the device at a time for the directions; for AdamW for all it does."""
    weights: int
    """On the device at a time for the weights: masters."""
    num_loads: int = 1
    """The number of times that `directions` bytes are loaded: AdamW's state comes in parts."""


def offloaded_bytes(group: Group, dtype: torch.dtype) -> int:
    """Return the bytes of state in host memory per entry of a parameter; 0 without offload."""
    if not group.offload:
        return 0
    specs = [spec for spec in group.rule.state if spec.shape == "param"]
    if dtype.itemsize < 4 and group.master is not None:
        specs.append(MASTER_SPECS[group.master])
    return sum(spec.dtype_for(dtype, group.state_dtype).itemsize for spec in specs)


def offloaded_entries(group: Group, dtype: torch.dtype) -> int | None:
    """Return the largest number of entries whose state a bucket may keep in host memory; None for any."""
    per_entry = offloaded_bytes(group, dtype)
    if not per_entry:
        return None
    budget = group.max_workspace_bytes
    return max(1, min(OFFLOAD_BYTES, OFFLOAD_BYTES if budget is None else budget // POOL_BUFFERS) // per_entry)


def buffers(offloaded: Sequence[Offloaded], kind: int) -> tuple[int, int]:
    """Return the number of buffers on one device, in which the state of its buckets takes turns, and the bytes of each.

    Kind 0 is what directions need, 1 what weights need.
    """
    sizes = [one.weights if kind else one.directions for one in offloaded]
    number = sum(one.num_loads for one, size in zip(offloaded, sizes, strict=True) if size)
    return min(number, POOL_BUFFERS), max(sizes, default=0)


def buffer_bytes(offloaded: Sequence[Offloaded]) -> int:
    """Return the bytes of all buffers on one device."""
    return sum(number * size for number, size in (buffers(offloaded, 0), buffers(offloaded, 1)))
