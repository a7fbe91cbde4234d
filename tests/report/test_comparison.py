"""Several runs on one page: the figures by hand, medians and ranges of seeds, what differs."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from report_pages import read, write_run

from quintic.errors import ConfigError
from quintic.report.comparison import write_comparison
from quintic.report.history import read_metrics
from quintic.train.metrics import MetricsLog


def write_curve(folder: Path, losses: dict[int, float], **config: Any) -> Path:
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.write("run", name=folder.name, config={"run": config})
        for step, loss in losses.items():
            log.write("eval", step=step, tokens=step * 10, seconds=step * 2.0, loss=loss, bpb=loss / 2)
    return folder


UNKNOWN = "how sure that is, is not known: it takes the bits of two documents or more, the same in both logs"


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
    candidates = write_comparison(runs, out, title="Race <1>")
    assert list(candidates) == ["Muon", "slow", "early", "exact"]
    assert vars(candidates["Muon"]) == {
        "sentence": "Muon reached AdamW's final validation loss after 150 of 400 steps (37.5 %)",
        "seconds": 300.0,
        "percent_of_seconds": 37.5,
        "difference_stderr": None,
        "ended": f"Muon ended 0.3750 bits per byte below AdamW; {UNKNOWN}",
        "unequal_speed": None,
    }
    assert vars(candidates["slow"]) == {
        "sentence": "slow never reached AdamW's final validation loss in its 500 steps",
        "seconds": None,
        "percent_of_seconds": None,
        "difference_stderr": None,
        "ended": f"slow ended 0.2500 bits per byte above AdamW; {UNKNOWN}",
        "unequal_speed": None,
    }
    assert candidates["early"].sentence.endswith("after 80 of 400 steps (20.0 %)")
    assert candidates["exact"].sentence.endswith("after 600 of 400 steps (150.0 %)")
    page = read(out)
    assert page.text.startswith("Race <1> The same task, trained in different ways. Who gets there sooner Muon reached")
    for words in (
        "Muon reached AdamW's final validation loss after 150 of 400 steps (37.5 %).",
        "and after 5 min of training, 37.5 % of AdamW's time",
        "slow never reached",
        "AdamW's final loss: 3.000",
        "run.lr 0.003 0.02 0.02 0.02 0.02",
    ):
        assert words in page.text, words
    assert "run.seed" not in page.text
    assert " seed " not in page.text[page.text.index("Settings in which they differ") :]


def write_documents(folder: Path, bits: list[float], num_bytes: list[int], *, seed: int = 0) -> Path:
    """A run whose last evaluation has the bits of each document."""
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.write("run", name=folder.name, config={"run": {"seed": seed}})
        bpb = sum(bits) / sum(num_bytes)
        nats = [value * math.log(2) for value in bits]
        log.write("eval", step=10, loss=bpb, bpb=bpb, bpb_stderr=0.5, document_nats=nats, document_bytes=num_bytes)
    return folder


def test_the_difference_of_two_runs_is_surer_than_each(tmp_path: Path) -> None:
    # Documents of 100 bytes that cost 100 to 300 bits, and in the other run 9 to 11 fewer.
    first = write_documents(tmp_path / "a", [100.0, 200.0, 300.0], [100, 100, 100])
    other = write_documents(tmp_path / "b", [91.0, 190.0, 289.0], [100, 100, 100])
    found = write_comparison({"a": first, "b": other}, tmp_path / "page.html", title="")["b"]
    # The mean is 10 of 100, and sqrt(3 / 2 * (1 + 0 + 1)) / 300 its error; each run's own error is 0.5.
    assert found.difference_stderr == pytest.approx(math.sqrt(3) / 300)
    words = "b ended 0.1000 bits per byte below a, ± 0.0058 over the documents, which both were scored on"
    assert found.ended == words
    text = read(tmp_path / "page.html").text
    assert words in text
    assert "What another seed would change is not in it." in text
    # Other documents, or a document without a finite loss: the page says why there is no error.
    for number, (bits, sizes) in enumerate((([91.0, 479.0], [100, 200]), ([91.0, math.nan, 289.0], [100, 100, 100]))):
        changed = write_documents(tmp_path / f"c{number}", bits, sizes)
        records = read_metrics(changed / "metrics.jsonl")
        records[1] |= {"loss": 1.9, "bpb": 1.9}
        (changed / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        found = write_comparison({"a": first, "c": changed}, tmp_path / "page.html", title="")["c"]
        assert found.ended.endswith(f"bits per byte below a; {UNKNOWN}")
        assert found.difference_stderr is None
        text = read(tmp_path / "page.html").text
        assert UNKNOWN in text
        assert "A difference of more than two of them is hardly chance" not in text


@pytest.mark.parametrize("sizes", [[0, 0, 0], [0, 200, 100]])
def test_documents_without_bytes_do_not_tell_how_sure_a_difference_is(sizes: list[int], tmp_path: Path) -> None:
    runs = {}
    for name, bits in (("a", [100.0, 200.0, 300.0]), ("b", [91.0, 190.0, 289.0])):
        folder = runs[name] = write_documents(tmp_path / name, bits, [100, 100, 100])
        records = read_metrics(folder / "metrics.jsonl")
        records[1]["document_bytes"] = sizes  # by hand: no run writes it
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = write_comparison(runs, tmp_path / "page.html", title="")["b"]
    assert found.ended == f"b ended 0.1000 bits per byte below a; {UNKNOWN}"


def share_beyond(threshold: float, number: int) -> float:
    """The share of Student's t with `number` - 1 degrees of freedom beyond ± threshold, by a sum over the density."""
    free = number - 1
    scale = math.gamma((free + 1) / 2) / (math.sqrt(free * math.pi) * math.gamma(free / 2))
    step = threshold / 10_000
    inside = sum((1 + ((n + 0.5) * step) ** 2 / free) ** (-(free + 1) / 2) for n in range(10_000))
    return 1 - 2 * scale * step * inside


