"""The table of `explain`, fitted to a terminal.

If one line per parameter has room for all columns, names are shortened in the middle, and views and reasons wrapped in
their columns. In a narrower terminal each parameter has a line with name and shape, and indented lines with the rest.
"""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from quintic.tables import aligned, shortened

__all__ = ["Cells", "column_lines", "table_lines"]

# A parameter gets one line if names, views and reasons have at least this many columns, or as many as they need.
_ROOM_FOR_NAME, _ROOM_FOR_VIEW, _ROOM_FOR_WHY = 28, 18, 14

_INDENT = "    "
_GAP = "  "


class Cells(NamedTuple):
    """One row of the table, for one parameter or for several whose names differ only in numbers."""

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
    """Return a heading and the rows as lines of at most `width` columns; below 50 columns some lines are wider."""
    sizes = {field: max(len(getattr(row, field)) for row in (_HEADING, *rows)) for field in Cells._fields}
    fields = [field for field in Cells._fields if sizes[field]]  # without `times` where nothing is folded
    fixed = sum(sizes[field] for field in fields if field not in ("name", "view", "why"))
    room = width - fixed - len(_GAP) * (len(fields) - 1)
    name, why = min(sizes["name"], _ROOM_FOR_NAME), min(sizes["why"], _ROOM_FOR_WHY)
    if room < name + min(sizes["view"], _ROOM_FOR_VIEW) + why:
        return _in_several_lines(rows, sizes, width)
    # Views get the room that they need first, then names, then reasons.
    view = min(sizes["view"], room - name - why)
    name = min(sizes["name"], room - view - why)
    sizes |= {"name": name, "view": view, "why": room - name - view}
    return [line for row in (_HEADING, *rows) for line in _in_columns(row, fields, sizes)]


def _in_several_lines(rows: Sequence[Cells], sizes: dict[str, int], width: int) -> list[str]:
    """Return two lines or more for each row: name and shape, and below them the other cells."""
    first = [field for field in ("name", "times", "shape") if sizes[field]]
    name = max(12, width - sizes["times"] - sizes["shape"] - len(_GAP) * (len(first) - 1))
    sizes = sizes | {"name": min(sizes["name"], name)}
    # Second line: numbers, then view and reason if there is room for them, else on a third line.
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
    """Return the lines of one row: the name shortened, view and reason wrapped into their columns."""
    columns = []  # for each field the lines of its cell
    for field in fields:
        cell, size = getattr(row, field), sizes[field]
        if field == "name":
            cell = shortened(cell, size)
        parts = textwrap.wrap(cell, size) if field in ("view", "why") else [cell]
        columns.append([part.rjust(size) if field in _RIGHT_ALIGNED else part.ljust(size) for part in parts])
    # Cells with fewer lines are filled up with blanks.
    height = max(map(len, columns))
    for field, parts in zip(fields, columns, strict=True):
        parts += [" " * sizes[field]] * (height - len(parts))
    return [_GAP.join(parts).rstrip() for parts in zip(*columns, strict=True)]


def column_lines(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return rows of numbers behind a name, which is shortened so that lines have at most `width` columns."""
    numbers = aligned([row[1:] for row in rows], [-1] * (len(rows[0]) - 1))
    size = max(12, width - len(numbers[0]) - len(_GAP))
    names = aligned([[shortened(row[0], size)] for row in rows], [1])
    return [f"{name}{_GAP}{line}" for name, line in zip(names, numbers, strict=True)]
