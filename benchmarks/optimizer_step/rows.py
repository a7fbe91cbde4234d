"""Measurements as rows of JSON: the key of a row, and merging the rows of many ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.results import spread


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key that identifies a row."""
    names = ("set", "dtype", "contestant", *(("layout", "ranks") if "layout" in row else ()))
    return tuple(row[name] for name in names)


def merge_ranks(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for those of all ranks.

    Args:
        rows: of the ranks in order. Of `times`, lists of milliseconds, each step counts with the slowest rank's; of
            `worst` the largest value counts, and of `of_ranks` all are kept. The part is that of a rank that failed.
            Of the rest the first rank's counts.
    """
    if len(rows) == 1 and "times" not in rows[0]:
        return rows[0]
    row = {name: value for name, value in rows[0].items() if name not in ("times", "worst", "of_ranks")}
    row |= next(({"part": one["part"]} for one in rows if "error" in one and "part" in one), {})
    for name in ("error", "graph_error"):
        told = [(one.get("when", float("inf")), rank, one[name]) for rank, one in enumerate(rows) if name in one]
        if told:
            row[name] = _one_message(sorted(told), len(rows))
    times = [one.get("times", {}) for one in rows]
    for kind in times[0]:
        if all(kind in of_rank for of_rank in times):
            row[kind] = spread([max(step) for step in zip(*(of_rank[kind] for of_rank in times), strict=True)])
    worst, kept = [one.get("worst", {}) for one in rows], [one.get("of_ranks", {}) for one in rows]
    row |= {name: max(one[name] for one in worst) for name in worst[0] if all(name in one for one in worst)}
    row |= {name: [one[name] for one in kept] for name in kept[0] if all(name in one for one in kept)}
    return row


def _one_message(told: Sequence[tuple[float, int, str]], num_ranks: int) -> str:
    """Join the messages of the ranks, the first to fail first; one message if they agree."""
    messages = {text for _, _, text in told}
    if len(told) == num_ranks and len(messages) == 1:
        return messages.pop()
    return "; ".join(f"rank {rank}: {text}" for _, rank, text in told)
