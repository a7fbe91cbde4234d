"""Bytes that each rank keeps between steps: weights, and state on the device or in host memory."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Layout, numel_of
from quintic.optim.state.placement import state_forms

__all__ = ["StoredBytes", "stored_bytes"]


class StoredBytes(NamedTuple):
    """Bytes of all parameters on each rank; each is (ranks,) int64."""

    weights: Tensor
    state: Tensor
    """On the device and in host memory together."""
    host: Tensor
    """The part of `state` in host memory."""


def stored_bytes(groups: Sequence[Group], layouts: Sequence[Sequence[Layout]], num_ranks: int) -> StoredBytes:
    """Return the bytes of weights and state: state with the parameter's shape is sharded like it, other state is whole.

    Args:
        groups: groups of `Muon`, whose parameters have the shapes of the whole model.
        layouts: the layout of each parameter of each group.
        num_ranks: ranks are numbered from 0.
    """
    # Bytes for an entry of all parameters with one layout: weights, state, and the part of the state in host memory.
    per_entry: dict[Layout, list[int]] = {}
    whole = 0
    for group, of_group in zip(groups, layouts, strict=True):
        for param, layout in zip(group.params, of_group, strict=True):
            sizes = per_entry.setdefault(layout, [0, 0, 0])
            sizes[0] += param.dtype.itemsize
            for dtype, shape in state_forms(param, group).values():
                if shape is not None:
                    whole += math.prod(shape) * dtype.itemsize
                    continue
                sizes[1] += dtype.itemsize
                sizes[2] += dtype.itemsize * group.offload
    totals = torch.tensor([[0], [whole], [0]]).repeat(1, num_ranks)
    for layout, sizes in per_entry.items():
        entries = torch.tensor([numel_of(layout.box_of(rank)) for rank in range(num_ranks)])
        totals += torch.tensor(sizes)[:, None] * entries
    return StoredBytes(*totals)
