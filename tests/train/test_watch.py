"""Measurements of a run: root mean squares by kind of layer, the smoothed loss and its spikes, times; by hand."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from allocated import peak_bytes
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from quintic.model.gpt import GPT, GPTConfig
from quintic.train.metrics import LossWatch, RmsMeter, layer_kind, summarize_log


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("embedding.weight", "embedding"),
        ("value_embeddings.0.weight", "value embeddings"),
        ("head.weight", "head"),
        ("blocks.3.attention.query.weight", "attention"),
        ("blocks.3.attention.value_gate.weight", "scalars and gates"),
        ("blocks.3.mlp.down.weight", "MLP"),
        ("residual_scales", "scalars and gates"),
        ("smear_gate.weight", "scalars and gates"),
    ],
)
def test_the_kind_of_a_layer(name: str, kind: str) -> None:
    assert layer_kind(name) == kind


def test_every_matrix_of_the_model_has_a_kind_of_its_own() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=300, depth=2, width=64, head_dim=32, num_kv_heads=2, seq_len=32, bos_id=0))
    small = [name for name, param in model.named_parameters() if layer_kind(name) == "scalars and gates"]
    assert all("gate" in name or "scale" in name for name in small)


def test_gradients_and_changes_by_hand() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5), "smear_gate": nn.Linear(3, 1)})
    frozen = model["head"].bias.requires_grad_(False)
    gradients = {}
    for name, param in model.named_parameters():
        if param is not frozen and "gate" not in name:
            param.grad = torch.randn_like(param) * 3
            gradients[name] = param.grad.double().numpy()
    meter = RmsMeter(model)
    measured = meter.before()
    # A kind of which nothing has a gradient is left out.
    assert measured.keys() == {"embedding", "head"}
    for name, gradient in gradients.items():
        assert measured[layer_kind(name)] == pytest.approx(np.sqrt(np.mean(gradient**2)), rel=1e-6)
    with torch.no_grad():
        model["embedding"].weight[0] += 2.0  # a fifth of the entries
        model["smear_gate"].weight -= 0.5  # three of four entries, the fourth is the bias
    changes = meter.after()
    assert changes["embedding"] == pytest.approx(2 / 5**0.5, rel=1e-6)
    assert changes["scalars and gates"] == pytest.approx(0.5 * (3 / 4) ** 0.5, rel=1e-6)
    assert changes["head"] == 0.0


def test_measuring_holds_the_weights_twice_and_nothing_else_whole() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    size = sum(param.nbytes for param in model.parameters())
    meter = RmsMeter(model, mean_gradient=torch.clone)
    assert size <= peak_bytes(meter.before) < 1.5 * size
    assert peak_bytes(meter.after) < 0.5 * size
    assert meter._before == []


def test_measuring_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = [param.detach().clone() for param in model.parameters()]
    meter = RmsMeter(model)
    assert meter.before() == {"scalars and gates": 1.0}
    assert meter.after() == {"scalars and gates": 0.0}
    assert all(torch.equal(old, param) for old, param in zip(before, model.parameters(), strict=True))


@given(st.lists(st.floats(0.1, 12.0), min_size=1, max_size=60))
def test_the_smoothed_loss_is_a_weighted_mean(losses: list[float]) -> None:
    watch = LossWatch()
    means = []
    for count, loss in enumerate(losses, start=1):
        watch.add(loss, 3.0)
        weights = 0.9 ** np.arange(count - 1, -1, -1)
        means.append(np.average(losses[:count], weights=weights))
        assert watch.smoothed == pytest.approx(means[-1], rel=1e-9)
    assert watch.least == pytest.approx(min(means), rel=1e-9)


@given(st.integers(0, 2**31), st.floats(1.0, 5.0))
def test_a_spike_is_a_loss_far_above_the_smoothed_one(seed: int, sigmas: float) -> None:
    rng = np.random.default_rng(seed)
    losses = 4 - 0.01 * np.arange(80) + 0.05 * rng.standard_normal(80) + 0.6 * (rng.random(80) < 0.05)
    watch = LossWatch()
    squares: list[float] = []
    for step, loss in enumerate(losses):
        expected = None
        if step:
            deviation = loss - np.average(losses[:step], weights=0.9 ** np.arange(step - 1, -1, -1))
            if squares:
                std = math.sqrt(np.average(squares, weights=0.99 ** np.arange(len(squares) - 1, -1, -1)))
                if len(squares) >= 20 and deviation > sigmas * std:
                    expected, deviation = deviation / std, sigmas * std
            squares.append(deviation**2)
        found = watch.add(float(loss), sigmas)
        assert (found is None) == (expected is None)
        assert found is None or found == pytest.approx(expected)
        # What is saved is all there is.
        watch = LossWatch(**json.loads(json.dumps(vars(watch))))


def test_a_steady_loss_has_no_spikes_but_a_jump_is_one() -> None:
    watch = LossWatch()
    assert math.isnan(watch.smoothed)
    assert [watch.add(3.0 + 0.01 * (-1) ** step, 6.0) for step in range(100)] == [None] * 100
    assert watch.add(math.nan, 6.0) is None
    jump = watch.add(4.0, 6.0)
    assert jump is not None
    assert jump > 50
    assert watch.add(2.0, 6.0) is None  # downwards is no spike


def test_the_norm_of_all_gradients() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5), "smear_gate": nn.Linear(3, 1)})
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    model["head"].weight.grad = None
    meter = RmsMeter(model)
    meter.before()
    squares = [float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None]
    assert meter.grad_norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-5)


def step(seconds: float, rate: float = 100.0) -> dict[str, Any]:
    """Return the record of a step of 64 tokens with 3 operations each, most of whose time is the backward pass."""
    times = {"data": 0.0, "forward_backward": 750 * seconds, "optimizer": 250 * seconds}
    speeds = {"tokens_per_second": 64 / seconds, "mfu": 64 * 3 / seconds / rate}
    return {"kind": "train", "step": 1, "times_ms": times, **speeds, "peak_memory_bytes": int(seconds)}


def test_a_summary_leaves_out_the_first_ten_steps() -> None:
    records = [{"kind": "run"}, *map(step, [60.0, *[5.0] * 9])]
    breakdown = {"data_frac": 0.0, "forward_backward_frac": 0.75, "optimizer_frac": 0.25}
    assert summarize_log(records) == {"peak_memory_bytes": 60, "breakdown": pytest.approx(breakdown)}
    records += map(step, (1.0, 2.0, 3.0))
    summary = summarize_log(records)
    assert summary["tokens_per_second"] == pytest.approx(32.0)
    assert summary["mfu"] == pytest.approx(0.96)
    assert summary["first_step_extra_seconds"] == pytest.approx(58.0)
    assert summarize_log([])["peak_memory_bytes"] is None


def test_a_summary_is_of_all_processes_of_a_run() -> None:
    before = [{"kind": "run"}, *map(step, [60.0, *[5.0] * 9, 1.0, 2.0, 3.0])]
    after = [{"kind": "resume"}, *(step(seconds, rate=20.0) for seconds in [30.0, *[5.0] * 9])]
    speeds = ("tokens_per_second", "mfu", "first_step_extra_seconds")
    assert [summarize_log(before + after)[name] for name in speeds] == [summarize_log(before)[name] for name in speeds]
    summary = summarize_log([*before, *after, step(14.0, rate=20.0)])  # on a slower machine
    expected = {"tokens_per_second": 12.8, "mfu": 64 * 4 * 3 / (600 + 280), "first_step_extra_seconds": 55.0}
    assert {name: summary[name] for name in speeds} == pytest.approx(expected)


def test_a_summary_has_the_least_score() -> None:
    records = [{"kind": "eval", "step": number, "bpb": bpb} for number, bpb in enumerate((3.0, None, 2.0, 2.5))]
    summary = summarize_log(records)
    assert (summary["least_bpb"], summary["least_bpb_step"]) == (2.0, 2)
