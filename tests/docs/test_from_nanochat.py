"""The page for readers of nanochat names files and functions that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "development" / "from-nanochat.md").read_text(encoding="utf-8")
# `file.py`: `name`, `Class.name`, ...
NAMED = re.findall(r"`([\w/]+\.py)`: (`[\w.]+`(?:, `[\w.]+`)*)", PAGE)
FILES = sorted({file for file, _ in NAMED})


def names_in(path: Path) -> set[str]:
    """Return the classes and functions of a file, and as Class.name what each class defines."""
    definitions = (ast.ClassDef, ast.FunctionDef)
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, definitions):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, definitions)}
    return names


@pytest.mark.parametrize("file", FILES)
def test_every_function_on_the_page_exists(file: str) -> None:
    path = ROOT / "quintic" / file
    assert path.is_file(), f"docs/development/from-nanochat.md names {file}, which is gone"
    named = {name for other, names in NAMED if other == file for name in re.findall(r"`([\w.]+)`", names)}
    missing = named - names_in(path)
    assert not missing, f"docs/development/from-nanochat.md: {file} has no {', '.join(sorted(missing))}"


def test_the_page_names_functions_for_most_of_nanochat() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| theirs")]
    with_names = [row for row in rows if re.search(r"\.py`: `", row)]
    assert len(with_names) > 60
    assert len(with_names) > 0.9 * len(rows)
