"""Builds the plan of one rank from the parameter groups and the layouts of their parameters.

    shared      buckets of matrices that lie on several ranks, or whose work is divided (`gathered.py`)
    sharded     buckets of groups with `comms="sharded"` (`sharded.py`)
    local       the rest: matrices of one kind, or AdamW's parameters of one dtype and device, which need no messages
    order       buckets with collectives get an order and a schedule (`order.py`)

Invariant: all ranks build the same shared and sharded buckets from the same groups; no sizes are ever exchanged.
"""

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from quintic.kernels.dispatch import Kernels, choose_kernels, is_dense
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Layout, local_tensor
from quintic.optim.layout.pieces import Piece
from quintic.optim.plan.bucket import Bucket, Gathered, Sharded
from quintic.optim.plan.gathered import gathered_buckets, shared_buckets
from quintic.optim.plan.kinds import kind_of
from quintic.optim.plan.offload_size import POOL_BUFFERS, offloaded_bytes, offloaded_entries
from quintic.optim.plan.order import Orders, order_buckets
from quintic.optim.plan.plan import Plan
from quintic.optim.plan.replicas import ReplicaChoice
from quintic.optim.plan.schedule import NO_BYTES
from quintic.optim.plan.sharded import sharded_buckets
from quintic.optim.plan.workspace.buckets import adamw_workspace_bytes, batch_bytes, needs_row_order
from quintic.optim.plan.workspace.matrices import WorkspaceSpec
from quintic.optim.state.placement import is_stepped_packed

__all__ = ["build_plan", "local_buckets"]

# The most entries of a bucket's matrices on a CPU: the C library returns larger temporary tensors to the system after
# each use, which then has to clear all of their pages again.
_CPU_ENTRIES = 2**22


def build_plan(
    param_groups: Sequence[Group],
    layouts: Sequence[Sequence[Layout | None]],
    rank: int = 0,
    sharded: Mapping[int, tuple[int, ...]] | None = None,
    orders: Orders | None = None,
    choices: Iterable[ReplicaChoice] = (),
) -> Plan:
    """Return the plan of one global rank.

    Args:
        param_groups: the groups, validated (see `Muon.add_param_group`).
        layouts: for each parameter of each group its layout if it needs messages, else None; from `layouts_for_work`
            if there were choices.
        rank: the global rank.
        sharded: number -> ranks of the groups whose state is sharded (`comms="sharded"`).
        orders: the user's orders of buckets with collectives.
        choices: from `choose_replica_strategies`, to be reported with the plan.
    """
    # Shared buckets are planned for all groups at once, because their owners are balanced over all of them.
    shared, balance = shared_buckets(param_groups, layouts)
    buckets: list[Bucket] = []
    for number, (group, of_group) in enumerate(zip(param_groups, layouts, strict=True)):
        if sharded and number in sharded:
            buckets += sharded_buckets(number, group, sharded[number], rank)
            continue
        for one in shared:
            if one.key.group == number and rank in one.exchange.ranks:
                buckets += gathered_buckets(one, of_group, rank)
        # Parameters that need no messages; frozen ones are in no bucket.
        here = [index for index, layout in enumerate(of_group) if layout is None and index not in group.idle]
        buckets += local_buckets(number, group, here)
    # A shared bucket whose owner holds all of its units whole needs no messages, and runs among the local ones.
    with_comm = [bucket for bucket in buckets if isinstance(bucket, Gathered | Sharded) and bucket.needs_comm]
    in_order, schedule = order_buckets(with_comm, param_groups, orders or Orders())
    without_comm = [bucket for bucket in buckets if not bucket.needs_comm]
    return Plan((*in_order, *without_comm), balance, schedule, choices=tuple(choices))


def local_buckets(group_index: int, group: Group, indices: Sequence[int]) -> list[Bucket]:
    """Return the local buckets of a validated group, for the parameters at positions `indices`."""
    build = _muon_buckets if group.rule.orthogonalizes else _adamw_buckets
    return list(build(group_index, group, indices))


def _adamw_buckets(group_index: int, group: Group, indices: Sequence[int]) -> Iterator[Bucket]:
    # Parameters that one launch of a kernel can handle: of one dtype and device, and with gaps in memory or without.
    members: dict[tuple[torch.dtype, torch.device, Kernels, bool, bool], list[Piece]] = {}
    for index in indices:
        name, param = group.param_names[index], local_tensor(group.params[index])
        packed = is_stepped_packed(group.params[index], group)
        key = (param.dtype, param.device, choose_kernels(group.kernels, param), is_dense(param), packed)
        members.setdefault(key, []).append(Piece(name, index))
    # One bucket each: AdamW's temporary memory does not grow with the number of parameters.
    for (dtype, device, kernels, dense, _), alike in members.items():
        numels = [local_tensor(group.params[member.index]).numel() for member in alike]
        yield Bucket(
            rule=group.rule,
            group=group_index,
            members=tuple(alike),
            dtype=dtype,
            device=device,
            kernels=kernels,
            numel=sum(numels),
            phase_bytes=NO_BYTES._replace(
                computing=adamw_workspace_bytes(max(numels), group, dtype, device, kernels, dense=dense)
            ),
        )