def test_the_difference_of_several_seeds_is_that_of_pairs(tmp_path: Path) -> None:
    def arm(name: str, ends: dict[int, float]) -> list[Path]:
        return [write_documents(tmp_path / f"{name}{seed}", [end], [1], seed=seed) for seed, end in ends.items()]

    # Differences of the seeds: -0.25, -0.5 and -0.75, in whatever order the runs are named.
    arms = {"a": arm("a", {0: 1.0, 1: 2.0, 2: 3.0}), "b": arm("b", {2: 2.25, 1: 1.5, 0: 0.75})}
    found = write_comparison(arms, tmp_path / "page.html", title="")["b"]
    assert found.difference_stderr == pytest.approx(0.25 / math.sqrt(3))
    assert found.ended == "b ended 0.5000 bits per byte below a, ± 0.1443 over 3 seeds"
    text = read(tmp_path / "page.html").text
    assert "What another seed" not in text
    # Two standard errors are not enough of so few seeds.
    assert "A difference of more than two of them is hardly chance" not in text
    said = re.search(
        r"larger than ([\d.]+) of them with two seeds, ([\d.]+) with three, ([\d.]+) with five and ([\d.]+) with ten",
        text,
    )
    assert said is not None
    for number, threshold in zip((2, 3, 5, 10), said.groups(), strict=True):
        assert share_beyond(float(threshold), number) == pytest.approx(0.05, rel=0.1)
    others = {"a": arms["a"], "c": arm("c", {0: 1.0, 1: 2.0, 7: 3.0})}
    found = write_comparison(others, tmp_path / "page.html", title="")["c"]
    assert found.difference_stderr is None
    assert found.ended == (
        "c ended 0.0000 bits per byte above a; how sure that is, is not known: it takes two runs or more of each, with "
        "the same seeds"
    )


