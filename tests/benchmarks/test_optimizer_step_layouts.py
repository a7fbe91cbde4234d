"""`benchmarks.optimizer_step --layout`: one round on CPUs, contestants that fail, tables and targets."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from harness import run

from benchmarks.common import peer_files, results
from benchmarks.optimizer_step import rows
from benchmarks.optimizer_step.layouts import collectives, invariance
from benchmarks.optimizer_step.layouts import contestants as layouts

MIB = 2**20

# A library that fails in every way: while it is made and later, on one rank only, and by waiting for ever.
DION = """
import time
import torch
import torch.distributed as dist


class Muon(torch.optim.Optimizer):
    def __init__(self, groups, distributed_mesh, **options):
        super().__init__([{"params": group["params"]} for group in groups], {})
        first = groups[0]["params"][0]
        placements = getattr(first, "placements", ())
        self.layout = "ddp" if not placements else "hsdp" if len(placements) == 2 else "cut" + str(placements[0].dim)
        self.steps = 0
        if self.layout == "ddp" and dist.get_rank() == 1:
            raise ValueError("not | made")

    def step(self):
        self.steps += 1
        if self.layout == "cut0" and self.steps == 3 and dist.get_rank() == 1:
            raise RuntimeError("out of memory")
        if self.layout == "hsdp" and self.steps == 2 and dist.get_rank() == 0:
            time.sleep(1000)
        dist.all_reduce(torch.zeros(1))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[str, str], dict[str, Any]], str, str]:
    """All layouts on two CPU ranks: the rows, what was printed, and the page."""
    folder = tmp_path_factory.mktemp("layouts")
    peers = folder / "peers"
    peers.mkdir()
    (peers / "dion.py").write_text(DION)
    words = ["--out", str(folder / "out"), "--layout", *layouts.LAYOUTS, "--ranks", "2", "--device", "cpu"]
    words += ["--set", "tiny", "--steps", "10", "--targets", "--peers", str(peers), "--limit", "12", "--commit", "0"]
    words += ["--caches", str(folder / "caches"), "--only", "quintic", "quintic-neuron", "dion-muon", "speedrun"]
    words += ["quintic-speedrun"]  # not for float32 weights
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.optimizer_step", *words],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = results.read_rows(folder / "out" / "optimizer_step_layouts.jsonl")
    text = (folder / "out" / "optimizer_step_layouts.md").read_text()
    return {(row["contestant"], row["layout"]): row for row in found}, done.stdout, text


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_layout_has_the_bits_of_one_device(outcome):
    found = outcome[0]
    assert [layout for name, layout in found if name == "quintic"] == list(layouts.LAYOUTS)
    assert [layout for name, layout in found if name == "quintic-neuron"] == ["single", "ddp", "sharded", "fsdp2"]
    for (name, layout), row in found.items():
        if row["family"] != "quintic":
            continue
        assert not {"error", "parts_error"} & row.keys(), row
        assert (row["differing_entries"], row["differing_tensors"]) == (0, 0)
        assert row["moved"] > 0.9
        assert row["step_ms"]["n"] == 10
        assert 0 < row["step_ms"]["q1"] <= row["step_ms"]["median"] <= row["step_ms"]["q3"]
        assert row["orthogonalization_alone_ms"]["median"] > 0
        assert row["finite"]
        assert len(row["planned_mib"]) == len(row["flops"]) == 2
        assert sum(row["flops"]) == sum(found[name, "single"]["flops"]) // (
            1 if layout in ("single", "replicated") else 2
        )
        assert ("exchange_ms" in row) == ("fill_ms" in row) == (layout != "single")
        assert ("bare_exchange_ms" in row) == (layout in ("sharded", "replicated"))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_is_sent_is_what_the_layout_needs(outcome):
    # Of 4 matrices of 64x64 and 2 of 128x64 each rank owns half, and sends directions and updates in 32 bits:
    # so small ones are multiplied on CPUs.
    owned = 4 * (2 * 64 * 64 + 128 * 64)
    everything = 4 * (4 * 64 * 64 + 2 * 128 * 64 + 512 * 64 + 3 * 64)
    sent = {layout: row["sent_mib"] * MIB for (name, layout), row in outcome[0].items() if name == "quintic"}
    counts = 4 * 10  # of the gradients that are there
    assert sent["single"] == 0
    for layout in ("ddp", "fsdp2", "tp"):
        assert owned <= sent[layout] <= owned + 2 * counts
    padding = 2 * 4 * 64  # each rank's share of averages is a whole number of 64 entries
    assert everything <= sent["replicated"] <= everything + 2 * counts + padding
    assert 0.9 * everything <= sent["sharded"] <= 1.1 * everything


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_failures_cost_the_others_nothing(outcome):
    found, printed, text = outcome
    assert found["dion-muon", "ddp"]["error"] == "rank 1: ValueError: not | made; rank 0: another rank failed"
    assert found["dion-muon", "fsdp2"]["error"].startswith("rank 1: RuntimeError: out of memory")
    assert "log" in found["dion-muon", "fsdp2"]
    assert found["dion-muon", "hsdp"]["error"].count("stopped after its time, in the part: warm-up") >= 1
    assert "error" not in found["dion-muon", "tp"]
    assert found["dion-muon", "tp"]["step_ms"]["n"] == 10
    assert ("speedrun", "sharded") not in found  # bf16 only
    assert "| dion-muon | failed: rank 1: ValueError: not / made; rank 0: another rank failed |" in text
    assert "tiny       ddp        dion-muon" in printed


