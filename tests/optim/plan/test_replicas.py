"""Division of the work on copies: sets of ranks, traffic between hosts, and the estimate behind "auto"."""

import itertools
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import quintic
from quintic.errors import ConfigError
from quintic.optim.layout.layouts import mesh_layout, replicated_layout
from quintic.optim.plan import replicas
from quintic.optim.plan.exchange import Exchange, ExchangeBytes, traffic_of
from quintic.optim.plan.replicas import LINKS, ReplicaChoice, has_replicas, speed_of, work_sets
from quintic.simulate.simulate import simulate_plan


def hsdp(copies, shards, shape=(16, 8), order=None):
    """The layout under HSDP; `order` names the ranks in another order than 0, 1, ..."""
    ranks = torch.arange(copies * shards) if order is None else torch.tensor(order)
    return mesh_layout(shape, ranks.view(copies, shards), (Replicate(), Shard(0)))


# -- sets of ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "hosts", "divide", "host", "repeat"),
    [
        (hsdp(2, 2), [5, 5, 5, 5], ["0123"], ["0123"], ["01", "23"]),
        (hsdp(2, 2), [5, 5, 4, 4], ["0123"], ["01", "23"], ["01", "23"]),
        # Each copy is on both hosts.
        (hsdp(2, 2), [5, 4, 5, 4], ["0123"], ["0123"], ["01", "23"]),
        (hsdp(4, 2), [0, 0, 0, 0, 1, 1, 1, 1], ["01234567"], ["0123", "4567"], ["01", "23", "45", "67"]),
        (hsdp(3, 2), [0, 0, 0, 0, 1, 1], ["012345"], ["0123", "45"], ["01", "23", "45"]),
        # The first and the last copy meet through the one between.
        (hsdp(3, 2), [0, 1, 1, 2, 2, 3], ["012345"], ["012345"], ["01", "23", "45"]),
        (hsdp(3, 2), [0, 1, 3, 4, 1, 2], ["012345"], ["0145", "23"], ["01", "23", "45"]),
        (hsdp(2, 2, order=[3, 1, 0, 2]), [0, 1, 0, 1], ["0123"], ["02", "13"], ["02", "13"]),
        (hsdp(1, 3), [0, 0, 1], ["012"], ["012"], ["012"]),
    ],
)
def test_sets_of_ranks(layout, hosts, divide, host, repeat):
    for way, expected in (("divide", divide), ("host", host), ("repeat", repeat)):
        assert work_sets(layout, way, hosts) == [tuple(map(int, text)) for text in expected], way


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_rank_is_in_one_set_of_whole_copies(copies, shards, data):
    order = data.draw(st.permutations(range(copies * shards)))
    layout = hsdp(copies, shards, order=order)
    hosts = data.draw(st.lists(st.integers(0, 3), min_size=len(order), max_size=len(order)))
    of_copies = [set(order[copy * shards : (copy + 1) * shards]) for copy in range(copies)]
    for way in ("divide", "host", "repeat"):
        sets = work_sets(layout, way, hosts)
        assert sorted(itertools.chain(*sets)) == sorted(order)
        for ranks in sets:
            assert all(copy <= set(ranks) or not copy & set(ranks) for copy in of_copies)
            assert [box for rank in ranks for box in [layout.among(ranks).box_of(rank)]] == [
                layout.box_of(rank) for rank in ranks
            ]
            assert layout.among(ranks).num_copies == len(ranks) // shards
    by_host = work_sets(layout, "host", hosts)
    for one, other in itertools.combinations(by_host, 2):
        assert not {hosts[rank] for rank in one} & {hosts[rank] for rank in other}


def test_a_layout_among_a_copys_ranks_is_that_of_their_mesh():
    layout = hsdp(2, 3, shape=(5, 4))
    assert layout.among((3, 4, 5)) == mesh_layout((5, 4), [3, 4, 5], (Shard(0),))
    assert layout.among(range(6)) is layout


