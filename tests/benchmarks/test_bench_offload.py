"""The benchmark of state in host memory, once on the CPU, and what it tells when something is wrong."""

import json

import pytest
import torch

from benchmarks import offload as bench_offload

ARGUMENTS = ["--device", "cpu", "--set", "tiny", "--dtype", "fp32", "--steps", "2"]


@pytest.mark.slow
def test_everything_once_on_the_cpu(tmp_path, capsys):
    assert bench_offload.main(["--out", str(tmp_path), *ARGUMENTS, "--variant", "muon", "neuron"]) == 0
    result = json.loads((tmp_path / "offload.json").read_text())
    rows = result["rows"]
    assert [(row["variant"], row["offload"]) for row in rows] == [
        ("muon", False),
        ("muon", True),
        ("neuron", False),
        ("neuron", True),
    ]
    for plain, hosted in (rows[:2], rows[2:]):
        assert hosted["same_bits"] is True
        assert "same_bits" not in plain
        # Momentum of 4 x 64 x 64 + 2 x 128 x 64, and two moments of 512 x 64 + 3 x 64.
        assert hosted["moved_mib"] * 2**20 == 4 * 32768 + 8 * 32960
        assert plain["moved_mib"] == plain["buffers_mib"] == 0
        assert hosted["rate_gb_s"] > 0
        assert "state in host memory" in hosted["plan"]
    page = (tmp_path / "offload.md").read_text()
    assert page.count("| same |") == 2
    assert str(tmp_path) not in page
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1
    assert capsys.readouterr().out.count("same bits") == 2


@pytest.mark.slow
def test_other_bits_and_errors_are_told(tmp_path, monkeypatch, capsys):
    make = bench_offload.quintic_muon

    def changed(weights, *, offload, **options):
        if offload:
            weights.matrices[0].data[0, 0] += 1
        return make(weights, offload=offload, **options)

    monkeypatch.setattr(bench_offload, "quintic_muon", changed)
    assert bench_offload.main(["--out", str(tmp_path), *ARGUMENTS]) == 1
    assert "OTHER BITS" in capsys.readouterr().out
    assert "| **other** |" in (tmp_path / "offload.md").read_text()

    def broken(weights, **options):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(bench_offload, "quintic_muon", broken)
    assert bench_offload.main(["--out", str(tmp_path), *ARGUMENTS]) == 1
    assert (tmp_path / "offload.md").read_text().count("OutOfMemoryError: no room") == 2
