"""The order in which a step's collectives begin and end, the same on all ranks that take part in them.

A bucket with collectives is stepped in three parts: it starts, gathering; it is worked on, and its results start on
their way to all ranks; it is finished. Ranks that run two collectives of a process group in different orders wait for
each other forever. So the order of one process group's buckets follows from these buckets alone, not from what else a
rank has to do, and process groups come in the same order everywhere.
"""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "NO_STAGES",
    "Schedule",
    "Stages",
    "filter_schedule",
    "overlapping",
    "overlapping_bytes",
    "prefetch_one_schedule",
]

Schedule = Sequence[int | None]
"""Numbers of steps: each makes the step go on to its next part, of three. None stands for work without collectives."""


class Stages(NamedTuple):
    """Bytes that a bucket with collectives holds on this rank, by stage; neighbours overlap."""

    gathering: int
    """Once it has started, until its gather is over."""
    computing: int
    """Then, until its updates are there."""
    updates: int
    """Bytes that go from there into the last stage."""
    scattering: int
    """From then until it is finished."""
    starting: int = 0
    """While it starts, if that is more than what it has then."""
    finishing: int = 0
    """While it is finished, if that is more than what it had."""

    @property
    def working(self) -> int:
        """Return the most from when it is worked on until its last stage has begun."""
        return max(self.gathering, self.computing, self.updates + self.scattering)

    @property
    def most(self) -> int:
        """Return the most at any time."""
        return max(self.starting, self.working, self.finishing)


NO_STAGES = Stages(0, 0, 0, 0)


def prefetch_one_schedule(count: int) -> list[int | None]:
    """Return a schedule in which each step starts before, and is finished after, the work on a neighbour."""
    schedule: list[int | None] = [*range(min(count, 1)), None]
    for number in range(count):
        schedule += [*range(number + 1, min(number + 2, count)), number, *range(max(number - 1, 0), number)]
    return [*schedule, *range(max(count - 1, 0), count)]


def overlapping(comm_order: Sequence[int], memory: Sequence[Stages], budget: int | None) -> list[int | None]:
    """Return a schedule that starts steps as early, and finishes them as late, as memory allows.

    What waits for a collective keeps the device from other work: so that is put off until the next step has been worked
    on at least, if memory allows that. Steps start in the launch order, and are worked on in that of their numbers. The
    budget, in bytes, is exceeded only for the step that is worked on next; None for no bound.
    """
    schedule: list[int | None] = []
    waiting = list(comm_order)
    unfinished: list[int] = []
    held = 0
    # What starts ahead leaves room for the results of the step before, which shall not be waited for.
    largest = max((one.scattering for one in memory), default=0)

    def held_at_work(number: int) -> int:
        """Return the bytes held while this bucket computes."""
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

    if comm_order:
        start(0)
    schedule.append(None)
    for number in range(len(comm_order)):
        start(number)
        while unfinished and budget is not None and held_at_work(number) > budget:
            finish()
        schedule.append(number)
        unfinished.append(number)
        held += memory[number].scattering - memory[number].gathering
    return schedule + unfinished


def filter_schedule(schedule: Schedule, kept: Sequence[int]) -> Schedule:
    """Return the schedule of some of the steps, by their numbers in ascending order, whose new numbers are 0, 1, ..."""
    new = {number: place for place, number in enumerate(kept)}
    order = [None if number is None else new[number] for number in schedule if number is None or number in new]
    if kept and order[0] is None:
        # What was to start first is left out.
        order[:2] = order[1::-1]
    return order


def overlapping_bytes(stages: Sequence[Stages], schedule: Schedule, local_bytes: int) -> int:
    """Return the most temporary memory at a time of buckets with collectives, in the order in which they are worked on.

    The others, each of which needs at most `local_bytes` bytes, run one after the other, while some of these are being
    gathered and some scattered.
    """
    parts = [0] * len(stages)
    peak = held = 0
    for number in schedule:
        if number is None:
            peak = max(peak, held + local_bytes)
            continue
        stage = stages[number]
        if parts[number] == 0:
            peak = max(peak, held + stage.starting)
            held += stage.gathering
        elif parts[number] == 1:
            held -= stage.gathering
            peak = max(peak, held + stage.working)
            held += stage.scattering
        else:
            held -= stage.scattering
            peak = max(peak, held + stage.finishing)
        parts[number] += 1
        peak = max(peak, held)
    return peak
