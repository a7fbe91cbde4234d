"""Assigns units of work to owners among ranks, such that the busiest rank has as little work as possible.

Pure functions of costs and numbers of ranks: every rank computes the same owners.
"""

import heapq
from collections.abc import Iterable, Sequence
from functools import lru_cache

from quintic.optim.polar.forms import resolve

__all__ = ["assign_owners", "balance", "loads_of", "shape_cost"]


@lru_cache(maxsize=4096)
def shape_cost(m: int, n: int) -> int:
    """Return the cost of one (m, n) matrix: the floating-point operations of the default form on GPUs."""
    # The form that the options choose does not matter, so that units, and sharded state with them, keep their owners
    # when options change.
    return resolve("auto", m, n, device_type="cuda").flops(m, n)


def assign_owners(costs: Sequence[int], holders: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Return the owner of each unit, a number from 0, such that the busiest rank has little work.

    Units are taken one after the other, each by the rank with the least work so far: the largest units first. Two
    orders are tried, and the better one is returned: first the units that only one rank may own, because the others
    can then fill up the other ranks; or all units by size. Of equal costs and loads the lower number comes first.

    Args:
        costs: of each unit.
        holders: for each unit the ranks that may own it; empty if all may.
        num_ranks: the number of ranks.

    Source: the rule of longest processing time, R. Graham, Bounds on Multiprocessing Timing Anomalies (1969).
    """
    # Two orders of the units; the numbers break ties.
    by_size = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    pinned_first = sorted(by_size, key=lambda item: len(holders[item]) != 1)
    assigned = _assigned(pinned_first, costs, holders, num_ranks)
    if pinned_first == by_size:
        return assigned
    other = _assigned(by_size, costs, holders, num_ranks)
    return min(assigned, other, key=lambda owners: max(loads_of(costs, owners, num_ranks)))


def _assigned(
    order: Iterable[int], costs: Sequence[int], holders: Sequence[Sequence[int]], num_ranks: int
) -> list[int]:
    """Return the owner of each unit, if units are taken in this order."""
    loads = [0] * num_ranks
    owners = [0] * len(costs)
    # A heap of (load, rank); an entry whose load is out of date is dropped when it is the smallest.
    lightest = [(0, rank) for rank in range(num_ranks)]
    for item in order:
        allowed = holders[item]
        # Among some ranks by search, among all by the heap.
        if allowed:
            owner = min(allowed, key=lambda rank: (loads[rank], rank))
        else:
            while lightest[0][0] != loads[lightest[0][1]]:
                heapq.heappop(lightest)
            owner = lightest[0][1]
        owners[item] = owner
        loads[owner] += costs[item]
        heapq.heappush(lightest, (loads[owner], owner))
    return owners


def loads_of(costs: Sequence[int], owners: Sequence[int], num_ranks: int) -> list[int]:
    """Return the total cost of each rank's units."""
    loads = [0] * num_ranks
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads


def balance(loads: Sequence[int]) -> float:
    """Return the work of the busiest rank over the mean: 1 is perfect; the number of ranks if one does everything."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
