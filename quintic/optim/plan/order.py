"""In which order buckets with collectives are worked on, and when each starts."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

from quintic.optim.groups.names import resolve_name
from quintic.optim.groups.options import Group
from quintic.optim.plan.bucket import Gathered, Sharded
from quintic.optim.plan.schedule import Schedule, overlapping, prefetch_one_schedule

__all__ = ["Orders", "order_buckets", "orders_of"]

_Shared: TypeAlias = Gathered | Sharded


class Orders(NamedTuple):
    """Names of the parameters that a user wants to come first; None for the order of `order_buckets`."""

    comm: tuple[str, ...] | None = None
    compute: tuple[str, ...] | None = None

    def renamed(self, names: Mapping[str, str]) -> "Orders":
        """Return the orders after parameters got other names: {old name: new name}."""
        return Orders(*(None if order is None else tuple(names.get(name, name) for name in order) for order in self))

    def resolved(self, groups: Iterable[Group]) -> "Orders":
        """Return the orders in the names that the parameter groups have: wrappers' prefixes do not count.

        A name of no parameter, or one that stands in an order twice, is a ValueError.
        """
        known = {name for group in groups for name in group.param_names}
        asked = {name: resolve_name(name, known) for name in (*(self.comm or ()), *(self.compute or ()))}
        unknown = set(asked.values()) - known
        if unknown:
            raise ValueError(
                f"comm_order, compute_order: no parameter is called {', '.join(sorted(map(repr, unknown)))}; names are "
                f"those of named_parameters(), see optimizer.plan()"
            )
        return orders_of(*(None if names is None else [asked[name] for name in names] for names in self))


def orders_of(comm_order: Sequence[str] | None, compute_order: Sequence[str] | None) -> Orders:
    """Return the orders that a user gave; an error if one is no sequence of names, or has a name twice."""
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
    """Return one rank's buckets with collectives in the order in which they are worked on, and when each starts.

    Buckets of one process group stay together, in the order of `_largest_first` where the user wants no other.
    """
    in_order: list[_Shared] = []
    schedule: list[int | None] = []
    for _, of_ranks in groupby(sorted(buckets, key=lambda bucket: bucket.ranks), key=lambda bucket: bucket.ranks):
        ordered = _by_names(_largest_first(of_ranks), orders.compute)
        first = len(in_order)
        in_order += ordered
        numbered = [None if step is None else first + step for step in _overlapping(ordered, groups, orders.comm)]
        if first:
            # Its first steps start before the last one of the process group before it ends.
            place = numbered.index(None)
            schedule[-1:] = [*numbered[:place], schedule[-1], *numbered[place + 1 :]]
        else:
            schedule = numbered
    return in_order, schedule or [None]


def _largest_first(buckets: Iterable[_Shared]) -> list[_Shared]:
    """Return the largest bucket of matrices, AdamW's buckets and the other matrices, each by descending size.

    A table takes long to send and hardly any time to step: its messages overlap with the work on matrices around it.
    """
    by_size = sorted(buckets, key=lambda bucket: -bucket.numel * bucket.dtype.itemsize)
    first = next((bucket for bucket in by_size if bucket.shape is not None), None)
    return sorted(by_size, key=lambda bucket: (bucket is not first, bucket.shape is not None))


def _overlapping(buckets: Sequence[_Shared], groups: Sequence[Group], names: Sequence[str] | None) -> list[int | None]:
    if names is None and any(groups[bucket.group].offload and isinstance(bucket, Gathered) for bucket in buckets):
        # Their state comes from the host before they start: of many at once the device would wait for it.
        return prefetch_one_schedule(len(buckets))
    memory = [bucket.shared_stages for bucket in buckets]
    budgets = [groups[bucket.group].max_workspace_bytes for bucket in buckets]
    budget = min((value for value in budgets if value is not None), default=None)
    numbers = {id(bucket): number for number, bucket in enumerate(buckets)}
    return overlapping([numbers[id(bucket)] for bucket in _by_names(buckets, names)], memory, budget)


def _by_names(buckets: Sequence[_Shared], names: Sequence[str] | None) -> list[_Shared]:
    """Return buckets by the first of the names that is in each, those without one behind."""
    places = {name: place for place, name in enumerate(names or ())}
    none = len(places)
    return sorted(buckets, key=lambda bucket: min((places.get(name, none) for name in bucket.names), default=none))
