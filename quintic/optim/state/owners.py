"""Owners of units: work divided among ranks so that the busiest has as little as possible."""

import heapq
from collections.abc import Iterable, Sequence
from functools import lru_cache

from quintic.optim.polar.forms import resolve

__all__ = ["assign_owners", "balance", "loads_of", "shape_cost"]


@lru_cache(maxsize=4096)
def shape_cost(m: int, n: int) -> int:
    """Floating-point operations of one (m, n) matrix in the default form on GPUs, whatever form it really gets.

    So work, and sharded state with it, has the same owner whatever the options are.
    """
    return resolve("auto", m, n, device_type="cuda").flops(m, n)


def assign_owners(costs: Sequence[int], holders: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Owner of each piece of work, such that the busiest rank has little; `holders`, if there are any, may take it.

    Work that only one rank may take comes first, because the rest can fill up the other ranks; then the largest first,
    each to the rank with the least so far. Where it is better to take all of it by size, that is done. Every rank
    computes the same answer; equal costs and loads fall to the lower number.

    Source: the rule of longest processing time, R. Graham, Bounds on Multiprocessing Timing Anomalies (1969).
    """
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
    """Owner of each piece of work, given in the order in which ranks take it."""
    loads = [0] * num_ranks
    owners = [0] * len(costs)
    # (load, rank); an entry whose load is out of date is dropped when it comes up.
    lightest = [(0, rank) for rank in range(num_ranks)]
    for item in order:
        allowed = holders[item]
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
    """Total cost of each rank's work."""
    loads = [0] * num_ranks
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads


def balance(loads: Sequence[int]) -> float:
    """Work of the busiest rank over the mean of all ranks: 1 is perfect, the number of ranks is one rank alone."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
