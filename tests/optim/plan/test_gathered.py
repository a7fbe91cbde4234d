"""Buckets that travel: of how many owners they have units, and how many of each, to keep within the workspace."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import quintic
from quintic.optim.layout.layouts import mesh_layout
from quintic.optim.plan import exchange
from quintic.optim.plan.gathered import shared_buckets
from quintic.optim.plan.planning import build_plan

SHAPE = (48, 32)


def buckets_of(count, num_ranks, budget, **options):
    """For each bucket of `count` matrices, cut into rows: of each rank what it plans."""
    params = [torch.nn.Parameter(torch.empty(SHAPE, dtype=torch.bfloat16, device="meta")) for _ in range(count)]
    optimizer = quintic.Muon(params, max_workspace_bytes=budget, compute_dtype=torch.float32, **options)
    layouts = [[mesh_layout(SHAPE, torch.arange(num_ranks), [Shard(0)])] * count]
    plans = [build_plan(optimizer._plans.current_groups(), layouts, rank) for rank in range(num_ranks)]
    return list(zip(*plans, strict=True))


def needed(count, num_ranks):
    """Most bytes of any rank for a bucket of `count` matrices, while one like it starts and one like it ends."""
    [of_ranks] = buckets_of(count, num_ranks, None)
    return max(
        bucket.phase_bytes.gathering + bucket.phase_bytes.most + bucket.phase_bytes.scattering for bucket in of_ranks
    )


def counts_of(count, num_ranks, budget, **options):
    """For each bucket how many matrices each rank owns."""
    return [of_ranks[0].exchange.counts for of_ranks in buckets_of(count, num_ranks, budget, **options)]


@pytest.mark.parametrize("num_ranks", [2, 4, 6, 16])
def test_as_many_of_each_owner_as_fit(num_ranks):
    for per_owner in (1, 2, 3):
        exactly = needed(per_owner * num_ranks, num_ranks)
        assert counts_of(6 * num_ranks, num_ranks, exactly) == [(per_owner,) * num_ranks] * (6 // per_owner)
        if per_owner > 1:
            found = counts_of(6 * num_ranks, num_ranks, exactly - 1)
            assert found[0] == (per_owner - 1,) * num_ranks


@pytest.mark.parametrize(("num_ranks", "least"), [(4, 4), (6, 3), (7, 4), (16, 8)])
def test_fewer_owners_at_a_time_where_one_unit_of_each_exceeds_the_workspace(num_ranks, least):
    """A single unit's need is unavoidable; a quarter more is worth it for fewer messages."""
    halved = [num_ranks]
    while halved[-1] > 1:
        halved.append(-(-halved[-1] // 2))
    of_owners = {owners: needed(owners, num_ranks) for owners in halved}
    limit = 1.25 * of_owners[1]
    # So near to the limit that nearly any other would give other numbers of owners.
    assert of_owners[least] <= limit < of_owners.get(2 * least, 1.25 * of_owners[least])
    budgets = {1, int(limit), of_owners[1], of_owners[num_ranks] - 1}
    for budget in budgets - {of_owners[num_ranks]}:
        expected = next(owners for owners in halved if of_owners[owners] <= max(budget, limit))
        assert expected >= least
        found = counts_of(num_ranks, num_ranks, budget)
        full, rest = divmod(num_ranks, expected)
        assert [sum(counts) for counts in found] == [expected] * full + [rest] * (rest > 0)
        # Every matrix once, and one of each owner.
        assert [sum(column) for column in zip(*found, strict=True)] == [1] * num_ranks


@pytest.mark.parametrize(("master", "bytes_per_entry"), [(None, 4), ("fp32", 8), ("mantissa", 6), ("8bit", 5)])
def test_the_workspace_has_room_for_three_buffers_of_offloaded_state(master, bytes_per_entry):
    num_ranks = 4
    held = SHAPE[0] // num_ranks * SHAPE[1]
    for per_owner in (1, 2, 3):
        buffers = 3 * bytes_per_entry * per_owner * num_ranks * held
        exactly = needed(per_owner * num_ranks, num_ranks) + buffers
        found = counts_of(6 * num_ranks, num_ranks, exactly, offload=True, master=master)
        assert found == [(per_owner,) * num_ranks] * (6 // per_owner)
        if per_owner > 1:
            found = counts_of(6 * num_ranks, num_ranks, exactly - 1, offload=True, master=master)
            assert found[0] == (per_owner - 1,) * num_ranks


def test_a_plan_without_messages_is_balanced():
    assert shared_buckets([], []) == ([], 1.0)


def plans_of(shape, mesh, placements, num_ranks, **group):
    """For each rank the plan of one parameter."""
    param = torch.nn.Parameter(torch.empty(shape, device="meta"))
    groups = quintic.Muon([{"params": [param], **group}])._plans.current_groups()
    return [build_plan(groups, [[mesh_layout(shape, mesh, placements)]], rank) for rank in range(num_ranks)]


def test_matrices_that_lie_whole_on_a_rank_are_planned_by_this_rank_alone():
    plans = plans_of((4, *SHAPE), torch.arange(2), [Shard(0)], 2, view=quintic.Experts())
    assert [[bucket.num_matrices for bucket in plan] for plan in plans] == [[2], [2]]


def test_pieces_belong_to_their_ranks_in_a_mesh_of_another_order():
    for rank, plan in enumerate(plans_of(SHAPE, [1, 0], [Shard(0)], 2)):
        (bucket,) = plan
        assert bucket.ranks == (0, 1)
        assert bucket.exchange.position == rank
        assert bucket.exchange.pieces == (((24, 48), (0, 32)), ((0, 24), (0, 32)))


def test_every_rank_expects_what_the_others_send():
    """Also where a parameter has several copies, and owners in each of them."""
    (plan, *_) = plans_of((5, *SHAPE), [[0, 2], [3, 1]], [Replicate(), Shard(1)], 4, view=quintic.Experts())
    for bucket in plan:
        ranks = [replace(bucket.exchange, position=position) for position in range(4)]
        assert len(set(bucket.exchange.counts)) > 1
        for messages in ([rank.gathering for rank in ranks], [rank.scattering for rank in ranks]):
            assert any(map(sum, (message.sends for message in messages)))
            sent = [list(column) for column in zip(*(message.sends for message in messages), strict=True)]
            assert sent == [message.receives for message in messages]


def test_padding_of_ranks_with_fewer_units_is_cut_off(monkeypatch):
    whole = ((0, 2), (0, 2))
    one = exchange.Exchange((0, 1), 1, (2, 2), (whole, whole), (0, 1), (2, 1))
    units = torch.arange(12.0).view(3, 2, 2)

    def gathered(send, num_ranks, group):
        assert send.shape == (2, 2, 2)
        return mock.Mock(wait=lambda: torch.cat([units[:2], send]))

    monkeypatch.setattr(exchange, "start_all_gather", gathered)
    assert torch.equal(one.start_all_gather(units[2:], SimpleNamespace())(), units)