@pytest.mark.parametrize(("slower", "flops", "is_said"), [(2.6, 1, True), (1.3, 1, False), (2.6, 2, False)])
def test_times_of_a_slowed_run_are_not_compared(slower: float, flops: int, is_said: bool, tmp_path: Path) -> None:
    runs = {}
    for name, factor, operations in (("a", slower, 1), ("b", 1.0, flops)):
        runs[name] = tmp_path / name
        with MetricsLog(runs[name] / "metrics.jsonl") as log:
            log.write("run", model={"flops_per_token": operations})
            # The optimizer may take any time, and the first step as well.
            for step in range(1, 5):
                passes = 5000.0 if step == 1 and name == "b" else 100.0 * factor
                times = {"data": 0.0, "forward_backward": passes, "optimizer": 1.0 if name == "a" else 90.0}
                log.write("train", step=step, tokens=64 * step, seconds=step * factor, loss=2.0, times_ms=times)
            log.write("eval", step=4, seconds=4 * factor, loss=2.0, bpb=1.0)
    found = write_comparison(runs, tmp_path / "page.html", title="")["b"]
    assert found.unequal_speed == (pytest.approx(slower) if is_said else None)
    text = read(tmp_path / "page.html").text
    assert ("Their times cannot be compared: the forward and backward passes" in text) is is_said
    assert ("and after 4 s of training" in text) is not is_said


def test_comparison_without_times_or_settings(tmp_path: Path) -> None:
    runs = {}
    for name, losses in (("a", (4.0, 3.0)), ("<b>", (3.5, 2.5))):
        with MetricsLog(tmp_path / name[-1] / "metrics.jsonl") as log:
            for step, loss in enumerate(losses, start=1):
                log.write("eval", step=step, loss=loss)
        runs[name] = log.path.parent
    found = write_comparison(runs, tmp_path / "out.html", title="Two")
    assert found["<b>"].percent_of_seconds is None
    assert "not a finite number" not in read(tmp_path / "out.html").text
    with MetricsLog(tmp_path / "a" / "metrics.jsonl") as log:
        log.write("eval", step=3, loss=math.nan)
    write_comparison(runs, tmp_path / "out.html", title="Two")
    assert "a: the loss was not a finite number at the end;" in read(tmp_path / "out.html").text
    assert "<b> reached a's final validation loss after 1.5 of 2 steps (75.0 %)" in read(tmp_path / "out.html").text


TEXT = {"source": "python", "val_documents": 4, "val_bytes": 900}


def write_text_curve(folder: Path, data: dict[str, Any] | None, ends: list[tuple[float, float | None]]) -> Path:
    """A run on a text, with losses in nats per token and in bits per byte after each ten steps."""
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.write("run", name=folder.name, **({} if data is None else {"data": data}))
        for number, (loss, bpb) in enumerate(ends, start=1):
            log.write("eval", step=10 * number, seconds=1.0 * number, loss=loss, bpb=bpb)
    return folder


def test_bits_per_byte_decide_between_tokenizers(tmp_path: Path) -> None:
    # Small tokens are easy ones: 2 nats of a byte each are 2.9 bits per byte, 4 nats of four bytes each 1.4.
    good = write_text_curve(tmp_path / "good", {**TEXT, "key": "large"}, [(6.0, 2.25), (4.0, 1.5)])
    bad = write_text_curve(tmp_path / "bad", {**TEXT, "key": "bytes"}, [(3.0, 4.25), (2.0, 3.0)])
    out = tmp_path / "page.html"
    found = write_comparison({"good": good, "bad": bad}, out, title="")["bad"]
    assert found.sentence == "bad never reached good's final validation loss in bits per byte in its 20 steps"
    text = read(out).text
    assert "Bits per byte do not depend on the tokenizer, and decide here." in text
    assert "good's final loss: 1.500" in text
    assert "Validation loss" not in text  # no curves of nats side by side
    assert "loss (nats per token; not comparable here) 4.0000 2.0000" in text
    # The other way round, in nats it would never get there: from 4.25 to 1.75 it passes 3.0 halfway.
    good = write_text_curve(tmp_path / "again", {**TEXT, "key": "large"}, [(6.0, 4.25), (4.0, 1.75)])
    found = write_comparison({"bad": bad, "good": good}, out, title="")["good"]
    assert found.sentence == ("good reached bad's final validation loss in bits per byte after 15 of 20 steps (75.0 %)")
    assert found.percent_of_seconds == 75.0
    # One candidate with another tokenizer among several: each is measured in the unit that both have.
    same = write_text_curve(tmp_path / "same", {**TEXT, "key": "bytes"}, [(2.0, 3.0)])
    found = write_comparison({"bad": bad, "good": good, "same": same}, out, title="")
    assert found["same"].sentence == "same reached bad's final validation loss after 10 of 20 steps (50.0 %)"
    assert "in bits per byte" in found["good"].sentence


