"""The manual says what is true: its code runs, its links lead somewhere, its commands and options exist.

Python in a page runs from top to bottom in one namespace, in which a `model` is there already. A comment in the line
before a block makes an exception: `<!-- ranks: 2 -->` starts it with torchrun, `<!-- not run: REASON -->` omits it.
"""

import dataclasses
import doctest
import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import nn

import quintic
from quintic.cli import OPTION_ALIASES
from quintic.commands.options import (
    ComparisonOptions,
    EvalOptions,
    ExportOptions,
    ReportOptions,
    SampleOptions,
    read_command,
)
from quintic.errors import ConfigError
from quintic.simulate.options import RatesOptions, SimulationOptions
from quintic.train.config import Config

ROOT = Path(__file__).resolve().parents[2]
MANUAL = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
PAGES = [*MANUAL, ROOT / "CHANGELOG.md", *sorted(ROOT.glob("benchmarks/results/*.md"))]

LANGUAGES = {"python", "bash", "text", "yaml", "json", "toml"}


def name(page):
    return page.relative_to(ROOT).as_posix()


class Documented(nn.Module):
    """Has the parameters that the pages speak of."""

    def __init__(self):
        super().__init__()
        self.stem = nn.ModuleDict({"conv": nn.Conv2d(3, 8, 3)})
        block = {"qkv": nn.Linear(16, 3 * 768, bias=False), "query": nn.Linear(16, 24, bias=False)}
        block["out"] = nn.Linear(24, 16, bias=False)
        self.blocks = nn.ModuleList([nn.ModuleDict(block)])
        self.head = nn.Linear(16, 5)


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    code: str
    ranks: int
    """Processes to start it on; 0 for this one."""
    why_not_run: str | None


FENCE = re.compile(
    r"^(?:<!-- (?:ranks: (?P<ranks>\d+)|not run: (?P<why>[^\n]+)) -->\n)?(?P<indent> *)```(?P<language>\w*)[^\n]*\n"
    r"(?P<code>.*?)^(?P=indent)``` *$",
    re.DOTALL | re.MULTILINE,
)


