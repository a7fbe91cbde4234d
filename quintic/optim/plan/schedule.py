"""The order in which a step's collectives begin and end, the same on all ranks that take part in them.

A bucket with collectives is stepped in three phases:

    1. it starts        its first message is under way
    2. it is computed   then its second message is under way
    3. it is finished

Ranks that run two collectives of a process group in different orders wait for each other forever. So the order of a
process group's buckets follows from these buckets only, whichever other buckets a rank has, and process groups come in
the same order everywhere.
"""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "NO_BYTES",
    "PhaseBytes",
    "Schedule",
    "filter_schedule",
    "overlapping_bytes",
    "overlapping_schedule",
    "prefetch_one_schedule",
]

# Indices of buckets: each moves its bucket on to the next phase. None stands for the buckets without collectives, which
# run together.
Schedule = Sequence[int | None]


class PhaseBytes(NamedTuple):
    """Temporary bytes of one bucket, by phase; phases of neighbouring buckets with collectives overlap."""

    # From its start until its first message has arrived.
    gathering: int
    # From then until its updates are computed.
    computing: int
    # While the second message is being started, beside `scattering`.
    updates: int
    # From the start of the second message until the bucket is finished.
    scattering: int
    # While it starts, if that is more than `gathering`.
    starting: int = 0
    # While it is finished, if that is more than `scattering`.
    finishing: int = 0

    @property
    def working(self) -> int:
        """Return the most bytes from the arrival of its first message until the second is under way."""
        return max(self.gathering, self.computing, self.updates + self.scattering)

    @property
    def most(self) -> int:
        """Return the most bytes at any time."""
        return max(self.starting, self.working, self.finishing)


NO_BYTES = PhaseBytes(0, 0, 0, 0)


def prefetch_one_schedule(count: int) -> list[int | None]:
    """Return a schedule in which each bucket starts before, and is finished after, the computation of a neighbour.

    For three buckets: 0 starts, work without collectives, 1 starts, 0 is computed, 2 starts, 1 is computed, 0 is
    finished, 2 is computed, 1 is finished, 2 is finished.
    """
    schedule: list[int | None] = [*range(min(count, 1)), None]
    for number in range(count):
        schedule += [*range(number + 1, min(number + 2, count)), number, *range(max(number - 1, 0), number)]
    return [*schedule, *range(max(count - 1, 0), count)]


def overlapping_schedule(
    comm_order: Sequence[int], memory: Sequence[PhaseBytes], budget: int | None
) -> list[int | None]:
    """Return a schedule that starts buckets as early, and finishes them as late, as memory allows.

    Waiting on a collective stalls the device, so each wait is put off until after the next bucket has been computed, if
    memory allows.

    Args:
        comm_order: the indices of the buckets in the order in which they start; they are computed in ascending order.
        memory: the bytes of each bucket, by phase.
        budget: bytes, exceeded only for the bucket that is computed next; None for no bound.
    """
    schedule: list[int | None] = []
    waiting = list(comm_order)  # not started
    unfinished: list[int] = []  # computed, but not finished
    held = 0  # bytes of all buckets that are under way
    # A bucket that starts early leaves room for the results of the one before, so that these need not be waited for.
    largest = max((one.scattering for one in memory), default=0)

    def held_at_work(number: int) -> int:
        """Return the bytes held while this bucket computes."""
        return held + memory[number].working - (0 if number in waiting else memory[number].gathering)

    def finish() -> None:
        nonlocal held
        held -= memory[unfinished[0]].scattering
        schedule.append(unfinished.pop(0))

    def start(needed: int) -> None:
        """Start the buckets that fit beside the computation of the needed one, and that one in any case."""
        nonlocal held
        while waiting:
            # The peak if `first` starts now: while the needed one computes, or while `first` itself starts.
            first = waiting[0]
            more = 0
            if first != needed:
                more = memory[first].gathering + max(0, largest - sum(memory[one].scattering for one in unfinished))
            most = max(held_at_work(needed) + more, held + memory[first].starting)
            fits = budget is None or most <= budget
            # Make room by finishing an old bucket, but not the last one computed, whose message may still be under way.
            if not fits and unfinished and (needed in waiting or unfinished[0] < needed - 1):
                finish()
            elif fits or needed in waiting:
                schedule.append(waiting.pop(0))
                held += memory[first].gathering
            else:
                return

    # First messages start before the work without collectives, which hides them.
    if comm_order:
        start(0)
    schedule.append(None)
    # Then bucket by bucket: start ahead, make room, compute.
    for number in range(len(comm_order)):
        start(number)
        while unfinished and budget is not None and held_at_work(number) > budget:
            finish()
        schedule.append(number)
        unfinished.append(number)
        # Its first message is used up, its second is under way.
        held += memory[number].scattering - memory[number].gathering
    return schedule + unfinished


def filter_schedule(schedule: Schedule, kept: Sequence[int]) -> Schedule:
    """Return the schedule of some of the buckets, given their numbers in ascending order; they become 0, 1, ..."""
    # Buckets of groups that are not due in a step drop out; the others keep their order, as on all ranks.
    new = {number: place for place, number in enumerate(kept)}
    order = [None if number is None else new[number] for number in schedule if number is None or number in new]
    if kept and order[0] is None:
        # The bucket that was to start first is left out: the next one starts before the work without collectives.
        order[:2] = order[1::-1]
    return order


def overlapping_bytes(memory: Sequence[PhaseBytes], schedule: Schedule, local_bytes: int) -> int:
    """Return the peak of temporary memory, in bytes, of a step that follows the schedule.

    Args:
        memory: the bytes of each bucket with collectives, in the order in which they are computed.
        schedule: their schedule.
        local_bytes: the most bytes that one of the other buckets needs; they run one after the other, beside the
            messages that are under way then.
    """
    begun = [0] * len(memory)  # phases that each bucket has begun
    peak = held = 0
    # Follow the schedule and add up the bytes that buckets hold between their phases.
    for number in schedule:
        if number is None:
            peak = max(peak, held + local_bytes)
            continue
        of_bucket = memory[number]
        # The bucket starts, is computed, or is finished.
        if begun[number] == 0:
            peak = max(peak, held + of_bucket.starting)
            held += of_bucket.gathering
        elif begun[number] == 1:
            held -= of_bucket.gathering
            peak = max(peak, held + of_bucket.working)
            held += of_bucket.scattering
        else:
            held -= of_bucket.scattering
            peak = max(peak, held + of_bucket.finishing)
        begun[number] += 1
        peak = max(peak, held)
    return peak