def test_medians_of_two_tokenizers_are_compared_in_bits_per_byte(tmp_path: Path) -> None:
    def runs(name: str, nats: float, bits: tuple[float, ...]) -> list[Path]:
        folders = []
        for seed, end in enumerate(bits):
            folders.append(tmp_path / f"{name}{seed}")
            with MetricsLog(folders[-1] / "metrics.jsonl") as log:
                log.write("run", config={"seed": seed}, data={**TEXT, "key": name})
                log.write("eval", step=100, loss=nats, bpb=end)
        return folders

    arms = {"a": runs("a", 4.0, (1.0, 1.25, 1.5)), "b": runs("b", 2.0, (1.125, 1.375, 1.625))}
    found = write_comparison(arms, tmp_path / "page.html", title="")["b"]
    # The median to reach is 1.25 bits.
    assert found.sentence == "b reached a's median final validation loss in bits per byte in 1 of 3 runs only"


def test_losses_of_other_texts_or_without_bits_per_byte_are_said_not_to_compare(tmp_path: Path) -> None:
    def sentence(a: dict[str, Any] | None, b: dict[str, Any] | None, bpb: float | None = 1.0) -> str:
        number = len(list(tmp_path.iterdir()))
        folders = [write_text_curve(tmp_path / f"{number}-{i}", data, [(2.0, bpb)]) for i, data in enumerate((a, b))]
        found = write_comparison(dict(zip("ab", folders, strict=True)), tmp_path / "out.html", title="")
        return str(found["b"].sentence)

    reached = "b reached a's final validation loss after 10 of 10 steps (100.0 %)"
    one = {**TEXT, "key": "one"}
    assert sentence(one, one) == reached
    assert sentence(one, one, None) == reached  # one tokenizer: nats per token will do
    assert sentence(one, {**one, "source": "/moved"}) == reached  # the key is that of the content
    assert sentence(None, one) == reached  # nothing known of one
    shards = {"source": "hf:a/b", "shards": 3}
    assert sentence(shards, shards) == reached
    # Other text to train on, with a validation text of its own that both have.
    with_own = [
        write_text_curve(tmp_path / f"own{i}", {**one, "key": f"{i}", "source": f"{i}"}, [(2.0, 1.0)]) for i in (0, 1)
    ]
    for folder in with_own:
        records = read_metrics(folder / "metrics.jsonl")
        records[0]["config"] = {"data": {"val_data": "held-out.txt"}}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = write_comparison(dict(zip("ab", with_own, strict=True)), tmp_path / "out.html", title="")
    assert found["b"].sentence.startswith("b reached a's final validation loss in bits per byte")
    advice = "`quintic eval --data FILE` scores each run on one text"
    other = f"b and a: they were validated on different texts, and so their losses cannot be compared; {advice}"
    for changed in ({"source": "hf:a/b"}, {"val_bytes": 901}, {"val_documents": 5}):
        assert sentence(one, {**one, "key": "two", **changed}) == other
    assert sentence(one, {"source": "python", "shards": 3}) == other  # a speedrun's share of the text is another one
    text = read(tmp_path / "out.html").text
    assert other in text
    assert "final loss:" not in text  # no line to reach
    lacking = "b and a: their tokenizers differ and a log lacks bits per byte, and so their losses cannot be compared"
    assert sentence(one, {**one, "key": "two"}, None) == lacking


