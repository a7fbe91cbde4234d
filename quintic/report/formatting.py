"""Formats numbers, times and names for readers."""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any

__all__ = ["date", "duration", "flatten", "format_si", "humanize", "large_number", "value_text"]

_NO_BREAK = "\u00a0"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

# Field names of the log for which the name with spaces is not clear, or that need a unit.
_WORDS = {
    "matrix_parameters": "parameters in weight matrices",
    "parameters_scalars": "parameters that are scalars, outside of the blocks",
    "flops_per_token": "floating-point operations per token",
    "width": "width (numbers per token)",
    "heads": "attention heads",
    "cores": "processor cores",
    "cpu": "processor",
    "gpu": "GPU",
    "memory_gb": "memory (GB)",
    "dtype": "number format (dtype)",
    "fp8": "8-bit matrix products",
    "matrix_flops_per_second": "floating-point operations per second in matrix products",
    "system": "operating system",
    "dirty": "uncommitted changes",
    "code": "SHA-256 of the source files",
    "untracked": "files that git does not know",
    "num_untracked": "number of files that git does not know",
    "diff_bytes": "bytes of changes",
    "path": "folder",
    "key": "fingerprint",
    "vocab_size": "vocabulary (tokens)",
    "bytes_per_token": "bytes per token",
}
# The first one that a name begins with counts.
_PREFIXES = {"parameters_": "parameters in ", "train_": "training ", "val_": "validation ", "": ""}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested mappings, with their names joined by dots."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def humanize(name: str) -> str:
    """Return a field's name in words: "parameters in value embeddings" for `parameters_value_embeddings`."""
    prefix = next(prefix for prefix in _PREFIXES if name.startswith(prefix))
    return _WORDS.get(name) or _PREFIXES[prefix] + name.removeprefix(prefix).replace("_", " ")


def value_text(value: Any) -> str:
    """Return a setting's value as text: "yes" or "no" for booleans, large numbers with separators or in words."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and value >= 1e9:
        return large_number(value)
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    return "–" if value is None else json.dumps(value, ensure_ascii=False)


def date(time: str) -> str:
    """Return an ISO time in a readable form; any other text unchanged."""
    try:
        moment = datetime.fromisoformat(time)
    except ValueError:
        return time
    return f"{moment:%Y-%m-%d at %H:%M} {moment.tzname() or ''}".rstrip()


def duration(seconds: float) -> str:
    """Return a duration with at most two units, without line breaks: 4.2 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    rest = round(seconds)
    for (unit, size), (small_unit, small_size) in pairwise(units):
        if rest >= size:
            small = rest % size // small_size
            words = f"{rest // size} {unit} {small} {small_unit}" if small else f"{rest // size} {unit}"
            return words.replace(" ", _NO_BREAK)
    return f"{seconds:.3g}{_NO_BREAK}s"


def large_number(value: float) -> str:
    """Return a count in words: 950, 12,300, 124.4 million, 2.5 billion, 1.25 × 10¹⁸."""
    if value >= 1e15:
        return " × ".join(_mantissa_and_power(value)).replace(" ", _NO_BREAK)
    for limit, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= limit:
            return f"{value / limit:.4g}{_NO_BREAK}{word}"
    return f"{value:,.0f}"


def format_si(value: float) -> str:
    """Return a short number for an axis: 1.5K for 1,500, 2M for two million, 3B for three (American) billion, 10⁻⁴."""
    if value != 0 and abs(value) < 1e-3:
        return "·".join(_mantissa_and_power(value)).removeprefix("1·")
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}" if abs(value) < 1000 * limit else f"{value / limit:,.0f}{suffix}"
    return f"{value:.4g}"


def _mantissa_and_power(value: float) -> tuple[str, str]:
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}", "10" + str(int(exponent)).translate(_SUPERSCRIPTS)
