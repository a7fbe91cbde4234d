"""The exchange of a table's rows among ranks: the arithmetic of `comms="sharded_sparse"`, without ranks."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import quintic
from quintic.optim.layout.packing import mean_of_ranks
from quintic.optim.plan.row_sharding import (
    RowSharding,
    mean_of_rows,
    places_of,
    rows_to_send,
    sharded_rows,
    touched_rows,
)
from quintic.optim.state.shards import shards_of


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def parts_of_table(shape, num_ranks, dtype=torch.float32, turned=False):
    param = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    if turned:
        param = nn.Parameter(param.detach().T)
    groups = [{"algorithm": "adamw", "params": [("table", param)]}]
    [shards] = shards_of(quintic.Muon(groups)._plans.current_groups()[0], range(num_ranks))
    return param, shards


@st.composite
def exchanges(draw):
    """Return a sharding and the gradients of its ranks, some of whose rows are zeros, or minus zeros."""
    num_ranks = draw(st.integers(1, 5))
    rows_per_rank = draw(st.integers(1, 6))
    missing = draw(st.integers(0, rows_per_rank - 1))
    sharding = RowSharding(num_ranks * rows_per_rank - missing, draw(st.integers(1, 4)), rows_per_rank, num_ranks)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    size = sharding.num_rows * sharding.row_size
    values = st.sampled_from([0.0, 0.0, 0.0, -0.0, 1.0, -1.0, 3e-39, 0.1, 1e30, -1e30])
    gradients = [
        torch.tensor(draw(st.lists(values, min_size=size, max_size=size)), dtype=dtype).view(-1, sharding.row_size)
        for _ in range(num_ranks)
    ]
    return sharding, gradients


@given(exchanges(), st.data())
def test_owners_receive_touched_rows_and_find_them(found, data):
    sharding, gradients = found
    each, num_ranks = sharding.rows_per_rank, sharding.num_ranks
    marks = torch.zeros(num_ranks, sharding.padded_rows, dtype=torch.uint8)
    for of_rank, gradient in zip(marks, gradients, strict=True):
        of_rank[: sharding.num_rows] = touched_rows(gradient)
        # What is announced but not touched after all does no harm.
        superfluous = data.draw(st.lists(st.integers(0, sharding.num_rows - 1), max_size=2))
        of_rank[superfluous] = 1
    counts = marks.view(num_ranks, num_ranks, each).sum(2).tolist()
    messages = []
    for rank, gradient in enumerate(gradients):
        rows = rows_to_send(marks[rank], sum(counts[rank]))
        assert rows.tolist() == marks[rank].nonzero().squeeze(1).tolist()
        messages.append(gradient[rows].split(counts[rank]))
    for owner in range(num_ranks):
        received = torch.cat([message[owner] for message in messages])
        first, num_rows = owner * each, sharding.rows_of(owner)
        places = places_of(marks[:, first : first + num_rows])
        assert places.shape == (num_ranks, num_rows)
        for rank, of_rank in enumerate(places.tolist()):
            for row, place in enumerate(of_rank):
                mine = gradients[rank][first + row]
                if place >= 0:
                    assert torch.equal(bits(received[place]), bits(mine))
                else:
                    assert not bits(mine).any()
        dense = torch.stack([gradient[first : first + num_rows].reshape(-1) for gradient in gradients])
        mean = mean_of_rows(received, places, "torch")
        # To the bit: a sum of minus zeros is minus zero only if no rank has zero.
        assert torch.equal(bits(mean.view(-1)), bits(mean_of_ranks(dense, "torch")))


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(
    st.integers(1, 3000),
    st.sampled_from([1, 7, 16, 33, 257, 320, 768, 4096, 1_000_003]),
    st.integers(2, 8),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_tables_are_divided_by_whole_rows_or_not_at_all(num_rows, row_size, num_ranks, dtype):
    param, shards = parts_of_table((num_rows, row_size), num_ranks, dtype)
    sharding = sharded_rows(param, shards, num_ranks)
    if sharding is None:
        assume(num_rows >= 64 * (num_ranks + 1) * num_ranks and row_size * dtype.itemsize >= 64)
        assert param.numel() * dtype.itemsize < 2**22
        return
    assert [sharding.rows_of(rank) for rank in range(num_ranks)] == [shard.numel // row_size for shard in shards]
    assert [shard.owner for shard in shards] == list(range(num_ranks))
    assert [shard.start for shard in shards] == [rank * sharding.rows_per_rank * row_size for rank in range(num_ranks)]
    assert sum(shard.numel for shard in shards) == param.numel()
    assert sharding.padded_rows >= num_rows


@pytest.mark.parametrize(
    ("shape", "dtype", "num_ranks", "turned"),
    [
        ((2**20,), torch.float32, 2, False),  # one dimension
        ((2048, 1024), torch.float32, 2, True),  # rows are not together in memory
        ((1023, 1024), torch.float32, 2, False),  # less than 4 MiB
        ((2**19, 8), torch.float32, 2, False),  # rows shorter than 64 bytes
        ((3, 2**19), torch.float32, 4, False),  # fewer rows than ranks
        ((70, 20_001), torch.float32, 4, False),  # shards that begin within rows
        ((257, 4097), torch.float32, 4, False),  # the last rank would have none
    ],
)
def test_what_always_travels_whole(shape, dtype, num_ranks, turned):
    param, shards = parts_of_table(shape, num_ranks, dtype, turned)
    assert sharded_rows(param, shards, num_ranks) is None


@pytest.mark.parametrize(
    ("shape", "dtype", "num_ranks"),
    [
        ((1024, 1024), torch.float32, 2),
        ((2**16, 16), torch.float32, 3),
        ((2**16, 32), torch.bfloat16, 3),
        ((4, 2**18), torch.float32, 4),
        ((17, 4, 2**14), torch.float32, 4),
    ],
)
def test_what_may_travel_by_rows(shape, dtype, num_ranks):
    param, shards = parts_of_table(shape, num_ranks, dtype)
    sharding = sharded_rows(param, shards, num_ranks)
    assert (sharding.num_rows, sharding.row_size) == (shape[0], param[0].numel())


@pytest.mark.parametrize(
    ("counts", "is_sparse"),
    [
        ([[0, 0], [0, 0]], True),
        ([[25, 25], [25, 25]], True),
        ([[26, 25], [25, 25]], False),  # the first sends more than half
        ([[50, 0], [0, 50]], True),
        ([[26, 0], [25, 0]], False),  # the first receives more than half
        ([[25, 0], [25, 0]], True),
        ([[50, 50], [0, 0]], False),
    ],
)
def test_rows_travel_up_to_half_of_all(counts, is_sparse):
    # 99 rows and one that is missing.
    assert RowSharding(99, 8, 50, 2).is_sparse(counts) == is_sparse


def test_minus_zero_and_what_is_not_a_number_are_touched():
    gradient = torch.zeros(5, 3)
    gradient[1, 2], gradient[2, 0], gradient[4, 1] = -0.0, float("nan"), 1e-45
    for dtype in (torch.float32, torch.float64):
        assert touched_rows(gradient.to(dtype)).tolist() == [False, True, True, False, True]
    assert touched_rows(gradient.to(torch.bfloat16)).tolist() == [False, True, True, False, False]
    assert touched_rows(torch.zeros(2, 3, 4)).tolist() == [False, False]


def test_rows_may_be_withdrawn_and_announced_before_any_plan():
    param = nn.Parameter(torch.zeros(6, 4))
    optimizer = quintic.Muon([{"params": [param], "algorithm": "adamw", "comms": "sharded_sparse"}])
    optimizer.withdraw_rows()
    optimizer.announce_rows(param, torch.tensor([1]))
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.last_step().adamw_parameters == 1
