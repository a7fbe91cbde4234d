"""The page of a run: right figures, nothing loaded from elsewhere, every state of a run drawn."""

import contextlib
import json
import math
import re
from pathlib import Path

import pytest
from durability import disk_events, durable_names
from report_pages import EVIL, read, write_run

from quintic.errors import ConfigError, DataError
from quintic.report.comparison import write_comparison
from quintic.report.history import read_metrics
from quintic.report.report import write_report
from quintic.train.metrics import MetricsLog, summarize_log


def test_the_page_of_a_finished_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = write_report(folder)
    assert path == folder / "report.html"
    page = read(path)
    for words in (
        "small run Started 2026-03-04 at 12:30 UTC; finished after 40 steps.",
        "1.000 bits per byte on the validation text",
        "xz -9 , a strong general-purpose compressor, needs 2.10 bits for each byte of the same text, this model 1.00.",
        "guesses each byte from the one before it, needs 3.33.",
        "10 million bytes of the text were scored: whole batches, which may leave out its end.",
        "25.3 million parameters",
        "40,000 tokens read",
        "20 min of training",
        "on the validation text xz -9: 2.10 byte bigram: 3.33",
        "training time (minutes)",
        "The training line is measured on each step's own batch, before its update",
        "muon (peak 0.02) adamw (peak 0.003)",
        "forward and backward pass (predicting, and computing the gradients) 70.0 %",
        "A typical step took 100 milliseconds.",
        "optim. lr 0.02",
        "processor cores 2",
        "torch 2.13.0",
        f"quintic train --note {' '.join(EVIL.split())}",
        f"Once <upon> {EVIL}",
    ):
        assert words in page.text, words
    # Two charts in each of three tabs, learning rates, momentum, two layer charts, speed.
    assert sum(attributes.get("class") == "chart" for _, attributes in page.tags) == 11


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
    assert "waiting for data 10.0 %" in page.text


def test_commands_on_a_page_can_be_typed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintic.launch.program", lambda: ".venv/bin/quintic")
    write_run(tmp_path, steps=20, final=False)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write(
            "run", command="quintic train --depth 6", repeat="torchrun -m quintic train && quintic train --resume"
        )
    text = read(write_report(tmp_path)).text
    assert "It was started with this: .venv/bin/quintic train --depth 6" in text
    assert "torchrun -m quintic train && .venv/bin/quintic train --resume" in text
    write_comparison({"a": tmp_path, "b": tmp_path}, tmp_path / "page.html", title="")
    assert ".venv/bin/quintic compare --seeds 3" in read(tmp_path / "page.html").text


def test_a_resumed_run_names_the_step(tmp_path: Path) -> None:
    write_run(tmp_path, steps=20)
    with MetricsLog(tmp_path / "metrics.jsonl", resume_step=10) as log:
        log.write("resume", step=10, time="2026-03-04T13:00:00+00:00")
        log.write("train", step=11, loss=2.0)
    page = read(write_report(tmp_path))
    assert "Started 2026-03-04 at 12:30 UTC; not finished: step 11 of 20; continued from step 10." in page.text


def test_a_run_continued_with_other_settings_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, steps=20, final=False)
    unchanged = "makes the same run wherever it is typed"
    last_digit = "give the same numbers to the last digit"

    def resumed(step: int, cores: int) -> str:
        with MetricsLog(tmp_path / "metrics.jsonl", resume_step=step) as log:
            command = f"quintic train --resume --cores {cores}"
            machine = {"device": "CPU", "cores": cores, "memory_gb": 1.0}
            log.write("resume", step=step, command=command, machine=machine, ranks=1)
            log.write("train", step=step + 1, loss=2.0)
        return read(write_report(tmp_path)).text

    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write("run", command="quintic train", repeat="quintic train --all", machine={"device": "CPU", "cores": 2})
    text = resumed(10, 2)
    assert (
        "It was started with this: quintic train And continued after step 10 with: quintic train --resume --cores 2"
        in text
    )
    assert unchanged in text
    assert last_digit in text
    text = resumed(15, 1)
    assert "; from step 15 on with processor cores 1 (before: 2)." in text
    assert "Machine from step 15 on processor cores 1" in text
    assert "This one was continued with others: from step 15 on processor cores 1 (before: 2)." in text
    assert unchanged not in text
    assert last_digit not in text
    text = resumed(18, 1)  # as before
    assert text.count("processor cores 1 (before: 2)") == 2


