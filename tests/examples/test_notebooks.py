"""The notebooks run, and show what they print."""

import json
import sys

import pytest
from launching import ROOT

sys.path.append(str(ROOT / "scripts"))

import run_notebooks

NOTEBOOKS = sorted(run_notebooks.FOLDER.glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_outputs_are_stored(path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    notebook = json.loads(path.read_text("utf-8"))
    printed = run_notebooks.run(notebook, path.parent)
    stored = [
        "".join(text for output in cell["outputs"] for text in output["text"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]
    # Losses differ in their digits from machine to machine, so that the first word of each line is compared.
    assert [words(text) for text in printed] == [words(text) for text in stored]


def words(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.strip()]


def test_the_outputs_are_those_of_the_cells():
    cells = [{"cell_type": kind, "source": [text]} for kind, text in (("markdown", "# A"), ("code", "x = 2"))]
    cells.append({"cell_type": "code", "source": ["print(x)\n", "x + 1"]})
    notebook = {"cells": cells}
    done = run_notebooks.with_outputs(notebook, run_notebooks.run(notebook, ROOT))
    assert done["cells"][0] == cells[0]
    assert done["cells"][1]["outputs"] == []
    assert done["cells"][2]["outputs"][0]["text"] == ["2\n", "3\n"]


def test_an_error_of_a_cell_is_raised():
    notebook = {"cells": [{"cell_type": "code", "source": ["1 / 0"]}]}
    with pytest.raises(ZeroDivisionError):
        run_notebooks.run(notebook, ROOT)
