"""Who orthogonalises what: work divided among ranks so that the busiest has as little as possible."""

import heapq
from collections.abc import Sequence

__all__ = ["assign_owners", "balance"]


def assign_owners(costs: Sequence[int], holders: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Return an owner for each piece of work: the largest first, each to the rank with the least so far.

    Every rank computes the same answer from the same arguments; equal costs and loads fall to the lower number.

    Args:
        costs: of each piece of work, in any unit.
        holders: for each, the ranks that may take it: those that hold all of its data, where there are some, because
            then nothing must be sent to them. Empty for any rank.
        num_ranks: ranks are 0 to num_ranks - 1.

    Returns:
        For each piece of work its owner.

    Source: the rule of longest processing time, R. Graham, Bounds on Multiprocessing Timing Anomalies (1969).
    """
    loads = [0] * num_ranks
    owners = [0] * len(costs)
    # (load, rank); an entry whose load is out of date is dropped when it comes up.
    lightest = [(0, rank) for rank in range(num_ranks)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
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


def balance(costs: Sequence[int], owners: Sequence[int], num_ranks: int) -> float:
    """Return the work of the busiest rank over the mean of all ranks: 1 is perfect, `num_ranks` one rank alone."""
    loads = [0] * num_ranks
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    total = sum(loads)
    return max(loads) * num_ranks / total if total else 1.0