def test_comparisons_that_cannot_be_made_are_errors(tmp_path: Path) -> None:
    run = write_curve(tmp_path / "a", {1: 2.0})
    lost = write_curve(tmp_path / "lost", {1: math.nan})
    out = tmp_path / "out.html"
    with pytest.raises(ConfigError, match=r"lost.*no finite validation loss"):
        write_comparison({"a": run, "lost": lost}, out, title="")
    with pytest.raises(ConfigError, match="absent holds no"):
        write_comparison({"a": run, "b": tmp_path / "absent"}, out, title="")
    assert not out.exists()


def test_a_comparison_has_what_was_measured(tmp_path: Path) -> None:
    runs = {}
    for name, mfu in (("a", 0.25), ("b", None)):
        runs[name] = write_run(tmp_path / name, final=False)
        with MetricsLog(runs[name] / "metrics.jsonl") as log:
            log.write("final", step=40, loss=2.0, bpb=1.0, seconds=9.0, mfu=mfu)
    write_comparison(runs, tmp_path / "page.html", title="two")
    words = read(tmp_path / "page.html").words
    assert "not finished" not in " ".join(words)
    position = words.index("model FLOPs utilisation")
    assert words[position : position + 3] == ["model FLOPs utilisation", "25.0%", "–"]
    assert not [word for word in words if word.startswith("least smoothed training loss")]


def test_several_seeds_are_a_median_and_a_range(tmp_path: Path) -> None:
    ends = {"a": (3.0, 2.9, 3.4), "b": (2.0, 2.6, 3.2)}
    runs = {
        name: [
            write_curve(tmp_path / f"{name}{seed}", {100: 4.0, 200: end}, seed=seed, lr=ends[name][0])
            for seed, end in enumerate(losses)
        ]
        for name, losses in ends.items()
    }
    found = write_comparison(runs, tmp_path / "page.html", title="Seeds")["b"]
    # From 4.0 down to the median 3.0: half of the way to 2.0, 1.0 / 1.4 of that to 2.6, never on that to 3.2.
    assert found.sentence == (
        "b reached a's median final validation loss after 171 of 200 steps (85.7 %); median of 3 runs, which took 150 "
        "to 171, never in 1"
    )
    page = read(tmp_path / "page.html")
    text = page.text.replace("\u00a0", " ")
    for words in (
        "loss (nats per token) 3.0000 (2.9000 to 3.4000) 2.6000 (2.0000 to 3.2000)",
        "a (median and range of 3 runs)",
        "Of several runs the median is shown",
        "a 1.500 (1.450 to 1.700)",
        "run.lr 3.0 2.0",
    ):
        assert words in text, words
    assert "Each is one run" not in text
    # The longest that a bar stands for is 1.7; a's range goes from 1.45 to that.
    whiskers = [a["style"] for _, a in page.tags if a.get("class") == "whisker"]
    assert whiskers == ["left:85.29%;width:14.71%", "left:58.82%;width:35.29%"]
    # At the last point 1.5, from 1.45 to 1.7.
    assert page.words.count("1.5 (1.45 to 1.7)") == 3


