"""The arithmetic of `benchmarks.optimizer_step`; what it measures is in benchmarks/results."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.common import results
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


def test_state_in_records_of_another_library_counts():
    record = SimpleNamespace(_data=None, quantized=torch.zeros(64, dtype=torch.int8), scales=torch.zeros(2))
    assert measure.state_bytes({0: {"exp_avg": record, "step": 7}}) == 64 + 8


def test_spread_is_median_and_quartiles():
    assert results.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "least": 1.0, "n": 5}


SMALL = contestants.WeightSet(matrices=((1, 48, 32),), others=((1, 32, 32),))


def test_weights_too_large_for_small_steps_follow_the_learning_rate():
    weights = measure.make_weights(SMALL, torch.device("cpu"), torch.bfloat16)
    optimizer = contestants.quintic_muon(weights, update_rule="adamuon")
    for param in weights.all:  # 0.5 has a unit in the last place of 2 ** -8, and a step of AdaMuon takes 0.0002
        param.data.fill_(0.5)
    before = [param.detach().clone() for param in weights.all]
    optimizer.step()
    assert all(map(torch.equal, before, weights.all))
    assert measure.follows_lr(optimizer.step, [optimizer], weights)


def test_a_rule_that_moves_weights_at_a_rate_of_0_follows_the_learning_rate():
    weights = measure.make_weights(SMALL, torch.device("cpu"), torch.float32)
    optimizer = contestants.quintic_muon(weights, update_rule="ema_nesterov")
    for _ in range(3):
        optimizer.step()
    assert measure.follows_lr(optimizer.step, [optimizer], weights)


@pytest.mark.parametrize("part", ["all", "matrices", "others"])
def test_a_step_with_a_learning_rate_of_its_own_is_found(part):
    weights = measure.make_weights(SMALL, torch.device("cpu"), torch.float32)
    optimizer = contestants.quintic_muon(weights)
    matrices, others = optimizer.param_groups
    kept = {"all": [matrices, others], "matrices": [matrices], "others": [others]}[part]
    rates = [group["lr"] for group in kept]

    def replay():
        given = [group["lr"] for group in kept]
        for group, lr in zip(kept, rates, strict=True):
            group["lr"] = lr
        optimizer.step()
        for group, lr in zip(kept, given, strict=True):
            group["lr"] = lr

    assert not measure.follows_lr(replay, [optimizer], weights)
