"""Cells of the tables of `optimizer_step.py`."""

import re
from collections.abc import Mapping
from typing import Any


def middle(row: Mapping[str, Any], name: str) -> str:
    """Return the median of a time with three digits, or a dash."""
    if name not in row:
        return "-"
    median = row[name]["median"]
    return f"{median:.0f}" if median >= 99.5 else f"{median:.1f}" if median >= 9.95 else f"{median:.2f}"


def number(row: Mapping[str, Any], name: str) -> str:
    """Return a whole number with thousands separated, or a dash."""
    return f"{row[name]:,.0f}" if name in row else "-"


def in_cell(text: str) -> str:
    """Return a message that fits a table's cell and names no folder of the machine."""
    return re.sub(r"(/[\w.+-]+){2,}", "FOLDER", text).replace("|", "/").replace("\n", " ")[:160]
