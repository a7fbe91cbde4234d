"""Text tables that fit the terminal: aligned columns, and names that are shortened to the available width."""

import shutil
from collections.abc import Sequence

__all__ = ["aligned", "bytes_text", "output_width", "shortened", "with_name"]

# Columns of text if the output is not a terminal.
_WIDTH_WITHOUT_TERMINAL = 160

# Names that are shortened further cannot be told apart.
_SHORTEST_NAME = 12


def output_width() -> int:
    """Return the columns of the terminal, or 160 if the output is not a terminal."""
    return shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns


def aligned(rows: Sequence[Sequence[str]], least: Sequence[int], *, gap: str = "  ") -> list[str]:
    """Return rows of cells as lines with columns at least `least` wide; a negative width aligns to the right."""
    columns = []
    for cells, size in zip(zip(*rows, strict=True), least, strict=False):
        longest = max(abs(size), *map(len, cells))
        columns.append([cell.rjust(longest) if size < 0 else cell.ljust(longest) for cell in cells])
    return [gap.join(row) for row in zip(*columns, strict=True)]


def with_name(line: str, name: str, more: str, width: int) -> str:
    """Return `line`, `name` and `more` as one line; the name is shortened if the line exceeds `width`."""
    return f"{line}{shortened(name, max(_SHORTEST_NAME, width - len(line) - len(more)))}{more}"


def shortened(text: str, size: int) -> str:
    """Return a text of at most `size` characters, with dots in the middle if it is longer.

    More of the end is kept than of the beginning, since the end of a name says more.
    """
    if len(text) <= size:
        return text
    kept = max(2, size - 3)
    head = kept * 2 // 5
    return f"{text[:head]}...{text[len(text) - (kept - head) :]}"


def bytes_text(count: int) -> str:
    """Return a number of bytes for people: `512 B`, `1.5 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
