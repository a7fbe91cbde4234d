"""`wrong_in` finds a field of the wrong type in a record of the metrics log, when the log is read."""

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["wrong_in"]

_STEPPED_KINDS = ("train", "eval", "core", "sample", "resume", "rollback")

# Largest integer, far beyond any run: all integers up to it are floats, as drawing needs, while JSON has no limit.
_MOST = 2**53


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST)


def _is_entry(value: Any) -> bool:
    return value is None or _is_number(value)


_CHECKS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("is not a text", lambda value: isinstance(value, str), "kind name time command repeat code on_spike"),
    (
        "is not a count",
        lambda value: isinstance(value, int) and _is_number(value) and value >= 0,
        "step total_steps steps_before spike_step least_bpb_step epoch stage ranks",
    ),
    (
        "is not a number",
        _is_number,
        "tokens seconds loss bpb bpb_stderr core core_stderr lr_multiplier momentum weight_decay tokens_per_second "
        "smoothed_loss least_loss least_bpb flops mfu peak_memory_bytes grad_norm spike first_step_extra_seconds "
        "compile_seconds warmup_seconds",
    ),
    (
        "does not hold numbers by name",
        lambda value: isinstance(value, Mapping) and all(map(_is_entry, value.values())),
        "lr times_ms grad_rms update_rms baselines breakdown centred accuracy epochs",
    ),
    (
        "does not hold values by name",
        lambda value: isinstance(value, Mapping),
        "config machine versions git model data track",
    ),
    (
        "is not a list of numbers",
        lambda value: isinstance(value, list) and all(map(_is_entry, value)),
        "document_nats document_bytes",
    ),
    (
        "is not a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
        "missing",
    ),
    (
        "is not a list of samples",
        lambda value: isinstance(value, list) and all(isinstance(item, Mapping) for item in value),
        "samples",
    ),
)
_CHECK_OF = {name: (words, check) for words, check, names in _CHECKS for name in names.split()}


def wrong_in(record: Mapping[str, Any]) -> str | None:
    """Describe the first field of the wrong type, such as `"loss" is not a number`; None if all fields are right.

    Unknown fields may hold any value. None stands for a missing value, except for a step.
    """
    if record.get("step", None if record.get("kind") in _STEPPED_KINDS else 0) is None:
        return 'it has no "step"'
    for name, value in record.items():
        words, check = _CHECK_OF.get(name, ("", None))
        if value is not None and check is not None and not check(value):
            return f'"{name}" {words}'
    return None