def _muon_buckets(group_index: int, group: Group, indices: Sequence[int]) -> Iterator[Bucket]:
    # Matrices that one launch of a kernel can handle: of one shape, strides, dtype and device. A view's block has shape
    # (b, g, r, n), or (b, g, r, c, k) for filters in channels_last.
    by_kind: dict[tuple[Any, ...], list[Piece]] = {}
    for index in indices:
        name, param = group.param_names[index], local_tensor(group.params[index])
        kernels = choose_kernels(group.kernels, param)
        packed, first = is_stepped_packed(group.params[index], group), 0
        for block in group.view.blocks(param.detach()):
            stop = first + block.shape[0]
            key = (block.shape[1:], block.stride()[1:], param.dtype, param.device, kernels, packed)
            by_kind.setdefault(key, []).append(Piece(name, index, tuple(range(first, stop)), box=None))
            first = stop
    for (block_shape, strides, dtype, device, kernels, _), members in by_kind.items():
        m, n = block_shape[:2].numel(), block_shape[2:].numel()  # (g, r) -> m, (n) or (c, k) -> n
        kind = kind_of(group, m, n, dtype, device)
        form = kind.form
        spec = WorkspaceSpec.of_group(group, dtype, device, kernels)
        total = sum(member.batch_size for member in members)
        largest = max(member.batch_size for member in members)

        # The number of matrices at a time follows from the worst device of the type, so that all ranks agree on it.
        is_copied = kernels == "triton" and needs_row_order(block_shape, strides, form)
        worst_case_bytes = functools.partial(
            batch_bytes,
            largest=largest,
            shape=(m, n),
            form=form,
            spec=spec._replace(worst_case=True),
            is_copied=is_copied,
        )
        at_a_time = _matrices_at_a_time(group, total, m * n, dtype, worst_case_bytes)
        if device.type == "cpu":
            at_a_time = min(at_a_time, max(1, _CPU_ENTRIES // max(1, m * n)))
        # One bucket for each list of matrices; its bound is for this device.
        for chunk in _member_chunks(members, at_a_time):
            counts = [member.batch_size for member in chunk]
            count = sum(counts)
            yield Bucket(
                rule=group.rule,
                group=group_index,
                members=tuple(chunk),
                shape=(m, n),
                dtype=dtype,
                device=device,
                kernels=kernels,
                form=form,
                numel=count * m * n,
                flops=count * kind.flops,
                phase_bytes=NO_BYTES._replace(computing=batch_bytes(count, max(counts), (m, n), form, spec, is_copied)),
            )


def _matrices_at_a_time(
    group: Group, total: int, numel: int, dtype: torch.dtype, workspace: Callable[[int], int]
) -> int:
    """Return the number of matrices that fit the workspace, with the buffers for offloaded state; at least 1.

    Args:
        group: their group, with its `max_workspace_bytes`.
        total: the number of matrices in all.
        numel: entries of one matrix.
        dtype: of the weights.
        workspace: returns the temporary bytes of a number of matrices, which grow with the number.
    """
    entries, budget = offloaded_entries(group, dtype), group.max_workspace_bytes
    limit = max(1, total)
    # The largest number whose memory is within the budget, by bisection.
    if budget is not None:
        pool = POOL_BUFFERS * offloaded_bytes(group, dtype) * numel
        limit = max(1, bisect_right(range(1, limit + 1), budget, key=lambda count: workspace(count) + pool * count))
    # With offload, buckets of equal size: one is loaded while another is computed.
    if entries is not None:
        number = -(-total // min(limit, max(1, entries // max(1, numel))))
        limit = -(-total // max(1, number))
    return limit


def _member_chunks(members: Sequence[Piece], limit: int) -> Iterator[list[Piece]]:
    """Yield members in lists of at most `limit` matrices each, in order; a member may be split over several lists."""
    chunk: list[Piece] = []
    free = limit
    for member in members:
        # Take as many of the member's matrices as the list has room for, until none is left.
        left = member.matrices
        while left:
            taken, left = left[:free], left[free:]
            chunk.append(replace(member, matrices=taken))
            free -= len(taken)
            if free == 0:
                yield chunk
                chunk, free = [], limit
    if chunk:
        yield chunk
