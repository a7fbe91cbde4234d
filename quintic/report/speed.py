"""`about_speed` returns the speed of a run for its page: tokens per second, and how a step's time is divided."""

import statistics
from collections.abc import Mapping
from typing import Any

from quintic.report.charts import curve_of, line_chart
from quintic.report.formatting import finite
from quintic.report.history import RunHistory

__all__ = ["about_speed"]

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
