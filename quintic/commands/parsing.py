"""Options of the command line: made from dataclasses, with one-line messages for mistakes.

tyro turns the fields of a dataclass and their docstrings into options and `--help`. Arguments are checked here first,
because tyro's own messages are boxes of many lines that speak of Python types.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

from quintic.errors import ConfigError, QuinticError

__all__ = ["options_of", "parse", "pop_option", "validate_args"]

T = TypeVar("T")


def parse(
    kind: type[T], arguments: list[str], command: str, description: str | None = None, default: T | None = None
) -> T:
    """Return the options, `default` where they are not given; `--help` prints and leaves with `SystemExit`.

    By default the description in the help is the docstring of `kind`.

    Raises:
        ConfigError: an option is unknown, or its value is of the wrong kind or out of range.
    """
    import tyro

    if not any(argument in ("-h", "--help") for argument in arguments):
        validate_args(kind, arguments, command)
    arguments = _expand_switches(arguments, dict(options_of(kind)))
    errors = io.StringIO()
    answer = _CapturedOutput(sys.stdout)
    given: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(answer):
            parsed: T = tyro.cli(
                kind,
                prog=f"quintic {command}",
                description=kind.__doc__ if description is None else description,
                args=arguments,
                config=(tyro.conf.OmitArgPrefixes,),
                **given,
            )
            return parsed
    except SystemExit as stop:
        if stop.code in (0, None):
            print(_wrap_description(answer.getvalue()), end="")  # --help
            raise
        refused: BaseException | None = stop
        while refused is not None and not isinstance(refused, QuinticError):
            refused = refused.__context__
        # Ours, from a dataclass that refused its values; else what tyro says, without its box.
        message = str(refused) if refused is not None else _without_box(errors.getvalue())
        raise ConfigError(message) from None


class _CapturedOutput(io.StringIO):
    """Collects tyro's output, coloured and framed as for the stream that it will be written to."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def isatty(self) -> bool:
        """True if colours make sense."""
        return self._stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # of a stream in memory it is None
        """Decides if frames can be drawn."""
        return self._stream.encoding


def _wrap_description(text: str) -> str:
    """Wrap the lines above the options of a help text, which tyro leaves as they are."""
    # They are in boxes; where frames cannot be drawn, below a heading.
    match = re.search(r"^(?:╭| *options *$)", text, re.MULTILINE)
    above, options = (text[: match.start()], text[match.start() :]) if match else (text, "")
    width = shutil.get_terminal_size().columns
    return "\n\n".join(textwrap.fill(lines, width) for lines in above.split("\n\n")) + options


def options_of(kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield each option and the type of its field; the sections of a configuration are looked into."""
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from options_of(hint)
        else:
            yield "--" + name.replace("_", "-"), hint
            if hint is bool or _is_switch(hint):
                yield "--no-" + name.replace("_", "-"), hint


def _is_switch(hint: Any) -> bool:
    """Return whether an option is on, off, or left to the command."""
    return set(typing.get_args(hint)) == {bool, types.NoneType}


def _expand_switches(arguments: list[str], hints: dict[str, Any]) -> list[str]:
    """Return the arguments with values for switches: `--x True` for `--x`, `--x False` for `--no-x`."""
    words: list[str] = []
    for argument, following in itertools.pairwise([*arguments, "--"]):
        option = argument.replace("_", "-")
        words.append(argument)
        if _is_switch(hints.get(option)) and option.startswith("--no-"):
            words[-1:] = [option.replace("--no-", "--", 1), "False"]
        elif _is_switch(hints.get(option)) and following.startswith("--"):
            words.append("True")
    return words


def validate_args(kind: Any, arguments: list[str], command: str) -> None:
    """Check names of options and types of values, each by itself: no defaults are needed.

    Raises:
        ConfigError: the first wrong argument, in one line.
    """
    hints = dict(options_of(kind))
    arguments = _expand_switches(arguments, hints)
    position, texts = 0, ""
    while position < len(arguments):
        typed, has_value, value = arguments[position].partition("=")
        position += 1
        option = typed.replace("_", "-")
        if not option.startswith("--"):
            raise ConfigError(f"{typed!r} is not an option; options begin with -- (see quintic {command} --help)")
        if option not in hints:
            # Without the dashes, which all options share.
            nearest = difflib.get_close_matches(option[2:], [name[2:] for name in hints], n=1)
            hint = f"did you mean --{nearest[0]}?" if nearest else f"quintic {command} --help lists the options"
            if texts:
                hint += f"; for a text of {texts} that begins with a dash write {texts}={arguments[position - 1]}"
            raise ConfigError(f"unknown option {typed}: {hint}")
        values = [value] if has_value else []
        while not has_value and position < len(arguments) and not arguments[position].startswith("--"):
            values.append(arguments[position])
            position += 1
        dashed = [value for value in values if re.match(r"-[^\W\d_]", value) and not _parses_as(value, float)]
        if dashed and not has_value and hints[option] is not bool:
            raise ConfigError(f"{option} {dashed[0]}: for a value that begins with a dash write {option}={dashed[0]}")
        _check_values(option, values, hints[option])
        texts = option if typing.get_origin(hints[option]) is tuple else ""
        if texts and not values:
            how = f"; one that begins with a dash as {option}={arguments[position]}" if arguments[position:] else ""
            raise ConfigError(f"{option} needs a value: a text{how}")


def _check_values(option: str, values: list[str], hint: Any) -> None:
    if typing.get_origin(hint) is tuple:
        return  # any number of texts
    if hint is bool:
        if values:
            raise ConfigError(f"{option} takes no value, but {values[0]!r} follows it")
        return
    expected = _expected(hint)
    if not values:
        raise ConfigError(f"{option} needs a value: {expected}")
    if len(values) > 1:
        raise ConfigError(f"{option} takes one value, but {values[1]!r} follows it; quote a value that has spaces")
    if not values[0]:
        raise ConfigError(f"{option} '': is empty; give {expected} or leave it out")
    if not _parses_as(values[0], hint):
        raise ConfigError(f"{option} {values[0]}: give {expected}")


def _parses_as(text: str, hint: Any) -> bool:
    """Return whether a text on the command line can be read as a type."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(_parses_as(text, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return text in typing.get_args(hint)
    if hint is types.NoneType:
        return text == "None"
    if hint is bool:
        return text in ("True", "False")
    if hint in (int, float):
        try:
            hint(text)
        except ValueError:
            return False
    return True


def _expected(hint: Any) -> str:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_expected(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return " or ".join(typing.get_args(hint))
    names = {int: "a whole number", float: "a number", bool: "True or False", Path: "a path", types.NoneType: "None"}
    return names.get(hint, "a text")


def pop_option(arguments: list[str], option: str) -> tuple[str | None, list[str]]:
    """Return the value of an option (`--x value` or `--x=value`) and the arguments without it."""
    rest: list[str] = []
    value: str | None = None
    remaining = iter(arguments)
    for argument in remaining:
        name, has_value, text = argument.partition("=")
        if name.replace("_", "-") != option:
            rest.append(argument)
        elif has_value:
            value = text
        else:
            value = next(remaining, None)
            if value is None or value.startswith("--"):
                raise ConfigError(f"{option} needs a value")
    return value, rest


def _without_box(box: str) -> str:
    """Return a boxed message of many lines in one line."""
    plain = re.sub(r"\x1b\[[0-9;]*m|[─│╭╮╰╯]", " ", box)
    return " ".join(plain.split()) or "the options cannot be read"
