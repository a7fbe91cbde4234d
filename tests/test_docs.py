"""The documentation says what is true: its Python runs, its links lead somewhere, its commands and options exist."""

import dataclasses
import doctest
import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import quintic
from quintic.cli import OPTION_ALIASES
from quintic.commands.evaluate import EvalOptions
from quintic.commands.export import ExportOptions
from quintic.commands.report import ReportOptions
from quintic.commands.sample import SampleOptions
from quintic.rehearsal.table import RehearsalOptions
from quintic.train.config import Config

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/results/*.md")])


class Documented(nn.Module):
    """Has the parameters that the examples speak of."""

    def __init__(self):
        super().__init__()
        self.stem = nn.ModuleDict({"conv": nn.Conv2d(3, 8, 3)})
        block = {"qkv": nn.Linear(16, 3 * 768, bias=False), "query": nn.Linear(16, 24, bias=False)}
        block["out"] = nn.Linear(24, 16, bias=False)
        self.blocks = nn.ModuleList([nn.ModuleDict(block)])
        self.head = nn.Linear(16, 5)


def python_blocks():
    for page in PAGES:
        found = re.findall(r"^ *```python\n(.*?)^ *```", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        for number, code in enumerate(found):
            yield pytest.param(textwrap.dedent(code), id=f"{page.name}-{number}")


@pytest.mark.filterwarnings("ignore:perhaps several matrices")  # qkv of the model above, which pages make rules for
@pytest.mark.parametrize("code", list(python_blocks()))
def test_python_in_the_pages_runs(code, capsys):
    exec(compile(code, "<page>", "exec"), {"quintic": quintic, "torch": torch, "model": Documented()})


def test_the_docstring_of_the_package_runs():
    failed, attempted = doctest.testmod(quintic)
    assert (failed, attempted) == (0, 3)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page):
    options = {"--help", "--resume", "--resume-step", "--config", "--preset", *OPTION_ALIASES}
    for section in dataclasses.fields(Config):
        options |= {"--" + f.name.replace("_", "-") for f in dataclasses.fields(section.default_factory)}
    kinds = {
        "sample": SampleOptions,
        "eval": EvalOptions,
        "export": ExportOptions,
        "plan": RehearsalOptions,
        "report": ReportOptions,
    }
    own = {name: {"--" + f.name.replace("_", "-") for f in dataclasses.fields(kind)} for name, kind in kinds.items()}
    commands = {"train", "compare", "prepare", *own}
    for command, rest in re.findall(
        r"(?<!--only )\bquintic (\w+)((?: +(?:--[\w-]+|[^\s`|#;]+))*)", page.read_text("utf-8")
    ):
        if "--" not in rest:
            continue
        assert command in commands, f"{page.name}: quintic {command}"
        for option in re.findall(r"--[\w-]+", rest):
            assert option in options | own.get(command, set()), f"{page.name}: quintic {command} {option}"
