"""Whole training steps: once on two CPU ranks, what is refused, and the page."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.end_to_end.training import Training

# Stands for a library whose optimizer cannot be made on one of the ranks.
DION = """
import torch.distributed as dist

def Muon(groups, distributed_mesh, **options):
    assert [len(group["params"]) for group in groups] == [14, 10]
    raise ValueError("not | made" if dist.get_rank() else "neither")
"""


@pytest.mark.slow
def test_everything_once_on_two_ranks(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "dion.py").write_text(DION)
    words = ["--out", str(tmp_path / "out"), "--device", "cpu", "--size", "tiny", "--ranks", "2", "--commit", "0"]
    words += ["--windows", "2", "--steps", "3", "--only", "dion-muon", "torch-adamw", "quintic"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.end_to_end", *words, "--peers", str(tmp_path / "peers")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 1, done.stderr  # dion is there and fails
    result = json.loads((tmp_path / "out" / "end-to-end.json").read_text())
    broken, *rows = result["rows"]
    assert broken == {"contestant": "dion-muon", "error": "ValueError: neither"}
    assert [row["contestant"] for row in rows] == ["torch-adamw", "quintic"]
    assert result["parameters"] == 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128 + 2 * 64 + 2 * 16) + 256 * 64 + 64
    assert result["devices"] == ["CPU", "CPU"]
    for row in rows:
        assert (row["step_ms"]["n"], row["single_ms"]["n"], row["optimizer_ms"]["n"]) == (2, 6, 6)
        assert 0 < row["optimizer_ms"]["median"] < row["single_ms"]["median"]
        assert row["gradient_norm"] > 0.01
        assert all(abs(loss - math.log(256)) < 0.5 for loss in row["losses"])
        assert row["losses"][0] == rows[0]["losses"][0]  # the same weights and tokens
        assert len(set(row["losses"])) > 1
    assert rows[0]["losses"][-1] != rows[1]["losses"][-1]
    # Two moments of each parameter in its dtype on two ranks.
    assert rows[0]["state_mib"] == pytest.approx(4 * result["parameters"] / 2 / 2**20, rel=0.1)
    text = (tmp_path / "out" / "end-to-end.md").read_text()
    assert "--peers PEERS` at commit 0" in text
    assert str(tmp_path) not in text
    assert "| dion-muon | ValueError: neither |" in text
    assert done.stdout.rstrip().splitlines()[-1].startswith("| quintic |")


def some_training(*gradients):
    """Training of parameters with these gradients, on one rank."""
    model = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in gradients])
    for param, gradient in zip(model, gradients, strict=True):
        param.grad = gradient
    found = object.__new__(Training)
    found.model, found.team = model, SimpleNamespace(from_all=lambda value: [value], cuda=False)
    return found


def test_the_norm_of_the_gradients():
    assert some_training(torch.tensor([3.0, 0, 0]), torch.tensor([0, 4.0, 0])).check_gradients() == 5.0


@pytest.mark.parametrize(
    "gradient", [None, torch.zeros(3), torch.tensor([1.0, math.inf, 0]), torch.tensor([1.0, math.nan, 0])], ids=str
)
def test_gradients_of_nothing_are_refused(gradient):
    with pytest.raises(ArithmeticError, match="1 parameters without a proper gradient, such as 1"):
        some_training(torch.ones(3), gradient).check_gradients()
