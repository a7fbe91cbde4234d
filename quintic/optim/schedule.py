"""The order in which a step's collectives begin and end, the same on all ranks that take part in them.

A bucket with collectives is stepped in three parts: it starts, gathering; it is worked on, and its results start for
everybody; it is finished. Ranks that run two collectives of a process group in different orders wait for each other
forever. So the order of one process group's buckets follows from these buckets alone, not from what else a rank has to
do, and process groups come in the same order everywhere.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from quintic.optim.names import known_as

if TYPE_CHECKING:
    from quintic.optim.plan import Bucket, Stages

__all__ = [
    "Orders",
    "Schedule",
    "arranged",
    "one_ahead",
    "orders_of",
    "overlapping",
    "restricted",
    "run_overlapping",
]

Schedule = Sequence[int | None]
"""Numbers of steps: each makes the step go on to its next part, of three. None stands for work without collectives."""


class Orders(NamedTuple):
    """What a user wants to come first, as names of parameters; None for the largest buckets."""

    launch: tuple[str, ...] | None = None
    work: tuple[str, ...] | None = None

    def resolved(self, groups: Iterable[Mapping[str, Any]]) -> "Orders":
        """Return the orders in the names that the parameter groups have: wrappers' prefixes do not count.

        Raises:
            ValueError: no parameter has a name, or one stands in an order twice.
        """
        known = {name for group in groups for name in group["param_names"]}
        asked = {name: known_as(name, known) for name in (*(self.launch or ()), *(self.work or ()))}
        unknown = set(asked.values()) - known
        if unknown:
            raise ValueError(
                f"launch_order, work_order: no parameter is called {', '.join(sorted(map(repr, unknown)))}; names are "
                f"those of named_parameters(), see optimizer.plan()"
            )
        return orders_of(*(None if names is None else [asked[name] for name in names] for names in self))


def orders_of(launch_order: Sequence[str] | None, work_order: Sequence[str] | None) -> Orders:
    """Return the orders that a user gave.

    Raises:
        TypeError: one is no sequence of names.
        ValueError: a name stands in one of them twice.
    """
    for option, names in (("launch_order", launch_order), ("work_order", work_order)):
        if names is None:
            continue
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"{option}={names!r}: give a list of names of parameters")
        if len(set(names)) < len(names):
            raise ValueError(f"{option} names a parameter twice: {names!r}")
    return Orders(*(None if names is None else tuple(names) for names in (launch_order, work_order)))


def run_overlapping(
    steps: Sequence[Iterator[None]], schedule: Schedule | None = None, meanwhile: Callable[[], None] | None = None
) -> None:
    """Run steps of three parts, divided by two yields, such that collectives are under way while others compute.

    Every rank of a process group must run the same steps in the same order.

    Args:
        steps: generators.
        schedule: in which order; None for each to start before the work on the one before it, and to be finished after
            the work on the next.
        meanwhile: work without collectives.
    """
    for number in one_ahead(len(steps)) if schedule is None else schedule:
        if number is not None:
            next(steps[number], None)
        elif meanwhile is not None:
            meanwhile()


def one_ahead(count: int) -> list[int | None]:
    """Return a schedule in which each step starts before, and is finished after, the work on a neighbour."""
    schedule: list[int | None] = [*range(min(count, 1)), None]
    for number in range(count):
        schedule += [*range(number + 1, min(number + 2, count)), number, *range(max(number - 1, 0), number)]
    return [*schedule, *range(max(count - 1, 0), count)]


def overlapping(launch_order: Sequence[int], memory: Sequence["Stages"], budget: int | None) -> list[int | None]:
    """Return a schedule that starts steps as early, and finishes them as late, as memory allows.

    What waits for a collective keeps the device from other work: so that is put off until the next step has been worked
    on at least, if memory allows that.

    Args:
        launch_order: the steps, which are worked on in the order of their numbers, in the order in which they start.
        memory: of each step.
        budget: bytes that may be held at a time, exceeded only for the step that is worked on next; None for no bound.
    """
    schedule: list[int | None] = []
    waiting = list(launch_order)
    unfinished: list[int] = []
    held = 0
    # What starts ahead leaves room for the results of the step before, which shall not be waited for.
    largest = max((one.scattering for one in memory), default=0)

    def held_at_work(number: int) -> int:
        """Return what will be held while a step is worked on."""
        return held + memory[number].working - (0 if number in waiting else memory[number].gathering)

    def finish() -> None:
        nonlocal held
        held -= memory[unfinished[0]].scattering
        schedule.append(unfinished.pop(0))

    def start(needed: int) -> None:
        """Start what fits beside the work on the step that is next, and that step in any case."""
        nonlocal held
        while waiting:
            step = waiting[0]
            more = 0
            if step != needed:
                more = memory[step].gathering + max(0, largest - sum(memory[one].scattering for one in unfinished))
            most = max(held_at_work(needed) + more, held + memory[step].starting)
            fits = budget is None or most <= budget
            if not fits and unfinished and (needed in waiting or unfinished[0] < needed - 1):
                finish()
            elif fits or needed in waiting:
                schedule.append(waiting.pop(0))
                held += memory[step].gathering
            else:
                return

    if launch_order:
        start(0)
    schedule.append(None)
    for number in range(len(launch_order)):
        start(number)
        while unfinished and budget is not None and held_at_work(number) > budget:
            finish()
        schedule.append(number)
        unfinished.append(number)
        held += memory[number].scattering - memory[number].gathering
    return schedule + unfinished


def restricted(schedule: Schedule, kept: Sequence[int]) -> Schedule:
    """Return the schedule of some of the steps, by their numbers in ascending order, whose new numbers are 0, 1, ..."""
    new = {number: place for place, number in enumerate(kept)}
    found = [None if number is None else new[number] for number in schedule if number is None or number in new]
    if kept and found[0] is None:
        # What was to start first is left out.
        found[:2] = found[1::-1]
    return found


def arranged(
    buckets: Iterable["Bucket"], groups: Sequence[Mapping[str, Any]], orders: Orders
) -> tuple[list["Bucket"], Schedule]:
    """Return the buckets with collectives in the order in which they are worked on, and when each starts.

    Buckets of one process group stay together, the largest first: its messages overlap with the work on all others.

    Args:
        buckets: of one rank's plan.
        groups: the parameter groups.
        orders: what the user wants first.
    """
    in_order: list[Bucket] = []
    schedule: list[int | None] = []
    for _, of_ranks in groupby(sorted(buckets, key=lambda bucket: bucket.ranks), key=lambda bucket: bucket.ranks):
        found = list(of_ranks)
        found.sort(key=lambda bucket: -bucket.numel * bucket.dtype.itemsize)
        found = _by_names(found, orders.work)
        first = len(in_order)
        in_order += found
        numbered = [None if step is None else first + step for step in _overlapping(found, groups, orders.launch)]
        if first:
            # Its first steps start before the last one of the process group before it ends.
            place = numbered.index(None)
            schedule[-1:] = [*numbered[:place], schedule[-1], *numbered[place + 1 :]]
        else:
            schedule = numbered
    return in_order, schedule or [None]


def _overlapping(
    buckets: Sequence["Bucket"], groups: Sequence[Mapping[str, Any]], names: Sequence[str] | None
) -> list[int | None]:
    if names is None and any(groups[bucket.group]["offload"] and bucket.sharding is None for bucket in buckets):
        # Their state comes from the host before they start: of many at once the device would wait for it.
        return one_ahead(len(buckets))
    memory = []
    for bucket in buckets:
        assert bucket.shared_stages is not None
        memory.append(bucket.shared_stages)
    budgets = [groups[bucket.group]["max_workspace_bytes"] for bucket in buckets]
    budget = min((value for value in budgets if value is not None), default=None)
    numbers = {id(bucket): number for number, bucket in enumerate(buckets)}
    return overlapping([numbers[id(bucket)] for bucket in _by_names(buckets, names)], memory, budget)


def _by_names(buckets: Sequence["Bucket"], names: Sequence[str] | None) -> list["Bucket"]:
    """Return buckets by the first of the names that is in each, those without one behind."""
    places = {name: place for place, name in enumerate(names or ())}
    none = len(places)
    return sorted(buckets, key=lambda bucket: min((places.get(name, none) for name in bucket.names), default=none))
