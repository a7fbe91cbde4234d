"""Parts of the manual that are made from the source: scripts, options of the command line, fields of files."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import itertools
import os
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from docs_results import results_table

__all__ = ["Option", "generated", "missing_names", "options"]

ROOT = Path(__file__).resolve().parent.parent

WIDTH = 78
"""Columns of the help texts."""

# What has to be made anew after an option of the optimizer has changed.
_WORK = {"plan": "new plan", "graph": "new capture"}


class Option(NamedTuple):
    """One option of training, as the configuration has it."""

    flag: str
    section: str
    values: str
    defaults: tuple[str, ...]
    """Without a GPU, and with one."""
    meaning: str


def generated(name: str) -> str:
    """Return the part of a page with a name.

    The names: `help COMMAND`, `file PATH`, `configuration`, `options`, `results`.

    Raises:
        ValueError: there is none of that name.
    """
    if name == "configuration":
        return configuration()
    if name == "options":
        return optimizer_options()
    if name == "results":
        return results_table(ROOT / "docs" / "reference" / "results.md")
    kind, _, rest = name.partition(" ")
    if kind == "file":
        return f"```python\n{(ROOT / rest).read_text('utf-8').rstrip()}\n```"
    if kind == "help":
        return f"```text\n{help_of(rest)}\n```"
    raise ValueError(f"nothing is generated under the name {name!r}")


def help_of(command: str) -> str:
    """Return the output of `quintic COMMAND --help`."""
    from quintic.cli import main

    output, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(WIDTH)
    try:
        with contextlib.redirect_stdout(output):
            code = main([*command.split(), "--help"])
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    if code:
        raise ValueError(f"quintic {command} --help exits with {code}")
    lines = (line.rstrip() for line in output.getvalue().strip("\n").splitlines())
    return "\n".join(lines)


def configuration() -> str:
    """Return a table of options for each section of the configuration."""
    text, section = [], ""
    for option in options():
        if option.section != section:
            section = option.section
            text += ["", f"## {section}", "", "| option | values | default | meaning |", "|---|---|---|---|"]
        default = " / ".join(f"`{value}`" for value in option.defaults)
        values = option.values.replace("|", "\\|")
        text.append(f"| `{option.flag}` | {values} | {default} | {option.meaning} |")
    return "\n".join(text[1:])


def options() -> Iterator[Option]:
    """Yield every option of `quintic train` that the configuration has, in its order."""
    from quintic.commands.presets import PRESETS, preset
    from quintic.train.config import Config

    presets = [preset(name) for name in PRESETS]
    for section in dataclasses.fields(Config):
        kind = typing.cast(type[Any], section.default_factory)
        hints, meanings = typing.get_type_hints(kind), _meanings(kind)
        for field in dataclasses.fields(kind):
            values = [_shown(getattr(getattr(config, section.name), field.name)) for config in presets]
            yield Option(
                "--" + field.name.replace("_", "-"),
                (inspect.getdoc(kind) or "").rstrip("."),
                _type(hints[field.name]),
                tuple(values if len(set(values)) > 1 else values[:1]),
                meanings[field.name],
            )


def optimizer_options() -> str:
    """Return the tables of the optimizer's options: keywords of the constructor, then keys of groups only."""
    from quintic.optim.groups.options import OPTIONS

    groups = {"muon": "Muon", "adamw": "AdamW", None: "all"}
    text = []
    for title, is_keyword in (("Keywords of the constructor and of groups", True), ("Keys of groups only", False)):
        text += [f"## {title}", ""]
        text.append("| option | values | default | groups | same on all ranks | from a checkpoint | when it changes |")
        text.append("|---|---|---|---|---|---|---|")
        for name, option in OPTIONS.items():
            if option.is_keyword is not is_keyword:
                continue
            compared, restored = "ranks" in option.affects, option.saved == "restored"
            work = [what for effect, what in _WORK.items() if effect in option.affects]
            cells = [f"`{name}`", option.values.text, f"`{option.default!r}`", groups[option.algorithm]]
            cells += ["yes" if compared else "", "yes" if restored else "", ", ".join(work)]
            text.append(f"| {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text).rstrip()


def missing_names() -> list[str]:
    """Return the public names that no page of the reference describes, such as `quintic.Muon`."""
    text = "\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
    described = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    missing = []
    for package in ("quintic", "quintic.interchange", "quintic.testing", "quintic.update_rules"):
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            one = getattr(module, name)
            # A name may be described where it is defined. Types of literals are part of the signatures that use them.
            # The name of the package itself may be the one that is described.
            at_top = {f"quintic.{name}"} if name in importlib.import_module("quintic").__all__ else set()
            places = {f"{package}.{name}", f"{getattr(one, '__module__', package)}.{name}", *at_top}
            if callable(one) and typing.get_origin(one) is None and not places & described:
                missing.append(f"{package}.{name}")
    # The libraries that integrations need may not be installed: their files are read and not imported.
    for path in sorted((ROOT / "quintic" / "integrations").glob("*.py")):
        if path.stem == "dropin":
            continue  # what the drop-ins have in common, nothing that users call
        module_name = "quintic.integrations" + ("" if path.stem == "__init__" else f".{path.stem}")
        names = [f"{module_name}.{name}" for name in _exported(path)]
        missing += [name for name in names if name not in described]
    return missing


def _exported(path: Path) -> list[str]:
    """Return the names in `__all__` of a file."""
    for statement in ast.parse(path.read_text("utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    return []


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _type(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "any number of texts"
    if inner := typing.get_args(hint):
        return " or ".join(_type(option) for option in inner)
    names = {int: "whole number", float: "number", bool: "flag", str: "text", Path: "path", type(None): "`None`"}
    return names[hint]


def _meanings(kind: type[Any]) -> dict[str, str]:
    """Return the text below each field of a dataclass, those that it inherits included."""
    bases = [base for base in reversed(kind.__mro__) if dataclasses.is_dataclass(base)]
    statements = [ast.parse(textwrap.dedent(inspect.getsource(base))).body[0] for base in bases]
    bodies = [definition.body for definition in statements if isinstance(definition, ast.ClassDef)]
    meanings = {}
    for field, text in itertools.chain.from_iterable(itertools.pairwise(body) for body in bodies):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            assert isinstance(text.value, ast.Constant)
            meanings[field.target.id] = " ".join(str(text.value.value).split())
    return meanings
