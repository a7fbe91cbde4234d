"""The benchmark of layouts: one round of it under torchrun, what it does with layouts that fail, and its table."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "distributed"))

import bench_layouts as bench
from harness import run

MIB = 2**20


@pytest.mark.slow
def test_every_layout_under_torchrun(tmp_path):
    words = ["--out", str(tmp_path), "--device", "cpu", "--set", "tiny", "--steps", "2", "--normalize", "neuron"]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*start, bench.__file__, *words], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "layouts.json").read_text())
    rows = {row["layout"]: row for row in result["rows"]}
    assert tuple(rows) == bench.LAYOUTS
    for row in rows.values():
        assert "error" not in row
        assert row["differing"] == {"entries": 0, "tensors": 0}
        assert row["step_ms"]["n"] == 2
        assert 0 < row["step_ms"]["q1"] <= row["step_ms"]["median"] <= row["step_ms"]["q3"]
        assert row["balance"] == 1.0
        assert ("exchange_ms" in row) == (row["layout"] != "single")
    assert rows["single"]["moved"] > 0.9
    # Of 4 matrices of 64x64 and 2 of 128x64 each rank owns half, and sends directions and updates in 16 bits.
    owned = 2 * (2 * 64 * 64 + 128 * 64)
    neurons = 4 * 2 * (2 * 64 + 128)  # factors and second moments
    everything = 4 * (4 * 64 * 64 + 2 * 128 * 64 + 512 * 64 + 3 * 64)
    sent = {layout: [size * MIB for size in row["sent_mib"]] for layout, row in rows.items()}
    assert sent["single"] == [0, 0]
    assert sent["averaged"] == [owned + neurons] * 2
    assert sent["fsdp2"] == sent["tp"] == [2 * owned / 2 + neurons] * 2
    assert sent["replicated"] == [everything] * 2
    # To the owners and back; one rank owns two of the three vectors, and what the other sends of its one is padded.
    assert sum(sent["sharded"]) == 2 * everything + 4 * 64
    page = (tmp_path / "layouts.md").read_text()
    assert page.startswith("# The same weights in every layout, on 2 x CPU\n")
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows)
    assert {line.count("|") for line in lines} == {len(bench.HEADER) + 1}
    command = (
        "torchrun --standalone --nproc-per-node 2 benchmarks/bench_layouts.py --out FOLDER --device cpu --set tiny"
    )
    assert result["command"] == f"{command} --steps 2 --normalize neuron"
    assert str(tmp_path) not in page


def measured(rank: int, world_size: int, folder: str, layouts: list[str], harm: str) -> list[dict[str, Any]]:
    """Measure some layouts in a process of the harness, to which harm is done."""
    build = bench.built

    def built(row: dict[str, Any], *others: Any) -> bench.Contestant:
        one = build(row, *others)
        if row["layout"] == "single" and harm == "no single":
            raise RuntimeError("not | built")
        if row["layout"] == "averaged" and rank == 1:
            with torch.no_grad():
                one.weights.matrices[0][0, 0] += 1
        # The second compared step, and the first timed one.
        breaks = {"sharded": 2, "replicated": bench.COMPARED_STEPS + 1 + bench.measure.WARMUP_STEPS + 1}.get(
            row["layout"], 0
        )
        if breaks and rank == 1:
            break_step(one.optimizer, breaks)
        return one

    bench.built = built
    words = ["--out", folder, "--device", "cpu", "--set", "tiny", "--steps", "2", "--commit", "0", "--limit", "2"]
    options = bench.parse([*words, "--layouts", *layouts])
    bench.measure_sets(options, bench.Team(torch.device("cpu"), options.limit, dist.new_group()))
    return json.loads(Path(folder, "layouts.json").read_text())["rows"] if rank == 0 else []


def break_step(optimizer: Any, number: int) -> None:
    """Let a step fail before its collectives."""
    step, left = optimizer.step, [number]

    def broken() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("out of memory")
        step()

    optimizer.step = broken


@pytest.mark.slow
def test_a_rank_that_fails_ends_only_its_layout(tmp_path):
    layouts = ["averaged", "sharded", "replicated", "fsdp2"]
    rows, _ = run(measured, 2, str(tmp_path), layouts, "", timeout=100)
    found = {row["layout"]: row for row in rows}
    for layout in ("sharded", "replicated"):
        assert found[layout]["error"].startswith("rank 1: RuntimeError: out of memory; rank 0: ")
        assert "step_ms" not in found[layout]
    for layout in ("single", "averaged", "fsdp2"):
        assert "error" not in found[layout]
        assert found[layout]["step_ms"]["n"] == 2
    assert found["fsdp2"]["differing"] == {"entries": 0, "tensors": 0}
    # One entry on one rank; the update does not depend on it.
    assert found["averaged"]["differing"] == {"entries": 1, "tensors": 1}
    page = (tmp_path / "layouts.md").read_text()
    assert "| averaged | **1 in 1** |" in page
    assert "| sharded | failed: rank 1: RuntimeError: out of memory; rank 0: " in page


def test_without_single_nothing_is_compared(tmp_path):
    rows, _ = run(measured, 2, str(tmp_path), ["tp"], "no single", timeout=60)
    assert rows[0]["error"].count("RuntimeError: not | built") == 2
    assert rows[1]["differing"] == {}
    assert bench.cells(rows[1])[:2] == ["tp", "-"]
    assert rows[1]["step_ms"]["n"] == 2


def test_single_is_always_first():
    assert bench.parse(["--out", "x", "--layouts", "tp", "averaged"]).layouts == ["single", "averaged", "tp"]
    assert tuple(bench.parse(["--out", "x"]).layouts) == bench.LAYOUTS


@pytest.mark.parametrize(
    ("peaks", "text"),
    [([90.0, 104.0], "104 / 100"), ([106.0, 90.0], "**106 / 100**"), ([5.0, 7.0], "7 / 100")],
)
def test_more_memory_than_planned_is_bold(peaks, text):
    assert bench.temporary({"peak_mib": peaks, "planned_mib": [100.0, 100.0]}) == text


def test_bits_are_compared_not_values():
    zeros, same = torch.zeros(3), torch.tensor([1.0, float("nan")])
    assert bench.differing([zeros, same], [-zeros, same.clone()]) == (3, 1)
    half = torch.ones(2, 2, dtype=torch.bfloat16)
    assert bench.differing([half], [half + 0.0078125]) == (4, 1)
