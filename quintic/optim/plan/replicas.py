"""Chooses the ranks that divide the work on parameters with several sharded copies, as under HSDP.

    divide    all ranks: each matrix is orthogonalised once, and its owner sends the update to every copy
    repeat    the ranks of one copy: every copy repeats the work, and nothing is sent between copies
    host      the ranks of the copies on one host: every host repeats the work, and nothing is sent between hosts

The update of a matrix has the same bits on any rank, so that copies stay equal with each strategy.

The fastest strategy depends on links and devices whose speeds are unknown. Times are estimated from the plan of each
strategy with the assumed speeds `LINKS` and `SPEEDS`; all ranks get the same result.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch

from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Layout
from quintic.optim.plan.exchange import traffic_of
from quintic.optim.plan.gathered import SharedBucket, shared_buckets

__all__ = [
    "LINKS",
    "SPEEDS",
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
"""The ranks that divide the work on a matrix: all, the ranks of one copy, or the ranks of one host's copies."""

# In order of preference if they are equally fast: the first repeats no work.
_STRATEGIES: tuple[ReplicaStrategy, ...] = ("divide", "repeat", "host")

LINKS = (250e9, 25e9)
"""Bytes per second that one rank sends, and receives at the same time, within its host and to other hosts.

GPUs of one host are linked directly, GPUs of several hosts by a network. NVLink: the exchange of 1.7B parameters,
without computing, moves 275 GB/s to and from each of two H200
(benchmarks/results/2026-11-22-2xh200-step-layouts.md). Networks: half the speed of one 400 Gb/s card per GPU, which
all-to-alls among several hosts do not reach."""

SPEEDS = {"cuda": (600e12, 50e12), "cpu": (1e12, 1e12)}
"""Device type -> operations per second of orthogonalisation with 16-bit products, and with wider ones, as plans count
them. An H200 reaches 630 (124M parameters) to 930 TFLOP/s (1.7B) in the same file."""


def speed_of(device_type: str, dtype: torch.dtype) -> float:
    """Return the assumed operations per second of a device type such as "cuda", with products of a dtype."""
    # Any accelerator counts as a GPU.
    narrow, wide = SPEEDS["cpu" if device_type == "cpu" else "cuda"]
    return narrow if dtype.itemsize <= 2 else wide


class ReplicaChoice(NamedTuple):
    """How ranks divide the work on the parameters that they share."""

    ranks: tuple[int, ...]
    """The ranks that share them, in ascending order."""
    strategy: ReplicaStrategy
    seconds: Mapping[ReplicaStrategy, float]
    """Estimated seconds of one step, for each strategy that differs from the strategies before it."""

    def __str__(self) -> str:
        """Return the choice and the estimates in one line."""
        # As in "copies on 16 ranks: all divide the work (estimated: divide 3.1 ms, repeat 4.2 ms)".
        texts = {
            "divide": "all divide the work",
            "repeat": "those of each copy divide the work, which others repeat",
            "host": "those of each host's copies divide the work, which others repeat",
        }
        estimates = ", ".join(f"{strategy} {seconds * 1e3:.3g} ms" for strategy, seconds in self.seconds.items())
        return f"copies on {len(self.ranks)} ranks: {texts[self.strategy]} (estimated: {estimates})"


def has_replicas(layout: Layout) -> bool:
    """Return whether a tensor has several copies, each of them sharded over ranks."""
    return layout.num_copies > 1 and not layout.is_replicated


