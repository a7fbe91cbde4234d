"""The benchmark of lookup layers on a CPU."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import lookup

TINY = ["--width", "16", "--vocab-size", "64", "--embeddings", "200", "--k-max", "16", "--seq-len", "32", "--rows", "2"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tries the script where it does not measure")
def test_times_and_touched_rows_are_written(tmp_path: Path) -> None:
    assert lookup.main(["--out", str(tmp_path), *TINY, "--steps", "3"]) == 0
    result = json.loads((tmp_path / "lookup.json").read_text())
    tokens = lookup.zipf_tokens(lookup.parse(["--out", "x", *TINY]), torch.Generator().manual_seed(1))
    assert result["facts"]["positions"] == 64
    # A token has 200 / 64 rows on average over the vocabulary, and frequent ones have more.
    assert result["facts"]["mean_rows"] > 200 / 64
    share_of_tokens = len(tokens[lookup.SAMPLE_ROWS :].unique()) / 64
    assert share_of_tokens < result["facts"]["touched"] < 1
    assert result["rows"][0]["both_ms"]["median"] > 0


def test_the_nth_token_is_as_frequent_as_one_in_n() -> None:
    options = lookup.parse(["--out", "x", "--vocab-size", "8", "--seq-len", "1000", "--rows", "100"])
    counts = torch.bincount(lookup.zipf_tokens(options, torch.Generator().manual_seed(1)).flatten(), minlength=8)
    expected = counts[0] / torch.arange(1, 9)
    torch.testing.assert_close(counts.double(), expected.double(), rtol=0.05, atol=0)
