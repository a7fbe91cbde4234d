"""The table of `explain`, fitted to a terminal.

If one line per parameter has room for all columns, names are shortened in the middle, and views and reasons wrapped in
their columns. In a narrower terminal each parameter has a line with name and shape, and indented lines with the rest.
"""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from quintic.optim.groups.names import shortened

__all__ = ["Cells", "bytes_text", "column_lines", "table_lines"]

# The least widths of names, views and reasons (less if all are shorter) with which a parameter gets a single line.
_ROOM_FOR_NAME, _ROOM_FOR_VIEW, _ROOM_FOR_WHY = 28, 18, 14

_INDENT = "    "
_GAP = "  "


class Cells(NamedTuple):
    """The cells of one row, for one parameter or several whose names differ only in numbers."""

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
    """Return a heading and the rows as lines of at most `width` columns of text, or of about 50 if `width` is less."""
    # The widest cell of each column; a column without text, like `times` if nothing is folded, is left out.
    sizes = {field: max(len(getattr(row, field)) for row in (_HEADING, *rows)) for field in Cells._fields}
    fields = [field for field in Cells._fields if sizes[field]]
    # The room that is left for the three columns of variable width.
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
    """Return a line with name and shape for each row, and indented lines below it with the other cells."""
    # First line: the name is shortened to the room beside the shape.
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
    """Return rows of a name and numbers as lines of `width` columns of text; names are shortened, numbers aligned."""
    # At least 12 columns for names, also if lines then become longer.
    names, *columns = zip(*rows, strict=True)
    sizes = [max(map(len, column)) for column in columns]
    size = min(max(map(len, names)), max(12, width - sum(sizes) - len(_GAP) * len(sizes)))
    lines = []
    for name, *cells in rows:
        numbers = [cell.rjust(length) for cell, length in zip(cells, sizes, strict=True)]
        lines.append(_GAP.join([shortened(name, size).ljust(size), *numbers]))
    return lines


def bytes_text(count: int) -> str:
    """Return a number of bytes as readable text: `512 B`, `1.5 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
