"""The values that an option may have: a check, and words for them in messages and in the manual."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from quintic.optim.numeric.numbers import is_count, is_number

__all__ = ["Values", "count", "number", "number_pair", "numbers_per_matrix", "one_of", "or_none", "tie"]


class Values(NamedTuple):
    """The values of one option. Options that must fit each other, or the parameters, are checked in `validate.py`."""

    text: str
    """As in "lr=-1 must be a number of at least 0"."""
    accepts: Callable[[Any], bool] = lambda value: True


def one_of(*choices: object) -> Values:
    """Return a fixed set of values."""
    # `in` compares by equality: 0 and 1 pass for False and True.
    return Values(" or ".join(map(repr, choices)), choices.__contains__)


def number(*, below: float | None = None, slack: float = 0.0) -> Values:
    """Return numbers of at least 0, less a rounding error of `slack`; Python's, NumPy's, or tensors of one entry."""
    if below is None:
        return Values("a number of at least 0", lambda value: is_number(value, -slack))
    return Values(f"a number in [0, {below})", lambda value: is_number(value, -slack, below))


def number_pair(example: str) -> Values:
    """Return pairs of averaging coefficients; messages show an example."""
    return Values(f"two numbers in [0, 1), such as {example}", _is_pair_below_1)


def count(text: str = "an integer of at least 1") -> Values:
    """Return integers of at least 1, with other words for them."""
    return Values(text, is_count)


def numbers_per_matrix() -> Values:
    """Return sequences of finite numbers, as many as a parameter of the group has matrices."""
    return Values("finite numbers, one for each matrix", _are_numbers)


def tie() -> Values:
    """Return the (name, transposed) pairs that `Muon.tie` sets."""
    return Values("the name of a parameter and whether it is stored transposed", _is_tie)


def or_none(values: Values, *, none_first: bool = False) -> Values:
    """Return values and None; the text begins or ends with None."""
    text = f"None, or {values.text}" if none_first else f"{values.text}, or None"
    return Values(text, lambda value: value is None or values.accepts(value))


def _is_pair_below_1(value: Any) -> bool:
    # Checkpoints make lists of tuples.
    return isinstance(value, tuple | list) and len(value) == 2 and all(is_number(entry, 0, 1) for entry in value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, Iterable) and all(map(is_number, value))


def _is_tie(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], str)
