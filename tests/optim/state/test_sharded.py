"""Sharded state: shards tile each parameter, and what must not have a say in whose they are."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quintic
from quintic.optim.layout.packing import in_memory_order
from quintic.optim.plan.sharded import sharded_buckets
from quintic.optim.state import parameters, sync
from quintic.optim.state.owners import assign_owners, loads_of, shape_cost
from quintic.optim.state.placement import init_state
from quintic.optim.state.shards import ShardedState, StateShard, local_shard_pairs, shards_of

VIEWS = [
    (quintic.Matrix(), (9, 14)),
    (quintic.Matrix(transposed=True), (130, 300)),
    (quintic.Experts(), (7, 16, 16)),
    (quintic.Rows(3), (12, 40)),
    (quintic.Split((4, 2)), (6, 7)),
    (quintic.Heads(2, dim=1), (5, 8)),
]


def group_of(params, **options):
    """A parameter group as `Muon` completes it."""
    [group] = quintic.Muon([{"params": params, **options}])._plans.current_groups()
    return group


def empty(shape, dtype=torch.float32, device="meta"):
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


options = st.fixed_dictionaries(
    {
        "orthogonalizer": st.sampled_from(["auto", "polar_express", "gram", "newton_schulz", "svd", torch.sign]),
        "orthogonalizer_steps": st.integers(1, 9),
        "compute_dtype": st.sampled_from([None, torch.float32, torch.float64]),
        "normalize": st.sampled_from([None, "neuron"]),
        "adjust_lr": st.sampled_from([None, "spectral", "unit_rms"]),
        "lr": st.sampled_from([0.0, 0.1]),
        "momentum": st.sampled_from([0.0, 0.9]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "max_workspace_bytes": st.sampled_from([None, 1, 2**20]),
        "master": st.sampled_from([None, "fp32", "mantissa", "8bit"]),
        "offload": st.booleans(),
        "step_every": st.integers(1, 3),
        "on_nonfinite": st.sampled_from(["propagate", "skip"]),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=8),
    st.tuples(options, options),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_owners_follow_from_shapes_alone(num_ranks, shapes, both, dtype):
    one, other = both
    ranks = range(num_ranks)
    expected = shards_of(group_of([empty(shape) for shape in shapes], **one), ranks)
    assert shards_of(group_of([empty(shape, dtype, "cpu") for shape in shapes], **other), ranks) == expected
    # Numbers of ranks within the world do not count, only how many there are.
    assert shards_of(group_of([empty(shape) for shape in shapes], **other), [7 - 2 * r for r in ranks]) == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(("view", "shape"), VIEWS, ids=str)
def test_parts_tile_the_state(view, shape, num_ranks):
    group = group_of([empty(shape), empty(shape)], view=view)
    state = torch.arange(float(torch.Size(shape).numel())).view(shape)
    for index, shards in enumerate(shards_of(group, range(num_ranks))):
        found = torch.full((state.numel(),), -1.0)
        for rank in range(num_ranks):
            own = [shard for shard in shards if shard.owner == rank]
            flat = torch.full((sum(shard.numel for shard in own),), -1.0)
            for run, of_state in local_shard_pairs(flat, state, own, group.params[index]):
                run.copy_(of_state)
            assert (flat >= 0).all()  # without gaps
            for shard in own:
                assert shard.index == index
                found[shard.start : shard.stop] = flat[shard.offset : shard.offset + shard.numel]
        assert torch.equal(found.view(shape), state)


def test_one_row_has_its_range_whatever_its_stride():
    plain, turned = torch.empty(1, 5000), torch.empty(5000, 1).T
    assert turned.is_contiguous()
    assert turned.stride() != plain.stride()
    groups = [group_of([torch.nn.Parameter(one)], algorithm="adamw") for one in (plain, turned)]
    one, other = (shards_of(group, range(3)) for group in groups)
    assert one == other


def owners_of(group, num_ranks):
    return [[shard.owner for shard in shards] for shards in shards_of(group, range(num_ranks))]


def test_banks_that_divide_evenly_are_divided_in_the_order_of_their_memory():
    bank, other = empty((12, 4, 4)), empty((4, 9, 5))
    group = group_of([bank, other], view=quintic.Experts())
    assert owners_of(group, 4) == [[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [0, 1, 2, 3]]
    # The rest goes to the ranks with the least: of five two ranks get a second one.
    assert owners_of(group, 3)[0] == [0] * 4 + [1] * 4 + [2] * 4
    assert sorted(owners_of(group, 3)[1]) == [0, 0, 1, 2]


@pytest.mark.parametrize(("units", "num_ranks"), [(5, 3), (20, 8), (22, 8), (60, 8), (7, 2), (8, 5)])
def test_each_rank_has_a_run_of_a_bank_that_does_not_divide_evenly(units, num_ranks):
    owners = owners_of(group_of([empty((units, 4, 4))], view=quintic.Experts()), num_ranks)[0]
    assert owners == sorted(owners)
    assert {owners.count(rank) for rank in range(num_ranks)} == {units // num_ranks, units // num_ranks + 1}


def test_what_is_left_of_banks_is_balanced():
    """Of two banks of seven on four ranks each leaves three; other matrices fill up the ranks with the least."""
    group = group_of([empty((7, 4, 4)), empty((7, 4, 4)), empty((2, 4, 4))], view=quintic.Experts())
    owners = owners_of(group, 4)
    assert all(of_bank == sorted(of_bank) for of_bank in owners[:2])
    assert [sum(of_bank.count(rank) for of_bank in owners) for rank in range(4)] == [4, 4, 4, 4]


def test_a_bank_is_in_no_runs_where_the_busiest_would_have_more():
    """A matrix that is eight times the work fills a rank: ten small ones go to the other two."""
    group = group_of([empty((1, 32, 32)), empty((10, 16, 16))], view=quintic.Experts())
    large, small = (shape_cost(side, side) for side in (32, 16))
    assert large > 5 * small
    assert owners_of(group, 3)[0] == [0]
    assert 0 not in owners_of(group, 3)[1]


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([8, 16, 24])), min_size=1, max_size=5), st.integers(1, 5))
def test_runs_leave_the_busiest_rank_no_more_to_do(banks, num_ranks):
    group = group_of([empty((units, side, side)) for units, side in banks], view=quintic.Experts())
    even = [units % num_ranks == 0 for units, _ in banks]
    costs = [shape_cost(side, side) for units, side in banks for _ in range(units)]
    # As if only banks that divide evenly were in runs: the same for each rank, and the others by size.
    rest = [
        shape_cost(side, side)
        for (units, side), is_even in zip(banks, even, strict=True)
        for _ in range(units * (not is_even))
    ]
    base = sum(
        units // num_ranks * shape_cost(side, side)
        for (units, side), is_even in zip(banks, even, strict=True)
        if is_even
    )
    before = base + max(loads_of(rest, assign_owners(rest, [()] * len(rest), num_ranks), num_ranks))
    owners = [owner for of_bank in owners_of(group, num_ranks) for owner in of_bank]
    assert max(loads_of(costs, owners, num_ranks)) <= before


def test_the_largest_matrices_come_first():
    group = group_of([empty(shape) for shape in [(8, 8), (8, 8), (16, 16), (4, 4)]])
    assert owners_of(group, 2) == [[1], [1], [0], [1]]


def test_vectors_have_an_owner_each_and_tables_are_divided():
    shapes = [(100,), (60,), (30,), (3000, 4), (20,)]
    group = group_of([empty(shape) for shape in shapes], algorithm="adamw")
    assert owners_of(group, 3) == [[0], [1], [2], [0, 1, 2], [2]]
    table = shards_of(group, range(3))[3]
    # Whole rows, so many that each begins where kernels like it.
    assert [(shard.start, shard.stop) for shard in table] == [(0, 4032), (4032, 8064), (8064, 12000)]


@pytest.mark.parametrize("budget", [None, 20_000])
def test_the_shards_of_a_bucket_are_in_the_order_of_their_owners(budget):
    group = group_of([empty((12, 40)) for _ in range(7)], max_workspace_bytes=budget)
    buckets = list(sharded_buckets(0, group, (1, 4, 6), 4))
    assert sum(len(bucket.shards) for bucket in buckets) == 7
    for bucket in buckets:
        assert [shard.owner for shard in bucket.shards] == sorted(shard.owner for shard in bucket.shards)
        assert bucket.shards[bucket.local_slice] == bucket.members


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_masters_of_shards_are_the_weights_in_their_ranges(order):
    weights = torch.randn(3, 4, 2, 2).bfloat16().to(memory_format=order)
    group = group_of([torch.nn.Parameter(weights)], algorithm="adamw", master="fp32")
    own = [StateShard("w", 0, start=a, stop=b, owner=0, offset=at) for a, b, at in ((5, 20, 0), (30, 37, 15))]
    master = init_state(group.params[0], group, own)["master"]
    entries = in_memory_order(weights)
    assert torch.equal(master, torch.cat([entries[5:20], entries[30:37]]).float())


@pytest.mark.parametrize("way", ["used", "filled", "new"])
def test_used_state_does_not_change_owners(way, monkeypatch):
    """Also on a rank whose own shards are zero: another rank's may not be."""
    group = group_of([torch.nn.Parameter(torch.ones(10))], algorithm="adamw")
    (param,), state, states = group.params, sync.StateSync(), {}

    def divide(first, last):
        """Let this rank, the first, own these entries and another one the rest."""
        shards = [
            StateShard("w", 0, start=first, stop=last, owner=0),
            StateShard("w", 0, start=last, stop=10, owner=1),
        ]
        monkeypatch.setattr(sync, "sharded_parameters", lambda groups: {param: ShardedState(shards, (0, 1))})

    divide(0, 6)
    state.bring_up_to_date([group], states)
    if way == "used":
        state.use()
    elif way == "filled":
        states[param]["exp_avg"].fill_(1)
    divide(0, 4)
    if way == "new":
        state.bring_up_to_date([group], states)
        assert states[param]["exp_avg"].shape == (4,)
        return
    with pytest.raises(ValueError, match="its sharded state no longer matches its group"):
        state.bring_up_to_date([group], states)
    assert states[param]["exp_avg"].shape == (6,)


def test_shards_are_broadcast_in_the_order_of_their_owners(monkeypatch):
    whole = torch.arange(4.0)
    shards = [StateShard("w", 0, start=a, stop=b, owner=owner) for a, b, owner in ((0, 3, 1), (3, 4, 0))]
    sent = {}

    def start_broadcasts(rows, sizes, group):
        sent["values"], sent["sizes"] = rows.view(torch.float32).tolist(), sizes
        return SimpleNamespace(wait=lambda: rows)

    monkeypatch.setattr(parameters, "start_broadcasts", start_broadcasts)
    monkeypatch.setattr(parameters, "group_ranks", lambda group: (0, 1))
    parameters.broadcast_shards([(whole, ShardedState(shards, (0, 1)))], None)
    assert sent == {"values": [3.0, 0.0, 1.0, 2.0], "sizes": [4, 12]}
