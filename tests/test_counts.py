"""How much there is to know about the optimizer: counts that may fall, but not grow unnoticed.

`tests/optim/step/test_steady_step.py` and `tests/distributed/test_steady_layouts.py` hold the calls of a step, and
`test_architecture.py` where names are spelt and options declared.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "quintic"
MAX_CLASSES = 128
MIN_COMMENTS = 8.0


def sources(room: str) -> list[str]:
    """The texts of a room's files."""
    return [path.read_text("utf-8") for path in sorted((PACKAGE / room).rglob("*.py"))]


def test_the_optimizer_has_no_more_classes_than_before():
    # A stage of a rule in the library is read by those who want this rule.
    paths = [path for path in sorted((PACKAGE / "optim").rglob("*.py")) if path.parent.name != "library"]
    trees = [ast.parse(path.read_text("utf-8")) for path in paths]
    classes = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert len(classes) <= MAX_CLASSES, "a class is one more thing to know; if it pays for itself, raise MAX_CLASSES"


@pytest.mark.parametrize("room", ["optim", "kernels"])
def test_code_on_tensors_is_explained(room):
    """Comment lines for each 100 other lines: shapes, phases, reasons."""
    lines = [line.strip() for text in sources(room) for line in text.splitlines() if line.strip()]
    comments = sum(line.startswith("#") for line in lines)
    assert 100 * comments / (len(lines) - comments) >= MIN_COMMENTS
