"""Places for messages: as few bytes as the rule says, never two at once, options that make no sense are refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import quintic
from quintic.optim.comms.channels import Route
from quintic.optim.comms.copy_engines import Slots


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3)), max_size=30))
def test_places_never_overlap(events):
    slots, held, used, most = Slots(), {}, set(), 0
    for size, drop in events:
        start, was_used = slots.take(size)
        blocks = set(range(start // 512, -(-(start + max(size, 1)) // 512)))
        assert was_used == bool(blocks & used)
        if was_used:
            slots.renew()
            used = set()
        assert start % 512 == 0
        for other, length in held.items():
            assert start >= other + max(length, 1) or other >= start + max(size, 1)
        held[start] = size
        most = max(most, start + size)
        assert slots.needed >= most
        for place in list(held)[:drop]:
            slots.give_back(place)
            used |= set(range(place // 512, -(-(place + max(held.pop(place), 1)) // 512)))


def test_the_first_gap_that_is_large_enough_is_taken():
    slots = Slots()
    assert [slots.take(size) for size in (512, 1024, 512)] == [(0, False), (512, False), (1536, False)]
    slots.give_back(512)
    assert slots.take(1025) == (2048, False)
    assert slots.take(1000) == (512, True)
    slots.clear()
    assert slots.take(1) == (0, False)
    assert slots.needed == 2048 + 1536


@given(st.integers(1, 5), st.data())
def test_a_route_is_what_all_ranks_agree_on(size, data):
    amounts = data.draw(
        st.lists(st.lists(st.integers(0, 9), min_size=size, max_size=size), min_size=size, max_size=size)
    )
    routes = [Route(size, rank, lambda i, j: amounts[i][j]) for rank in range(size)]
    for i, one in enumerate(routes):
        assert one.most == max(sum(route.receives) for route in routes)
        for j, other in enumerate(routes):
            assert one.sends[j] == other.receives[i]
            assert one.places[j] == sum(other.receives[:i])


def test_an_unknown_transport_is_refused():
    with pytest.raises(ValueError, match=r"transport='bus'.*'collectives' or 'copy_engines'"):
        quintic.Muon([nn.Parameter(torch.ones(2, 2))], transport="bus")


def test_one_process_needs_no_transport():
    param = nn.Parameter(torch.ones(2, 2))
    param.grad = torch.eye(2)
    quintic.Muon([param], transport="copy_engines").step()
    assert not torch.equal(param, torch.ones(2, 2))
