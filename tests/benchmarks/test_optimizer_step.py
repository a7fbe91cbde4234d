"""The arithmetic and tables of `benchmarks.optimizer_step`; what it measures is in benchmarks/results."""

import pytest
import torch

from benchmarks.common import results
from benchmarks.optimizer_step import __main__ as optimizer_step
from benchmarks.optimizer_step import contestants, measure

# -------------------------------------------------------------------------------- optimizer_step


def test_weights_come_with_normal_gradients_and_are_the_same_for_everyone():
    first, second = (measure.make_weights(contestants.SETS["tiny"], torch.device("cpu"), torch.float32) for _ in "ab")
    assert [tuple(param.shape) for param in first.all] == [(64, 64)] * 4 + [(128, 64)] * 2 + [(512, 64)] + [(64,)] * 3
    for one, other in zip(first.all, second.all, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.grad, other.grad)
    gradients = torch.cat([param.grad.flatten() for param in first.matrices])
    assert gradients.std().item() == pytest.approx(0.001, rel=0.05)
    assert (gradients != 0).all()


def test_state_counts_every_storage_once():
    flat = torch.zeros(100)
    state = {0: {"momentum": flat[:60], "more": [flat[60:], torch.zeros(3, dtype=torch.bfloat16)], "step": 7}}
    assert measure.state_bytes(state) == 400 + 6


def test_spread_is_median_and_quartiles():
    assert results.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "least": 1.0, "n": 5}


def measured(**changes: object) -> dict[str, object]:
    times = {"median": 12.34, "q1": 12.0, "q3": 13.0, "least": 11.9, "n": 30}
    row = {
        "set": "tiny", "dtype": "fp32", "contestant": "quintic", "caches": "empty", "first_step_s": 3.21,
        "step_ms": times, "host_ms": {**times, "median": 1.234}, "device_ms": times, "replay_ms": times,
        "state_mib": 1234.5, "peak_mib": 10.0, "whole_peak_mib": 20.0, "workspace_mib": 5.0, "syncs": "none",
        "device": "NVIDIA H200", "versions": {"python": "3.12.3"},
    }  # fmt: skip
    return {**row, **changes}


def test_the_page_tells_why():
    rows = [measured(), measured(contestant="torch-muon", graph_error="RuntimeError: not capturable")]
    text = optimizer_step.page(rows, "python x.py", "abc")
    assert text.startswith("# `optimizer.step()` alone, on one NVIDIA H200\n")
    assert "- torch-muon, tiny, fp32: RuntimeError: not capturable\n" in text