# -------------------------------------------------------------------------------------------------------- collectives


def steps_of(rank: int, world_size: int) -> list[Any]:
    """Note the collectives of a step, run them alone, and make the step without them."""
    mine = torch.full((4,), float(rank + 1))
    all_gather = next(name for name in collectives.ALL_GATHER if hasattr(dist, name))

    def step() -> list[torch.Tensor]:
        whole, total = torch.zeros(8), mine.clone()
        sends, receives = ([3, 1], [3, 3]) if rank == 0 else ([3, 1], [1, 1])
        received = torch.zeros(sum(receives))
        dist.all_to_all_single(received, mine, receives, sends)
        getattr(dist, all_gather)(whole, mine, async_op=True).wait()
        dist.all_reduce(total)
        dist.broadcast(total, 1)
        return [received, whole, total]

    found = collectives.recorded(step)
    alone = collectives.run_alone(found)
    alone()
    with collectives.without_sending():
        without = [tensor.tolist() for tensor in step()]
    assert step()[2].tolist() == [3.0] * 4  # the collectives are back
    return [[(one.name, one.sent_bytes) for one in found], without]


@pytest.mark.slow
def test_collectives_are_noted_run_again_and_left_out():
    (first, without_first), (second, without_second) = run(steps_of, 2, timeout=60)
    names = [name for name, _ in first]
    assert names[0] == "all_to_all_single"
    assert names[1] in collectives.ALL_GATHER
    assert names[2:] == ["all_reduce", "broadcast"]
    # Splits but for what stays; to one other rank; there and back; from rank 1 only. Of four bytes an entry.
    assert [sent for _, sent in first] == [4 * 1, 4 * 4, 4 * 4, 0]
    assert [sent for _, sent in second] == [4 * 3, 4 * 4, 4 * 4, 4 * 4]
    # What is sent, again and again; a sum of two equal ones; and nothing from rank 1 for rank 0.
    assert without_first == [[1.0] * 6, [1.0] * 8, [0.0] * 4]
    assert without_second == [[2.0] * 2, [2.0] * 8, [4.0] * 4]


# --------------------------------------------------------------------------------------------------------- invariance


def test_means_are_sums_in_order_rounded_once():
    # In another order, or rounded after each sum, 1 would be lost.
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, -256.0)]
    assert invariance.mean(parts).item() == 0.5
    huge = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]
    assert invariance.mean(huge).item() == 0.25


def test_gradients_differ_by_rank_and_average_to_the_mean():
    from benchmarks.optimizer_step.contestants import Weights

    weights = Weights([torch.nn.Parameter(torch.zeros(3, 4))], [torch.nn.Parameter(torch.zeros(5))])
    found = []
    for rank in (0, 1, None):
        invariance.set_gradients(weights, 2, 2, rank)
        found.append([param.grad for param in weights.all])
    for first, second, both in zip(*found, strict=True):
        assert not torch.equal(first, second)
        assert torch.equal(both, (first + second) / 2)


def test_bits_are_compared_not_values():
    zeros, same = torch.zeros(3), torch.tensor([1.0, float("nan")])
    assert invariance.differing([zeros, same], [-zeros, same.clone()]) == (3, 1)
    half = torch.ones(2, 2, dtype=torch.bfloat16)
    assert invariance.differing([half], [half + 0.0078125]) == (4, 1)


# --------------------------------------------------------------------------------------------------------- peers' files


def test_what_a_name_needs_is_taken_out_of_a_script(tmp_path):
    (tmp_path / "kernels_beside.py").write_text(
        "raise_it = 1 / 0 if False else 5\ndef twice(x):\n    return x * raise_it\n1 / 0\n"
    )
    script = tmp_path / "train.py"
    script.write_text(
        "import json as j, missing_package\n"
        "from kernels_beside import twice, absent\n"
        "from dataclasses import dataclass\n"
        "1 / 0\n"
        "factor = 3\n"
        "unused = open('/nowhere')\n"
        "def helper(x):\n    return twice(x) * factor\n"
        "@dataclass(slots=True)\nclass Config:\n    size: int = 2\n"
        "class Wanted:\n    def run(self):\n        return j.dumps(helper(Config().size))\n"
        "raise SystemExit\n"
    )
    module = peer_files.load(script, ["Wanted"])
    assert module.Wanted().run() == "30"
    assert not hasattr(module, "unused")
    with pytest.raises(ImportError, match=r"train.py has no Muon"):
        peer_files.load(script, ["Muon"])
    with pytest.raises(ImportError, match=r"no file other.py in the folders of --peers"):
        peer_files.load(tmp_path / "other.py", ["Muon"])


# --------------------------------------------------------------------------------------------------- jobs, rows, tables


def test_the_slowest_rank_counts_in_each_step():
    merged = rows.merge_ranks(
        [
            {
                "part": "done",
                "times": {"step_ms": [1.0, 5.0, 2.0], "x": [1.0]},
                "worst": {"mib": 3},
                "of_ranks": {"p": 1},
            },
            {"part": "done", "times": {"step_ms": [4.0, 1.0, 3.0]}, "worst": {"mib": 7}, "of_ranks": {"p": 2}},
        ]
    )
    assert merged["step_ms"] == {"median": 4.0, "q1": 3.5, "q3": 4.5, "least": 3.0, "n": 3}
    assert merged["mib"] == 7
    assert merged["p"] == [1, 2]
    assert not {"x", "times", "worst"} & merged.keys()
