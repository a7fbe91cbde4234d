"""The pieces that report pages are made of: the page itself, tables, tabs, and numbers as a person writes them.

Here: HTML as strings; every function that takes a text from outside escapes it. Not here: drawings (`figures`), and
what a page says (`report`).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from importlib import resources
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

from quintic.durable import write_atomically

__all__ = [
    "axis_tabs",
    "date",
    "duration",
    "finite",
    "flatten",
    "large_number",
    "number_table",
    "render_page",
    "section",
    "settings_table",
    "tabs",
    "write_text_atomically",
]

_NO_BREAK = "\u00a0"


def render_page(title: str, body: str) -> str:
    """The whole page: one file that needs nothing else, styles included; ``body`` is HTML, ``title`` is not."""
    template = resources.files("quintic.report").joinpath("report_template.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=escape(title), body=body)


def write_text_atomically(path: Path, text: str) -> None:
    """Replace ``path`` in one move, so that a browser never sees half a page; its folder is created if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode("utf-8", errors="replace"))


def section(title: str, *parts: str) -> str:
    """A titled card; empty parts are left out, and so is a card without content."""
    content = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def tabs(name: str, panels: Mapping[str, str]) -> str:
    """Up to three panels of HTML, one shown at a time; works without scripts. ``name`` is unique on the page."""
    buttons = "".join(
        f'<input type="radio" name="{escape(name)}" id="{escape(name)}-{index}"{"" if index else " checked"}>'
        f'<label for="{escape(name)}-{index}">{escape(label)}</label>'
        for index, label in enumerate(panels)
    )
    bodies = "".join(f'<div class="grid2">{panel}</div>' for panel in panels.values())
    return f'<div class="tabs">{buttons}{bodies}</div>'


def axis_tabs(draw: Callable[[str, str, float], str], records: Sequence[Mapping[str, Any]], *, name: str) -> str:
    """The same charts over steps, tokens and time, in tabs.

    Args:
        draw: called with a field of the records, the label of the x axis and the divisor of the field's values.
        records: all records that are drawn; they decide the unit of time.
        name: unique on the page.
    """
    longest = max((finite(record.get("seconds")) or 0.0 for record in records), default=0.0)
    if longest >= 7200:
        size, unit = 3600, "hours"
    elif longest >= 120:
        size, unit = 60, "minutes"
    else:
        size, unit = 1, "seconds"
    panels = {
        "by steps": draw("step", "training steps", 1),
        "by tokens": draw("tokens", "tokens read (K thousand, M million, B billion)", 1),
        "by time": draw("seconds", f"training time ({unit})", size),
    }
    return tabs(name, panels)


def settings_table(settings: Mapping[str, Any]) -> str:
    """Names and values, nested names joined by dots; nothing for no settings."""
    rows = "".join(
        f"<tr><th>{_breakable(name)}</th><td>{escape(_value_text(value))}</td></tr>"
        for name, value in flatten(settings)
    )
    return f'<table class="settings"><tbody>{rows}</tbody></table>' if rows else ""


def number_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_text_columns: int = 0) -> str:
    """A table with a header; columns after the first ``num_text_columns`` are numbers, aligned to the right."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        classes = ["" if index < num_text_columns else ' class="n"' for index in range(len(texts))]
        return "".join(f"<{tag}{c}>{escape(text)}</{tag}>" for c, text in zip(classes, texts, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', header)}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested mappings, with their names joined by dots."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf"):
        return float(value)
    return None


def date(time: str) -> str:
    """An ISO time as a person writes it; as it is where it is not one."""
    try:
        moment = datetime.fromisoformat(time)
    except ValueError:
        return time
    return f"{moment:%Y-%m-%d at %H:%M} {moment.tzname() or ''}".rstrip()


def duration(seconds: float) -> str:
    """A duration with two units at most: 4.2 s, 3 min 20 s, 2 h 5 min, 3 d 4 h; it does not break over lines."""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    rest = round(seconds)
    for (unit, size), (small_unit, small_size) in pairwise(units):
        if rest >= size:
            small = rest % size // small_size
            words = f"{rest // size} {unit} {small} {small_unit}" if small else f"{rest // size} {unit}"
            return words.replace(" ", _NO_BREAK)
    return f"{seconds:.3g}{_NO_BREAK}s"


def large_number(value: float) -> str:
    """A count in words: 950, 12,300, 124.4 million, 2.5 billion."""
    for limit, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= limit:
            return f"{value / limit:.4g}{_NO_BREAK}{word}"
    return f"{value:,.0f}"


def _breakable(name: str) -> str:
    """A name, escaped, that a narrow page may break after its dots and underscores."""
    return escape(name).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _value_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:,}"
    return json.dumps(value, ensure_ascii=False)
