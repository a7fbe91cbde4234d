"""`state_dtype="int8"`: what steps make of the bytes, against NumPy and float64; and that every rule steps with it."""

import numpy as np
import pytest
import torch
from test_int8_state import DTYPES, ORTHOGONALIZE, bytes_of, decoded, encoded
from torch import nn

import quintic
from quintic import Experts, Heads, Matrix, Rows, Split
from quintic.optim.rules.table import RULES


def whole_numbers(shape, seed):
    """Gradients of few bits, so that averages with a coefficient of a half are exact in float32."""
    return torch.randint(-512, 513, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((20, 48), Matrix()),
        ((20, 48), Matrix(transposed=True)),
        ((20, 48), Heads(2, dim=1)),
        ((20, 48), Split((8, 40), transposed=True)),
        ((3, 10, 16), Experts(transposed=True)),
        ((20, 16), Rows(4)),
    ],
    ids=str,
)
def test_momentum_follows_the_oracle(shape, view, dtype, nesterov):
    param = nn.Parameter(torch.randn(shape).to(dtype))
    options = {"momentum": 0.5, "nesterov": nesterov, "state_dtype": "int8"}
    optimizer = quintic.Muon([{"params": [param], "view": view}], **ORTHOGONALIZE, **options)
    expected = np.zeros(shape)
    for step in range(6):
        param.grad = whole_numbers(shape, step).to(dtype)
        optimizer.step()
        average = (expected + param.grad.double().numpy()) / 2
        numbers = encoded(average, torch.int8)
        assert np.array_equal(bytes_of(optimizer.state[param]["momentum_buffer"]), numbers)
        expected = decoded(numbers, torch.int8)


@pytest.mark.parametrize("max_workspace_bytes", [None, 3000])
@pytest.mark.parametrize("master", [None, "fp32", "mantissa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_follows_the_oracle_and_steps_before_its_moments_are_rounded(dtype, master, max_workspace_bytes):
    torch.manual_seed(0)
    param, shape = nn.Parameter(torch.randn(20, 48).to(dtype)), (20, 48)
    weight, mean, mean_square = param.detach().double().numpy().copy(), np.zeros(shape), np.zeros(shape)
    optimizer = quintic.Muon(
        [{"params": [param], "algorithm": "adamw", "betas": (0.5, 0.5), "eps": 1e-8}],
        adamw_lr=0.01,
        adamw_weight_decay=0.3,
        master=master,
        state_dtype="int8",
        max_workspace_bytes=max_workspace_bytes,
    )
    for count in range(1, 7):
        param.grad = whole_numbers(shape, count).to(dtype)
        optimizer.step()
        g = param.grad.double().numpy()
        mean, mean_square = (mean + g) / 2, (mean_square + g * g) / 2
        share = 1 - 0.5**count
        weight -= 0.01 * (0.3 * weight + (mean / share) / (np.sqrt(mean_square / share) + 1e-8))
        if dtype == torch.float32 or master is None:
            value = param.detach().double().numpy()
            tolerance = 1e-5 if dtype == torch.float32 else 2.0**-8
            np.testing.assert_allclose(value, weight, rtol=tolerance, atol=tolerance / 10)
            weight = value.copy()
        elif master == "fp32":
            np.testing.assert_allclose(optimizer.state[param]["master"].numpy(), weight, rtol=1e-5, atol=1e-6)
        state = optimizer.state[param]
        for key, average in (("exp_avg", mean), ("exp_avg_sq", mean_square)):
            assert np.array_equal(bytes_of(state[key]), encoded(average, DTYPES[key], count)), key
        mean, mean_square = (decoded(bytes_of(state[key]), DTYPES[key]) for key in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_first_step_is_that_of_bfloat16_state(algorithm, dtype):
    """Neither has rounded anything yet; float32 moments are stepped by PyTorch's fused kernel."""
    found = []
    for state_dtype in ("bf16", "int8"):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(12, 16).to(dtype))
        param.grad = torch.randn(12, 16).to(dtype)
        quintic.Muon([{"params": [param], "algorithm": algorithm}], state_dtype=state_dtype, **ORTHOGONALIZE).step()
        found.append(param.detach())
    assert torch.equal(*found)


def test_training_ends_where_float32_state_ends():
    torch.manual_seed(0)
    inputs, targets = torch.randn(256, 16), torch.randn(256, 8)
    losses = {}
    for state_dtype in (None, "int8"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
        optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02, state_dtype=state_dtype, **ORTHOGONALIZE)
        for step in range(200):
            for group in optimizer.param_groups:
                group["lr"] = (0.02 if group["algorithm"] == "muon" else 3e-4) * (1 - step / 200)
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
        losses[state_dtype] = float(loss.detach())
    assert losses["int8"] == pytest.approx(losses[None], rel=0.02)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_steps(rule):
    found = {}
    for state_dtype in (None, "int8"):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(24, 16))
        options = {} if rule in ("muon", "normuon", "adamuon") else {"update_rule": rule}
        optimizer = quintic.Muon([param], lr=0.02, state_dtype=state_dtype, **ORTHOGONALIZE, **options)
        for _ in range(4):
            param.grad = torch.randn(24, 16)
            optimizer.step()
        found[state_dtype] = param.detach()
        packed = RULES[rule].packed_state if options else {"momentum_buffer": torch.int8}
        for key, value in optimizer.state[param].items():
            if state_dtype == "int8" and key in packed:
                assert value.dtype == packed[key]
            else:
                assert value.dtype != torch.int8
        assert not packed or state_dtype is None or torch.int8 in {v.dtype for v in optimizer.state[param].values()}
    change = (found["int8"] - found[None]).norm() / found[None].norm()
    assert 0 < float(change) < 0.02
