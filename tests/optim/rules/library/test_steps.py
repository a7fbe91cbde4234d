"""Whole steps of every rule of the library against its formulas in NumPy, matrix by matrix."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_oracles import ORACLES
from torch import nn

import quintic
from quintic.optim.rules.table import RULES

FLOAT64 = {"orthogonalizer": "polar_express", "compute_dtype": torch.float64}
RULE_NAMES = tuple(ORACLES)
CONSTRAINING = {name for name, rule in RULES.items() if rule.constrain is not None}

# Rows and columns that are not the stored ones, and several matrices in one parameter: view, shape, its matrices.
VIEWS = {
    "transposed": (quintic.Matrix(transposed=True), (4, 7), lambda w: [w.T]),
    "heads": (quintic.Heads(3), (12, 5), lambda w: list(w.reshape(3, 4, 5))),
    "heads of columns": (quintic.Heads(2, dim=1), (4, 10), lambda w: [w[:, :5], w[:, 5:]]),
    "split": (quintic.Split((2, 6)), (8, 4), lambda w: [w[:2], w[2:]]),
    "experts": (quintic.Experts(), (3, 5, 4), list),
    "experts in columns": (quintic.Experts(transposed=True), (2, 5, 3), lambda w: [one.T for one in w]),
}


def weights_of(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def gradient_of(shape, number):
    # Momentum that turns, not one that only grows.
    return np.random.default_rng([7, number]).standard_normal(shape) * (1 + number % 3)


def started(weight, **options):
    param = nn.Parameter(torch.from_numpy(weight.copy()))
    view = options.pop("view", quintic.Matrix())
    return param, quintic.Muon([{"params": [param], "view": view}], **{**FLOAT64, "lr": 0.05, **options})


def assert_is(param, expected):
    np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", RULE_NAMES)
@settings(deadline=None, max_examples=10)
@given(
    m=st.integers(1, 8),
    n=st.integers(1, 8),
    mu=st.sampled_from([0.0, 0.8]),
    nesterov=st.booleans(),
    decay=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 1000),
)
def test_a_step_is_that_of_the_formulas(name, m, n, mu, nesterov, decay, seed):
    if name == "muown" and n == 1:
        n = 2  # a row of one entry has no other direction: its update is made of rounding errors
    weight = weights_of((m, n), seed)
    oracle = ORACLES[name](weight)
    param, optimizer = started(weight, update_rule=name, momentum=mu, nesterov=nesterov, weight_decay=decay)
    for number in range(4):
        # As a schedule sets it.
        lr = optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        gradient = gradient_of((m, n), seed + number)
        param.grad = torch.from_numpy(gradient)
        optimizer.step()
        assert_is(param, oracle.step(gradient, lr=lr, mu=mu, nesterov=nesterov, wd=decay))


@pytest.mark.parametrize("name", RULE_NAMES)
@pytest.mark.parametrize(("view", "shape", "matrices_of"), VIEWS.values(), ids=VIEWS)
def test_every_matrix_of_a_view_is_stepped_by_itself(name, view, shape, matrices_of):
    weight = weights_of(shape)
    oracles = [ORACLES[name](one) for one in matrices_of(weight)]
    multipliers = [0.5 + number for number in range(len(oracles))]
    param, optimizer = started(weight, view=view, update_rule=name, lr_multipliers=multipliers, weight_decay=0.2)
    for number in range(3):
        gradient = gradient_of(shape, number)
        param.grad = torch.from_numpy(gradient)
        optimizer.step()
        for oracle, own, multiplier, stepped in zip(
            oracles, matrices_of(gradient), multipliers, matrices_of(param.detach().numpy()), strict=True
        ):
            expected = oracle.step(own, lr=0.05, wd=0.2, multiplier=multiplier)
            np.testing.assert_allclose(stepped, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in RULE_NAMES if name not in CONSTRAINING])
@pytest.mark.parametrize("cautious", [True, "strict"])
def test_cautious_decay_looks_at_the_rules_updates(name, cautious):
    weight = weights_of((6, 4))
    oracle = ORACLES[name](weight)
    param, optimizer = started(weight, update_rule=name, weight_decay=2.0, cautious=cautious)
    for number in range(3):
        gradient = gradient_of((6, 4), number)
        param.grad = torch.from_numpy(gradient)
        optimizer.step()
        assert_is(param, oracle.step(gradient, lr=0.05, wd=2.0, cautious=cautious))


@pytest.mark.parametrize("name", RULE_NAMES)
@pytest.mark.parametrize(
    ("shape", "size"), [((6, 4), 1e3), ((4, 6), 1e-3), ((5, 5), 1e3), ((1, 5), 1e3), ((5, 1), 1e3)]
)
def test_rows_and_columns_of_zeros(name, shape, size):
    """What units that never fire and inputs that are never set have for gradients, of any size."""
    weight = weights_of(shape)
    oracle = ORACLES[name](weight)
    param, optimizer = started(weight, update_rule=name)
    for number in range(3):
        gradient = size * gradient_of(shape, number)
        if shape[0] > 1:
            gradient[0] = 0
        if shape[1] > 1:
            gradient[:, -1] = 0
        param.grad = torch.from_numpy(gradient)
        optimizer.step()
        assert_is(param, oracle.step(gradient, lr=0.05))


@pytest.mark.parametrize("name", RULE_NAMES)
@pytest.mark.parametrize("zeros", ["all", "rows"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=str)
def test_weights_that_begin_with_zeros(name, zeros, shape):
    weight = weights_of(shape)
    weight[slice(None) if zeros == "all" else slice(1, 3)] = 0
    oracle = ORACLES[name](weight)
    param, optimizer = started(weight, update_rule=name, lr=0.3)
    for number in range(6):
        gradient = gradient_of(shape, number)
        param.grad = torch.from_numpy(gradient)
        optimizer.step()
        assert_is(param, oracle.step(gradient, lr=0.3))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_gradient_of_zeros_moves_nothing(name, dtype):
    """What a layer in front of an output projection that begins with zeros has at the first step."""
    param = nn.Parameter(torch.from_numpy(weights_of((40, 24))).to(dtype))
    before = param.detach().clone()
    wide = torch.promote_types(dtype, torch.float32)
    optimizer = quintic.Muon([param], lr=0.1, update_rule=name, compute_dtype=wide)
    for _ in range(2):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    assert all(value.isfinite().all() for value in optimizer.state[param].values())
    # Rules that keep norms multiply by a quotient of two, which is one up to rounding.
    tolerance = 4 * torch.finfo(dtype).eps if name in CONSTRAINING else 0.0
    torch.testing.assert_close(param.detach(), before, rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("shape", "size"), [((40, 24), 1e6), ((24, 40), 1e-12)], ids=str)
def test_rows_of_zeros_stay_finite_in_float32(name, shape, size):
    param = nn.Parameter(torch.from_numpy(weights_of(shape)).float())
    before = param.detach().clone()
    optimizer = quintic.Muon([param], update_rule=name, compute_dtype=torch.float32)
    for number in range(3):
        gradient = size * gradient_of(shape, number)
        gradient[2] = gradient[:, 5] = 0
        param.grad = torch.from_numpy(gradient).float()
        optimizer.step()
    assert param.isfinite().all()
    assert not torch.equal(param, before)
    assert all(value.isfinite().all() for value in optimizer.state[param].values())


def test_decay_that_takes_all_of_a_magnitude_leaves_a_direction():
    param = nn.Parameter(torch.eye(4))
    optimizer = quintic.Muon([param], lr=0.25, weight_decay=4.0, update_rule="muown", compute_dtype=torch.float32)
    for number in range(4):
        optimizer.param_groups[0]["weight_decay"] = 4.0 if number == 0 else 0.0
        param.grad = torch.ones(4, 4)
        optimizer.step()
    assert param.isfinite().all()
    assert (param.detach().norm(dim=1) > 0.1).all()