def work_sets(layout: Layout, strategy: ReplicaStrategy, hosts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the sets of ranks that each do all of the work on a tensor, in ascending order; every rank is in one set.

    `hosts` has a number for each rank, in ascending order of the ranks, equal for ranks on the same host. Only "host"
    reads it: copies that have a host in common are one set.
    """
    if strategy == "divide":
        return [tuple(sorted(layout.ranks))]
    # "repeat": the ranks of each copy.
    of_copy: dict[int, set[int]] = {}
    for rank, copy in zip(layout.ranks, layout.copies, strict=True):
        of_copy.setdefault(copy, set()).add(rank)
    sets = list(of_copy.values())
    # Copies that have a rank on the same host become one set.
    if strategy == "host":
        host_of = dict(zip(sorted(layout.ranks), hosts, strict=True))
        sets = _joined([(ranks, {host_of[rank] for rank in ranks}) for ranks in sets])
    return sorted(tuple(sorted(ranks)) for ranks in sets)


def renumbered(hosts: Iterable[int]) -> list[int]:
    """Return the hosts numbered from 0 in the order of their first occurrence."""
    # Hosts of some of the ranks may have any numbers; sums over hosts need consecutive ones.
    numbers: dict[int, int] = {}
    return [numbers.setdefault(host, len(numbers)) for host in hosts]


def _joined(sets: Sequence[tuple[set[int], set[int]]]) -> list[set[int]]:
    """Merge sets of ranks that have a host in common, directly or through other sets; `sets` are (ranks, hosts)."""
    joined: list[tuple[set[int], set[int]]] = []
    for ranks, hosts in sets:
        # Merge this set with all merged ones that have one of its hosts.
        meeting = [other for other in joined if other[1] & hosts]
        joined = [other for other in joined if not other[1] & hosts]
        joined.append((ranks.union(*(one for one, _ in meeting)), hosts.union(*(one for _, one in meeting))))
    return [ranks for ranks, _ in joined]


def choose_replica_strategies(
    param_groups: Sequence[Group],
    layouts: Sequence[Sequence[Layout | None]],
    hosts: Mapping[tuple[int, ...], Sequence[int]],
) -> dict[tuple[int, ...], ReplicaChoice]:
    """Return the choice for each set of ranks that shares parameters with `replicas="auto"` and several copies.

    Equal on all ranks. A step is estimated to take as long as the busiest rank computes or the busiest link sends, the
    longer of the two, because messages overlap with computation.

    Args:
        param_groups: the groups.
        layouts: as for `build_plan`.
        hosts: ranks in ascending order -> a number for each, equal on the same host; for sets whose hosts are known.
    """
    # The parameters of each set of ranks.
    by_ranks: dict[tuple[int, ...], list[tuple[Group, Layout]]] = {}
    for group, of_group in zip(param_groups, layouts, strict=True):
        for layout in of_group:
            if layout is not None:
                by_ranks.setdefault(tuple(sorted(layout.ranks)), []).append((group, layout))
    choices = {}
    for ranks, shared in by_ranks.items():
        # Distinct layouts that need a choice.
        undecided = dict.fromkeys(one for group, one in shared if group.replicas == "auto" and has_replicas(one))
        if not undecided or ranks not in hosts:
            continue
        # Estimate every strategy, unless one before it has the same sets of ranks.
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
    """Return the layouts restricted to the ranks that divide the work with global rank `rank`.

    Without a choice, all ranks divide the work. Layouts without this rank are returned unchanged; a layout becomes
    None if this rank does all of the work on it.
    """

    @functools.cache
    def among_workers(layout: Layout, replicas: str) -> Layout | None:
        if rank not in layout.ranks or not has_replicas(layout):
            return layout
        # The group's own strategy, or the chosen one for "auto".
        ranks = tuple(sorted(layout.ranks))
        strategy: ReplicaStrategy = "repeat" if replicas == "repeat" else "divide"
        if replicas == "auto" and ranks in choices:
            strategy = choices[ranks].strategy
        # The set of ranks that this rank belongs to.
        own = next(members for members in work_sets(layout, strategy, hosts.get(ranks, ())) if rank in members)
        return layout.among(own) if len(own) > 1 else None

    return [
        [None if layout is None else among_workers(layout, group.replicas) for layout in of_group]
        for group, of_group in zip(param_groups, layouts, strict=True)
    ]


def _unit_seconds(shared: SharedBucket) -> float:
    """Return the estimated seconds for orthogonalising one unit of a bucket, by `SPEEDS`."""
    spec, seconds = shared.key.spec, 0.0
    # A user's function is taken to compute in the dtype of the weights.
    for kind in shared.units.kinds:
        seconds += kind.cost / speed_of(spec.device.type, spec.dtype if kind.form is None else kind.form.compute_dtype)
    return seconds


def _seconds(
    param_groups: Sequence[Group],
    layouts: Sequence[Sequence[Layout | None]],
    choice: ReplicaChoice,
    hosts: Sequence[int],
) -> float:
    """Return the estimated seconds of a step on the ranks of a choice, by `LINKS` and `SPEEDS`.

    Only the ranks that divide the work with the first rank are considered, since the other sets do the same work.
    """
    # The plan of these parameters with this choice.
    ranks = choice.ranks
    of_ranks = [[one if one is not None and tuple(sorted(one.ranks)) == ranks else None for one in f] for f in layouts]
    of_first = layouts_for_work(param_groups, of_ranks, {ranks: choice}, {ranks: hosts}, ranks[0])
    places = dict(zip(ranks, renumbered(hosts), strict=True))
    # Seconds of work, and bytes within hosts and between them, (sent or received, ranks), added up over buckets.
    busy, within, between = (torch.zeros(2, len(ranks), dtype=torch.float64, device="cpu") for _ in range(3))
    for shared in shared_buckets(param_groups, of_first)[0]:
        # Work: each rank orthogonalises its units.
        where = torch.tensor([ranks.index(rank) for rank in shared.exchange.ranks], device="cpu")
        busy[:, where] += _unit_seconds(shared) * torch.tensor(shared.exchange.counts, device="cpu")
        # Messages, (2, ranks of the bucket): all of them, and the bytes that leave a host.
        if shared.exchange_bytes is not None:
            everywhere = torch.stack(traffic_of(shared.exchange_bytes))
            hosts_of_these = torch.tensor([places[rank] for rank in shared.exchange.ranks], device="cpu")
            away = torch.stack(traffic_of(shared.exchange_bytes, hosts_of_these))
            between[:, where] += away
            within[:, where] += everywhere - away
    # The slowest resource: the busiest rank's device, or the busiest link of either kind.
    within_host, between_hosts = LINKS
    return max(float(busy.max()), float(within.max()) / within_host, float(between.max()) / between_hosts)
