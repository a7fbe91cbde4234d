"""`inline` turns an SVG file of matplotlib into an SVG element of a page."""

import re
from collections.abc import Iterable
from html import escape

__all__ = ["COLORS", "GRID", "INK", "MARKS", "SOFT", "inline"]

# Colours that matplotlib draws with; each is then replaced by a variable of the page.
COLORS = ["#fe0000", "#fe0001", "#fe0002", "#fe0003", "#fe0004", "#fe0005"]
INK, SOFT, GRID = "#fe0006", "#fe0007", "#fe0008"
_VARIABLES = {color: f"var(--c{index})" for index, color in enumerate(COLORS)}
_VARIABLES |= {INK: "var(--ink)", SOFT: "var(--soft)", GRID: "var(--grid)"}

MARKS = "marks"
"""The `gid` of a group of marks, which get titles."""


def inline(svg: str, name: str, titles: Iterable[str]) -> str:
    """Return the drawing with the page's font and colours, without elements that only a file needs.

    Args:
        svg: content of the file.
        name: name of the drawing, for screen readers.
        titles: titles of the marks in the order of drawing, shown when the pointer is on a mark.
    """
    # Metadata, style sheets and comments are for files; the page has styles of its own.
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>|<!--.*?-->", "", svg, flags=re.DOTALL)
    head, body = re.findall(r'(<svg[^>]* viewBox="[^"]*")[^>]*>(.*)', svg, flags=re.DOTALL)[0]
    box = head[head.index("viewBox") :]
    body = re.sub(r">\s+<", "><", re.sub(r"<[^>]*>", _tidied, body)).strip()
    texts = iter(titles)
    body = re.sub(
        rf'(?<=<g class="{MARKS}">).*?</g></g>',
        lambda marks: re.sub(r"(<use [^>]*)/>", lambda use: f"{use[1]}><title>{next(texts)}</title></use>", marks[0]),
        body,
    )
    return f'<svg class="chart" role="img" aria-label="{escape(name)}" {box}>{body}'


def _tidied(match: re.Match[str]) -> str:
    """Return a tag without unused names, in the page's font and colours, with numbers rounded to hundredths."""
    tag = match[0]
    # Groups need no names, except that of the marks; text takes the page's font.
    if tag.startswith("<g id="):
        if tag.endswith("/>"):
            return ""
        return f'<g class="{MARKS}">' if f'"{MARKS}"' in tag else "<g>"
    if tag.startswith("<text"):
        style = "".join(f"{part}; " for part in re.findall(r"(?:text-anchor|fill): [\w#]+", tag))
        tag = re.sub(r' (style|transform)="[^"]*"', "", tag)[:-1] + f' style="{style.strip()}">'
    tag = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), tag)
    tag = re.sub(r"#fe000\d", lambda color: _VARIABLES[color[0]], tag)
    return re.sub(r"\s+", " ", tag)