def test_a_single_evaluation_and_nothing_else(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write("eval", step=1, tokens=100, seconds=0.5, loss=5.0, bpb=2.0)
    page = read(write_report(tmp_path))
    assert f"{tmp_path.name} Not finished: step 1." in page.text
    assert "2.000 bits per byte" in page.text
    # The point is a mark in each of six charts, and says what it is.
    titles = re.findall("<title>([^<]*)</title></path>", (tmp_path / "report.html").read_text(encoding="utf-8"))
    assert sorted(title.partition(": ")[2] for title in titles) == ["2"] * 3 + ["5"] * 3
    assert "The training line is measured" not in page.text


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
    lines = [a["d"] or "" for tag, a in page.tags if tag == "path" and a.get("class") == "sparse c1"]
    # Two pieces in each of six charts, whose legends have one line.
    assert [line.count("M") for line in lines] == [2, 1] * 6


def test_everything_lost_still_gives_a_page(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write("train", step=1, tokens=1, seconds=1, loss=math.nan, bpb=math.nan, lr={"muon": 0.0}, times_ms={})
        log.write("sample", step=1, samples=[])
    page = read(write_report(tmp_path))
    assert page.text.count("Nothing was measured yet.") == 6
    assert "– bits per byte: no validation result yet" in page.text


@pytest.mark.slow
def test_a_log_without_a_field_gives_a_page_and_a_summary(tmp_path: Path) -> None:
    """Of each field in turn, missing in all records of a kind, as in a log that was edited."""
    records = read_metrics(write_run(tmp_path / "whole", steps=20, every=4) / "metrics.jsonl")
    folder, fields = tmp_path / "edited", {(record["kind"], name) for record in records for name in record}
    folder.mkdir()
    for kind, missing in sorted(fields):
        edited = [
            {name: value for name, value in record.items() if (record["kind"], name) != (kind, missing)}
            for record in records
        ]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, edited)))
        with contextlib.suppress(DataError):  # a record without its step is named
            write_report(folder)
            summarize_log(read_metrics(folder / "metrics.jsonl"))


def test_a_run_that_was_lost_at_the_end_shows_no_older_result(tmp_path: Path) -> None:
    write_run(tmp_path, final=False)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for kind in ("eval", "final"):
            log.write(kind, step=40, loss=math.nan, bpb=math.nan, seconds=1.0)
    page = read(write_report(tmp_path))
    assert "the last validation result was not a finite number" in page.text
    assert "validation loss (nats" not in page.text


def test_a_run_of_many_steps_is_thinned(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3000, every=5)
    path = write_report(tmp_path)
    page = read(path)
    assert path.stat().st_size < 300_000
    assert "an average over neighbouring steps" in page.text
    assert page.count("tr") < 500
    assert any(attributes.get("class") == "band c1" for _, attributes in page.tags)


def test_folders_that_cannot_be_reported_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path.name} holds no metrics\.jsonl"):
        write_report(tmp_path)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write("run", name="x")
    with pytest.raises(
        ConfigError, match=r"no training step yet: wait .*, or continue the run if it was stopped, with"
    ):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("broken\n{}\n")
    with pytest.raises(DataError, match="line 1"):
        write_report(tmp_path)


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
        "1.25 × 10¹⁸ floating-point operations",
        "the least loss on the training text was 1.4321",
        "The loss jumped at step 41 (7.3)",
        "the run went back to its last checkpoint",
        "Norm of the whole gradient",
        "c0ffee",
        "quintic train --depth 4",
    ):
        assert expected in text, expected


