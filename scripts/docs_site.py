"""Hooks of `make docs` for MkDocs: links that leave `docs/`, pages generated from the source, Markdown for programs.

Pages link to each other, to examples, to measurements and to the changelog by their places in the repository, as a
code host shows them. In the site everything keeps its place relative to the others: `docs/x.md` is `x.md`, any other
file keeps its path.

Each page of the navigation also stands in the site as Markdown (`x.html`, `x.md`), and `llms.txt` lists them. The build
fails if the reference describes a public name nowhere.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from docs_reference import generated, missing_names  # noqa: E402
from mkdocs.exceptions import PluginError  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent

# A link of Markdown, inline: everything up to the target, its path, its anchor.
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")

# A fenced block; what looks like a link in it is none.
FENCE = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)

# Names in a line of text, not in a block.
CODE = re.compile(r"(?<!<span></span>)<code>[^<]*--[a-z][^<]*</code>")

# Pages of the repository that the site has under another name.
ELSEWHERE = {"README.md": "docs/index.md", "examples": "docs/how-to/layouts/index.md", "docs": "docs/index.md"}

MARKER = re.compile(r"^<!-- generated: ([\w ./-]+) -->$", re.MULTILINE)


# Address of a page in the site -> its title and its Markdown.
_PAGES: dict[str, tuple[str, str]] = {}


def on_pre_build(config: Any) -> None:
    """Fail if a public name is missing in the reference."""
    _PAGES.clear()
    if missing := missing_names():
        raise PluginError(
            f"docs/reference describes {', '.join(missing)} nowhere: add a line `::: NAME` to a page there"
        )


def on_post_build(config: Any) -> None:
    """Write each page's Markdown beside it, and `llms.txt`, which lists the pages."""
    site = Path(config["site_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    for heading, pages in _sections(config["nav"]):
        lines += [f"## {heading}", ""]
        for page in pages:
            title, markdown = _PAGES[page]
            (site / page).write_text(markdown, "utf-8")
            lines.append(f"- [{title}]({page}): {_summary(markdown)}")
        lines.append("")
    (site / "llms.txt").write_text("\n".join(lines), "utf-8")


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to outside of `docs/`, and what those pages link to."""
    waiting = [ROOT / "docs" / file.src_uri for file in files if file.src_uri.endswith(".md")]
    waiting += [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")]
    for path in waiting[-2:]:
        files.append(_file(path, config))
    while waiting:
        path = waiting.pop()
        for target in _targets(path):
            place = place_in_site(target)
            if target.is_file() and files.get_file_from_path(place) is None:
                files.append(_file(target, config))
                if target.suffix == ".md":
                    waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fill in generated parts and let links lead to where their targets are in the site."""
    markdown = MARKER.sub(lambda match: generated(match[1]), markdown)
    source = Path(page.file.abs_src_path)
    folder = posixpath.dirname(place_in_site(source))

    def in_site(match: re.Match[str]) -> str:
        if _is_address(match[2]):
            return match[0]
        target = Path(os.path.normpath(source.parent / match[2]))
        return match[1] + posixpath.relpath(place_in_site(target), folder or ".") + (match[3] or "")

    parts = _outside_of_fences(markdown)
    text = "".join(LINK.sub(in_site, text) if is_prose else text for text, is_prose in parts)
    _PAGES[page.file.src_uri] = (page.title or page.file.src_uri, text)
    return text


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Mark the options of commands in lines of text, so that they are not broken after a hyphen."""
    return CODE.sub(lambda code: re.sub(r"--[\w-]+", r'<span class="option">\g<0></span>', code[0]), html)


def _sections(nav: list[Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield the tabs of the navigation, each with all of its pages."""
    for entry in nav:
        for heading, below in entry.items():
            yield heading, list(_pages_of(below))


def _pages_of(below: Any) -> Iterator[str]:
    if isinstance(below, str):
        yield below
        return
    for entry in below:
        yield from _pages_of(entry if isinstance(entry, str) else next(iter(entry.values())))


def _summary(markdown: str) -> str:
    """Return the first sentence of a page, without links and marks."""
    prose = "".join(text for text, is_prose in _outside_of_fences(markdown) if is_prose)
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", prose)]
    first = next((part for part in paragraphs if part and part[0] not in "#|<-!:"), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first.split()))
    return re.split(r"(?<=[.:])\s", plain)[0].rstrip(":")


def place_in_site(path: Path) -> str:
    """Return the path of a repository's file in the site, relative to its root."""
    place = path.relative_to(ROOT).as_posix()
    return ELSEWHERE.get(place, place).removeprefix("docs/")


def _file(path: Path, config: Any) -> File:
    return File.generated(config, place_in_site(path), abs_src_path=str(path))


def _targets(path: Path) -> Iterator[Path]:
    for text, is_prose in _outside_of_fences(path.read_text("utf-8")):
        for match in LINK.finditer(text) if is_prose else ():
            if not _is_address(match[2]):
                yield Path(os.path.normpath(path.parent / match[2]))


def _is_address(target: str) -> bool:
    return re.match(r"[a-z]+:", target) is not None


def _outside_of_fences(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a page, and whether each is prose and not a fenced block."""
    end = 0
    for fence in FENCE.finditer(markdown):
        yield markdown[end : fence.start()], True
        yield fence[0], False
        end = fence.end()
    yield markdown[end:], True