def test_a_run_that_is_not_at_its_end_has_no_final_loss(tmp_path: Path) -> None:
    runs = {name: write_curve(tmp_path / name, {10: loss}) for name, loss in (("whole", 2.0), ("part", 3.0))}
    for folder in runs.values():
        log = folder / "metrics.jsonl"
        log.write_text(
            log.read_text().replace('"kind":"run",', f'"kind":"run","total_steps":{10 + (folder.name == "part")},')
        )
    found = write_comparison(runs, tmp_path / "page.html", title="")["part"]
    assert found.sentence == "part has not reached whole's final validation loss in its 10 steps so far"
    assert found.ended == f"part is so far 0.5000 bits per byte above whole; {UNKNOWN}"
    assert "whole's final loss" in read(tmp_path / "page.html").text
    found = write_comparison(dict(reversed(runs.items())), tmp_path / "page.html", title="")["whole"]
    assert found.sentence == "whole reached part's last validation loss after 10 of 10 steps (100.0 %)"
    assert found.ended == f"whole is so far 0.5000 bits per byte below part; {UNKNOWN}"
    assert "part's last loss" in read(tmp_path / "page.html").text


def test_most_seeds_must_reach_the_loss(tmp_path: Path) -> None:
    runs = {"a": [write_curve(tmp_path / "a", {10: 2.0})]}
    runs["b"] = [write_curve(tmp_path / f"b{end}", {10: end}) for end in (1.0, 3.0, 4.0)]
    found = write_comparison(runs, tmp_path / "page.html", title="Seeds")["b"]
    assert found.sentence == "b reached a's final validation loss in 1 of 3 runs only"
    runs["b"].append(write_curve(tmp_path / "other", {7: 1.0}))
    with pytest.raises(ConfigError, match="b: its runs were never evaluated at the same step"):
        write_comparison(runs, tmp_path / "page.html", title="Seeds")


def test_one_run_each_shows_the_error_over_documents(tmp_path: Path) -> None:
    runs: dict[str, Any] = {}
    for name in ("a", "b"):
        with MetricsLog(tmp_path / name / "metrics.jsonl") as log:
            log.write(
                "run",
                command=f"quintic train --run {name}",
                repeat=f"quintic train --depth 1 --run {name}",
                ranks=1 + (name == "b"),
            )
            log.write("eval", step=5, loss=2.0, bpb=1.0, bpb_stderr=0.125)
        runs[name] = tmp_path / name
    write_comparison(runs, tmp_path / "page.html", title="Two")
    text = read(tmp_path / "page.html").text
    for words in (
        "a 1.000 ± 0.125 b 1.000 ± 0.125",
        "standard error over documents (bits per byte) 0.1250 0.1250",
        "Each is one run.",
        "a, b: not finished; shown is the last evaluation so far.",
        "It was started with: quintic train --run a quintic train --run b",
        "a quintic train --depth 1 --run a",
        "b torchrun --standalone --nproc-per-node=2 -m quintic train --depth 1 --run b",
    ):
        assert words in text, words
    runs["b"] = [runs["b"], runs["b"]]
    write_comparison(runs, tmp_path / "page.html", title="Two")
    assert "±" not in read(tmp_path / "page.html").text  # it would be taken for a range of seeds


def test_medians_are_those_of_runs_that_differ_in_their_seeds_only(tmp_path: Path) -> None:
    def group(*configs: dict[str, Any]) -> dict[str, Any]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return {
            "a": write_curve(folder / "a", {10: 2.0}),
            "b": [write_curve(folder / f"b{number}", {10: 1.0}, **config) for number, config in enumerate(configs)],
        }

    out = tmp_path / "page.html"
    stored = {"runs_dir": "runs", "threads": 1, "keep": 2, "run": "x"}  # where and how a run is kept
    write_comparison(group({"seed": 1, "lr": 2.0}, {"seed": 2, "lr": 2.0, **stored}), out, title="")
    write_comparison(group({}, {}), out, title="")  # old logs without seeds
    # An option that one version of quintic does not have, and a log that lacks its length and text.
    groups = group({"seed": 1, "lr": 2.0}, {"seed": 2, "lr": 2.0, "new": False}, {"seed": 3, "lr": 2.0})
    with MetricsLog(groups["b"][2] / "metrics.jsonl") as log:
        log.write("run", config={"run": {"seed": 3, "lr": 2.0}}, total_steps=10, data={"key": "x"})
    write_comparison(groups, out, title="")
    with pytest.raises(ConfigError) as caught:
        write_comparison(group({"seed": 1, "lr": 2.0}, {"seed": 2, "lr": 3.0}, {"seed": 3}), out, title="")
    assert str(caught.value) == (
        "b=b0,b1,b2: a median is that of runs which differ in their seeds only, and these differ in run.lr (2.0, 3.0): "
        "give each a name of its own (--runs A B), or leave some out"
    )
    with pytest.raises(ConfigError) as caught:
        write_comparison(group({"seed": 1}, {"seed": 2}, {"seed": 1}), out, title="")
    assert str(caught.value) == (
        "b=b0,b1,b2: a median is that of runs with different seeds, and b0 and b2 have the same (seed 1): "
        "give each a name of its own (--runs A B), or leave some out"
    )