def test_the_least_score_and_tokens_per_parameter_are_among_the_figures(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write("run", name="n", model={"parameters": 5000, "parameters_blocks": 600, "parameters_head": 400})
        for step, bpb in ((0, 8.0), (10, 2.0), (20, 1.5), (30, 1.5), (40, float("nan")), (50, 1.75)):
            log.write("train", step=step + 1, tokens=500 * step, loss=1.0)
            log.write("eval", step=step, tokens=500 * step, seconds=step, loss=2 * bpb, bpb=bpb)
    text = read(write_report(tmp_path)).text.replace("\u00a0", " ")
    assert "1.5000 bits per byte at the least, at step 20" in text
    assert "25 tokens read per parameter of matrices and head" in text
    (tmp_path / "metrics.jsonl").unlink()
    with MetricsLog(tmp_path / "metrics.jsonl") as log:  # a speedrun
        log.write("run", name="n", model={"parameters": 5000})
        log.write("train", step=1, tokens=20_000, loss=1.0)
        log.write("eval", step=1, tokens=20_000, loss=1.0)
    text = read(write_report(tmp_path)).text.replace("\u00a0", " ")
    assert "4 tokens read per parameter " in text
    assert "at the least" not in text


def test_the_source_that_ran_is_on_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert "The source that ran" not in read(write_report(folder)).text
    facts = {"version": "1.2", "commit": "c0ffee", "dirty": True, "untracked": ["new.py"], "code": "f00"}
    (folder / "source.json").write_text(json.dumps({**facts, "diff_bytes": 30, "files": {"a.py": "0123abcd"}}))
    (folder / "source.diff").write_text(f"-old\n+{EVIL}\n")
    (folder / "source-from-step-000020.json").write_text(json.dumps({"version": "1.3", "commit": "decade"}))
    page = read(write_report(folder))
    for words in (
        "The source that ran version 1.2 commit c0ffee uncommitted changes yes",
        'files that git does not know ["new.py"]',
        f"What differed from the commit -old +{' '.join(EVIL.split())}",
        "From step 20 on version 1.3 commit decade",
    ):
        assert words in page.text, words
    assert "0123abcd" not in page.text
    (folder / "source.diff").unlink()
    (folder / "source-from-step-000020.json").write_text("{damaged")
    assert "source.diff is gone" in read(write_report(folder)).text


def test_standard_errors_are_said_and_drawn(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for step, bpb in ((0, 2.45), (10, 2.4), (20, 2.0)):
            log.write("eval", step=step, tokens=step, seconds=step, loss=2 * bpb, bpb=bpb, bpb_stderr=0.25)
        log.write("final", step=20, loss=4.0, bpb=2.0, baselines={"xz_bpb": 1.5, "bigram_bpb": 3.0})
    page = read(write_report(tmp_path))
    assert "this model 2.000 ± 0.250" in page.text
    assert "± 0.250 is the standard error over the documents of the validation text" in page.text
    # The bar of 2.0 is two thirds of the longest; its whisker goes from 1.75 to 2.25.
    assert [a["style"] for _, a in page.tags if a.get("class") == "whisker"] == ["left:58.33%;width:16.67%"]
    assert "loss (nats per token) bits per byte ± standard error 0 0 0 s 4.9000 2.4500 ± 0.2500" in page.text
    assert page.words.count("20: 2 (1.75 to 2.25)") == 3  # the mark in each tab's chart of bits per byte
    bars = [a["d"] or "" for _, a in page.tags if a.get("class") == "error c0"]
    assert [bar.count("M") for bar in bars] == [3] * 3
    heights = {float(y1) - float(y0) for y1, y0 in re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)", bars[0])}
    [height] = {round(height, 1) for height in heights}
    assert height == pytest.approx(192 * 0.5 / 1.5, abs=0.1)  # the axis goes from 1.5 to 3


@pytest.mark.parametrize(
    ("ranks", "command", "device"),
    [
        (None, "quintic train --depth 4", "CPU trained on this device"),
        (1, "quintic train --depth 4", "CPU trained on this device"),
        (8, "torchrun --standalone --nproc-per-node=8 -m quintic train --depth 4", "CPU trained on 8 of this device"),
    ],
)
def test_the_command_starts_as_many_ranks_as_the_run_had(
    ranks: int | None, command: str, device: str, tmp_path: Path
) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        some = {} if ranks is None else {"ranks": ranks}
        machine = {"device": "CPU", "matrix_flops_per_second": 1e12}
        log.write(
            "run",
            name="n",
            machine=machine,
            command="quintic train",
            repeat="quintic train --depth 4",
            git={"commit": "c0ffee"},
            **some,
        )
        log.write("train", step=1, loss=1.0, times_ms={"optimizer": 1.0})
        log.write("final", step=1, loss=2.0625, bpb=1.5, tokens_per_second=100.0, mfu=0.5)
    page = read(write_report(tmp_path))
    assert command in page.words
    assert ("It was started with this, behind torchrun and its options:" in page.text) == (ranks == 8)
    assert device in page.text
    assert ("this machine multiplied" if (ranks or 1) == 1 else "each device multiplied") in page.text
    assert (
        "The code was at commit c0ffee . The run ended with a validation loss of 2.062500 nats per token" in page.text
    )


@pytest.mark.parametrize(("milliseconds", "words"), [(999.0, "999 milliseconds"), (22_140.0, "22.1 seconds")])
def test_the_time_of_a_step_is_written_out(milliseconds: float, words: str, tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write("run", name="n", machine={"device": "CPU"})
        log.write("train", step=1, loss=1.0, times_ms={"optimizer": milliseconds})
    assert f"A typical step took {words}." in read(write_report(tmp_path)).text