def test_copies_that_are_cut():
    assert has_replicas(hsdp(2, 2))
    assert not has_replicas(hsdp(1, 4))
    assert not has_replicas(replicated_layout((4, 4), range(4)))
    assert not has_replicas(mesh_layout((4, 4), [[0, 1], [2, 3]], (Replicate(), Replicate())))


# -- what crosses -----------------------------------------------------------------------------------------------------


def drawn_exchange(copies, shards, counts):
    layout = hsdp(copies, shards, shape=(5, 3))
    pieces = tuple(None if start == stop else ((start, stop), (0, 3)) for (start, stop), _ in layout.boxes)
    return Exchange(layout.ranks, 0, (5, 3), pieces, layout.copies, tuple(counts))


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 4), st.data())
def test_ranks_send_what_others_receive(copies, shards, data):
    num_ranks = copies * shards
    counts = data.draw(st.lists(st.integers(0, 3), min_size=num_ranks, max_size=num_ranks).filter(any))
    ranks = [replace(drawn_exchange(copies, shards, counts), position=position) for position in range(num_ranks)]
    for i, one in enumerate(ranks):
        assert sum(one.gathering.receives) == one.num_owned * 15  # whole units, from one copy
        assert sum(one.scattering.receives) == one.num_units * math.prod(one.piece_shape)
        for j, other in enumerate(ranks):
            assert one.gathering.sends[j] == other.gathering.receives[i]
            assert one.scattering.sends[j] == other.scattering.receives[i]


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 4), st.data())
def test_traffic_between_places_is_that_of_all_pairs_of_ranks(copies, shards, data):
    num_ranks = copies * shards
    some = st.lists(st.integers(0, 3), min_size=num_ranks, max_size=num_ranks)
    counts, places = data.draw(some.filter(any)), data.draw(some)
    exchange = drawn_exchange(copies, shards, counts)
    sent, received = torch.zeros(num_ranks, dtype=torch.int64), torch.zeros(num_ranks, dtype=torch.int64)
    for position in range(num_ranks):
        one = replace(exchange, position=position)
        if exchange.is_replicated:
            most = counts[position] if exchange.has_few_owners else max(counts)
            to_each = [15 * 2 * most] * num_ranks
        else:
            gather, scatter = one.gathering.sends, one.scattering.sends
            to_each = [4 * a + 2 * b for a, b in zip(gather, scatter, strict=True)]
        for other in range(num_ranks):
            if places[other] != places[position]:
                sent[position] += to_each[other]
                received[other] += to_each[other]
    found = traffic_of(ExchangeBytes(exchange, direction=4, update=2, factors=0), torch.tensor(places))
    assert [moved.tolist() for moved in found] == [sent.tolist(), received.tolist()]


# -- the estimate -----------------------------------------------------------------------------------------------------


def model_of(width, layers):
    with torch.device("meta"):
        return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers))).bfloat16()


def simulated(width, layers, mesh, node_size, names=("replicate", "fsdp"), **options):
    params = model_of(width, layers).parameters()
    optimizer = quintic.Muon(params, orthogonalizer="polar_express", **options)
    return simulate_plan(optimizer, mesh, names, node_size=node_size)


def test_the_estimate_is_the_longer_of_computing_and_sending():
    # 32 matrices of 512 x 512 on 4 nodes of 8: each rank has a 1/8 of every matrix, and orthogonalises one, or four.
    (choice,) = simulated(512, 32, (4, 8), 8).choices
    flops = int(simulated(512, 32, (32,), None, ("fsdp",)).flops[0])
    entries, speed = 512 * 512, speed_of("cuda", torch.bfloat16)
    directions, updates = 2 * entries * 7 / 8, 2 * entries
    within_host, between_hosts = LINKS
    # Divided: a matrix' pieces come from the own copy, its updates go to 24 pieces of other nodes, 7 of this one.
    divided = (flops / speed, (directions + updates * 7 / 8) / within_host, updates * 3 / between_hosts)
    repeated = (4 * flops / speed, 4 * (directions + updates * 7 / 8) / within_host)
    assert choice.seconds == pytest.approx({"divide": max(divided), "repeat": max(repeated)})
    assert choice == ReplicaChoice(tuple(range(32)), "repeat", choice.seconds)


