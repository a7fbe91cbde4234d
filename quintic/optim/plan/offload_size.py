"""Sizes of offloaded state: in host memory, and of the buffers on the device through which it passes.

A bucket's state is loaded into one buffer while another bucket computes in a second and a third is stored back. Only
numbers here; `step/offload/` moves the state.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quintic.optim.groups.group import Group
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
"""The most state that is loaded at a time, except for a single larger matrix: small in comparison with the memory that
offload saves, and large enough that a copy's fixed cost does not matter."""

POOL_BUFFERS = 3
"""The number of buffers that loads take in turn: one is loaded, one used and one stored."""


class Offloaded(NamedTuple):
    """The offloaded state of a bucket, in bytes."""

    # The three sizes need not be equal: a bucket may be computed in several loads, and has two kinds of them.
    num_bytes: int
    """Loaded and stored in a step."""
    directions: int
    """On the device at a time while directions are computed; with AdamW, during its whole update."""
    weights: int
    """On the device at a time while weights are written: masters."""
    num_loads: int = 1
    """The number of times that `directions` bytes are loaded: AdamW's state is loaded in several pieces."""


def offloaded_bytes(group: Group, dtype: torch.dtype) -> int:
    """Return the bytes of state in host memory per entry of a parameter; 0 without offload."""
    if not group.offload:
        return 0
    # State of the parameter's shape; smaller state stays on the device. A master needs a 16-bit weight.
    specs = [spec for spec in group.rule.state if spec.shape == "param"]
    if dtype.itemsize < 4 and group.master is not None:
        specs.append(MASTER_SPECS[group.master])
    return sum(spec.dtype_for(dtype, group.state_dtype).itemsize for spec in specs)


def offloaded_entries(group: Group, dtype: torch.dtype) -> int | None:
    """Return the largest number of entries that a bucket may have with offload; None without offload."""
    per_entry = offloaded_bytes(group, dtype)
    if not per_entry:
        return None
    # One load must not exceed `OFFLOAD_BYTES`, nor all buffers the workspace.
    budget = group.max_workspace_bytes
    return max(1, min(OFFLOAD_BYTES, OFFLOAD_BYTES if budget is None else budget // POOL_BUFFERS) // per_entry)


def buffers(offloaded: Sequence[Offloaded], kind: int) -> tuple[int, int]:
    """Return the number of one device's buffers, and the bytes of each; `offloaded` are the device's buckets.

    Kind 0 are the buffers for directions, kind 1 those for masters of weights.
    """
    sizes = [one.weights if kind else one.directions for one in offloaded]
    # No more buffers than loads; each must hold the largest one.
    number = sum(one.num_loads for one, size in zip(offloaded, sizes, strict=True) if size)
    return min(number, POOL_BUFFERS), max(sizes, default=0)


def buffer_bytes(offloaded: Sequence[Offloaded]) -> int:
    """Return the bytes of all buffers on one device, which has the buckets `offloaded`."""
    # Directions and weights have buffers of their own.
    return sum(number * size for number, size in (buffers(offloaded, 0), buffers(offloaded, 1)))
