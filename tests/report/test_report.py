"""The pages: right figures, nothing loaded from elsewhere, every state of a run drawn."""

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from durability import disk_events, durable_names

from quintic.errors import ConfigError, DataError
from quintic.report.figures import Bar, Curve, Reference, format_si, line_chart, nice_ticks, share_bar, upper_edge
from quintic.report.page import date, duration, large_number
from quintic.report.report import write_comparison, write_report
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
        if self.open and self.open[-1] not in ("style", "title"):
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
                "final", step=steps, loss=loss, bpb=1.4142, seconds=steps * 30.0, samples=[],
                baselines={"xz_bpb": 2.1049, "bigram_bpb": 3.3333, "bytes": 10_000_000},
                breakdown={"data_frac": 0.05, "forward_backward_frac": 0.8, "optimizer_frac": 0.1},
            )  # fmt: skip
    return folder


def read(path: Path) -> Page:
    """The parsed page, after the checks that hold for each: self-contained, escaped, every drawn number finite."""
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert html.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "img", "iframe", "object", "use", "image"} & {tag for tag, _ in page.tags}
    loads = {"src", "href", "srcset", "data", "action", "xlink:href"}
    assert not [attributes for _, attributes in page.tags if loads & attributes.keys()]
    assert "url(" not in html
    assert "@import" not in html
    for tag, attributes in page.tags:
        if tag in ("path", "circle", "text", "svg", "span"):
            drawn = " ".join(value or "" for name, value in attributes.items() if name != "aria-label")
            assert not re.search(r"\b(nan|inf|None)\b", drawn), (tag, attributes)
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    assert list(path.parent.glob("*.tmp")) == []
    return page


def test_the_page_of_a_finished_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = write_report(folder)
    assert path == folder / "report.html"
    page = read(path)
    for words in (
        "small run Started 2026-03-04 at 12:30 UTC; finished after 40 steps.",
        "1.414 bits per byte on the validation text",
        "xz -9 , a strong general-purpose compressor, needs 2.10 bits for each byte of the same text, this model 1.41.",
        "guesses each byte from the one before it, needs 3.33. The text has 10 million bytes.",
        "25.3 million parameters",
        "40,000 tokens read",
        "20 min of training",
        "xz -9: 2.10",
        "byte bigram: 3.33",
        "training time (minutes)",
        "muon (peak 0.02)",
        "forward and backward pass (predicting, and computing the gradients): 80.0 %",
        "everything else: 5.0 %",
        "A typical step took 100 milliseconds.",
        "optim. lr 0.02",
        "cores 2",
        "torch 2.13.0",
        f"quintic train --note {' '.join(EVIL.split())}",
        f"Once <upon> {EVIL}",
    ):
        assert words in page.text, words
    assert "muon (peak 0.02) adamw (peak 0.003)" in page.text
    # Two charts in each of three tabs, learning rates, momentum, two layer charts, speed.
    assert sum("role" in attributes for tag, attributes in page.tags if tag == "svg") == 11
    # The reference lines: two in each tab's chart of bits per byte.
    assert sum(attributes.get("class") == "reference" for _, attributes in page.tags) == 6


def test_pages_survive_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second")
    events = disk_events(monkeypatch)
    path = write_report(first)
    write_comparison({"first": first, "second": second}, tmp_path / "pages" / "comparison.html", title="Two")
    assert durable_names(events) == [path.name, "comparison.html"]


def test_an_unfinished_run_says_so_and_uses_what_there_is(tmp_path: Path) -> None:
    write_run(tmp_path, steps=25, final=False)
    page = read(write_report(tmp_path))
    assert "not finished: step 25 of 25" in page.text
    # The last evaluation, at step 20: loss 3, half of it in bits per byte.
    assert "1.500 bits per byte on the validation text so far" in page.text
    assert "are added when the run ends" in page.text
    assert "waiting for data: 10.0 %" in page.text


def test_a_resumed_run_names_the_step(tmp_path: Path) -> None:
    write_run(tmp_path, steps=20)
    with MetricsLog(tmp_path / "metrics.jsonl", resume_step=10) as log:
        log.write("resume", step=10, time="2026-03-04T13:00:00+00:00")
        log.write("train", step=11, loss=2.0)
    page = read(write_report(tmp_path))
    assert "Started 2026-03-04 at 12:30 UTC; not finished: step 11 of 20; continued from step 10." in page.text


