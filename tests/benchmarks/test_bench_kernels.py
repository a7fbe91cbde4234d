"""The benchmark of kernels: one round of it on the CPU, with tiny sizes."""

import gc
import json
from collections.abc import Iterator

import pytest

from benchmarks.kernels import __main__ as bench_kernels
from benchmarks.kernels.cases import SUBJECTS


@pytest.fixture(autouse=True)
def little_to_collect() -> Iterator[None]:
    """Keep what other tests have left out of the garbage collections, of which there is one for every case."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_everything_once_on_the_cpu(tmp_path, capsys):
    assert bench_kernels.main(["--out", str(tmp_path), "--device", "cpu", "--repetitions", "3", "--sets", "2"]) == 0
    result = json.loads((tmp_path / "kernels.json").read_text())
    rows = result["rows"]
    assert [row for row in rows if "failed" in row] == []
    assert list(dict.fromkeys(row["subject"] for row in rows)) == list(SUBJECTS)
    assert {row["ms"]["n"] for row in rows} == {3}
    for row in rows:
        assert 0 < row["ms"]["p10"] <= row["ms"]["median"] <= row["ms"]["p90"]
        # bfloat16 has 8 bits, e4m3 four: of each result one rounding, and those of its inputs.
        limit = 0.12 if "float8" in row["name"] or "fp8_" in row["name"] else 0.02
        assert all(error < limit for error in row.get("errors", []))
    compared = {row["subject"] for row in rows if "errors" in row}
    assert compared == {"loss", "linear", "fp8", "attention"}
    assert result["command"] == "python -m benchmarks.kernels --out FOLDER --device cpu --repetitions 3 --sets 2"
    assert result["active"]["attention"] == "sdpa"
    page = (tmp_path / "kernels.md").read_text()
    assert page.startswith("# Kernels on one CPU\n")
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert len(lines) == len(rows) + 2 * len(SUBJECTS)
    assert {line.count("|") for line in lines} == {7}
    assert str(tmp_path) not in page
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
