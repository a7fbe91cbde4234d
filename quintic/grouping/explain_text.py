"""The table of `explain`, fitted to a terminal: cells are shortened, wrapped, or given a line of their own."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from quintic.optim.groups.names import shortened

__all__ = ["Cells", "bytes_text", "column_lines", "table_lines"]

# Everything is on one line per parameter where names, views and reasons have this much room, if they need it.
_ROOM_FOR_NAME, _ROOM_FOR_VIEW, _ROOM_FOR_WHY = 28, 18, 14

_INDENT = "    "
_GAP = "  "


class Cells(NamedTuple):
    """One row of a table, for parameters whose names differ in numbers only."""

    name: str
    times: str
    shape: str
    optimizer: str
    view: str
    rate: str
    decay: str
    state: str
    why: str


_HEADING = Cells("parameter", "", "shape", "optimizer", "view", "lr x scale", "decay", "state", "why")
_RIGHT_ALIGNED = frozenset({"times", "decay", "state"})


def table_lines(rows: Sequence[Cells], width: int) -> list[str]:
    """Return a heading and the rows as text of at most `width` columns, or of some 50 where that is less."""
    sizes = {field: max(len(getattr(row, field)) for row in (_HEADING, *rows)) for field in Cells._fields}
    fields = [field for field in Cells._fields if sizes[field]]  # without `times` where nothing is folded
    fixed = sum(sizes[field] for field in fields if field not in ("name", "view", "why"))
    room = width - fixed - len(_GAP) * (len(fields) - 1)
    name, why = min(sizes["name"], _ROOM_FOR_NAME), min(sizes["why"], _ROOM_FOR_WHY)
    if room < name + min(sizes["view"], _ROOM_FOR_VIEW) + why:
        return _in_several_lines(rows, sizes, width)
    view = min(sizes["view"], room - name - why)
    name = min(sizes["name"], room - view - why)
    sizes |= {"name": name, "view": view, "why": room - name - view}
    return [line for row in (_HEADING, *rows) for line in _in_columns(row, fields, sizes)]


def _in_several_lines(rows: Sequence[Cells], sizes: dict[str, int], width: int) -> list[str]:
    """Return lines with names and shapes, each with another one below it for the rest."""
    first = [field for field in ("name", "times", "shape") if sizes[field]]
    name = max(12, width - sizes["times"] - sizes["shape"] - len(_GAP) * (len(first) - 1))
    sizes = sizes | {"name": min(sizes["name"], name)}
    numbers = ("optimizer", "rate", "decay", "state")
    room = width - len(_INDENT) - sum(sizes[field] for field in numbers) - len(_GAP) * len(numbers)
    lines = []
    for row in (_HEADING, *rows):
        lines += _in_columns(row, first, sizes)
        words = ": ".join(filter(None, (row.view, row.why)))
        if room >= _ROOM_FOR_WHY:
            row = row._replace(why=words)
            lines += [_INDENT + line for line in _in_columns(row, (*numbers, "why"), sizes | {"why": room})]
        else:
            lines += [_INDENT + line for line in _in_columns(row, numbers, sizes)]
            lines += textwrap.wrap(words, max(width, 20), initial_indent=2 * _INDENT, subsequent_indent=2 * _INDENT)
    return lines


def _in_columns(row: Cells, fields: Sequence[str], sizes: dict[str, int]) -> list[str]:
    """Return one row: the name shortened, view and reason wrapped into their columns."""
    columns = []
    for field in fields:
        cell, size = getattr(row, field), sizes[field]
        if field == "name":
            cell = shortened(cell, size)
        parts = textwrap.wrap(cell, size) if field in ("view", "why") else [cell]
        columns.append([part.rjust(size) if field in _RIGHT_ALIGNED else part.ljust(size) for part in parts])
    height = max(map(len, columns))
    for field, parts in zip(fields, columns, strict=True):
        parts += [" " * sizes[field]] * (height - len(parts))
    return [_GAP.join(parts).rstrip() for parts in zip(*columns, strict=True)]


def column_lines(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return rows of numbers behind a name, which is shortened to `width` columns of text in all."""
    names, *columns = zip(*rows, strict=True)
    sizes = [max(map(len, column)) for column in columns]
    size = min(max(map(len, names)), max(12, width - sum(sizes) - len(_GAP) * len(sizes)))
    lines = []
    for name, *cells in rows:
        numbers = [cell.rjust(length) for cell, length in zip(cells, sizes, strict=True)]
        lines.append(_GAP.join([shortened(name, size).ljust(size), *numbers]))
    return lines


def bytes_text(count: int) -> str:
    """Return a number of bytes for people: `512 B`, `1.5 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
