"""Run the notebooks and store what their cells print.

    python scripts/run_notebooks.py [examples/notebooks/NAME.ipynb ...]

Needs no Jupyter: a notebook is JSON, and its cells are run here one after the other in one namespace, from the folder
of the notebook. What a cell prints becomes its output, and so does the value of its last line. Without names all
notebooks are run.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "notebooks"


def run(notebook: dict[str, Any], folder: Path) -> list[str]:
    """Run the cells of a notebook; return what each cell of code prints.

    Raises:
        Exception: whatever a cell raises.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    before = Path.cwd()
    os.chdir(folder)
    try:
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                printed.append(_run_cell("".join(cell["source"]), namespace))
    finally:
        os.chdir(before)
    return printed


def _run_cell(source: str, namespace: dict[str, Any]) -> str:
    """Run one cell; return what it prints, and the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    output = io.StringIO()
    with contextlib.redirect_stdout(output), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(tree, "<cell>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
            if value is not None:
                print(repr(value))
    return output.getvalue()


def with_outputs(notebook: dict[str, Any], printed: list[str]) -> dict[str, Any]:
    """Return the notebook with the outputs of its cells of code."""
    texts = iter(printed)
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            text = next(texts)
            stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
            cell = {**cell, "execution_count": None, "outputs": [stream] if text else []}
        cells.append(cell)
    return {**notebook, "cells": cells}


def main() -> int:
    """Run the notebooks that the command line names, or all; return the exit code."""
    os.environ["COLUMNS"] = "110"
    for path in [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text("utf-8"))
        done = with_outputs(notebook, run(notebook, path.parent.resolve()))
        path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
