"""Parsing of command-line options into dataclasses, with one-line messages for mistakes.

tyro turns the fields of a dataclass and their docstrings into options and `--help`. `validate_args` checks names and
values first, because tyro's messages are boxes of many lines about Python types. The types of fields that it knows are
str, int, float, bool, Path, Literal, tuple of str, and unions of these with None.
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
    """Return the options as an instance of `kind`; `--help` prints the help and raises `SystemExit`.

    Args:
        kind: a dataclass; its fields and the fields of nested dataclasses are the options.
        arguments: the command line after the command's name.
        command: the command's name, for messages.
        description: first paragraph of the help; None for the docstring of `kind`.
        default: values of options that are not given; None for the defaults of `kind`.

    Raises:
        ConfigError: an option is unknown, or its value has the wrong type or is out of range.
    """
    import tyro

    if not any(argument in ("-h", "--help") for argument in arguments):
        validate_args(kind, arguments, command)
    arguments = _expand_switches(arguments, dict(options_of(kind)))
    errors = io.StringIO()
    output = _CapturedOutput(sys.stdout)
    # Capture tyro's output: its help is wrapped below, its errors become one line.
    given: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
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
            print(_wrap_description(output.getvalue()), end="")  # --help
            raise
        # If the dataclass rejected its values, its error is among the causes; else use tyro's message.
        cause: BaseException | None = stop
        while cause is not None and not isinstance(cause, QuinticError):
            cause = cause.__context__
        message = str(cause) if cause is not None else _without_box(errors.getvalue())
        raise ConfigError(message) from None


class _CapturedOutput(io.StringIO):
    """Collects tyro's output, which gets colours and frames if the stream that it stands for can show them."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def isatty(self) -> bool:
        """Tell tyro whether to use colours."""
        return self._stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # None in the base class
        """Tell tyro whether frames can be drawn."""
        return self._stream.encoding


def _wrap_description(text: str) -> str:
    """Wrap the description above the options of a help text, because tyro does not."""
    # The options begin with a box, or, without frames, with a heading.
    match = re.search(r"^(?:╭| *options *$)", text, re.MULTILINE)
    above, options = (text[: match.start()], text[match.start() :]) if match else (text, "")
    width = shutil.get_terminal_size().columns
    return "\n\n".join(textwrap.fill(lines, width) for lines in above.split("\n\n")) + options


def options_of(kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield each option of a dataclass and of the dataclasses nested in it, with the type of its field."""
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from options_of(hint)
        else:
            yield "--" + name.replace("_", "-"), hint
            if hint is bool or _is_switch(hint):
                yield "--no-" + name.replace("_", "-"), hint


def _is_switch(hint: Any) -> bool:
    """Return whether an option is a switch with three states: on, off, and None, which leaves it to the command."""
    return set(typing.get_args(hint)) == {bool, types.NoneType}


def _expand_switches(arguments: list[str], hints: dict[str, Any]) -> list[str]:
    """Return the arguments with three-state switches spelled out: `--x True` for `--x`, `--x False` for `--no-x`."""
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
    """Check the names of options and the types of their values; needs no defaults, and so no PyTorch.

    Raises:
        ConfigError: describes the first mistake in one line.
    """
    hints = dict(options_of(kind))  # option -> type of its field
    arguments = _expand_switches(arguments, hints)
    # `texts` is the previous option if it takes any number of texts: "-x" after it may be meant as one of them.
    position, texts = 0, ""
    while position < len(arguments):
        typed, has_value, value = arguments[position].partition("=")
        position += 1
        option = typed.replace("_", "-")
        if not option.startswith("--"):
            raise ConfigError(f"{typed!r} is not an option; options begin with -- (see quintic {command} --help)")
        if option not in hints:
            # Compare without the dashes, which would make all options similar.
            nearest = difflib.get_close_matches(option[2:], [name[2:] for name in hints], n=1)
            hint = f"did you mean --{nearest[0]}?" if nearest else f"quintic {command} --help lists the options"
            if texts:
                hint += f"; if it is a text for {texts}, write {texts}={arguments[position - 1]}"
            raise ConfigError(f"unknown option {typed}: {hint}")
        # The values: after "=", or all arguments up to the next option.
        values = [value] if has_value else []
        while not has_value and position < len(arguments) and not arguments[position].startswith("--"):
            values.append(arguments[position])
            position += 1
        # "-5" and "-.5" are numbers; "-x" is more likely a mistaken option.
        dashed = [value for value in values if re.match(r"-[^\W\d_]", value) and not _parses_as(value, float)]
        if dashed and not has_value and hints[option] is not bool:
            raise ConfigError(f"{option} {dashed[0]}: for a value that begins with a dash write {option}={dashed[0]}")
        _check_values(option, values, hints[option])
        texts = option if typing.get_origin(hints[option]) is tuple else ""
        if texts and not values:
            how = f"; write {option}={arguments[position]} if that is the text" if arguments[position:] else ""
            raise ConfigError(f"{option} needs a value: a text{how}")


def _check_values(option: str, values: list[str], hint: Any) -> None:
    if typing.get_origin(hint) is tuple:
        return  # any number of texts is allowed
    if hint is bool:
        if values:
            raise ConfigError(f"{option} takes no value, but {values[0]!r} follows it")
        return
    # All other options take exactly one value of their type.
    expected = _expected(hint)
    if not values:
        raise ConfigError(f"{option} needs a value: {expected}")
    if len(values) > 1:
        raise ConfigError(f"{option} takes one value, but {values[1]!r} follows it; quote a value that has spaces")
    if not values[0]:
        raise ConfigError(f"{option} '': the value is empty; give {expected} or leave {option} out")
    if not _parses_as(values[0], hint):
        raise ConfigError(f"{option} {values[0]}: give {expected}")


def _parses_as(text: str, hint: Any) -> bool:
    """Return whether a text on the command line is a value of a field's type."""
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
    """Describe the values of a field's type for a message."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_expected(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return " or ".join(typing.get_args(hint))
    names = {int: "a whole number", float: "a number", bool: "True or False", Path: "a path", types.NoneType: "None"}
    return names.get(hint, "a text")


def pop_option(arguments: list[str], option: str) -> tuple[str | None, list[str]]:
    """Return the value of an option (`--x value` or `--x=value`; None if not given) and the remaining arguments."""
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
    """Return tyro's boxed message as one line."""
    plain = re.sub(r"\x1b\[[0-9;]*m|[─│╭╮╰╯]", " ", box)
    return " ".join(plain.split()) or "the options cannot be read"
