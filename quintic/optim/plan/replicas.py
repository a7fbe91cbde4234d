"""Which ranks divide the work on parameters of which there are several copies, each cut among ranks, as under HSDP.

All ranks may: then each matrix is orthogonalised once, and its owner sends the update to every copy. Or only those that
hold one copy, or the copies of one host: then others repeat the work, and nothing of it is sent between them. The
update of a matrix has the same bits on any rank, so that copies stay equal.

Which is faster depends on links and devices whose speed is unknown. It is estimated from the plan with the assumed
speeds `LINKS` and `SPEEDS`, with the same result on all ranks.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch

from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import Layout
from quintic.optim.plan.exchange import traffic_of
from quintic.optim.plan.gathered import SharedBucket, shared_buckets

__all__ = [
    "LINKS",
    "SPEEDS",
    "Links",
    "ReplicaChoice",
    "ReplicaStrategy",
    "choose_replica_strategies",
    "has_replicas",
    "layouts_for_work",
    "renumbered",
    "speed_of",
    "work_sets",
]

ReplicaStrategy: TypeAlias = Literal["divide", "repeat", "host"]
"""The ranks that divide the work on a matrix: all, those of one copy, or those of the copies of one host."""

# In the order in which equal ones, and equally fast ones, are preferred: the first repeats nothing.
_STRATEGIES: tuple[ReplicaStrategy, ...] = ("divide", "repeat", "host")


class Links(NamedTuple):
    """Bytes per second that one rank sends, and receives at the same time."""

    within_host: float
    between_hosts: float


LINKS = Links(within_host=250e9, between_hosts=25e9)
"""NVLink: the exchange alone of 1.7B parameters moves 275 GB/s to and from each of two H200
(benchmarks/results/2026-11-22-2xh200-step-layouts.md). Networks: half of what one 400 Gb/s card per GPU could do, which
all-to-alls among several hosts do not reach."""

SPEEDS = {"cuda": (600e12, 50e12), "cpu": (1e12, 1e12)}
"""Type of device -> operations per second of orthogonalisation with 16-bit products, and with wider ones, as plans
count them. An H200 does 630 (124M parameters) to 930 TFLOP/s (1.7B) in the same file."""


def speed_of(device_type: str, dtype: torch.dtype) -> float:
    """Return the operations per second, with products of a dtype, that are assumed of a type of device such as "cuda".

    Any accelerator is taken for a GPU.
    """
    narrow, wide = SPEEDS["cpu" if device_type == "cpu" else "cuda"]
    return narrow if dtype.itemsize <= 2 else wide


class ReplicaChoice(NamedTuple):
    """The way in which ranks divide the work on the parameters that they share."""

    ranks: tuple[int, ...]
    """The ranks that share them, in ascending order."""
    strategy: ReplicaStrategy
    seconds: Mapping[ReplicaStrategy, float]
    """Estimated time of one step, for each strategy that differs from those before."""

    def __str__(self) -> str:
        """Return the choice and the estimates in one line."""
        texts = {
            "divide": "all divide the work",
            "repeat": "those of each copy divide the work, which others repeat",
            "host": "those of each host's copies divide the work, which others repeat",
        }
        estimates = ", ".join(f"{strategy} {seconds * 1e3:.3g} ms" for strategy, seconds in self.seconds.items())
        return f"copies on {len(self.ranks)} ranks: {texts[self.strategy]} (estimated: {estimates})"


def has_replicas(layout: Layout) -> bool:
    """Return whether a tensor has several copies, each cut among ranks."""
    return layout.num_copies > 1 and not layout.is_replicated


def work_sets(layout: Layout, strategy: ReplicaStrategy, hosts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the sets of ranks, in ascending order, that each do all of the work on a tensor; every rank is in one.

    Hosts are a number for each rank, in ascending order of the ranks, equal for ranks of one host. They are read for
    "host" only: copies that share a host are worked on together.
    """
    if strategy == "divide":
        return [tuple(sorted(layout.ranks))]
    of_copy: dict[int, set[int]] = {}
    for rank, copy in zip(layout.ranks, layout.copies, strict=True):
        of_copy.setdefault(copy, set()).add(rank)
    sets = list(of_copy.values())
    if strategy == "host":
        host_of = dict(zip(sorted(layout.ranks), hosts, strict=True))
        sets = _joined([(ranks, {host_of[rank] for rank in ranks}) for ranks in sets])
    return sorted(tuple(sorted(ranks)) for ranks in sets)


