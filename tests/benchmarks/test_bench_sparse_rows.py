"""The benchmark of touched rows: once on CPUs, and what its page says of when they are worth it."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from harness import run

from benchmarks import sparse_rows as bench

ARGUMENTS = ["--device", "cpu", "--rows", "20000", "--columns", "64", "--dtype", "fp32", "--steps", "2"]


def measured(rank, world_size, out):
    options = bench.parse(["--out", out, *ARGUMENTS, "--touched", "50", "15000"])
    return bench.measure(options, bench.Team(torch.device("cpu"), dist.group.WORLD))


@pytest.mark.slow
def test_everything_once_on_cpus(tmp_path):
    result, other = run(measured, 2, str(tmp_path))
    assert result["rows"] == other["rows"]
    few, many = result["rows"]
    assert (few["touched"], few["rule"], few["differing"]) == (50, "rows", 0)
    assert (many["touched"], many["rule"], many["differing"]) == (15000, "whole", 0)
    # Both send that many of the 20,000 rows, and receive about as many.
    assert 50 <= few["share"] * 20000 < 100
    assert 15000 <= many["share"] * 20000 < 15400
    assert all(few[way]["median"] > 0 for way in bench.WAYS)
    assert "adamw, sparse" in result["plan"]
    page = bench.page(result)
    assert str(tmp_path) not in page
    assert "| 50 | 0." in page
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1


def rows(*saved):
    times = [{"whole": {"median": 5.0}, "announced": {"median": 5.0 - gain}} for gain in saved]
    return [{"touched": 1000 * (number + 1), **row} for number, row in enumerate(times)]


def test_when_both_take_the_same_time():
    assert bench.break_even(rows(1.0, -3.0)) == "at about 1,250 touched rows"
    assert bench.break_even(rows(1.0, 0.5)) == "above 2,000 touched rows, if anywhere"
    assert bench.break_even(rows(-1.0, 0.5)) == "below 1,000 touched rows, if anywhere"