def blocks(page):
    text = page.read_text("utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        code = textwrap.dedent(found["code"])
        yield Block(line, found["language"], code, int(found["ranks"] or 0), found["why"])


def test_a_reason_ends_with_its_line(tmp_path):
    page = tmp_path / "page.md"
    omitted = "<!-- not run: no such library here -->\n```python\nimport no_such_library\n```\n"
    page.write_text(f"{omitted}\n## Between\n\n```python\n1\n```\n\n{omitted}", "utf-8")
    assert [runs_here(block) for block in blocks(page)] == [False, True, False]
    assert anchors(page) == {"between"}


def runs_here(block):
    return block.language == "python" and not (block.ranks or block.why_not_run)


@pytest.mark.filterwarnings("ignore:perhaps several matrices")  # qkv of the model above, which pages make rules for
@pytest.mark.parametrize("page", [page for page in MANUAL if any(map(runs_here, blocks(page)))], ids=name)
def test_python_in_the_pages_runs(page, capsys):
    namespace = {"model": Documented()}  # a page imports what it uses
    for block in blocks(page):
        if runs_here(block):
            code = "\n" * block.line + block.code
            exec(compile(code, str(page), "exec"), namespace)


RANKED = [
    pytest.param(block, id=f"{name(page)}-{block.line}") for page in MANUAL for block in blocks(page) if block.ranks
]


@pytest.mark.slow
@pytest.mark.parametrize("block", RANKED)
def test_python_for_several_ranks_runs(block, tmp_path):
    script = tmp_path / "script.py"
    # Gloo's threads may let go of tensors while Python ends, which aborts the process: pytorch/pytorch#179291.
    script.write_text(f"{block.code}\nimport os\nos._exit(0)\n", "utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={block.ranks}"]
    answer = subprocess.run([*launcher, script], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("page", MANUAL, ids=name)
def test_pages_that_the_site_completes_tell_readers_of_the_plain_file(page):
    """Scripts have a link in their place; docstrings and tables need a sentence before the first of them."""
    text = page.read_text("utf-8")
    places = [match.start() for match in re.finditer(r"^(::: |<!-- generated: (?!file ))", text, re.MULTILINE)]
    if places:
        assert "`make docs`" in text[: places[0]]
        assert "plain file" in text[: places[0]]


@pytest.mark.parametrize("page", MANUAL, ids=name)
def test_blocks_are_of_a_known_language_and_exceptions_say_why(page):
    for block in blocks(page):
        where = f"{name(page)}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: a block of {block.language!r}"
        assert block.why_not_run is None or len(block.why_not_run.split()) > 3, f"{where}: why is it not run?"
    for file in re.findall(r"^<!-- generated: file (.+) -->$", page.read_text("utf-8"), re.MULTILINE):
        assert (ROOT / file).is_file(), f"{name(page)} shows {file}"
        assert f"/{file})" in page.read_text("utf-8"), f"{name(page)} shows {file}, and has no link to it"


def test_the_docstring_of_the_package_runs():
    failed, attempted = doctest.testmod(quintic)
    assert (failed, attempted) == (0, 3)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page):
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text) + re.findall(r" (?:src|srcset)=\"([^\"#]+)", text):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def slug(heading):
    """The anchor that code hosts and MkDocs both give a heading."""
    text = re.sub(r"`|\[([^]]*)\]\([^)]*\)", lambda match: match[1] or "", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


def anchors(page):
    text = re.sub(FENCE, "", page.read_text("utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_anchors_are_headings(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text("utf-8")):
        # The site shows an image with #only-light in its light colours.
        if target.startswith("https://") or anchor in ("only-light", "only-dark"):
            continue
        to = page.parent / target if target else page
        assert anchor in anchors(to), f"{name(page)} links to {target}#{anchor}"


def known_options():
    options = {"--help", "--resume", "--resume-step", "--config", "--preset", *OPTION_ALIASES}
    for section in dataclasses.fields(Config):
        options |= {"--" + f.name.replace("_", "-") for f in dataclasses.fields(section.default_factory)}
        flags = [f.name for f in dataclasses.fields(section.default_factory) if f.type in (bool, "bool")]
        options |= {"--no-" + flag.replace("_", "-") for flag in flags}
    return options


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_and_options_exist(page):
    options = known_options()
    kinds = {
        "compare": ComparisonOptions,
        "sample": SampleOptions,
        "eval": EvalOptions,
        "export": ExportOptions,
        "plan": SimulationOptions,
        "rates": RatesOptions,
        "report": ReportOptions,
    }
    own = {name: {"--" + f.name.replace("_", "-") for f in dataclasses.fields(kind)} for name, kind in kinds.items()}
    commands = {"train", "prepare", *own}
    for command, rest in re.findall(
        r"(?<!--only )\bquintic (\w+)((?: +(?:--[\w-]+|[^\s`|#;]+))*)", page.read_text("utf-8")
    ):
        if "--" not in rest:
            continue
        assert command in commands, f"{name(page)}: quintic {command}"
        for option in re.findall(r"--[\w-]+", rest):
            assert option in options | own.get(command, set()), f"{name(page)}: quintic {command} {option}"


def commands_of(page):
    """The commands of a page's shell blocks that can be read without a run, as (command, options)."""
    for block in blocks(page):
        for line in block.code.replace("\\\n", " ").splitlines() if block.language == "bash" else ():
            words = shlex.split(line, comments=True)
            if words[:1] == ["make"] and words[1:2] in (["train"], ["compare"]):
                yield words[1], shlex.split("".join(words[2:]).removeprefix("ARGS="))
            elif set(words) & {"quintic", ".venv/bin/quintic"}:
                place = next(n for n, word in enumerate(words) if word in ("quintic", ".venv/bin/quintic"))
                yield words[place + 1], list(itertools.takewhile(lambda word: "$(" not in word, words[place + 2 :]))


@pytest.mark.parametrize("page", [page for page in MANUAL if any(commands_of(page))], ids=name)
def test_the_options_of_commands_can_be_read(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command, given in commands_of(page):
        given = [OPTION_ALIASES.get(word, word) for word in given]
        if "--resume" in given:
            with pytest.raises(ConfigError, match=r"no run|is not a run"):
                read_command(command, given)
        elif "--init-from" in given:
            with pytest.raises(ConfigError, match="is neither a run in"):
                read_command(command, given)
        elif "--help" not in given:
            read_command(command, given)


@pytest.mark.parametrize("page", [page for page in MANUAL if page.name != "LOG.md"], ids=name)
def test_scripts_modules_and_targets_exist(page):
    text = page.read_text("utf-8")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    lines = "\n".join(block.code for block in blocks(page) if block.language == "bash")
    for target in [*re.findall(r"`make ([a-z-]+)", text), *re.findall(r"^make ([\w-]+)", lines, re.MULTILINE)]:
        assert target in targets, f"{name(page)}: make {target}"
    for module in re.findall(r"python -m (benchmarks(?:\.[a-z_0-9]+)*)", text):
        assert importlib.util.find_spec(module), f"{name(page)}: {module}"
    for script, rest in re.findall(r"\b(examples/[a-z_0-9]+\.py)((?: +[\w./-]+)*)", text):
        source = (ROOT / script).read_text("utf-8")
        for option in re.findall(r"--[\w-]+", rest):
            assert f'"{option}"' in source, f"{name(page)}: {script} {option}"


def test_no_page_has_marks_of_an_unfinished_merge():
    marked = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in [*MANUAL, ROOT / "CHANGELOG.md"]
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1)
        if line.startswith(("<<<<<<< ", ">>>>>>> ")) or line == "======="
    ]
    assert marked == []