def renumbered(hosts: Iterable[int]) -> list[int]:
    """Return numbers from 0, in the order in which they come, equal where the given ones are."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(host, len(numbers)) for host in hosts]


def _joined(sets: Sequence[tuple[set[int], set[int]]]) -> list[set[int]]:
    """Return sets of ranks, with those made one that have a host in common, be it through others."""
    joined: list[tuple[set[int], set[int]]] = []
    for ranks, hosts in sets:
        meeting = [other for other in joined if other[1] & hosts]
        joined = [other for other in joined if not other[1] & hosts]
        joined.append((ranks.union(*(one for one, _ in meeting)), hosts.union(*(one for _, one in meeting))))
    return [ranks for ranks, _ in joined]


def choose_replica_strategies(
    param_groups: Sequence[Group],
    layouts: Sequence[Sequence[Layout | None]],
    hosts: Mapping[tuple[int, ...], Sequence[int]],
) -> dict[tuple[int, ...], ReplicaChoice]:
    """Return the choices for "auto": ranks that share parameters with several copies -> those that divide the work.

    The same on all ranks: a step is taken to last as long as the busiest rank computes, or as the busiest link of its
    kind sends, whichever is longer, because messages are under way while others compute. Layouts are those of
    `build_plan`; hosts have for ranks in ascending order, as far as known, a number for each, equal on one host.
    """
    by_ranks: dict[tuple[int, ...], list[tuple[Group, Layout]]] = {}
    for group, of_group in zip(param_groups, layouts, strict=True):
        for layout in of_group:
            if layout is not None:
                by_ranks.setdefault(tuple(sorted(layout.ranks)), []).append((group, layout))
    choices = {}
    for ranks, shared in by_ranks.items():
        undecided = dict.fromkeys(one for group, one in shared if group.replicas == "auto" and has_replicas(one))
        if not undecided or ranks not in hosts:
            continue
        seconds: dict[ReplicaStrategy, float] = {}
        seen: list[object] = []
        for strategy in _STRATEGIES:
            sets = [work_sets(layout, strategy, hosts[ranks]) for layout in undecided]
            if sets not in seen:
                seen.append(sets)
                seconds[strategy] = _seconds(param_groups, layouts, ReplicaChoice(ranks, strategy, {}), hosts[ranks])
        choices[ranks] = ReplicaChoice(ranks, min(seconds, key=lambda strategy: seconds[strategy]), seconds)
    return choices


def layouts_for_work(
    param_groups: Sequence[Group],
    layouts: Sequence[Sequence[Layout | None]],
    choices: Mapping[tuple[int, ...], ReplicaChoice],
    hosts: Mapping[tuple[int, ...], Sequence[int]],
    rank: int,
) -> list[list[Layout | None]]:
    """Return each layout among those ranks alone that divide the work with one global rank.

    Where `choose_replica_strategies` chose nothing, all ranks divide the work. Layouts without this rank stay.
    """

    @functools.cache
    def among_workers(layout: Layout, replicas: str) -> Layout | None:
        if rank not in layout.ranks or not has_replicas(layout):
            return layout
        ranks = tuple(sorted(layout.ranks))
        strategy: ReplicaStrategy = "repeat" if replicas == "repeat" else "divide"
        if replicas == "auto" and ranks in choices:
            strategy = choices[ranks].strategy
        own = next(members for members in work_sets(layout, strategy, hosts.get(ranks, ())) if rank in members)
        return layout.among(own) if len(own) > 1 else None

    return [
        [None if layout is None else among_workers(layout, group.replicas) for layout in of_group]
        for group, of_group in zip(param_groups, layouts, strict=True)
    ]


def _unit_seconds(shared: SharedBucket) -> float:
    """Return the seconds that the orthogonalisation of one unit of a bucket takes, by `SPEEDS`."""
    spec, seconds = shared.key.spec, 0.0
    for kind in shared.units.kinds:
        seconds += kind.cost / speed_of(spec.device.type, spec.dtype if kind.form is None else kind.form.compute_dtype)
    return seconds


def _seconds(
    param_groups: Sequence[Group],
    layouts: Sequence[Sequence[Layout | None]],
    choice: ReplicaChoice,
    hosts: Sequence[int],
) -> float:
    """Return the seconds that ranks that share parameters take for a step of these, by `LINKS` and `SPEEDS`.

    Those that divide the work with the first one are looked at, the others do the same.
    """
    ranks = choice.ranks
    of_ranks = [[one if one is not None and tuple(sorted(one.ranks)) == ranks else None for one in f] for f in layouts]
    of_first = layouts_for_work(param_groups, of_ranks, {ranks: choice}, {ranks: hosts}, ranks[0])
    places = dict(zip(ranks, renumbered(hosts), strict=True))
    busy, within, between = (torch.zeros(2, len(ranks), dtype=torch.float64, device="cpu") for _ in range(3))
    for shared in shared_buckets(param_groups, of_first)[0]:
        where = torch.tensor([ranks.index(rank) for rank in shared.exchange.ranks], device="cpu")
        busy[:, where] += _unit_seconds(shared) * torch.tensor(shared.exchange.counts, device="cpu")
        if shared.exchange_bytes is not None:
            everywhere = torch.stack(traffic_of(shared.exchange_bytes))
            hosts_of_these = torch.tensor([places[rank] for rank in shared.exchange.ranks], device="cpu")
            away = torch.stack(traffic_of(shared.exchange_bytes, hosts_of_these))
            between[:, where] += away
            within[:, where] += everywhere - away
    return max(float(busy.max()), float(within.max()) / LINKS.within_host, float(between.max()) / LINKS.between_hosts)