def test_medians_are_those_of_runs_on_one_text(tmp_path: Path) -> None:
    runs = {}
    for name, seed, key in (("a", 0, "x"), ("b", 1, "x"), ("c", 2, "y")):
        with MetricsLog(tmp_path / name / "metrics.jsonl") as log:
            log.write("run", name=name, config={"seed": seed}, data={"key": key}, machine={"dtype": "float32"})
            log.write("eval", step=5, loss=2.0, bpb=1.0)
        runs[name] = log.path.parent
    with pytest.raises(ConfigError, match=r"b=b,c: .* differ in text and tokenizer \(x, y\)"):
        write_comparison({"a": runs["a"], "b": [runs["b"], runs["c"]]}, tmp_path / "page.html", title="")


def test_medians_are_those_of_runs_of_one_length(tmp_path: Path) -> None:
    for seed, name in enumerate("abc"):
        with MetricsLog(tmp_path / name / "metrics.jsonl") as log:
            log.write("run", name=name, config={"seed": seed}, total_steps=10)
            log.write("eval", step=10, loss=2.0, bpb=1.0)
    runs = {"a": tmp_path / "a", "b": [tmp_path / "b", tmp_path / "c"]}
    write_comparison(runs, tmp_path / "page.html", title="")
    with MetricsLog(tmp_path / "c" / "metrics.jsonl") as log:
        log.write("resume", step=10, steps_before=10, total_steps=20)  # `--resume --steps 20`
        log.write("eval", step=20, loss=1.5, bpb=0.75)
    with pytest.raises(ConfigError, match=r"b=b,c: .* differ in length \(10, 20\)"):
        write_comparison(runs, tmp_path / "page.html", title="")


def test_steps_since_the_last_validation_count(tmp_path: Path) -> None:
    runs = {}
    for name, losses in (("stopped", {0: 5.0, 8: 3.0}), ("other", {0: 5.0, 8: 4.0, 11: 2.0})):
        with MetricsLog(tmp_path / name / "metrics.jsonl") as log:
            log.write("run", name=name, config={"run": name, "preset": "speedrun-tiny", "seed": len(name)})
            for step in range(12):
                if step:
                    log.write("train", step=step, loss=3.0)
                if step in losses:
                    log.write("eval", step=step, loss=losses[step])
        runs[name] = log.path.parent
    found = write_comparison(runs, tmp_path / "page.html", title="Two")
    assert found["other"].sentence == (
        "other reached stopped's final validation loss after 9.5 of 8 steps (118.8 %); stopped made 11 steps, and was "
        "last validated after 8"
    )
    text = read(tmp_path / "page.html").text
    assert "steps 11 11 step of this evaluation 8 11" in text
    found = write_comparison(dict(reversed(runs.items())), tmp_path / "page.html", title="Two")
    assert found["stopped"].sentence == "stopped never reached other's final validation loss in its 11 steps"
    # A speedrun's name is an option of its own, and no setting.
    assert "setting other stopped seed 5 7" in read(tmp_path / "page.html").text
