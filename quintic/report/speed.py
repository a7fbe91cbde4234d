"""The speed of a run for its page, and whether the speeds of two runs differ by more than their optimizers explain."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from quintic.report.charts import curve_of, line_chart
from quintic.report.formatting import finite
from quintic.report.history import RunHistory

__all__ = ["about_speed", "unequal_speed"]

# Forward and backward passes of the same model differ by less than this on a machine that does nothing else.
_MOST_UNEQUAL = 1.5

_PHASES = (
    ("data", "waiting for data"),
    ("forward_backward", "forward and backward pass (predicting, and computing the gradients)"),
    ("optimizer", "optimizer (changing the weights)"),
)


def about_speed(history: RunHistory) -> dict[str, Any]:
    """Return ``chart``, ``median`` (tokens per second), ``shares``, ``step`` (milliseconds) and ``steady``."""
    curve = curve_of(history.train, "step", "tokens_per_second", label="measured", style="noisy", look=2)
    known = [speed for speed in curve.y if speed is not None]
    chart = line_chart([curve], title="Tokens per second", y_label="tokens per second", y_limits=(0.0, None))
    times = [sum(record["times_ms"].values()) for record in history.train if _is_timed(record)]
    return {
        "chart": chart if known else None,
        "median": statistics.median(known) if known else None,
        "shares": [(label, f"{100 * share:.1f} %", share, 0, 0) for label, share in _time_shares(history)],
        "step": statistics.median(times) if times else None,
        "steady": _steady(history),
    }


def unequal_speed(runs: Sequence[RunHistory]) -> float | None:
    """Return how many times as long the slowest run's forward and backward passes took as the fastest one's.

    The passes do not depend on the optimizer. If the same model needs much longer for them, something else slowed it,
    such as other programs, and the runs' times cannot be compared.

    Returns:
        The ratio if it is above 1.5; None if it is less, the models differ, or the passes were not timed.
    """
    if len({(history.run.get("model") or {}).get("flops_per_token") for history in runs}) > 1:
        return None
    seconds = []
    for history in runs:
        timed = [record for record in history.train if _is_timed(record) and finite(record.get("tokens"))]
        passes = [finite(record["times_ms"].get("forward_backward")) for record in timed]
        if not timed or None in passes:
            return None
        # The first step of a compiled run takes long for another reason.
        usual = passes[1:] or passes
        tokens_per_step = timed[-1]["tokens"] / timed[-1]["step"]
        seconds.append(statistics.mean(value for value in usual if value is not None) / tokens_per_step)
    ratio = max(seconds) / min(seconds) if min(seconds) > 0 else 1.0
    return ratio if ratio > _MOST_UNEQUAL else None


def _steady(history: RunHistory) -> dict[str, float | None] | None:
    """Return the speed after the first ten steps, the speed of plain matrix products, and the time of the start."""
    final = history.final
    speed, mfu = finite(final.get("tokens_per_second")), finite(final.get("mfu"))
    rate = finite((history.run.get("machine") or {}).get("matrix_flops_per_second"))
    if speed is None or mfu is None or rate is None:
        return None
    extra, compiled = finite(final.get("first_step_extra_seconds")), finite(final.get("compile_seconds"))
    return {"tokens": speed, "mfu": mfu, "rate": rate, "extra": extra, "compiled": compiled}


def _time_shares(history: RunHistory) -> list[tuple[str, float]]:
    """Return the fraction of a step's time in each phase, from the final record or else from the steps so far."""
    breakdown = history.final.get("breakdown") or {}
    shares = {name: finite(breakdown.get(f"{name}_frac")) for name, _ in _PHASES}
    if not any(shares.values()):
        timed = [record["times_ms"] for record in history.train if _is_timed(record)]
        sums = {name: sum(times.get(name) or 0.0 for times in timed) for name, _ in _PHASES}
        total = sum(sums.values())
        if total <= 0:
            return []
        shares = {name: value / total for name, value in sums.items()}
    known = [(label, share) for name, label in _PHASES if (share := shares[name]) is not None]
    # Time outside of the measured phases, unless negligible.
    rest = 1.0 - sum(share for _, share in known)
    return [*known, ("everything else", rest)] if rest > 0.002 else known


def _is_timed(record: Mapping[str, Any]) -> bool:
    times = record.get("times_ms")
    return isinstance(times, Mapping) and all(finite(value) is not None for value in times.values())
