"""What a demanding reader looks for: each score with its spread, values that can be read, nothing said twice."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from report_pages import Page, read, write_run

from quintic.report import report
from quintic.report.comparison import write_comparison
from quintic.report.report import write_report
from quintic.train.metrics import MetricsLog, summarize_log

CORE: dict[str, Any] = {
    "step": 40,
    "core": 0.125,
    "core_stderr": 0.01,
    "centred": {"copa": 0.25, "piqa": 0.0},
    "accuracy": {"copa": 0.625, "piqa": None},
    "missing": ["squad", "<coqa>"],
}

TIMES = {"data": 2.0, "forward_backward": 93.0, "optimizer": 5.0}


def written(folder: Path, *records: dict[str, Any], **run: Any) -> Page:
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.write("run", name="n", **run)
        for record in records:
            log.write(**record)
    return read(write_report(folder))


def core_page(folder: Path, *records: dict[str, Any]) -> str:
    return written(folder, {"kind": "eval", "step": 40, "loss": 1.0}, *({"kind": "core", **r} for r in records)).text


def test_the_newest_answers_are_a_table(tmp_path: Path) -> None:
    text = core_page(tmp_path, CORE | {"step": 20, "core": 0.1, "core_stderr": None}, CORE)
    assert "Their mean, without the tasks that were missing, is 0.1250 ± 0.0100 after 40 steps" in text
    assert "task accuracy centred copa 0.6250 0.2500 piqa – 0.0000" in text
    assert "Missing: squad, <coqa>." in text
    assert "CORE, their mean," not in text
    assert " 20: 0.1 40: 0.125 (0.115 to 0.135) " in text


def test_all_tasks_are_core_and_a_score_without_error_says_why(tmp_path: Path) -> None:
    text = core_page(tmp_path, CORE | {"missing": [], "core_stderr": None})
    assert "CORE, their mean, is 0.1250 after 40 steps. Its standard error is not known: the questions are too" in text
    assert "Missing" not in text
    assert "Mean centred accuracy" not in text  # one record needs no chart
    (tmp_path / "metrics.jsonl").unlink()
    assert "What it can answer" not in core_page(tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bpb_stderr": 0.125}, "± 0.125 is the standard error over the documents"),
        ({"bpb_stderr": None}, "is not known: that takes two documents or more, and this text is one."),
        ({}, "(the standard error) is not known: this run did not measure it."),
    ],
)
def test_a_score_has_its_error_or_why_there_is_none(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    text = written(tmp_path, {"kind": "eval", "step": 1, "loss": 2.0, "bpb": 1.5, **fields}).text
    assert words in text
    assert ("1.500 ± 0.125 bits per byte on" in text) == bool(fields.get("bpb_stderr"))
    # And in a comparison.
    write_comparison({"a": tmp_path, "b": tmp_path}, tmp_path / "page.html", title="")
    text = read(tmp_path / "page.html").text
    assert ("a 1.500 ± 0.125" in text) == bool(fields.get("bpb_stderr"))
    assert ("(the standard error) is not known" in text) == (not fields.get("bpb_stderr"))


def test_samples_over_training_are_there_with_their_steps(tmp_path: Path) -> None:
    records = [
        {"kind": "sample", "step": step, "samples": [{"prompt": "Once", "text": f" {step} times."}]}
        for step in range(1, 31)
    ]
    text = written(tmp_path, {"kind": "train", "step": 1, "loss": 2.0}, *records).text
    start = text.index("What it writes")
    shown = [int(step) for step in re.findall(r"Once (\d+) times\.", text[start:])]
    assert shown[0] == 30
    # Of many samples those at even distances.
    assert shown[1:] == list(range(3, 30, 3))
    assert "What it wrote earlier After 3 steps Once 3 times. After 6 steps" in text
    (tmp_path / "metrics.jsonl").unlink()
    assert "What it wrote earlier" not in written(tmp_path, {"kind": "train", "step": 1, "loss": 2.0}, records[0]).text


def test_shares_are_bars_of_the_whole(tmp_path: Path) -> None:
    page = written(tmp_path, {"kind": "train", "step": 1, "loss": 2.0, "times_ms": TIMES})
    bars = [attributes["style"] for _, attributes in page.tags if attributes.get("class") == "bar"]
    assert bars == ["width:2.00%", "width:93.00%", "width:5.00%"]


def test_memory_is_the_most_of_all_processes(tmp_path: Path) -> None:
    train: list[dict[str, Any]] = [
        {"kind": "train", "step": step, "loss": 2.0, "peak_memory_bytes": gib * 2**30, "times_ms": TIMES}
        for step, gib in ((1, 3), (2, 2))
    ]
    evaluation = {"kind": "eval", "step": 2, "loss": 2.0, "bpb": 1.0, "peak_memory_bytes": 4 * 2**30}
    written(tmp_path, *train)
    assert "<li><b>3\u00a0GiB</b>" in (tmp_path / "report.html").read_text("utf-8")
    written(tmp_path, *train, evaluation)
    assert "<li><b>4\u00a0GiB</b>" in (tmp_path / "report.html").read_text("utf-8")
    assert summarize_log([*train, evaluation])["peak_memory_bytes"] == 4 * 2**30


def test_no_key_figure_is_alone_on_a_line(tmp_path: Path) -> None:
    fields = {"tokens": 100, "seconds": 5.0, "flops": 10.0, "peak_memory_bytes": 2.0**30}
    record: dict[str, Any] = {"kind": "train", "step": 10, "loss": 2.0}
    numbers = []
    for count in range(len(fields) + 1):
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        some = dict(list(fields.items())[:count])
        evals = [{"kind": "eval", "step": step, "loss": 2.0, "bpb": 1.0} for step in (5, 10)]
        page = written(tmp_path, record | some, *evals, model={"parameters": 1000}, machine={"device": "CPU"})
        [style] = [a["style"] or "" for _, a in page.tags if a.get("class") == "facts"]
        numbers.append((tmp_path / "report.html").read_text("utf-8").count("<li><b>"))
        assert numbers[-1] % int(style.removeprefix("--columns:")) != 1
    assert numbers == [4, 6, 7, 8, 9]


def test_equal_schedules_have_one_entry_in_the_legend(tmp_path: Path) -> None:
    groups = ("matrices", "scalars", "embedding", "head", "values", "scales")
    records = [
        {"kind": "train", "step": step, "loss": 2.0, "lr": dict.fromkeys(groups, 0.1 * (10 - step))}
        for step in range(1, 10)
    ]
    page = written(tmp_path, *records)
    html = (tmp_path / "report.html").read_text("utf-8")
    [legend] = re.findall(r'<ul class="legend">(.*?)</ul>', html[html.index("<h2>Schedule") :], re.DOTALL)
    assert legend.count("<li>") == 1
    assert ", ".join(f"{name} (peak 0.9)" for name in groups) in page.text


def test_nothing_is_said_twice(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_report(folder)
    write_comparison({"a": folder, "b": folder}, tmp_path / "page.html", title="a, b compared")
    for path in (folder / "report.html", tmp_path / "page.html"):
        html = path.read_text("utf-8")
        found = re.findall(r"<(?:h\d|figcaption|dt)[^>]*>(.*?)</(?:h\d|figcaption|dt)>", html)
        # The charts of the other tabs are those of the first, over another axis.
        visible = html.replace(html[html.index('<div class="tabs">') : html.index("<h2>", html.index('"tabs"'))], "")
        titles = re.findall(r"<(?:h\d|figcaption)[^>]*>(.*?)</(?:h\d|figcaption)>", visible)
        assert len(titles) == len(set(titles)), titles
        # A drawing names its x axis only; title and unit are above it.
        texts = re.findall(r'<text class="label"[^>]*>([^<]*)<', html)
        assert not {re.sub("<.*", "", title).strip() for title in found} & set(texts)


def test_an_odd_chart_has_the_text_beside_it(tmp_path: Path) -> None:
    record = {"kind": "train", "loss": 2.0, "grad_rms": {"mlp": 0.1}, "update_rms": {"mlp": 0.1}, "grad_norm": 0.5}
    written(tmp_path, *({**record, "step": step} for step in (1, 2)))
    html = (tmp_path / "report.html").read_text("utf-8")
    section = html[html.index("<h2>Layer by layer") :].partition("</section>")[0]
    cells = re.findall(r"<(p|figure)>", section[section.index('<div class="grid2">') :])
    assert cells == ["p", "figure", "figure", "figure"]


def test_paragraphs_are_as_wide_as_charts() -> None:
    template = (Path(report.__file__).parent / "templates" / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"^(p|dd) \{[^}]*max-width", template, re.MULTILINE)


def test_nothing_on_a_page_is_kept_on_one_line() -> None:
    # A long command, name or path would run out of its card on a phone.
    templates = Path(report.__file__).parent / "templates"
    assert len(list(templates.glob("*.html"))) == 5
    assert [path.name for path in templates.glob("*.html") if "nowrap" in path.read_text(encoding="utf-8")] == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_pages_fit_a_phone(tmp_path: Path) -> None:
    name = "a-run-with-quite-a-long-name-2026-11-25_of_somebody"
    unbroken = "averylongnameofarunwithoutanyplacetobreakit_20261125"
    runs = {label: write_run(tmp_path / folder) for label, folder in ((unbroken, "a"), (name, "b"), ("c", "c"))}
    write_comparison(runs, tmp_path / "comparison.html", title=f"{unbroken}, {name}, c compared")
    write_report(runs[name], tmp_path / "run.html")
    # A browser's own window is 500 pixels wide at least: the page is measured in a frame.
    said = "<script>onload = () => parent.postMessage(document.documentElement.scrollWidth, '*')</script></body>"
    for page, width in itertools.product(("comparison", "run"), (320, 390, 1280)):
        text = (tmp_path / f"{page}.html").read_text(encoding="utf-8")
        (tmp_path / "inner.html").write_text(text.replace("</body>", said), encoding="utf-8")
        outer = "<p id=w></p><script>onmessage = e => { w.textContent = 'needs ' + e.data }</script>"
        frame = f"<iframe src=inner.html width={width} height=900 style='border:0'></iframe>"
        (tmp_path / "outer.html").write_text(f"<!doctype html>{outer}{frame}")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom"]
        command = ["chromium", *options, f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "outer.html").as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        needed = re.search(r"needs (\d+)", shown)
        assert needed is not None
        assert int(needed[1]) <= width, page
