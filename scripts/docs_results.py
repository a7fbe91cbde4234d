"""The index of measurements: a row for each page in `benchmarks/results`, newest first."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["Result", "results", "results_table"]

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results"

# DATE-SUBJECT; a subject may end with the commit that it is of, or with the number of the run.
_NAME = re.compile(r"(?P<date>\d{4}-\d\d-\d\d)-(?P<subject>.+?)(?:-[0-9a-f]{7})?(?:-\d)?$")

_HARDWARE = re.compile(r"(?:(?P<count>\d+)x)?(?P<kind>h100|h200)|(?P<cpu>epyc|xeon)")

# In pages and JSON files: "at commit 3fb898c", "commit": "3fb898c".
_COMMIT = re.compile(r"commit[\"']?:? ?[\"']?([0-9a-f]{7,40})\b")


class Result(NamedTuple):
    """One page of measurements."""

    page: Path
    date: str
    subject: str
    """The name of the file without its date: a later page with the same subject supersedes this one."""
    title: str
    hardware: str
    commit: str
    is_superseded: bool


def results() -> list[Result]:
    """Return all pages of measurements, newest first.

    Raises:
        ValueError: the name of a page does not begin with a date.
    """
    found = [_read(page) for page in sorted(FOLDER.rglob("*.md"))]
    newest: dict[tuple[Path, str], str] = {}
    for result in found:
        key = (result.page.parent, result.subject)
        newest[key] = max(newest.get(key, ""), result.date)
    marked = [one._replace(is_superseded=one.date < newest[one.page.parent, one.subject]) for one in found]
    return sorted(marked, key=lambda one: (one.date, one.page.name), reverse=True)


def results_table(page: Path) -> str:
    """Return the index as a Markdown table, with links from a page of the manual."""
    lines = ["| date | what | hardware | commit | state |", "|---|---|---|---|---|"]
    for one in results():
        link = os.path.relpath(one.page, page.parent)
        state = "superseded" if one.is_superseded else "current"
        title = one.title.replace("|", "/")
        lines.append(f"| {one.date} | [{title}]({Path(link).as_posix()}) | {one.hardware} | {one.commit} | {state} |")
    return "\n".join(lines)


def _read(page: Path) -> Result:
    match = _NAME.match(page.stem)
    if match is None:
        raise ValueError(f"{page.relative_to(ROOT)}: the name of a result is YYYY-MM-DD-SUBJECT.md")
    text = page.read_text("utf-8")
    data = page.with_suffix(".json")
    commit = _COMMIT.search(text) or (_COMMIT.search(data.read_text("utf-8")) if data.exists() else None)
    title = next((line[2:].strip() for line in text.splitlines() if line.startswith("# ")), page.stem)
    return Result(
        page, match["date"], match["subject"], title, _hardware(page.stem), commit[1][:7] if commit else "", False
    )


def _hardware(name: str) -> str:
    """Return the hardware that the name of a result tells."""
    match = _HARDWARE.search(name)
    if match is None:
        return "CPU"
    if match["cpu"]:
        return {"epyc": "AMD EPYC", "xeon": "Intel Xeon"}.get(match["cpu"], "CPU")
    return f"{match['count'] or 1}x NVIDIA {match['kind'].upper()}"