def test_a_single_evaluation_and_nothing_else(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write("eval", step=1, tokens=100, seconds=0.5, loss=5.0, bpb=2.0)
    page = read(write_report(tmp_path))
    assert f"{tmp_path.name} Not finished: step 1." in page.text
    assert "2.000 bits per byte" in page.text
    # The point is drawn in each of six charts (as a line of one point, and its mark).
    assert page.count("circle") == 12


def test_losses_that_are_not_finite_are_named_and_leave_gaps(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for step in range(1, 10):
            loss = math.nan if 4 <= step <= 6 else 3.0
            log.write("train", step=step, tokens=step, seconds=step, loss=loss, bpb=loss)
            log.write("eval", step=step, tokens=step, seconds=step, loss=math.inf, bpb=None)
    page = read(write_report(tmp_path))
    # Three training steps and nine evaluations.
    assert "not a finite number in 12 records, first at step 1." in page.text
    assert "– bits per byte: the last validation result was not a finite number" in page.text
    lines = [a for _, a in page.tags if a.get("class") == "line c1"]
    assert len(lines) == 2 * 6  # two pieces in each of six charts


def test_everything_lost_still_gives_a_page(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write("train", step=1, tokens=1, seconds=1, loss=math.nan, bpb=math.nan, lr={"muon": 0.0}, times_ms={})
        log.write("sample", step=1, samples=[])
    page = read(write_report(tmp_path))
    assert page.text.count("Nothing was measured yet.") == 6
    assert "– bits per byte: no validation result yet" in page.text


def test_a_run_that_was_lost_at_the_end_shows_no_older_result(tmp_path: Path) -> None:
    write_run(tmp_path, final=False)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write("final", step=40, loss=math.nan, bpb=math.nan, seconds=1.0)
    page = read(write_report(tmp_path))
    assert "the last validation result was not a finite number" in page.text
    assert "validation loss (nats" not in page.text


def test_a_run_of_many_steps_is_thinned(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3000, every=5)
    path = write_report(tmp_path)
    page = read(path)
    assert path.stat().st_size < 300_000
    assert "an average over neighbouring steps" in page.text
    assert page.count("tr") < 80
    assert any(attributes.get("class") == "band c1" for _, attributes in page.tags)


def test_folders_that_cannot_be_reported_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path.name} holds no metrics\.jsonl"):
        write_report(tmp_path)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write("run", name="x")
    with pytest.raises(ConfigError, match="has no training step yet"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("broken\n{}\n")
    with pytest.raises(DataError, match="line 1"):
        write_report(tmp_path)


def write_curve(folder: Path, losses: dict[int, float], **config: Any) -> Path:
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.write("run", name=folder.name, config=config)
        for step, loss in losses.items():
            log.write("eval", step=step, tokens=step * 10, seconds=step * 2.0, loss=loss, bpb=loss / 2)
    return folder


def test_comparison_figures_by_hand(tmp_path: Path) -> None:
    runs = {
        "AdamW": write_curve(tmp_path / "a", {100: 5.0, 200: 4.0, 400: 3.0}, lr=0.003, seed=1),
        # 3.0 lies a quarter of the way from 3.25 (step 100) to 2.25 (step 300): step 150.
        "Muon": write_curve(tmp_path / "b", {50: 4.0, 100: 3.25, 200: math.nan, 300: 2.25}, lr=0.02, seed=1),
        "slow": write_curve(tmp_path / "c", {100: 6.0, 500: 3.5}, lr=0.02, seed=1),
        "early": write_curve(tmp_path / "d", {80: 2.0, 90: 3.0}, lr=0.02, seed=1),
        "exact": write_curve(tmp_path / "e", {10: 7.0, 600: 3.0}, lr=0.02, seed=1),
    }
    out = tmp_path / "pages" / "comparison.html"
    figures = write_comparison(runs, out, title="Race <1>")
    assert figures["baseline"] == "AdamW"
    assert figures["runs"]["Muon"] == {"steps": 300, "tokens": 3000.0, "seconds": 600.0, "loss": 2.25, "bpb": 1.125}
    candidates = figures["candidates"]
    assert list(candidates) == ["Muon", "slow", "early", "exact"]
    assert candidates["Muon"] == {
        "steps_to_baseline_loss": 150.0,
        "percent_of_steps": 37.5,
        "seconds_to_baseline_loss": 300.0,
        "percent_of_seconds": 37.5,
        "sentence": "Muon reached AdamW's final validation loss after 150 of 400 steps (37.5 %)",
    }
    assert candidates["slow"] == {
        "steps_to_baseline_loss": None,
        "percent_of_steps": None,
        "seconds_to_baseline_loss": None,
        "percent_of_seconds": None,
        "sentence": "slow never reached AdamW's final validation loss in its 500 steps",
    }
    assert candidates["early"]["steps_to_baseline_loss"] == 80.0
    assert (candidates["exact"]["steps_to_baseline_loss"], candidates["exact"]["percent_of_steps"]) == (600.0, 150.0)
    page = read(out)
    assert page.text.startswith("Race <1> AdamW, Muon, slow, early, exact")
    for words in (
        "Muon reached AdamW's final validation loss after 150 of 400 steps (37.5 %).",
        "and after 5 min of training, 37.5 % of AdamW's time",
        "slow never reached",
        "AdamW's final loss: 3.000",
        "lr 0.003 0.02 0.02 0.02 0.02",
    ):
        assert words in page.text, words
    assert "seed" not in page.text


def test_comparison_without_times_or_settings(tmp_path: Path) -> None:
    runs = {}
    for name, losses in (("a", (4.0, 3.0)), ("<b>", (3.5, 2.5))):
        with MetricsLog(tmp_path / name[-1] / "metrics.jsonl") as log:
            for step, loss in enumerate(losses, start=1):
                log.write("eval", step=step, loss=loss)
        runs[name] = log.path.parent
    figures = write_comparison(runs, tmp_path / "out.html", title="Two")
    assert figures["candidates"]["<b>"]["steps_to_baseline_loss"] == 1.5
    assert figures["candidates"]["<b>"]["percent_of_seconds"] is None
    assert "not a finite number" not in read(tmp_path / "out.html").text
    with MetricsLog(tmp_path / "a" / "metrics.jsonl") as log:
        log.write("eval", step=3, loss=math.nan)
    write_comparison(runs, tmp_path / "out.html", title="Two")
    assert "a: the loss was not a finite number at the end;" in read(tmp_path / "out.html").text
    assert "<b> reached a's final validation loss after 1.5 of 2 steps (75.0 %)" in read(tmp_path / "out.html").text


def test_comparisons_that_cannot_be_made_are_errors(tmp_path: Path) -> None:
    run = write_curve(tmp_path / "a", {1: 2.0})
    lost = write_curve(tmp_path / "lost", {1: math.nan})
    out = tmp_path / "out.html"
    with pytest.raises(ConfigError, match="needs two runs at least, got 1"):
        write_comparison({"a": run}, out, title="")
    with pytest.raises(ConfigError, match=r"lost.*no finite validation loss"):
        write_comparison({"a": run, "lost": lost}, out, title="")
    with pytest.raises(ConfigError, match="absent holds no"):
        write_comparison({"a": run, "b": tmp_path / "absent"}, out, title="")
    assert not out.exists()


def test_a_line_is_drawn_where_its_values_are() -> None:
    curve = Curve(label="a <b>", x=[0, 50, 100], y=[0.0, 5.0, 10.0])
    chart = line_chart([curve], title="t", x_label="x", y_label="y", y_limits=(0.0, None))
    points = re.search(r'class="line c0" d="M([^"]*)"', chart)
    assert points is not None
    (x0, y0), (x1, y1), (x2, y2) = (map(float, pair.split()) for pair in points[1].split("L"))
    assert (x0, x2) == (56, 388)
    assert x1 == (x0 + x2) / 2
    assert y0 > y1 > y2
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert "a &lt;b&gt;" in chart


def test_a_log_axis_skips_what_it_cannot_show() -> None:
    curve = Curve(label="a", x=[1, 2, 3, 4], y=[1e-4, 0.0, -1.0, 1e-2])
    chart = line_chart([curve], title="t", x_label="x", y_label="y", log_y=True)
    assert chart.count("<circle") == 2
    assert ">10⁻⁴<" in chart
    assert ">0.01<" in chart


def test_labels_of_close_references_do_not_overlap() -> None:
    references = [Reference(label="upper", y=2.02), Reference(label="lower", y=2.0)]
    curve = Curve(label="a", x=[0, 1], y=[0.0, 4.0])
    chart = line_chart([curve], title="t", x_label="x", y_label="y", references=references)
    upper, lower = (float(y) for y in re.findall(r'class="on-plot" x="\d+" y="([\d.]+)"', chart))
    assert lower - upper > 15


def test_shares_are_of_the_sum() -> None:
    bar = share_bar([Bar(label="a", value=1, text="1"), Bar(label="b", value=3, text="3", color=1)], title="t")
    assert re.findall(r"width:([\d.]+)%", bar) == ["25.00", "75.00"]


def test_upper_edge_cuts_only_a_steep_start() -> None:
    assert upper_edge([(1, 10.0), (50, 4.0), (100, 3.0)]) == 4.0
    assert upper_edge([(1, 4.1), (50, 4.0), (100, 3.0)]) is None
    assert upper_edge([]) is None


def test_numbers_as_people_write_them() -> None:
    assert nice_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(0.11, 0.39, 4) == [0.2, 0.3]
    assert nice_ticks(3, 3) == [3]
    assert [format_si(n) for n in (0, 0.25, 950, 1500, 2e6, 3.25e9)] == ["0", "0.25", "950", "1.5K", "2M", "3.25B"]
    words = [duration(s).replace("\u00a0", " ") for s in (0, 0.1234, 59.2, 59.7, 200, 3600, 7500, 273600)]
    assert words == ["0 s", "0.123 s", "59.2 s", "1 min", "3 min 20 s", "1 h", "2 h 5 min", "3 d 4 h"]
    numbers = [large_number(n).replace("\u00a0", " ") for n in (950, 12_300, 124_439_808, 2.5e9)]
    assert numbers == ["950", "12,300", "124.4 million", "2.5 billion"]
    assert date("2026-03-04T12:30:00") == "2026-03-04 at 12:30"
    assert date("yesterday") == "yesterday"


def test_what_the_machine_did_is_on_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", final=False)
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.write("run", name="n", machine={"matrix_flops_per_second": 5e14}, git={"commit": "c0ffee", "dirty": True},
                  command="quintic train", repeat="quintic train --depth 4")  # fmt: skip
        log.write("train", step=41, loss=2.0, spike=7.3, on_spike="rollback", grad_norm=0.25)
        log.write("rollback", step=40, spike_step=41)
        log.write("train", step=41, loss=1.5, grad_norm=0.5)
        log.write("final", step=41, loss=1.5, bpb=1.2, seconds=900.0, tokens_per_second=450_040.0, mfu=0.3456,
                  first_step_extra_seconds=45.2, compile_seconds=40.1, peak_memory_bytes=3.5 * 2**30, flops=1.25e18,
                  least_loss=1.4321)  # fmt: skip
    text = " ".join(read(write_report(folder)).words).replace("\u00a0", " ")
    for expected in (
        "450,040 tokens per second, 34.6 % of the 500 trillion operations per second",
        "The first step took 45.2 s more than others; compiling took 40.1 s.",
        "3.5 GiB of memory at most",
        "1.25e+18 floating-point operations",
        "the least loss on the training text was 1.4321",
        "The loss jumped at step 41 (7.3)",
        "the run went back to its last checkpoint",
        "Norm of the gradient",
        "c0ffee",
        "quintic train --depth 4",
    ):
        assert expected in text, expected


def test_a_comparison_has_what_was_measured(tmp_path: Path) -> None:
    runs = {}
    for name, mfu in (("a", 0.25), ("b", None)):
        runs[name] = write_run(tmp_path / name, final=False)
        with MetricsLog(runs[name] / "metrics.jsonl") as log:
            log.write("final", step=40, loss=2.0, bpb=1.0, seconds=9.0, mfu=mfu)
    write_comparison(runs, tmp_path / "page.html", title="two")
    words = read(tmp_path / "page.html").words
    position = words.index("model FLOPs utilisation")
    assert words[position : position + 3] == ["model FLOPs utilisation", "25.0%", "–"]
    assert "least smoothed training loss" not in words
