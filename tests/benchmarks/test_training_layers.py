"""The benchmarks of 8-bit products and of lookup layers: equal data, and what the tables say."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.training import fp8, lookup
from benchmarks.training.bare_runs import BOS, Task, steady, word_tokens

TINY = ["--depth", "1", "--steps", "3", "--rows", "2", "--seq-len", "32", "--vocab-size", "512", "--tokens", "100000"]


def test_words_of_the_library() -> None:
    tokens = word_tokens(300, 50_000)
    assert tokens.shape == (50_000,)
    assert torch.equal(tokens, word_tokens(300, 50_000))
    assert (int(tokens.min()), int(tokens.max())) == (BOS, 299)
    assert int(tokens[0]) == BOS
    # The more frequent a word, the smaller its id.
    counts = torch.bincount(tokens, minlength=300)[2:]
    assert bool((counts[:-1] >= counts[1:]).all())


def test_runs_of_a_seed_see_the_same_batches_and_none_of_the_text_held_back() -> None:
    task = Task(torch.arange(1000) + 1, 2000, 1, 64, 64, 10, 3, 5, torch.device("cpu"), False)
    first, second, other, held = (
        next(task.batches(seed, held_back=kept)) for seed, kept in ((7, False), (7, False), (8, False), (7, True))
    )
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], other[0])
    inputs, targets = first
    assert inputs.shape == targets.shape == (3, 10)
    assert inputs[:, 0].tolist() == [BOS] * 3
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(targets.max()) <= 950 < int(held[1].min())


def test_the_first_steps_are_no_measure() -> None:
    assert steady(range(100)) == list(range(10, 100))
    assert steady([9.0, 1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]


def test_what_the_table_of_8_bits_says() -> None:
    def row(recipe: str | None, median: float, loss: float) -> dict[str, object]:
        times = {"median": median, "p10": 1.0, "p90": 99.0}
        row = {"width": 768, "recipe": recipe, "step_ms": times, "tokens_per_second": 5e5, "peak_gib": 3.0}
        return {**row, "last_loss": loss}

    rows = [row(None, 50.0, 3.5), row("tensorwise", 40.0, 3.52)]
    assert fp8.cells(rows[0], rows)[3::4] == ["-", "-"]
    assert fp8.cells(rows[1], rows) == [
        *("768", "tensorwise", "40.0 (1.0 to 99.0)", "1.250", "500,000", "3.0", "3.5200", "+0.0200")
    ]


def test_what_the_tables_of_lookups_say() -> None:
    def row(model: str, seed: int, step_ms: float, losses: list[float]) -> dict[str, object]:
        evaluations = [(10 * (i + 1), loss, 10 * (i + 1) * step_ms / 1000) for i, loss in enumerate(losses)]
        row = {"model": model, "seed": seed, "parameters": 7, "flops_per_token": 1e6, "step_ms": step_ms}
        return {**row, "evaluations": evaluations}

    rows = [
        *(row("without", 1, 100.0, [4.0, 3.0]), row("with", 1, 200.0, [3.9, 2.8])),
        *(row("without", 2, 100.0, [4.2, 3.2]), row("with", 2, 200.0, [4.0, 3.1]), row("without", 3, 1.0, [9.0, 9.0])),
    ]
    plain, with_lookups = lookup.lines(rows)
    assert plain == ["without", "7", "1e+06", "100.0", "3.1000", "3.0000, 3.2000", "-"]
    assert with_lookups[4:] == ["2.9500", "2.8000, 3.1000", "-0.1500 (-0.2000 to -0.1000)"]
    assert lookup.curves(rows[:4], 500_000)[1] == ["20", "10.0", "3.1000", "2.0", "2.9500", "4.0"]
    assert lookup.lines(rows[:1]) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tries the scripts where they do not measure")
def test_they_run(tmp_path: Path) -> None:
    assert fp8.main(["--out", str(tmp_path), *TINY, "--widths", "128"]) == 0
    rows = json.loads((tmp_path / "fp8.json").read_text())["rows"]
    assert [row["recipe"] for row in rows] == [None, "tensorwise", "rowwise"]
    assert len({tuple(row["losses"]) for row in rows}) == 3
    assert max(row["last_loss"] for row in rows) - min(row["last_loss"] for row in rows) < 0.1
    assert lookup.main(["--out", str(tmp_path), *TINY, "--width", "64", "--seeds", "1", "2"]) == 0
    result = json.loads((tmp_path / "lookup.json").read_text())
    assert [(row["model"], row["seed"]) for row in result["rows"]] == [
        *(("without", 1), ("with", 1), ("without", 2), ("with", 2))
    ]
    assert 0 < result["facts"]["touched"] < 1
    assert "one step touches" in (tmp_path / "lookup.md").read_text()
