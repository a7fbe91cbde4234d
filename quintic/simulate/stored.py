"""Bytes that each rank keeps: weights, state on the device or in host memory, and buffers for the latter."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Layout, numel_of, size_of
from quintic.optim.layout.views import View
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.planning import build_plan
from quintic.optim.state.cut_state import storing_bytes
from quintic.optim.state.placement import shares_groups, state_forms
from quintic.optim.step.offload.offload import Offload
from quintic.simulate.meta_tensors import MetaTensors

__all__ = ["StoredBytes", "cut_state_bytes", "cut_state_traffic", "offload_buffer_bytes", "stored_bytes"]


class StoredBytes(NamedTuple):
    """Bytes of all parameters on each rank; each is (ranks,) int64."""

    weights: Tensor
    state: Tensor
    """On the device and in host memory together."""
    host: Tensor
    """The part of `state` in host memory."""


def _shared_averages(groups: Sequence[Group], layouts: Sequence[Sequence[Layout]]) -> Iterator[tuple[int, Layout]]:
    """Yield the number of averages and the layout of each parameter whose groups of 8-bit state ranks share."""
    for group, of_group in zip(groups, layouts, strict=True):
        for param, layout in zip(group.params, of_group, strict=True):
            if shares_groups(param, group, layout):
                yield len(group.rule.packed_state), layout


def cut_state_bytes(groups: Sequence[Group], layouts: Sequence[Sequence[Layout]], num_ranks: int) -> Tensor:
    """Return (ranks,) temporary bytes of a step for 8-bit state whose groups lie on several ranks (`cut_state.py`)."""
    wide = torch.zeros(num_ranks, dtype=torch.int64)
    most = 0
    for averages, layout in _shared_averages(groups, layouts):
        wide += 4 * averages * torch.tensor([numel_of(layout.box_of(rank)) for rank in range(num_ranks)])
        most = max(most, storing_bytes(layout))
    return wide + most


def cut_state_traffic(
    groups: Sequence[Group], layouts: Sequence[Sequence[Layout]], nodes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the bytes that each rank sends, and receives, for such state in a step, and those sent to other nodes.

    Both are (ranks,) int64; `nodes` has the node of each rank.
    """
    sent, between = torch.zeros(2, len(nodes), dtype=torch.int64)
    for averages, layout in _shared_averages(groups, layouts):
        # Each average is gathered three times: its bytes, its values in float32, and its bytes.
        each = (1 + 4 + 1) * averages * max(numel_of(layout.box_of(rank)) for rank in layout.ranks)
        for rank in layout.ranks:
            sent[rank] += each * (len(layout.ranks) - 1)
            between[rank] += each * sum(nodes[other] != nodes[rank] for other in layout.ranks)
    return sent, between


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


class _AnyShape(View):
    """A view that fits every tensor, in place of one that fits only whole parameters."""

    def blocks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensor as one row."""
        return (tensor.view(1, 1, 1, -1),)


def offload_buffer_bytes(
    groups: Sequence[Group], layouts: Sequence[Sequence[Layout]], shared: Sequence[Sequence[Layout | None]]
) -> int:
    """Return the bytes of the device's buffers for offloaded state on rank 0, which has the largest boxes.

    Args:
        groups: groups of `Muon`, whose parameters have the shapes of the whole model and the ranks' device.
        layouts: the layout of each parameter of each group.
        shared: the same as rank 0 divides the work; None for parameters without messages.
    """
    here = []
    for group, of_group in zip(groups, layouts, strict=True):
        pairs = [(param, size_of(layout.box_of(0))) for param, layout in zip(group.params, of_group, strict=True)]
        # An object for each parameter, because each has state of its own.
        here.append(
            replace(group, params=tuple(MetaTensors(param.device.type).of(param, size) for param, size in pairs))
        )
    plan = build_plan(here, shared)
    # Pieces of matrices are boxes, for which the view of the whole parameter is not needed.
    boxes = [replace(group, view=_AnyShape()) for group in here]
    buckets: list[Bucket] = []
    for bucket in plan:
        of_boxes = any(member.box is not None for member in bucket.members)
        buckets += Offload(replace(plan, buckets=(bucket,)), boxes if of_boxes else here, {}).plan.buckets
    return replace(plan, buckets=tuple(buckets)).offload_buffer_bytes