@pytest.mark.parametrize(
    ("width", "mesh", "node_size", "way"),
    [
        # Operations per entry grow with the width, bytes per entry do not.
        (512, (4, 8), 8, "repeat"),
        (16384, (4, 8), 8, "divide"),
        # On one node links are fast.
        (2048, (4, 8), 32, "divide"),
        # Two copies on each node divide what nodes repeat.
        (512, (8, 4), 8, "host"),
        # A copy is on two nodes: then messages cross between nodes in any case.
        (16384, (2, 8), 4, "divide"),
    ],
)
def test_auto_weighs_operations_against_bytes(width, mesh, node_size, way):
    (choice,) = simulated(width, 64, mesh, node_size).choices
    assert choice.strategy == way
    assert choice.seconds[way] == min(choice.seconds.values())


@pytest.mark.parametrize(
    ("links", "way"), [((1e15, 1e6), "repeat"), ((1e15, 1e15), "divide"), ((1e6, 1e6), "divide")], ids=str
)
def test_slower_links_between_hosts_repeat(links, way):
    with mock.patch.object(replicas, "LINKS", links):
        # With links of one speed as much is received either way, and repeating nothing is preferred.
        assert simulated(64, 8, (2, 2), 2).choices[0].strategy == way


def test_nothing_is_chosen_without_copies_or_nodes_or_by_a_user():
    assert simulated(64, 8, (4,), 2, ("fsdp",)).choices == ()
    assert simulated(64, 8, (4,), 2, ("replicate",)).choices == ()
    assert simulated(64, 8, (4,), 2, ("dp",)).choices == ()
    assert simulated(64, 8, (2, 2), None).choices == ()
    assert simulated(64, 8, (2, 2), 2, replicas="repeat").choices == ()
    assert simulated(64, 8, (2, 2), 2, replicas="divide").choices == ()


def test_a_simulation_counts_the_bytes_between_nodes():
    divided, repeated = (simulated(64, 8, (2, 4), 4, replicas=replicas) for replicas in ("divide", "repeat"))
    # A rank has a quarter of each of the eight matrices, and gets of half of them the updates, of two bytes each.
    assert divided.bytes_between.tolist() == [64 * 64 * 2] * 8
    assert repeated.bytes_between.tolist() == [0] * 8
    assert repeated.flops.tolist() == [2 * flops for flops in divided.flops.tolist()]
    assert (
        [load.num_matrices for load in repeated.bucket_loads]
        == [load.num_matrices for load in divided.bucket_loads]
        == [8]
    )
    assert simulated(64, 8, (2, 4), None, replicas="divide").bytes_between.tolist() == [0] * 8


def test_a_copy_on_two_nodes_is_not_like_one_on_a_single_node():
    # Each rank of the second copy sends half of four matrices, and then half of the other four's updates.
    assert simulated(64, 8, (3, 2), 3, replicas="repeat").bytes_between.tolist() == [
        *(0, 0, 4 * 64 * 64 * 2, 4 * 64 * 64 * 2, 0, 0)
    ]


def test_a_node_without_ranks_is_an_error():
    with pytest.raises(ConfigError, match="node_size=0: give at least one rank"):
        simulated(64, 8, (2, 2), 0)


def test_a_choice_is_printed():
    text = str(ReplicaChoice(tuple(range(32)), "repeat", {"divide": 0.0127, "repeat": 0.0114}))
    assert text == (
        "copies on 32 ranks: those of each copy divide the work, which others repeat "
        "(estimated: divide 12.7 ms, repeat 11.4 ms)"
    )


@pytest.mark.parametrize("value", ["node", None, True])
def test_another_value_is_an_error(value):
    with pytest.raises(ValueError, match=r"replicas=.* must be 'auto' or 'divide' or 'repeat'"):
        quintic.Muon([torch.nn.Parameter(torch.ones(2, 2))], replicas=value)
