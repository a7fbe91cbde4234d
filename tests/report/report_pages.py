"""Runs to write pages of, and pages read back: self-contained, escaped, every drawn number finite."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from quintic.train.metrics import MetricsLog

EVIL = "<script>alert('x')</script> & \"quoted\" <img src=http://example.org/a.png>"


class Page(HTMLParser):
    """Collects the text and the tags, and checks that every tag is closed."""

    VOID = frozenset({"meta", "input", "wbr", "br", "link", "img"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style" and self.open != ["html", "head", "title"]:
            self.words.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def write_run(folder: Path, *, steps: int = 40, every: int = 10, final: bool = True, **changes: Any) -> Path:
    """A run whose validation loss at a step is 1 + 40 / step."""
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.write(
            "run",
            time="2026-03-04T12:30:00+00:00",
            name="small run",
            config={"optim": {"lr": 0.02, "note": EVIL}, "seed": 1, **changes},
            machine={"device": "CPU", "cores": 2},
            versions={"torch": "2.13.0"},
            model={"parameters": 25_300_000},
            data={"tokens": 1_000_000},
            total_steps=steps,
            command=f"quintic train --note {EVIL}",
        )
        for step in range(1, steps + 1):
            loss = 1 + 40 / step
            times = {"data": 10.0, "forward_backward": 70.0, "optimizer": 20.0}
            fields: dict[str, Any] = {"grad_rms": {"mlp": 1e-3 / step, "attention": 0.0}} if step % 5 == 0 else {}
            log.write(
                "train", step=step, tokens=step * 1000, seconds=step * 30.0, loss=loss, bpb=loss / 2,
                lr={"muon": 0.02, "adamw": 0.003 * step / steps}, momentum=0.95, weight_decay=0.0,
                tokens_per_second=10_000.0, times_ms=times, update_rms={"mlp": 1e-4}, **fields,
            )  # fmt: skip
            if step % every == 0:
                log.write("eval", step=step, tokens=step * 1000, seconds=step * 30.0, loss=loss, bpb=loss / 2)
        log.write("sample", step=steps, samples=[{"prompt": "Once <upon>", "text": EVIL}])
        if final:
            loss = 1 + 40 / steps
            log.write(
                "final", step=steps, loss=loss, bpb=loss / 2, seconds=steps * 30.0, samples=[],
                baselines={"xz_bpb": 2.1049, "bigram_bpb": 3.3333, "bytes": 10_000_000},
            )  # fmt: skip
    return folder


def read(path: Path) -> Page:
    """The parsed page, after the checks that hold for each: self-contained, escaped, every drawn number finite."""
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert html.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "img", "iframe", "object", "image"} & {tag for tag, _ in page.tags}
    loads = {"src", "href", "srcset", "data", "action"}
    assert not [attributes for _, attributes in page.tags if loads & attributes.keys()]
    assert not re.search(r"url\((?!#)|@import|@font-face", html)
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    # What a drawing refers to is in it.
    referred = {value for _, a in page.tags for name, value in a.items() if name == "xlink:href"}
    referred |= {f"#{name}" for name in re.findall(r"url\(#([^)]*)\)", html)}
    assert referred <= {f"#{identifier}" for identifier in identifiers}
    assert not [a for tag, a in page.tags if tag == "th" and a.get("scope") not in ("row", "col")]
    for tag, attributes in page.tags:
        if tag in ("path", "use", "text", "svg", "span"):
            drawn = " ".join(value or "" for name, value in attributes.items() if name != "aria-label")
            assert not re.search(r"\b(nan|inf|None)\b", drawn), (tag, attributes)
    assert list(path.parent.glob("*.tmp")) == []
    return page
