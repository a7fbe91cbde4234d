"""Chooses which ranks divide the work on parameters with several copies, by what each way asks of links and devices."""

import functools
from collections.abc import Mapping, Sequence

import torch

from quintic.optim.comms.replicas import LINKS, WAYS, ReplicaChoice, Way, dividing_sets, has_replicas, renumbered
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import Layout
from quintic.optim.plan.exchange import traffic_of
from quintic.optim.plan.gathered import shared_buckets

__all__ = ["choose_ways", "divided_layouts"]


def choose_ways(
    param_groups: Sequence[Group],
    layouts: Sequence[Sequence[Layout | None]],
    hosts: Mapping[tuple[int, ...], Sequence[int]],
) -> dict[tuple[int, ...], ReplicaChoice]:
    """Return which ranks shall divide the work on parameters with several copies, for groups with `replicas="auto"`.

    The same on all ranks: a step is taken to last as long as the busiest rank computes, or as the busiest link of its
    kind sends, whichever is longer, because messages are under way while others compute.

    Args:
        param_groups: validated.
        layouts: for each group and each of its parameters where it travels, or None.
        hosts: ranks in ascending order -> a number for each, equal for ranks of one host, as far as known.

    Returns:
        By the ranks, in ascending order, that share parameters with several copies.
    """
    by_ranks: dict[tuple[int, ...], list[tuple[Group, Layout]]] = {}
    for group, found in zip(param_groups, layouts, strict=True):
        for layout in found:
            if layout is not None:
                by_ranks.setdefault(tuple(sorted(layout.ranks)), []).append((group, layout))
    choices = {}
    for ranks, shared in by_ranks.items():
        undecided = dict.fromkeys(one for group, one in shared if group.replicas == "auto" and has_replicas(one))
        if not undecided or ranks not in hosts:
            continue
        seconds: dict[Way, float] = {}
        seen: list[object] = []
        for way in WAYS:
            sets = [dividing_sets(layout, way, hosts[ranks]) for layout in undecided]
            if sets not in seen:
                seen.append(sets)
                seconds[way] = _seconds(param_groups, layouts, ReplicaChoice(ranks, way, {}), hosts[ranks])
        choices[ranks] = ReplicaChoice(ranks, min(seconds, key=lambda way: seconds[way]), seconds)
    return choices


def divided_layouts(
    param_groups: Sequence[Group],
    layouts: Sequence[Sequence[Layout | None]],
    choices: Mapping[tuple[int, ...], ReplicaChoice],
    hosts: Mapping[tuple[int, ...], Sequence[int]],
    rank: int,
) -> list[list[Layout | None]]:
    """Return each layout among those ranks alone that divide the work with one global rank.

    Where `choose_ways` chose nothing all ranks divide the work. What the rank has no part in is left as it is.
    """

    @functools.cache
    def divided(layout: Layout, replicas: str) -> Layout | None:
        if rank not in layout.ranks or not has_replicas(layout):
            return layout
        ranks = tuple(sorted(layout.ranks))
        way: Way = "repeat" if replicas == "repeat" else "divide"
        if replicas == "auto" and ranks in choices:
            way = choices[ranks].way
        own = next(found for found in dividing_sets(layout, way, hosts.get(ranks, ())) if rank in found)
        return layout.among(own) if len(own) > 1 else None

    return [
        [None if layout is None else divided(layout, group.replicas) for layout in found]
        for group, found in zip(param_groups, layouts, strict=True)
    ]


def _seconds(
    param_groups: Sequence[Group],
    layouts: Sequence[Sequence[Layout | None]],
    choice: ReplicaChoice,
    hosts: Sequence[int],
) -> float:
    """Return how long ranks that share parameters take for a step of these, by `LINKS` and `SPEEDS`.

    Those that divide the work with the first one are looked at, the others do the same.
    """
    ranks = choice.ranks
    of_ranks = [[one if one is not None and tuple(sorted(one.ranks)) == ranks else None for one in f] for f in layouts]
    of_first = divided_layouts(param_groups, of_ranks, {ranks: choice}, {ranks: hosts}, ranks[0])
    places = dict(zip(ranks, renumbered(hosts), strict=True))
    busy, within, between = (torch.zeros(2, len(ranks), dtype=torch.float64, device="cpu") for _ in range(3))
    for shared in shared_buckets(param_groups, of_first)[0]:
        where = torch.tensor([ranks.index(rank) for rank in shared.exchange.ranks], device="cpu")
        busy[:, where] += shared.unit_seconds * torch.tensor(shared.exchange.counts, device="cpu")
        if shared.cargo is not None:
            everywhere = torch.stack(traffic_of(shared.cargo))
            hosts_of_these = torch.tensor([places[rank] for rank in shared.exchange.ranks], device="cpu")
            away = torch.stack(traffic_of(shared.cargo, hosts_of_these))
            between[:, where] += away
            within[:, where] += everywhere - away
    return max(float(busy.max()), float(within.max()) / LINKS.within_host, float(between.max()) / LINKS.between_hosts)
