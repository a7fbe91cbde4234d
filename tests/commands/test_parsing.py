"""Reading options: the words of a command line as values of a dataclass's fields."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from quintic.commands.parsing import parse
from quintic.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Every:
    """One option of each type."""

    name: str
    count: int = 1
    rate: float | None = 0.5
    folder: Path = Path("here")
    kind: Literal["a", "b"] | None = None
    texts: tuple[str, ...] = ()
    flag: bool = False
    is_on: bool | None = None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--count 3", {"count": 3}),
        ("--count=-3", {"count": -3}),
        ("--count -3 --count 4", {"count": 4}),  # the last one counts
        ("--rate 1e3", {"rate": 1000.0}),
        ("--rate -.5", {"rate": -0.5}),
        ("--rate -inf", {"rate": float("-inf")}),
        ("--rate None", {"rate": None}),
        ("--folder None", {"folder": Path("None")}),
        ("--kind b", {"kind": "b"}),
        ("--kind b --kind None", {"kind": None}),
        ("--texts a b=c --flag", {"texts": ("a", "b=c"), "flag": True}),
        ("--texts=--a", {"texts": ("--a",)}),
        ("--flag --no-flag", {"flag": False}),
        ("--is_on", {"is_on": True}),
        ("--no-is-on --count 2", {"is_on": False, "count": 2}),
        ("--is-on False", {"is_on": False}),
        ("--is-on --is-on None", {"is_on": None}),
    ],
)
def test_words_become_values(words: str, expected: dict[str, Any]) -> None:
    assert parse(Every, ["--name", "x", *words.split()], "test") == Every(name="x", **expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--count 3", "--name is needed (see quintic test --help)"),
        ("--name x --count 1.5", "--count 1.5: give a whole number"),
        ("--name x --kind c", "--kind c: give a or b or None"),
        ("--name x --is-on maybe", "--is-on maybe: give True or False or None"),
        ("--name x --no-is-on False", "--no-is-on takes no value, but 'False' follows it"),
        ("--name x --flag True", "--flag takes no value, but 'True' follows it"),
        ("--name x --no-count", "unknown option --no-count: did you mean --count?"),
        ("x", "'x' is not an option; options begin with -- (see quintic test --help)"),
    ],
)
def test_words_that_fit_no_field_are_named(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Every, words.split(), "test")
    assert str(caught.value) == message
