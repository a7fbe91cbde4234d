"""The sweep of models, with models of its own."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.roles import judgments, page
from benchmarks.roles.compare import Attempt, compare, first_that_runs, is_held_out
from benchmarks.roles.pool import Worker, sweep

LIBRARY = """
import os, time, torch
from torch import nn
from benchmarks.roles.compare import Attempt

def families():
    return {"Fine": "one", "Crashes": "one", "Hangs": "two", "Prints": "two"}

def build(name):
    if name == "Crashes":
        os._exit(3)
    if name == "Hangs":
        time.sleep(60)
    print("a library that talks", flush=True)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))

def attempts(name):
    return [Attempt("only", lambda: build(name), lambda model: torch.rand(2, 8))]
"""


class Classifier(nn.Module):
    """A body in a wrapper whose last layer has no telling name, beside one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.fc = nn.Linear(16, 5)
        self.spare = nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs).relu()
        return self.fc(inputs)


def lines_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {line["weight"]: line for line in found["lines"]}


def test_lines_merge_layer_numbers_and_have_both_sides() -> None:
    lines = lines_of(compare(Classifier(), torch.rand(2, 16)))
    assert {name: line["count"] for name, line in lines.items()} == {
        "layers.*.weight": 3,
        "fc.weight": 1,
        "spare.weight": 1,
    }
    assert (lines["fc.weight"]["names"], lines["fc.weight"]["example"]) == ("Matrix", "AdamW")
    assert page.kind_of(lines["fc.weight"]) == "algorithm"
    assert lines["spare.weight"]["role"] == "unknown"


def test_the_first_attempt_that_runs_counts() -> None:
    def fails() -> nn.Module:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    example = lambda model: torch.rand(2, 16)  # noqa: E731
    skipped = Attempt("skipped", Classifier, example, after="no such error")
    found = first_that_runs(
        [Attempt("narrow", fails, example), skipped, Attempt("wide", Classifier, example, after="shapes")]
    )
    assert found["attempt"] == "wide"
    found = first_that_runs([Attempt("narrow", fails, example), skipped])
    assert [(one["attempt"], one["stage"]) for one in found["errors"]] == [("narrow", "build")]
    assert "shapes cannot" in found["errors"][0]["error"]
    found = first_that_runs([Attempt("too long", Classifier, lambda model: torch.rand(2, 17))])
    assert found["errors"][0]["stage"] == "trace"


@pytest.mark.parametrize(
    ("names", "example", "right", "expected"),
    [
        ("Matrix", "AdamW", "AdamW", ("to Muon", "right")),
        ("Matrix", "AdamW", "Matrix", ("right", "to AdamW")),
        ("Matrix", "Split 3: 4+4+4", "Split 3", ("view", "right")),
        ("undecided", "AdamW", "AdamW", ("undecided", "right")),
        ("Matrix", "Split 2: 6+6", "Matrix/Split 2", ("right", "right")),
        ("AdamW", "AdamW", "Matrix", ("to AdamW", "to AdamW")),
        ("Matrix", "AdamW", None, ("not judged", "not judged")),
        ("Matrix", "Matrix", None, ("right", "right")),
    ],
)
def test_verdicts_tell_the_two_directions_apart(
    names: str, example: str, right: str | None, expected: tuple[str, str]
) -> None:
    line = {"weight": "blocks.*.qkv.weight", "shape": [12, 4], "names": names, "example": example}
    made = (
        [judgments.Judgment("lib", "My*, Your*", "*.out.weight *.qkv.weight@12x*", tuple(right.split("/")), "")]
        if right
        else []
    )
    found = judgments.judged(made, "lib", "YourModel", line)
    assert tuple(judgments.verdict(line[side], line, found) for side in page.SIDES) == expected
    assert judgments.judged(made, "other", "YourModel", line) is None
    assert judgments.judged(made, "lib", "Model", line) is None


def test_the_judgments_can_be_read_and_say_something_known() -> None:
    known = ("AdamW", "Matrix", "Split ", "Experts", "Flatten", "undecided")
    for judgment in judgments.read():
        assert set(judgment.library.split()) <= {"transformers", "timm", "diffusers", "fla", "other"}
        assert judgment.right, judgment
        assert all(right.startswith(known) for right in judgment.right), judgment
        assert judgment.why


def test_a_judgment_of_too_few_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "judgments.tsv").write_text("library\tclasses\tweights\tright\twhy\ntimm\tLevit*\tqkv\tSplit 3\n")
    with pytest.raises(ValueError, match="line 2: 4 columns"):
        judgments.read(tmp_path / "judgments.tsv")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Worker]:
    (tmp_path / "small_library.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return lambda limit: Worker("small_library", tmp_path / "log", limit)


@pytest.mark.slow
def test_a_class_that_crashes_or_hangs_costs_itself_only(library: Callable[[float], Worker], tmp_path: Path) -> None:
    worker = library(120.0)
    families = worker.families()
    rows = {row["class"]: row for row in sweep(worker, [name for name in families if name != "Hangs"])}
    rows |= {row["class"]: row for row in sweep(library(1.0), ["Hangs"])}
    assert rows["Crashes"]["errors"][0]["error"] == "the process ended with 3"
    assert rows["Hangs"]["errors"][0]["error"] == "no answer within 1 s"
    assert "a library that talks" in (tmp_path / "log").read_text()
    for name in ("Fine", "Prints"):
        assert [line["example"] for line in rows[name]["lines"]] == ["Matrix", "AdamW"]
    rows = {name: {**row, "family": families[name]} for name, row in rows.items()}
    counts = page.summary("small", list(rows.values()), [])
    assert (counts["tried"], counts["ran"], counts["weights"]) == (4, 2, 4)
    result = {"command": "c", "commit": "d", "versions": {}, "libraries": {"small": {"built": counts}}}
    text = page.page(json.loads(json.dumps(result)))
    # The last layer, a head that names do not show, is doubted in both models, and nobody has judged it.
    assert counts["doubts"] == {"wrong": 0, "wrong, doubted": 0, "right, doubted": 0}
    judgment = judgments.Judgment("small", "*", "*@3x12", ("AdamW",), "a head")
    counts = page.summary("small", list(rows.values()), [judgment])
    assert counts["doubts"] == {"wrong": 2, "wrong, doubted": 2, "right, doubted": 0}
    counts = page.summary("small", list(rows.values()), [dataclasses.replace(judgment, right=("Matrix",))])
    assert counts["doubts"] == {"wrong": 0, "wrong, doubted": 0, "right, doubted": 2}
    assert counts["classes, doubted though right"] == 2
    assert "| small | built | 4 | 2 | 4 |" in text
    assert {one["error"] for one in page.failures(list(rows.values()))} == {
        "the process ended with 3",
        "no answer within 1 s",
    }


def test_about_a_third_of_families_is_held_out() -> None:
    share = sum(is_held_out(f"family{number}") for number in range(3000)) / 3000
    assert 0.3 < share < 0.37
    assert is_held_out("llama") == is_held_out("llama")
