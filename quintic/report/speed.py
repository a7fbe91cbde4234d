"""The speed of a run for its page, and whether the speeds of two runs differ by more than their optimizers explain."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from quintic.report.charts import curve_of, line_chart
from quintic.report.history import RunHistory

__all__ = ["about_speed", "unequal_speed"]

# Forward and backward passes of the same model differ by less than this on a machine that does nothing else.
_MOST_UNEQUAL = 1.5

_PHASES = {
    "data": "waiting for data",
    "forward_backward": "forward and backward pass (predicting, and computing the gradients)",
    "optimizer": "optimizer (changing the weights)",
}


def about_speed(history: RunHistory) -> dict[str, Any]:
    """Return ``chart`` and ``median`` of tokens per second, ``step`` (milliseconds) and ``shares`` of its phases."""
    curve = curve_of(history.train, "step", "tokens_per_second", label="", noisy=True, look=2)
    speeds = [point.y for piece in curve.pieces for point in piece]
    times = _times(history)
    return {
        "chart": line_chart([curve], title="Tokens per second", low=0.0) if speeds else None,
        "median": statistics.median(speeds) if speeds else None,
        "step": statistics.median(sum(phases.values()) for phases in times) if times else None,
        "shares": [(label, f"{100 * share:.1f} %", share, 0, 0) for label, share in _time_shares(times)],
    }


def unequal_speed(runs: Sequence[RunHistory]) -> float | None:
    """Return how many times as long the slowest run's forward and backward passes took as the fastest one's.

    The passes do not depend on the optimizer. If the same model needs much longer for them, something else slowed it,
    such as other programs, and the runs' times cannot be compared.

    Returns:
        The ratio if it is above 1.5; None if it is less, the models differ, or the passes were not timed.
    """
    if len({history.run["model"].get("flops_per_token") for history in runs}) > 1:
        return None
    seconds = []
    for history in runs:
        passes = [times["forward_backward"] for times in _times(history) if "forward_backward" in times]
        tokens = history.train[-1].get("tokens") if history.train else None
        if not passes or not tokens:
            return None
        # The first step of a compiled run takes long for another reason.
        seconds.append(statistics.mean(passes[1:] or passes) * history.train[-1]["step"] / tokens)
    ratio = max(seconds) / min(seconds) if min(seconds) > 0 else 1.0
    return ratio if ratio > _MOST_UNEQUAL else None


def _time_shares(times: Sequence[Mapping[str, float]]) -> list[tuple[str, float]]:
    """Return the fraction of the steps' time in each phase; nothing without any time."""
    sums = {words: sum(phases.get(name, 0.0) for phases in times) for name, words in _PHASES.items()}
    total = sum(sums.values())
    return [(words, size / total) for words, size in sums.items()] if total > 0 else []


def _times(history: RunHistory) -> list[Mapping[str, float]]:
    """Return the milliseconds of each phase, for the steps that have them all."""
    records = [record["times_ms"] for record in history.train if record.get("times_ms")]
    return [times for times in records if all(value is not None for value in times.values())]
