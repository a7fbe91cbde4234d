"""When collectives start and end: as early and late as memory allows, the same for a part of the steps."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import quintic
from quintic.optim.plan.order import Orders, order_buckets
from quintic.optim.plan.schedule import (
    PhaseBytes,
    filter_schedule,
    overlapping_bytes,
    overlapping_schedule,
    prefetch_one_schedule,
)
from quintic.optim.step.bucket_step import run_overlapping

SIZES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=8)


@st.composite
def schedules(draw):
    memory = [PhaseBytes(a, b, 0, c) for a, b, c in draw(SIZES)]
    order = draw(st.permutations(range(len(memory))))
    budget = draw(st.none() | st.integers(0, 60))
    return order, memory, budget, overlapping_schedule(order, memory, budget)


def parts_of(schedule):
    """Return (number, part) in order."""
    counts = {}
    for number in schedule:
        if number is not None:
            yield number, counts.get(number, 0)
            counts[number] = counts.get(number, 0) + 1


def check_complete(schedule, count):
    found = list(parts_of(schedule))
    assert sorted(found) == [(number, part) for number in range(count) for part in range(3)]
    assert [number for number, part in found if part == 1] == list(range(count))
    assert schedule.count(None) == 1
    assert count == 0 or schedule[0] is not None  # something is under way meanwhile


@given(schedules())
def test_every_step_has_three_parts_in_the_orders_asked_for(found):
    order, *_, schedule = found
    check_complete(schedule, len(order))
    assert [number for number, part in parts_of(schedule) if part == 0] == list(order)
    assert [number for number, part in parts_of(schedule) if part == 2] == list(range(len(order)))


@given(st.integers(0, 6))
def test_one_ahead_and_one_behind(count):
    schedule = prefetch_one_schedule(count)
    check_complete(schedule, count)
    positions = {pair: place for place, pair in enumerate(parts_of(schedule))}
    for number in range(1, count):
        assert positions[number, 0] < positions[number - 1, 1] < positions[number, 1] < positions[number - 1, 2]


@given(schedules())
def test_more_than_the_budget_is_held_only_for_the_next_step(found):
    order, memory, budget, schedule = found
    if budget is None:
        assert schedule[: len(order)] == list(order)
        assert schedule[len(schedule) - len(order) :] == list(range(len(order)))
        return
    held, next_work = 0, 0
    started, finished = set(), set()
    for number, part in parts_of(schedule):
        if part == 0:
            # Whatever is held besides, it is because the next step waits behind it.
            needed = next_work not in started
            started.add(number)
            held += memory[number].gathering
            at_work = held + memory[next_work].working - memory[next_work].gathering * (next_work in started)
            assert needed or at_work <= budget
        elif part == 1:
            unfinished = set(range(next_work)) - finished
            assert held - memory[number].gathering + memory[number].working <= budget or not unfinished
            held += memory[number].scattering - memory[number].gathering
            next_work = number + 1
        else:
            finished.add(number)
            held -= memory[number].scattering
    assert held == 0


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9), st.integers(2, 9))
def test_room_for_two_neighbours_lets_everything_overlap(gathering, working, scattering, count):
    memory = [PhaseBytes(gathering, working, 0, scattering)] * count
    schedule = overlapping_schedule(range(count), memory, gathering + memory[0].working + scattering)
    places = {pair: place for place, pair in enumerate(parts_of(schedule))}
    for number in range(count - 1):
        assert places[number + 1, 0] < places[number, 1]  # the next one is under way when one is worked on
        assert places[number, 2] > places[number + 1, 1]  # and no wait is for the message just sent


@given(schedules(), st.data())
def test_some_of_the_steps_keep_their_order(found, data):
    order, *_, schedule = found
    kept = [step for step in range(len(order)) if data.draw(st.booleans())]
    part = filter_schedule(schedule, kept)
    check_complete(part, len(kept))
    assert [kept[number] for number in part if number is not None] == [step for step in schedule if step in kept]


def test_the_first_step_that_is_left_starts_before_local_work():
    assert list(filter_schedule([0, None, 1, 0, 1, 0, 1], [1])) == [0, None, 0, 0]


@pytest.mark.parametrize(
    ("first", "second", "local", "peak"),
    [
        ({}, {}, 0, 6 + 40 - 2),  # the second is computed, without its directions, beside the first one's updates
        ({}, {}, 100, 1 + 100),  # local work beside the first one's directions
        ({}, {"starting": 200}, 0, 1 + 200),
        ({"finishing": 300}, {}, 0, 8 + 300),  # beside the second one's updates
    ],
)
def test_the_peak_is_what_all_buckets_under_way_hold_at_their_stages(first, second, local, peak):
    stages = [PhaseBytes(1, 16, 0, 4, **first), PhaseBytes(2, 3, 32, 8, **second)]
    assert overlapping_bytes(stages, [0, None, 1, 0, 1, 0, 1], local) == peak


def test_steps_run_as_scheduled():
    events = []

    def step(name):
        for part in ("start", "work", "finish"):
            events.append(part + name)
            if part != "finish":
                yield

    run_overlapping([step("A"), step("B")], [1, None, 0, 0, 1, 0, 1], [step("L")])
    assert events == ["startB", "startL", "workL", "finishL", "startA", "workA", "workB", "finishA", "finishB"]
    events.clear()
    run_overlapping([step("A"), step("B"), step("C")])
    assert events == [
        *("startA", "startB", "workA", "startC", "workB", "finishA", "workC", "finishB", "finishC"),
    ]
    events.clear()
    run_overlapping([], None, [step("L"), step("M")])
    assert events == ["startL", "workL", "finishL", "startM", "workM", "finishM"]


def test_names_of_an_order_are_checked():
    params = [("a", nn.Parameter(torch.randn(3, 4)))]
    with pytest.raises(TypeError, match="comm_order='a': give a list"):
        quintic.Muon(params, comm_order="a")
    with pytest.raises(ValueError, match="compute_order names a parameter twice"):
        quintic.Muon(params, compute_order=["a", "a"])
    with pytest.raises(ValueError, match="no parameter is called 'b'"):
        quintic.Muon(params, compute_order=["b"]).plan()
    assert len(quintic.Muon(params, compute_order=["a"]).plan().buckets) == 1


def test_the_largest_bucket_of_matrices_comes_first_and_tables_behind_it():
    def bucket(name, ranks, numel, dtype=torch.float32, shape=(2, 2)):
        memory = PhaseBytes(0, 0, 0, 0)
        return SimpleNamespace(
            names=(name,),
            ranks=ranks,
            numel=numel,
            dtype=dtype,
            shape=shape,
            group=0,
            max_phase_bytes=memory,
        )

    buckets = [
        bucket("a", (2, 3), 9),
        bucket("b", (0, 1), 3),
        bucket("c", (0, 1), 5, torch.bfloat16),
        bucket("s", (0, 1), 1, shape=None),
        bucket("t", (0, 1), 99, shape=None),
        bucket("d", (0, 1), 4),
        bucket("e", (0, 1), 3),
    ]
    groups = [SimpleNamespace(offload=False, max_workspace_bytes=None)]

    def names(**orders):
        return "".join(found.names[0] for found in order_buckets(buckets, groups, Orders(**orders))[0])

    assert names() == "dtsbeca"
    assert names(compute=("e", "a")) == "edtsbca"
