"""Ranks that decide together: threads stand for ranks that tell each other with whom they share parameters."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from quintic.optim.comms import connected
from quintic.optim.comms.connected import Connected, RankInfo, gather_rank_info, num_rounds


class Meeting:
    """An all-gather among threads."""

    def __init__(self, ranks):
        self._barrier = threading.Barrier(len(ranks))
        self._ranks, self._values = ranks, {}

    def gather(self, rank, value):
        self._values[rank] = value
        self._barrier.wait(timeout=20)
        found = [self._values[other] for other in self._ranks]
        self._barrier.wait(timeout=20)
        return found


def local_rank_info(sets, rank, **other):
    found = {
        "guards_nonfinite": False,
        "raises": False,
        "devices": ("cpu",),
        "has_own": False,
        "names": "",
        "problem": None,
    }
    return RankInfo(tuple(sorted(ranks for ranks in sets if rank in ranks)), **{**found, **other})


def component(sets, rank):
    """The ranks that a path of sets leads to."""
    found, size = {rank}, 0
    while len(found) > size:
        size = len(found)
        found |= {other for ranks in sets if found & set(ranks) for other in ranks}
    return found


def run_exchange(sets, num_ranks):
    """The answers of each rank, and the number of times that it gathers."""
    local = threading.local()
    meetings = {ranks: Meeting(ranks) for ranks in sets}
    counts = dict.fromkeys(range(num_ranks), 0)

    def gather(value, meeting):
        counts[local.rank] += 1
        return meeting.gather(local.rank, value)

    def this_rank():
        return local.rank

    def of_rank(rank):
        local.rank = rank
        return gather_rank_info(local_rank_info(sets, rank, names=str(rank)), meetings)

    with (
        mock.patch.object(connected, "all_gather_values", gather),
        mock.patch.object(connected, "this_rank", this_rank),
        ThreadPoolExecutor(num_ranks) as pool,
    ):
        return list(pool.map(of_rank, range(num_ranks))), counts


def drawn(seed):
    """Random sets of ranks, some of them inside others, in no connection, or in long chains."""
    choose = random.Random(seed)
    num_ranks = choose.randint(2, 8)
    ranks = list(range(num_ranks))
    choose.shuffle(ranks)
    sets = {
        tuple(sorted(choose.sample(ranks, choose.randint(2, min(3, num_ranks))))) for _ in range(choose.randint(1, 5))
    }
    if choose.random() < 0.3:
        sets |= {tuple(sorted(pair)) for pair in pairwise(ranks)}
    if choose.random() < 0.2:
        sets.add(tuple(range(num_ranks)))
    return sorted(sets), num_ranks


@pytest.mark.parametrize("seed", range(40))
def test_every_rank_learns_of_all_that_it_is_connected_with(seed):
    sets, num_ranks = drawn(seed)
    learnt, counts = run_exchange(sets, num_ranks)
    for rank, facts in enumerate(learnt):
        expected = component(sets, rank)
        assert set(facts) == expected
        assert {other: found.names for other, found in facts.items()} == {other: str(other) for other in expected}
        # All of them come equally often, and as often as the last of them needs to.
        own = len(local_rank_info(sets, rank).sets)
        assert counts[rank] == own * num_rounds({other: found.sets for other, found in facts.items()} if own else {})


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ([(0, 1, 2, 3)], 1),
        ([(0, 1), (0, 1, 2, 3), (2, 3)], 1),
        # Upwards at once, and a rank at a time back.
        ([(0, 1), (1, 2), (2, 3)], 3),
    ],
)
def test_rounds(sets, expected):
    ranks = {rank for found in sets for rank in found}
    assert num_rounds({rank: local_rank_info(sets, rank).sets for rank in ranks}) == expected


def test_a_rank_alone_asks_nobody():
    found = Connected({3: local_rank_info([], 3, guards_nonfinite=True)}, [], {})
    assert found.is_single_rank
    flags = torch.zeros(2, dtype=torch.int32)
    found.connect()
    found.all_agree_(flags)
    assert found.total(["a", "b"], torch.tensor([1.0, 2.0])).item() == 3


def test_the_device_is_one_that_all_ranks_have():
    params = [torch.zeros(1), torch.zeros(1, device="meta")]
    groups = [SimpleNamespace(params=params)]

    def device_of(*devices):
        facts = {rank: local_rank_info([], rank, devices=found) for rank, found in enumerate(devices)}
        return Connected(facts, groups, {}).device.type

    assert device_of(("cpu", "meta"), ("cpu", "meta")) == "meta"
    assert device_of(("cpu", "meta"), ("cpu",)) == "cpu"
    assert device_of(("cpu", "meta"), ("cuda",)) == "cpu"
