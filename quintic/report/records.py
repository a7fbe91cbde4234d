"""`wrong_in` validates records of the metrics log when they are read; `history` documents their fields."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__all__ = ["wrong_in"]

_TEXTS = ("kind", "name", "time", "command", "repeat", "code", "on_spike")
_COUNTS = ("step", "total_steps", "steps_before", "spike_step", "least_bpb_step", "epoch", "stage", "ranks")
_NUMBERS = (
    "tokens", "seconds", "loss", "bpb", "bpb_stderr", "core", "core_stderr", "lr_multiplier", "momentum",
    "weight_decay", "tokens_per_second", "smoothed_loss", "least_loss", "least_bpb", "flops", "mfu",
    "peak_memory_bytes", "grad_norm", "spike", "first_step_extra_seconds", "compile_seconds", "warmup_seconds",
)  # fmt: skip
_NUMBERS_BY_NAME = (
    "lr",
    "times_ms",
    "grad_rms",
    "update_rms",
    "baselines",
    "breakdown",
    "centred",
    "accuracy",
    "epochs",
)
_LISTS = ("document_nats", "document_bytes")
_MAPPINGS = ("config", "machine", "versions", "git", "model", "data", "track")
_STEPPED_KINDS = ("train", "eval", "core", "sample", "resume", "rollback")

# Largest integer, far beyond any run: all integers up to it are floats, as drawing needs, while JSON has no limit.
_MOST = 2**53
# Largest depth of nested mappings and lists.
_DEEPEST = 64
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def wrong_in(record: Mapping[str, Any], line: bytes) -> str | None:
    """Describe the first field of the wrong type, such as `"loss" is not a number`; None if all fields are right.

    Unknown fields may hold any value. None stands for a missing value, except for a step.

    Args:
        record: the record.
        line: the line of the file with the record.
    """
    # Most records need no walk: the number of brackets bounds the depth, and without escapes there are no surrogates.
    if line.count(b"{") + line.count(b"[") > _DEEPEST and _depth(record) > _DEEPEST:
        return f"it is nested more than {_DEEPEST} levels deep"
    if b"\\u" in line and any(_HALF_CHARACTER.search(text) for text in _texts(record)):
        return "a text in it has half of a character (a lone surrogate)"
    if record.get("step", None if record.get("kind") in _STEPPED_KINDS else 0) is None:
        return 'it has no "step"'
    # Unknown names match none of the tables.
    for name, value in record.items():
        if value is None:
            continue
        if name in _TEXTS and not isinstance(value, str):
            return f'"{name}" is not a text'
        if name in _COUNTS and not (_is_number(value) and isinstance(value, int) and value >= 0):
            return f'"{name}" is not a count'
        if name in _NUMBERS and not _is_number(value):
            return f'"{name}" is not a number'
        if name in _NUMBERS_BY_NAME and not (isinstance(value, Mapping) and all(map(_is_entry, value.values()))):
            return f'"{name}" does not hold numbers by name'
        if name in _MAPPINGS and not isinstance(value, Mapping):
            return f'"{name}" does not hold values by name'
        if name in _LISTS and not (isinstance(value, list) and all(map(_is_entry, value))):
            return f'"{name}" is not a list of numbers'
        if name == "missing" and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            return '"missing" is not a list of texts'
        if name == "samples" and not (isinstance(value, list) and all(isinstance(item, Mapping) for item in value)):
            return '"samples" is not a list of samples'
    return None


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= _MOST


def _is_entry(value: Any) -> bool:
    return value is None or _is_number(value)


def _depth(record: Mapping[str, Any]) -> int:
    """Return the number of levels of mappings and lists, counted without recursion."""
    depth = 0
    level: list[Any] = [record]
    while level:
        depth += 1
        level = [inner for outer in level for inner in _inner(outer) if isinstance(inner, Mapping | list)]
    return depth


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield all strings and names in a record."""
    level: list[Any] = [record]
    while level:
        yield from (item for item in level if isinstance(item, str))
        yield from (name for item in level if isinstance(item, Mapping) for name in item)
        level = [inner for item in level for inner in _inner(item)]


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()
