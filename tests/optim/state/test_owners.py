"""Owners: how near the busiest rank is to the least possible, who may take what, and what must not change an owner."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintic.optim.polar.forms import resolve
from quintic.optim.state.owners import assign_owners, balance, loads_of, shape_cost


def busiest(costs, owners, num_ranks):
    work = list(zip(costs, owners, strict=True))
    return max(sum(cost for cost, owner in work if owner == rank) for rank in range(num_ranks))


def least_possible(costs, holders, num_ranks):
    """Work of the busiest rank in the best of all assignments."""
    choices = [allowed or range(num_ranks) for allowed in holders]
    return min(busiest(costs, owners, num_ranks) for owners in itertools.product(*choices))


def in_order(order, costs, holders, num_ranks):
    """Each piece of work in an order to the rank with the least so far, the lower one of equals."""
    loads, owners = [0] * num_ranks, [0] * len(costs)
    for item in order:
        owner = min(holders[item] or range(num_ranks), key=lambda rank: (loads[rank], rank))
        owners[item] = owner
        loads[owner] += costs[item]
    return owners


@st.composite
def work(draw, most=6):
    num_ranks = draw(st.integers(1, 3))
    costs = draw(st.lists(st.integers(1, 20), min_size=1, max_size=most))
    some_ranks = st.lists(st.integers(0, num_ranks - 1), max_size=num_ranks, unique=True).map(tuple)
    return costs, [draw(some_ranks) for _ in costs], num_ranks


@given(st.integers(1, 3), st.lists(st.integers(1, 20), min_size=1, max_size=7))
def test_free_work_is_within_grahams_bound_of_the_best(num_ranks, costs):
    holders = [()] * len(costs)
    found = busiest(costs, assign_owners(costs, holders, num_ranks), num_ranks)
    assert 3 * num_ranks * found <= (4 * num_ranks - 1) * least_possible(costs, holders, num_ranks)


def test_the_largest_comes_first():
    # The smallest first, or as they come: 1 and 1 to different ranks, then 2 on top of one of them.
    assert sorted(loads_of([1, 1, 2], assign_owners([1, 1, 2], [()] * 3, 2), 2)) == [2, 2]
    costs = [3, 3, 4, 5, 5]
    assert busiest(costs, assign_owners(costs, [()] * 5, 2), 2) == 11  # 5 4 3, and 5 3
    assert busiest(costs, in_order([0, 1, 2, 3, 4], costs, [()] * 5, 2), 2) == 12


def test_equal_work_is_dealt_out_in_the_order_of_ranks():
    assert assign_owners([7] * 7, [()] * 7, 3) == [0, 1, 2, 0, 1, 2, 0]


@given(work())
def test_work_stays_with_a_holder(case):
    costs, holders, num_ranks = case
    owners = assign_owners(costs, holders, num_ranks)
    for owner, allowed in zip(owners, holders, strict=True):
        assert owner in (allowed or range(num_ranks))


def test_holders_share_their_work():
    assert assign_owners([5, 5, 5], [(1, 2)] * 3, 3) == [1, 2, 1]
    assert assign_owners([5, 5, 5, 5], [(2, 0)] * 4, 3) == [0, 2, 0, 2]
    # What others may take goes to those who hold nothing.
    assert assign_owners([5, 5, 4, 4], [(0, 1), (0, 1), (), ()], 4) == [0, 1, 2, 3]


def test_what_one_rank_alone_may_take_comes_before_free_work():
    # By size alone rank 0 would get the largest, and then what only it may take on top of it.
    assert assign_owners([9, 4, 4], [(), (0,), (0,)], 2) == [1, 0, 0]


@given(work(most=20))
def test_never_worse_than_all_of_it_by_size(case):
    costs, holders, num_ranks = case
    by_size = sorted(range(len(costs)), key=lambda item: -costs[item])
    found = busiest(costs, assign_owners(costs, holders, num_ranks), num_ranks)
    assert found <= busiest(costs, in_order(by_size, costs, holders, num_ranks), num_ranks)


def test_taking_pinned_work_first_is_better_on_the_whole():
    generator, better = random.Random(0), 0
    for _ in range(300):
        num_ranks, count = generator.randint(2, 8), generator.randint(8, 40)
        costs = [generator.randint(1, 100) for _ in range(count)]
        holders = [(generator.randrange(num_ranks),) if generator.random() < 0.5 else () for _ in range(count)]
        by_size = sorted(range(count), key=lambda item: -costs[item])
        before = busiest(costs, in_order(by_size, costs, holders, num_ranks), num_ranks)
        better += busiest(costs, assign_owners(costs, holders, num_ranks), num_ranks) < before
    assert better > 100


@given(work(most=12), st.randoms(use_true_random=False))
def test_loads_do_not_depend_on_the_order_of_the_work(case, generator):
    costs, _, num_ranks = case
    order = list(range(len(costs)))
    generator.shuffle(order)
    free = [()] * len(costs)
    loads = loads_of(costs, assign_owners(costs, free, num_ranks), num_ranks)
    turned = [costs[item] for item in order]
    assert loads_of(turned, assign_owners(turned, free, num_ranks), num_ranks) == loads


def test_balance_is_the_busiest_over_the_mean():
    assert balance([3, 3, 3]) == 1.0
    assert balance([9, 0, 0]) == 3.0
    assert balance([4, 2, 0]) == 2.0
    assert balance([0, 0]) == 1.0
    # Operations of a large model in one step, on many ranks: more than 64 bits hold.
    assert balance([10**17] + [0] * 1023) == 1024.0


@pytest.mark.parametrize("shape", [(768, 768), (768, 3072), (3072, 768), (64, 2048), (1, 5), (2048, 2049)], ids=str)
def test_a_shape_costs_what_its_default_form_does_on_gpus(shape):
    assert shape_cost(*shape) == resolve("auto", *shape, device_type="cuda").flops(*shape)
    assert shape_cost(*shape) == shape_cost(*reversed(shape))
