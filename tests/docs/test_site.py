"""The site: it builds without a warning, loads nothing from other hosts, and has what is generated from the source."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quintic
from quintic.cli import main
from quintic.optim.groups.options import OPTIONS
from quintic.train.config import Config

ROOT = Path(__file__).resolve().parents[2]

sys.path.append(str(ROOT / "scripts"))

import docs_reference  # noqa: E402
import docs_results  # noqa: E402


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_builds_strictly_and_loads_nothing_from_other_hosts(tmp_path):
    missing = [package for package in ("material", "mkdocstrings") if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip("mkdocs-material or mkdocstrings not installed: `make docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", tmp_path]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=environment)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    for page in pages:
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\" >]+)", text)
        loaded += re.findall(r"<link[^>]* href=\"?([^\" >]+)[^>]*rel=\"?(?:stylesheet|preload|icon)", text)
        assert not [target for target in loaded if target.startswith(("http", "//"))], page
        assert "<!-- generated:" not in text, page
    index = (tmp_path / "llms.txt").read_text("utf-8")
    for page in ROOT.glob("docs/**/*.md"):
        markdown = page.relative_to(ROOT / "docs").as_posix()
        assert f"]({markdown}): " in index, markdown
        assert "<!-- generated:" not in (tmp_path / markdown).read_text("utf-8"), markdown
        place = tmp_path / page.relative_to(ROOT / "docs").with_suffix(".html")
        assert place in pages, f"{page} is not in the site"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"([\w./-]+\.md)$", navigation, re.MULTILINE)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")]
    assert sorted([*pages, "CHANGELOG.md", "CONTRIBUTING.md"]) == sorted(listed)


def test_the_configuration_lists_every_option_with_the_defaults_of_each_preset():
    options = {option.flag: option for option in docs_reference.options()}
    sections = [field.default_factory for field in dataclasses.fields(Config)]
    assert len(options) == sum(len(dataclasses.fields(section)) for section in sections)
    assert options["--depth"].defaults == ("4", "8", "12")
    assert options["--head-dim"].meaning == "Channels of an attention head."
    assert options["--optimizer"].values == "`muon`, `adamw`"
    assert options["--steps"].defaults == ("500", "500", "None")
    assert options["--prompts"].defaults == ("none",)
    table = docs_reference.generated("configuration")
    for flag in options:
        assert f"| `{flag}` |" in table


def test_the_options_page_lists_every_option_with_its_default_and_effects():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", docs_reference.generated("options"), re.MULTILINE)
    assert [name for name, _ in rows[-4:]] == ["algorithm", "view", "tied_to", "pending_steps"]
    cells = dict(rows)
    assert cells.keys() == OPTIONS.keys()
    assert cells["lr"] == "a number of at least 0 | `0.02` | all |  | yes | "
    assert cells["kernels"] == "'auto' or 'torch' or 'triton' | `'auto'` | all |  |  | new plan, new capture"
    assert cells["step_every"] == "an integer of at least 1 | `1` | all | yes | yes | new capture"


def test_help_texts_are_those_of_the_commands(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(docs_reference.WIDTH))
    main(["report", "--help"])
    printed = capsys.readouterr().out
    text = docs_reference.generated("help report")
    assert text.startswith("```text\n")
    assert [line.rstrip() for line in printed.strip("\n").splitlines()] == text.splitlines()[1:-1]
    assert os.environ["COLUMNS"] == str(docs_reference.WIDTH)


def test_the_page_of_the_metrics_file_names_the_fields_that_its_reader_checks():
    from quintic.report import history

    page = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
    named = set(re.findall(r"\w+", page))
    assert {name for name in history._TYPES if name not in named} == set()


def test_a_page_shows_a_script_as_it_is():
    script = (ROOT / "examples" / "plain.py").read_text("utf-8")
    assert docs_reference.generated("file examples/plain.py") == f"```python\n{script}```"


def test_an_unknown_part_is_an_error():
    with pytest.raises(ValueError, match="weather"):
        docs_reference.generated("weather")


def test_every_public_name_is_in_the_reference(monkeypatch):
    assert docs_reference.missing_names() == []
    monkeypatch.setattr(quintic, "__all__", [*quintic.__all__, "_stopped"])
    monkeypatch.setattr(quintic, "_stopped", main, raising=False)
    assert docs_reference.missing_names() == ["quintic._stopped"]


def test_the_index_of_measurements_has_every_page_and_marks_what_is_superseded():
    found = docs_results.results()
    pages = set(docs_results.FOLDER.rglob("*.md"))
    assert {one.page for one in found} == pages
    assert [one.date for one in found] == sorted((one.date for one in found), reverse=True)
    for one in found:
        later = [
            o for o in found if o.subject == one.subject and o.page.parent == one.page.parent and o.date > one.date
        ]
        assert one.is_superseded == bool(later), one.page
    table = docs_reference.generated("results").splitlines()
    assert len(table) == len(pages) + 2


@pytest.mark.parametrize(
    ("name", "hardware", "subject"),
    [
        ("2026-11-24-2xh200-step-layouts-idle-8d2f84c-1", "2x NVIDIA H200", "2xh200-step-layouts-idle"),
        ("2026-11-22-cpu-step-epyc-bf16", "AMD EPYC", "cpu-step-epyc-bf16"),
        ("2026-11-20-gram-error", "CPU", "gram-error"),
    ],
)
def test_the_name_of_a_result_tells_its_hardware_and_subject(name, hardware, subject):
    assert docs_results._hardware(name) == hardware
    assert docs_results._NAME.match(name)["subject"] == subject
