"""Limits of options, declared beside the types of their fields, and the names of options in messages."""

import math
import re
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

from quintic.errors import ConfigError

__all__ = [
    "Average",
    "Count",
    "Fraction",
    "Limit",
    "Limited",
    "NotNegative",
    "Positive",
    "Whole",
    "at_least",
    "at_most",
    "check",
    "in_options",
    "metadata_of",
    "option_of",
]


class Limit(NamedTuple):
    """A limit of an option's values, as `Annotated[int, limit]`; None, where a field may have it, is always allowed."""

    words: str
    allows: Callable[[Any], bool]


def at_least(least: int) -> Limit:
    """Return a lower limit."""
    return Limit(f"must be at least {least}", lambda value: value >= least)


def at_most(most: int) -> Limit:
    """Return an upper limit."""
    return Limit(f"must be at most {most:,}", lambda value: value <= most)


Count = Annotated[int, at_least(1)]
Whole = Annotated[int, at_least(0)]
Positive = Annotated[float, Limit("must be above 0 and finite", lambda value: 0 < value < math.inf)]
NotNegative = Annotated[float, Limit("must be at least 0 and finite", lambda value: 0 <= value < math.inf)]
Fraction = Annotated[float, Limit("must lie between 0 and 1", lambda value: 0 <= value <= 1)]
Average = Annotated[float, Limit("must be at least 0 and below 1", lambda value: 0 <= value < 1)]


class Limited:
    """Base of a dataclass whose fields are options: a value outside its field's limits raises a ConfigError."""

    def __post_init__(self) -> None:
        """Check the limits."""
        for name, limit in metadata_of(type(self)):
            if isinstance(limit, Limit):
                check(name, getattr(self, name), limit)


def check(name: str, value: Any, *limits: Limit) -> None:
    """Raise a ConfigError that names the option of a field if its value is outside a limit."""
    for limit in limits:
        if value is not None and not limit.allows(value):
            raise ConfigError(f"{option_of(name)} {value!r}: {limit.words}")


def metadata_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the limits and marks that a dataclass declares with `Annotated`, each with the name of its field."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        parts = [hint]
        for part in parts:  # in a union such as `Count | None`, one of the types has a limit
            yield from ((name, found) for found in getattr(part, "__metadata__", ()))
            parts += typing.get_args(part)


def option_of(name: str) -> str:
    """Return the option of a field."""
    return "--" + name.replace("_", "-")


def in_options(error: ValueError) -> str:
    """Return a library's message with arguments written as options: "top_k=0: ..." becomes "--top-k 0: ..."."""
    return re.sub(r"\b([a-z]\w*)=(?:'([^']+)')?", lambda match: f"{option_of(match[1])} {match[2] or ''}", str(error))
