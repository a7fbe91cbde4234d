"""AdaMuon, `normalize="element"`: the paper's numbers, its state wherever state is, properties of its updates."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import AdaMuonMatrix
from torch import nn

import quintic
from quintic.optim.rules.library.adamuon import ADAMUON, ElementSecondMoment
from quintic.optim.rules.rule import PARAM_SHAPED_STATE, STATE_KEYS
from quintic.optim.rules.stages import StageOptions, StateSpec
from quintic.optim.state.placement import state_bytes

MOMENT = "element_second_moment"
FLOAT64 = {"orthogonalizer": "polar_express", "compute_dtype": torch.float64}
PAPER = {"lr": 0.05, "normalize": "element", "nesterov": False, "momentum": 0.9, "normalize_beta": 0.8}


def param_of(shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))


def step(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
    optimizer.step()


@settings(deadline=None)
@given(
    m=st.integers(1, 9),
    n=st.integers(1, 9),
    mu=st.sampled_from([0.0, 0.5, 0.95]),
    beta=st.sampled_from([0.0, 0.3, 0.95]),
    decay=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 1000),
)
def test_a_step_is_the_papers_algorithm(m, n, mu, beta, decay, seed):
    param = param_of((m, n), seed=seed)
    oracle = AdaMuonMatrix(param.detach().numpy())
    options = {**FLOAT64, **PAPER, "momentum": mu, "normalize_beta": beta, "weight_decay": decay}
    optimizer = quintic.Muon([param], **options)
    for number in range(3):
        gradient = np.random.default_rng([seed, number]).standard_normal((m, n))
        param.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        expected = oracle.step(gradient, lr=0.05, mu=mu, wd=decay, beta=beta)
        np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(optimizer.state[param][MOMENT].numpy(), oracle.v, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    ("view", "shape", "matrix_shape"),
    [
        (quintic.Heads(3), (12, 5), (4, 5)),
        (quintic.Experts(), (3, 5, 4), (5, 4)),
        (quintic.Rows(4), (12, 5), (4, 5)),
    ],
)
def test_every_matrix_of_a_view_has_moments_of_its_own(view, shape, matrix_shape):
    param = param_of(shape)
    optimizer = quintic.Muon([{"params": [param], "view": view}], **FLOAT64, **PAPER)
    oracles = [AdaMuonMatrix(one) for one in param.detach().reshape(-1, *matrix_shape).numpy()]
    for number in range(3):
        step(optimizer, number)
        gradients = param.grad.reshape(-1, *matrix_shape).numpy()
        expected = np.stack([one.step(g, lr=0.05, mu=0.9, beta=0.8) for one, g in zip(oracles, gradients, strict=True)])
        np.testing.assert_allclose(param.detach().reshape(expected.shape).numpy(), expected, rtol=1e-9, atol=1e-11)


@settings(deadline=None)
@given(m=st.integers(1, 8), n=st.integers(1, 8), count=st.integers(1, 4), seed=st.integers(0, 1000))
def test_the_stage_keeps_the_norm_and_the_signs_of_each_matrix_by_itself(m, n, count, seed):
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(count, m, n, generator=generator)
    moments = torch.rand(count, m, n, generator=generator)
    options = StageOptions(normalize_beta=0.95)
    together = moments.clone()
    result, factors = ElementSecondMoment().apply(matrices, {MOMENT: together}, options)
    assert factors is None
    torch.testing.assert_close(torch.linalg.matrix_norm(result), torch.full((count,), math.sqrt(min(m, n))))
    assert torch.equal(result.sign(), matrices.sign())
    for number in range(count):
        alone = moments[number : number + 1].clone()
        own, _ = ElementSecondMoment().apply(matrices[number : number + 1], {MOMENT: alone}, options)
        assert torch.equal(own[0], result[number])
        assert torch.equal(alone[0], together[number])


@settings(deadline=None)
@given(power=st.integers(-60, 60), seed=st.integers(0, 100))
def test_the_size_of_the_gradients_counts_for_nothing(power, seed):
    params = [param_of((5, 3), torch.float32, seed) for _ in range(2)]
    optimizers = [quintic.Muon([param], **PAPER, compute_dtype=torch.float32) for param in params]
    for number in range(3):
        gradient = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        for param, scale, optimizer in zip(params, (1.0, 2.0**power), optimizers, strict=True):
            param.grad = gradient * scale
            optimizer.step()
    assert torch.equal(*params)


def test_an_update_has_the_root_mean_square_of_adamws():
    param = param_of((24, 40), torch.float32)
    optimizer = quintic.Muon([param], lr=1.0, normalize="element")
    for number in range(4):
        before = param.detach().clone()
        step(optimizer, number)
        rms = (param - before).square().mean().sqrt()
        torch.testing.assert_close(rms, torch.tensor(0.2), rtol=1e-3, atol=0)


def test_a_gradient_of_zeros_moves_nothing():
    param = param_of((4, 3), torch.float32)
    before = param.detach().clone()
    optimizer = quintic.Muon([param], normalize="element", compute_dtype=torch.float32)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(param, before)
    assert not optimizer.state[param][MOMENT].any()


def test_gradients_that_are_not_finite_leave_the_moments_alone():
    param = param_of((4, 3), torch.float32)
    optimizer = quintic.Muon([param], normalize="element", on_nonfinite="skip")
    step(optimizer, 0)
    before = copy.deepcopy((param.data, dict(optimizer.state[param])))
    param.grad = torch.full_like(param, float("nan"))
    optimizer.step()
    assert torch.equal(param, before[0])
    assert all(torch.equal(optimizer.state[param][key], value) for key, value in before[1].items())


@pytest.mark.parametrize(
    "options", [{}, {"state_dtype": "bf16"}, {"master": "mantissa"}, {"master": "fp32"}, {"master": "8bit"}], ids=str
)
@pytest.mark.parametrize("offload", [False, True])
def test_saved_steps_go_on_bit_for_bit(options, offload):
    options = {"lr": 0.02, "normalize": "element", "offload": offload, **options}
    params = [param_of((6, 4), torch.bfloat16, seed) for seed in range(2)]
    trained = quintic.Muon([("a", params[0]), ("b", params[1])], **options)
    for number in range(3):
        step(trained, number)
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    loaded = quintic.Muon([("a", copies[0]), ("b", copies[1])], **{**options, "offload": not offload})
    loaded.load_state_dict(trained.state_dict())
    for number in range(3, 5):
        step(trained, number)
        step(loaded, number)
    for param, twin in zip(params, copies, strict=True):
        assert torch.equal(param, twin)
        assert trained.state[param][MOMENT].dtype == (torch.bfloat16 if "state_dtype" in options else torch.float32)
        assert torch.equal(trained.state[param][MOMENT], loaded.state[twin][MOMENT])


def test_state_is_explained_and_planned():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    rows = {row.name: row for row in quintic.explain(model, normalize="element", lr=0.02).rows}
    assert rows["0.weight"].optimizer == "AdaMuon"
    assert rows["0.weight"].state_bytes == 2 * 4 * 8 * 16
    assert rows["0.weight"].lr_scale == (0.2 * math.sqrt(16),)
    assert "AdaMuon" in str(quintic.explain(model, normalize="element"))
    optimizer = quintic.Muon(quintic.param_groups(model), normalize="element", offload=True)
    params = [(param, group) for group in optimizer._plans.groups for param in group.params]
    sizes = {param: sum(value.nbytes for value in optimizer.state[param].values()) for param, _ in params}
    assert sizes == {param: state_bytes(param, group) for param, group in params}
    matrices = [bucket for bucket in optimizer.plan() if bucket.rule is ADAMUON]
    # All of their state is in host memory.
    assert sum(bucket.offloaded.num_bytes for bucket in matrices) == 2 * 4 * (8 * 16 + 16 * 8)


def test_every_step_agrees_with_the_reference():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).bfloat16()
    groups = quintic.param_groups(model)
    optimizer = quintic.Muon(groups, normalize="element", master="mantissa", state_dtype="bf16", weight_decay=0.1)
    for number in range(3):
        step(optimizer, number)
        report = quintic.verify(model, optimizer)
        assert report.ok, str(report)
        assert report.is_bitwise, str(report)


def test_telemetry_measures_the_polar_factor_and_the_update():
    param = param_of((40, 4), torch.float32)
    optimizer = quintic.Muon([("w", param)], normalize="element", orthogonalizer="svd", telemetry_every=1)
    step(optimizer, 0)
    (measured,) = optimizer.telemetry()["w"]
    assert measured.update_rms == pytest.approx(0.2, rel=1e-4)
    assert measured.mean_squared_sigma == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("adjust_lr", ["unit_rms", None, lambda m, n: 1.0])
def test_another_scale_is_refused(adjust_lr):
    with pytest.raises(ValueError, match=r"adjust_lr=.* with the update rule AdaMuon.* leave adjust_lr out"):
        quintic.Muon([param_of((4, 3))], normalize="element", adjust_lr=adjust_lr)


def test_moments_in_bfloat16_need_a_beta_that_it_can_follow():
    with pytest.raises(ValueError, match=r"normalize_beta=0.99 with state_dtype='bf16'"):
        quintic.Muon([param_of((4, 3))], normalize="element", state_dtype="bf16", normalize_beta=0.99)
    # NorMuon's moments are float32 whatever `state_dtype` is.
    quintic.Muon([param_of((4, 3))], normalize="neuron", state_dtype="bf16", normalize_beta=0.99)


def test_its_state_is_declared_once():
    assert ADAMUON.matrix_state == (StateSpec(MOMENT, "average", "param"),)
    assert MOMENT in STATE_KEYS
    assert MOMENT in PARAM_SHAPED_STATE
