"""Tables of addresses in steps that are captured as graphs, with what stands for a capture."""

import gc
import weakref

import pytest
import torch

from quintic.optim.layout import tables
from quintic.optim.layout.tables import MOST_GRAPHS, AddressTable

CPU = torch.device("cpu")


@pytest.fixture
def capture(monkeypatch):
    """Switch capturing on and off; pinned memory is ordinary memory."""
    switch = {"on": False}
    monkeypatch.setattr(tables, "is_capturing", lambda device: switch["on"])
    monkeypatch.setattr(tables, "_pinned", lambda shape, device: list(torch.empty(shape, dtype=torch.int64)))
    return switch


def get(table, *addresses):
    return table.get(addresses, lambda: torch.tensor(addresses), CPU)


def test_a_table_is_made_when_it_changes(capture):
    table = AddressTable()
    first = get(table, 16, 32)
    assert get(table, 16, 32) is first
    assert table.aligned
    assert get(table, 16, 40).tolist() == [16, 40]
    assert not table.aligned


def test_tables_that_graphs_read_live_on_when_others_take_their_place(capture):
    table, kept, dropped = AddressTable(), [], []
    for number in range(2 * MOST_GRAPHS):
        before = weakref.ref(get(table, number, 1))
        capture["on"] = True
        kept.append(weakref.ref(get(table, number, number % 2)))
        capture["on"] = False
        if number % 2:  # the same addresses
            assert kept[-1]() is before()
        else:
            dropped.append(before)
    assert get(table, 0, 0).tolist() == [0, 0]
    gc.collect()
    assert [one().tolist() for one in kept] == [[number, number % 2] for number in range(2 * MOST_GRAPHS)]
    assert [one() for one in dropped] == [None] * len(dropped)


def test_each_of_several_captures_has_pinned_memory_of_its_own(capture):
    table = AddressTable()
    get(table, 0, 0)
    capture["on"] = True
    found = [get(table, number, 1) for number in range(MOST_GRAPHS)]
    assert [one.tolist() for one in found] == [[number, 1] for number in range(MOST_GRAPHS)]
    with pytest.raises(RuntimeError, match="make one step"):
        get(table, -1, 1)
    capture["on"] = False
    get(table, -1, 1)  # which makes as much again
    capture["on"] = True
    assert [get(table, number, 2).tolist() for number in range(MOST_GRAPHS)][-1] == [MOST_GRAPHS - 1, 2]


def test_a_step_outside_does_not_read_what_only_a_replay_fills(capture):
    table = AddressTable()
    get(table, 0, 0)
    capture["on"] = True
    inside = get(table, 1, 1)
    capture["on"] = False
    assert get(table, 1, 1) is not inside


def test_another_number_of_addresses_needs_a_step_before_its_capture(capture):
    table = AddressTable()
    get(table, 0, 0)
    capture["on"] = True
    with pytest.raises(RuntimeError, match="make one step"):
        get(table, 1, 2, 3)
