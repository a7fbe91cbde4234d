"""Judgments: what weights are, by the sources of their models, where names and forward pass differ.

`judgments.tsv` has a line for each: libraries; classes, with commas between them, and weights, both as patterns of
fnmatch (`fc.weight@7x*` is about a shape); what is right, the start of `AdamW`, `Matrix`, `Split 3`, `Experts` or
`undecided`, several with `/` between them; and why.
"""

import csv
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("judgments.tsv")

VERDICTS = ("right", "to AdamW", "to Muon", "view", "undecided", "not judged")
"""Of one side: right; wrong towards AdamW, towards Muon, or in the view; undecided though it could be decided."""


@dataclass(frozen=True)
class Judgment:
    """What weights are."""

    library: str
    classes: str
    weights: str
    right: tuple[str, ...]
    why: str

    def fits(self, library: str, name: str, line: Mapping[str, Any]) -> bool:
        """Return whether it is about a line of a class."""
        full = f"{line['weight']}@{'x'.join(map(str, line['shape']))}"
        return (
            library in self.library.split()
            and any(fnmatch.fnmatchcase(name, pattern) for pattern in self.classes.split(", "))
            and any(
                fnmatch.fnmatchcase(full, pattern if "@" in pattern else f"{pattern}@*")
                for pattern in self.weights.split()
            )
        )


def read(path: Path = FILE) -> list[Judgment]:
    """Return the judgments of a file.

    Raises:
        ValueError: a line has other than five columns.
    """
    found = []
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), start=1):
            if not row or row[0] == "library":
                continue
            if len(row) != 5:
                raise ValueError(f"{path.name}, line {number}: {len(row)} columns, not 5")
            library, classes, weights, right, why = row
            found.append(Judgment(library, classes, weights, tuple(right.split("/")), why))
    return found


def verdict(said: str, line: Mapping[str, Any], judgment: Judgment | None) -> str:
    """Return what is to be said of one side of a line, of which `said` is the decision.

    Without a judgment, both sides are right where they agree, and undecided is no error where neither decides.
    """
    if judgment is None:
        return "right" if line["names"] == line["example"] else "not judged"
    if any(said.startswith(right) for right in judgment.right):
        return "right"
    if said in ("AdamW", "undecided"):
        return "to AdamW" if said == "AdamW" else "undecided"
    return "to Muon" if all(right.startswith(("AdamW", "undecided")) for right in judgment.right) else "view"


def judged(judgments: Sequence[Judgment], library: str, name: str, line: Mapping[str, Any]) -> Judgment | None:
    """Return the first judgment that is about a line."""
    return next((one for one in judgments if one.fits(library, name, line)), None)
