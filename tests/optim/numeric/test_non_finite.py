"""Gradients that are not finite: let through, skipped without a trace, or named."""

import copy

import pytest
import torch
from torch import nn

from quintic import Muon
from quintic.optim.grad_scaler import unscale_
from quintic.optim.numeric.non_finite import all_finite, first_non_finite

BAD = [float("inf"), float("-inf"), float("nan")]


def optimizer_of(**options):
    params = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(5))]
    groups = [
        {"params": [("first", params[0]), ("second", params[1])]},
        {"params": [("bias", params[2])], "algorithm": "adamw"},
    ]
    return params, Muon(groups, lr=0.1, normalize="neuron", weight_decay=0.1, adamw_weight_decay=0.1, **options)


def everything(params, optimizer):
    return [t.detach().clone() for p in params for t in (p, *optimizer.state[p].values())]


def give_gradients(params):
    for param in params:
        param.grad = torch.randn_like(param)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("master", [None, "fp32", "mantissa", "8bit"])
def test_skip_leaves_every_bit_and_counts(bad, where, master):
    params, optimizer = optimizer_of(on_nonfinite="skip", master=master)
    give_gradients(params)
    optimizer.step()
    give_gradients(params)
    params[where].grad.view(-1)[1] = bad
    before = everything(params, optimizer)
    optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, everything(params, optimizer), strict=True))
    assert optimizer.last_step().skipped
    give_gradients(params)
    optimizer.step()
    report = optimizer.last_step()
    assert (report.skipped, report.skipped_steps) == (False, 1)
    assert "1 step skipped" in str(report)
    assert not any(torch.equal(old, new) for old, new in zip(before, everything(params, optimizer), strict=True))


def test_a_skipped_step_is_as_if_it_had_not_been():
    torch.manual_seed(0)
    params, optimizer = optimizer_of(on_nonfinite="skip")
    twins, twin = optimizer_of()
    for p, q in zip(params, twins, strict=True):
        q.data.copy_(p)
    for step in range(6):
        give_gradients(params)
        if step in (0, 3):
            params[step % 2].grad[0, 0] = float("nan")
            optimizer.step()
            continue
        for p, q in zip(params, twins, strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        twin.step()
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


def test_raise_names_the_parameter_and_changes_nothing():
    params, optimizer = optimizer_of(on_nonfinite="raise")
    give_gradients(params)
    params[1].grad[2, 3] = float("nan")
    before = everything(params, optimizer)
    with pytest.raises(FloatingPointError, match="second: the gradient has an infinite or undefined entry"):
        optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, everything(params, optimizer), strict=True))
    give_gradients(params)
    optimizer.step()


def test_an_error_does_not_count_as_a_step():
    param = nn.Parameter(torch.randn(3))
    groups = [{"params": [("w", param)], "algorithm": "adamw", "step_every": 2}]
    optimizer = Muon(groups, on_nonfinite="raise")
    param.grad = torch.randn(3)
    optimizer.step()
    param.grad = torch.full((3,), float("nan"))
    with pytest.raises(FloatingPointError, match="w: "):
        optimizer.step()
    assert optimizer.param_groups[0]["pending_steps"] == 1


def test_propagate_lets_them_through():
    params, optimizer = optimizer_of()
    give_gradients(params)
    params[0].grad[0, 0] = float("nan")
    optimizer.step()
    assert params[0].isnan().any()
    assert not params[1].isnan().any()


def test_groups_that_did_not_ask_are_stepped():
    params = [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    optimizer = Muon([{"params": params[:1], "on_nonfinite": "skip"}, {"params": params[1:]}])
    before = [p.detach().clone() for p in params]
    give_gradients(params)
    params[0].grad[0, 0] = float("inf")
    optimizer.step()
    assert torch.equal(params[0], before[0])
    assert not torch.equal(params[1], before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_largest_finite_gradient_is_finite(dtype):
    largest = torch.full((3, 3), torch.finfo(dtype).max, dtype=dtype)
    empty = torch.empty(0, dtype=dtype)
    device = torch.device("cpu")
    assert bool(all_finite([largest, empty, torch.zeros(2)], device))
    assert first_non_finite(["a", "b"], [largest, empty]) is None
    broken = largest.clone()
    broken[1, 1] = float("nan")
    assert not bool(all_finite([largest, broken], device))
    assert first_non_finite(["a", "b"], [largest, broken]) == "b"
    assert bool(all_finite([], device))


def test_a_raised_step_every_recovers():
    """The gradients that raised are reset by `zero_grad`, which leaves those alone that wait for their turn."""
    param = nn.Parameter(torch.randn(4, 3))
    optimizer = Muon([param], lr=0.1, step_every=2, on_nonfinite="raise")
    before = param.detach().clone()
    for step in range(2):
        param.grad = torch.full_like(param, float("inf")) if param.grad is None else param.grad + 1
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(FloatingPointError, match=r"group0\.param0"):
        optimizer.step()
    optimizer.zero_grad()
    assert param.grad is None
    assert torch.equal(param, before)
    for _ in range(2):
        param.grad = torch.ones_like(param) if param.grad is None else param.grad + 1
        optimizer.step()
        optimizer.zero_grad()
    assert param.grad is None
    assert not torch.equal(param, before)


def test_a_raised_step_can_be_made_with_mended_gradients():
    params, optimizer = optimizer_of(on_nonfinite="raise")
    give_gradients(params)
    params[0].grad[0, 0] = float("nan")
    with pytest.raises(FloatingPointError):
        optimizer.step()
    before = params[0].detach().clone()
    params[0].grad.nan_to_num_()
    optimizer.step()
    assert not torch.equal(params[0], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_unscaled_as_grad_scaler_does_it(dtype):
    """Bit for bit, also with a scale that is no power of two."""
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
    param = nn.Parameter(torch.randn(64, 32).to(dtype))
    optimizer = Muon([param])
    scaler.scale(param.square().sum()).backward()
    scaled = param.grad.clone()
    scaler.unscale_(optimizer)
    expected, param.grad = param.grad, scaled
    unscale_(optimizer._plans.current_groups(), torch.tensor(3.0))
    assert torch.equal(param.grad, expected)


def test_grad_scaler_with_step_every_is_refused():
    params, optimizer = optimizer_of(step_every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(sum(p.square().sum() for p in params)).backward()
    with pytest.raises(ValueError, match="param group 0 has step_every=2, and GradScaler"):
        scaler.step(optimizer)


def test_grad_scaler_that_is_switched_off_is_not_there():
    params, optimizer = optimizer_of(step_every=2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(2):
        scaler.scale(sum(p.square().sum() for p in params)).backward()
        before = params[0].detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert not torch.equal(params[0], before)


def test_a_copied_optimizer_counts_its_own_skips():
    param = nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([param], on_nonfinite="skip")
    param.grad = torch.full_like(param, float("nan"))
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    optimizer.step()
    assert (optimizer.last_step().skipped_steps, twin.last_step().skipped_steps) == (2, 1)
