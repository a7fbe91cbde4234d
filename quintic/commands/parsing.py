"""Reading command-line options into dataclasses, with one-line messages for mistakes.

The fields of a dataclass, and of the dataclasses nested in it, are the options; tyro writes `--help` from them and
their docstrings. tyro's own messages are boxes of many lines about Python types, so the words are read here. The types
of fields that are known are str, int, float, bool, Path, Literal, tuple of str, and unions of these with None.
"""

import contextlib
import dataclasses
import difflib
import re
import shutil
import textwrap
import types
import typing
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from quintic.errors import ConfigError
from quintic.limits import option_of

__all__ = ["asks_help", "options_of", "parse", "print_help", "read_options"]

T = TypeVar("T")

# The types of values in words.
_TYPES: Mapping[Any, str] = {str: "a text", int: "a whole number", float: "a number", Path: "a path"}


def parse(kind: type[T], arguments: list[str], command: str, description: str | None = None) -> T:
    """Return the options as an instance of a dataclass, whose docstring is the help's first paragraph without another.

    Raises:
        ConfigError: an option is unknown or missing, or its value has the wrong type or is out of range.
        SystemExit: after `--help`.
    """
    if asks_help(arguments):
        print_help(kind, command, description or str(kind.__doc__))
    given = read_options(options_of(kind), arguments, command)
    for f in dataclasses.fields(typing.cast(Any, kind)):
        if f.name not in given and f.default is f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{option_of(f.name)} is needed (see quintic {command} --help)")
    return kind(**given)


def options_of(*kinds: Any) -> dict[str, Any]:
    """Return the options of dataclasses, and of the dataclasses nested in them, with the types of their fields."""
    options: dict[str, Any] = {}
    for name, hint in (item for kind in kinds for item in typing.get_type_hints(kind).items()):
        if dataclasses.is_dataclass(hint):
            options |= options_of(hint)
        else:
            options[option_of(name)] = hint
            if _is_switch(hint):
                options[option_of(f"no_{name}")] = hint
    return options


def read_options(
    options: Mapping[str, Any], arguments: list[str], command: str, unavailable: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Return the values of the options that are given, by the names of their fields; the last one counts.

    Args:
        options: option -> type of its field.
        arguments: the command line after the command's name.
        command: the command's name, for messages.
        unavailable: option that the command only has together with others -> the message, after the option's name.

    Raises:
        ConfigError: describes the first mistake in one line.
    """
    given: dict[str, Any] = {}
    # `texts` is the previous option if it takes any number of texts: "-x" after it may be meant as one of them.
    words, texts = deque(arguments), ""
    while words:
        word = words.popleft()
        typed, has_value, value = word.partition("=")
        option = typed.replace("_", "-")
        if not option.startswith("--"):
            raise ConfigError(f"{typed!r} is not an option; options begin with -- (see quintic {command} --help)")
        if option not in options:
            if option in unavailable:
                raise ConfigError(f"{option} {unavailable[option]}")
            # Compare without the dashes, which would make all options similar.
            nearest = difflib.get_close_matches(option[2:], [name[2:] for name in options], n=1)
            hint = f"did you mean --{nearest[0]}?" if nearest else f"quintic {command} --help lists the options"
            if texts:
                hint += f"; if it is a text for {texts}, write {texts}={word}"
            raise ConfigError(f"unknown option {typed}: {hint}")
        # The values: after "=", or all arguments up to the next option.
        values = [value] if has_value else []
        while not has_value and words and not words[0].startswith("--"):
            values.append(words.popleft())
        hint = options[option]
        is_off = _is_switch(hint) and option.startswith("--no-")
        name = option.removeprefix("--no-" if is_off else "--").replace("-", "_")
        # "-5" and "-.5" are numbers; "-x" is more likely a mistaken option.
        dashed = [value for value in values if re.match(r"-[^\W\d_]", value) and not re.fullmatch("-(inf|nan)", value)]
        if dashed and not has_value and hint is not bool:
            raise ConfigError(f"{option} {dashed[0]}: for a value that begins with a dash write {option}={dashed[0]}")
        texts = option if typing.get_origin(hint) is tuple else ""
        if texts and not values:
            how = f"; write {option}={words[0]} if that is the text" if words else ""
            raise ConfigError(f"{option} needs a value: a text{how}")
        if _is_switch(hint) and not values:
            given[name] = not is_off
        elif is_off or hint is bool:
            raise ConfigError(f"{option} takes no value, but {values[0]!r} follows it")
        else:
            given[name] = tuple(values) if texts else _only_value(option, values, hint)
    return given


def _members(hint: Any) -> list[Any]:
    """Return the types of a field's values; in place of bool, None and a Literal, the values themselves."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return [member for part in typing.get_args(hint) for member in _members(part)]
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    if hint is bool:
        return [True, False]
    return [None if hint is types.NoneType else hint]


def _is_switch(hint: Any) -> bool:
    """Return whether an option needs no value: on with `--x`, off with `--no-x`; None may leave it to the command."""
    return True in _members(hint)


def _only_value(option: str, values: list[str], hint: Any) -> Any:
    """Return the value of an option that takes exactly one of its type."""
    members = _members(hint)
    expected = " or ".join(_TYPES.get(member, str(member)) for member in members)
    if not values:
        raise ConfigError(f"{option} needs a value: {expected}")
    if len(values) > 1:
        raise ConfigError(f"{option} takes one value, but {values[1]!r} follows it; quote a value that has spaces")
    if not values[0]:
        raise ConfigError(f"{option} '': the value is empty; give {expected} or leave {option} out")
    named = {str(member): member for member in members if member not in _TYPES}
    if values[0] in named:
        return named[values[0]]
    for kind in (member for member in members if member in _TYPES):
        with contextlib.suppress(ValueError):
            return kind(values[0])
    raise ConfigError(f"{option} {values[0]}: give {expected}")


def asks_help(arguments: list[str]) -> bool:
    """Return whether the help is asked for; other options are then only read for the defaults that it shows."""
    return "-h" in arguments or "--help" in arguments


def print_help(kind: Any, command: str, description: str, default: Any = None) -> NoReturn:
    """Print a description and the options of a dataclass with their defaults, and end the command."""
    import tyro

    # Printed here because tyro would not wrap it.
    for paragraph in description.split("\n\n"):
        print(textwrap.fill(paragraph, shutil.get_terminal_size().columns), end="\n\n")
    options: dict[str, Any] = {} if default is None else {"default": default}
    tyro.cli(
        kind, prog=f"quintic {command}", description="", args=["--help"], config=(tyro.conf.OmitArgPrefixes,), **options
    )
    raise SystemExit(0)  # as tyro has done already
