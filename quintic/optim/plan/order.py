"""Orders the buckets with collectives, and decides when the messages of each start.

    process groups    in ascending order of their ranks, so that ranks that share several groups run them in one order
    buckets           of one process group stay together: by the user's `compute_order`, else the largest first
    starts            as early as memory allows (`schedule.py`), by the user's `comm_order`

Invariant: the order of a process group's buckets follows from these buckets only, and is equal on all of its ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

from quintic.optim.groups.group import Group
from quintic.optim.groups.names import resolve_name
from quintic.optim.plan.bucket import Gathered, Sharded
from quintic.optim.plan.schedule import Schedule, overlapping_schedule, prefetch_one_schedule

__all__ = ["Orders", "order_buckets", "orders_of"]

_Shared: TypeAlias = Gathered | Sharded


class Orders(NamedTuple):
    """The names of parameters that come first, as a user gave them; None for the default order."""

    # Order in which messages start, and in which buckets are computed.
    comm: tuple[str, ...] | None = None
    compute: tuple[str, ...] | None = None

    def renamed(self, names: Mapping[str, str]) -> "Orders":
        """Return the orders after parameters were renamed; `names` is {old name: new name}."""
        return Orders(*(None if order is None else tuple(names.get(name, name) for name in order) for order in self))

    def resolved(self, groups: Iterable[Group]) -> "Orders":
        """Return the orders with the names that parameters have in the groups, without wrappers' prefixes.

        Raises:
            ValueError: no parameter has one of the names, or an order has a name twice.
        """
        known = {name for group in groups for name in group.param_names}
        asked = {name: resolve_name(name, known) for name in (*(self.comm or ()), *(self.compute or ()))}
        unknown = set(asked.values()) - known
        if unknown:
            raise ValueError(
                f"comm_order, compute_order: no parameter is called {', '.join(sorted(map(repr, unknown)))}; use the "
                f"names of named_parameters(), see optimizer.plan()"
            )
        return orders_of(*(None if names is None else [asked[name] for name in names] for names in self))


def orders_of(comm_order: Sequence[str] | None, compute_order: Sequence[str] | None) -> Orders:
    """Return a user's options as `Orders`; an error if one is not a sequence of names, or has a name twice."""
    for option, names in (("comm_order", comm_order), ("compute_order", compute_order)):
        if names is None:
            continue
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"{option}={names!r}: give a list of names of parameters")
        if len(set(names)) < len(names):
            raise ValueError(f"{option} names a parameter twice: {names!r}")
    return Orders(*(None if names is None else tuple(names) for names in (comm_order, compute_order)))


def order_buckets(
    buckets: Iterable[_Shared], groups: Sequence[Group], orders: Orders
) -> tuple[list[_Shared], Schedule]:
    """Return one rank's buckets with collectives in the order of their computation, and their schedule."""
    in_order: list[_Shared] = []
    schedule: list[int | None] = []
    # One process group after the other, each with a schedule of its own numbers.
    for _, of_ranks in groupby(sorted(buckets, key=lambda bucket: bucket.ranks), key=lambda bucket: bucket.ranks):
        ordered = _by_names(_largest_first(of_ranks), orders.compute)
        first = len(in_order)
        in_order += ordered
        numbered = [None if step is None else first + step for step in _schedule_of(ordered, groups, orders.comm)]
        if first:
            # Join the schedules: the entries of this one before its None, which start its first buckets, come before
            # the last entry of the previous one, which finishes its last bucket.
            place = numbered.index(None)
            schedule[-1:] = [*numbered[:place], schedule[-1], *numbered[place + 1 :]]
        else:
            schedule = numbered
    return in_order, schedule or [None]


def _largest_first(buckets: Iterable[_Shared]) -> list[_Shared]:
    """Return the largest bucket of matrices, then AdamW's buckets, then the other matrices, by descending size."""
    # An embedding table takes long to send and hardly any time to step, so its messages should overlap with work on
    # matrices before and after it.
    by_size = sorted(buckets, key=lambda bucket: -bucket.numel * bucket.dtype.itemsize)
    first = next((bucket for bucket in by_size if bucket.shape is not None), None)
    return sorted(by_size, key=lambda bucket: (bucket is not first, bucket.shape is not None))


def _schedule_of(buckets: Sequence[_Shared], groups: Sequence[Group], names: Sequence[str] | None) -> list[int | None]:
    """Return the schedule of one process group's buckets, in their order; `names` is the user's `comm_order`."""
    # With offload a bucket needs its state before it starts: starting many at once would make the device wait for the
    # host, so start one ahead only.
    if names is None and any(groups[bucket.group].offload and isinstance(bucket, Gathered) for bucket in buckets):
        return prefetch_one_schedule(len(buckets))
    # Bounded by the rank that needs most, since all ranks must make the same schedule, and by the smallest workspace.
    memory = [bucket.max_phase_bytes for bucket in buckets]
    budgets = [groups[bucket.group].max_workspace_bytes for bucket in buckets]
    budget = min((value for value in budgets if value is not None), default=None)
    numbers = {id(bucket): number for number, bucket in enumerate(buckets)}
    return overlapping_schedule([numbers[id(bucket)] for bucket in _by_names(buckets, names)], memory, budget)


def _by_names(buckets: Sequence[_Shared], names: Sequence[str] | None) -> list[_Shared]:
    """Return buckets in the order of the first of `names` that each contains; buckets without one come last."""
    # `sorted` is stable, so that buckets without a name keep their order.
    places = {name: place for place, name in enumerate(names or ())}
    none = len(places)
    return sorted(buckets, key=lambda bucket: min((places.get(name, none) for name in bucket.names), default=none))
