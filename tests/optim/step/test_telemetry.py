"""Sampled measurements against singular values computed by NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from quintic import Heads, Muon, Split

FIELDS = ("update_rms", "mean_squared_sigma", "sigma_spread", "effective_rank")


def stepped(optimizer, param, gradient=None):
    param.grad = torch.randn_like(param) if gradient is None else gradient
    optimizer.step()


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (6, 6), (1, 4)])
def test_measurements_are_those_of_the_singular_values(shape):
    param = nn.Parameter(torch.randn(shape))
    before = param.detach().clone()
    optimizer = Muon([("w", param)], lr=0.1, momentum=0.0, telemetry_every=1, compute_dtype=torch.float32)
    stepped(optimizer, param)
    (found,) = optimizer.telemetry()["w"]
    step = ((before - param.detach()) / 0.1).double().numpy()
    assert found.update_rms == pytest.approx(np.sqrt(np.mean(step**2)), rel=1e-4)
    sigma = np.linalg.svd(step / max(1.0, shape[0] / shape[1]) ** 0.5, compute_uv=False)
    assert found.mean_squared_sigma == pytest.approx(np.mean(sigma**2), rel=1e-3)
    assert found.sigma_spread == pytest.approx(np.std(sigma**2), abs=2e-3)
    given = np.linalg.svd(param.grad.double().numpy(), compute_uv=False) ** 2
    assert found.effective_rank == pytest.approx(given.sum() ** 2 / (given**2).sum(), rel=1e-3)


def test_an_exact_polar_factor_has_no_spread_and_rank_one_has_rank_one():
    param = nn.Parameter(torch.randn(6, 4))
    optimizer = Muon([("w", param)], orthogonalizer="svd", momentum=0.0, telemetry_every=1)
    stepped(optimizer, param)
    (found,) = optimizer.telemetry()["w"]
    assert found.mean_squared_sigma == pytest.approx(1, abs=1e-5)
    assert found.sigma_spread == pytest.approx(0, abs=1e-3)
    stepped(optimizer, param, torch.outer(torch.randn(6), torch.randn(4)) * 1e-20)
    (found,) = optimizer.telemetry()["w"]
    assert found.effective_rank == pytest.approx(1, abs=1e-3)


def test_every_matrix_of_a_view_is_measured_in_order():
    param = nn.Parameter(torch.randn(12, 5))
    optimizer = Muon([{"params": [("w", param)], "view": Split((8, 4), heads=(2, 1))}], telemetry_every=1)
    gradient = torch.randn(12, 5)
    gradient[4:8] = torch.outer(torch.randn(4), torch.randn(5))
    stepped(optimizer, param, gradient)
    ranks = [found.effective_rank for found in optimizer.telemetry()["w"]]
    assert len(ranks) == 3
    assert ranks[1] == pytest.approx(1, abs=0.01)
    assert min(ranks[0], ranks[2]) > 1.2


def test_only_every_kth_step_is_measured_and_nothing_changes():
    params = [nn.Parameter(torch.randn(6, 4)) for _ in range(2)]
    params[1].data.copy_(params[0])
    watched = Muon([{"params": [("w", params[0])], "view": Heads(2)}], telemetry_every=3, normalize="neuron")
    plain = Muon([{"params": [("w", params[1])], "view": Heads(2)}], normalize="neuron")
    assert watched.telemetry() == {}
    seen = []
    for _ in range(7):
        gradient = torch.randn(6, 4)
        stepped(watched, params[0], gradient)
        stepped(plain, params[1], gradient.clone())
        seen.append(watched.telemetry()["w"][0].update_rms)
    assert torch.equal(*params)
    assert plain.telemetry() == {}
    assert seen[0] == seen[1] == seen[2] != seen[3] == seen[4] == seen[5] != seen[6]


def test_zero_gradients_measure_zero():
    param = nn.Parameter(torch.randn(6, 4))
    optimizer = Muon([("w", param)], telemetry_every=1)
    stepped(optimizer, param, torch.zeros(6, 4))
    (found,) = optimizer.telemetry()["w"]
    assert [getattr(found, name) for name in FIELDS] == [0, 0, 0, 0]


def test_parameters_absent_from_the_last_sampled_step_are_not_reported():
    params = {name: nn.Parameter(torch.randn(shape)) for name, shape in {"a": (6, 4), "b": (6, 4), "c": (5, 5)}.items()}
    optimizer = Muon(params.items(), telemetry_every=2)

    def step(*names):
        for name, param in params.items():
            param.grad = torch.randn_like(param) if name in names else None
        optimizer.step()
        return set(optimizer.telemetry())

    assert step("a", "b", "c") == {"a", "b", "c"}
    assert step("a") == {"a", "b", "c"}  # not sampled
    assert step("b") == {"b"}  # of c's bucket nothing is stepped at all
    assert step("c") == {"b"}
    assert step() == set()
    step()
    assert step("a", "c") == {"a", "c"}


def test_each_group_keeps_its_own_last_sampled_step():
    params = [nn.Parameter(torch.randn(6, 4)) for _ in range(2)]
    optimizer = Muon(
        [{"params": [("often", params[0])], "telemetry_every": 1}, {"params": [("rarely", params[1])]}],
        telemetry_every=2,
    )
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    rarely = optimizer.telemetry()["rarely"]
    optimizer.step()
    assert optimizer.telemetry().keys() == {"often", "rarely"}
    assert optimizer.telemetry()["rarely"] == rarely


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_skipped_step_measures_nothing(kernels):
    params = [nn.Parameter(torch.randn(6, 4)) for _ in range(2)]
    optimizer = Muon(
        [{"params": [("guarded", params[0])], "on_nonfinite": "skip"}, {"params": [("other", params[1])]}],
        telemetry_every=1,
        kernels=kernels,
    )
    params[0].grad, params[1].grad = torch.full((6, 4), torch.inf), torch.randn(6, 4)
    optimizer.step()
    assert optimizer.telemetry().keys() == {"other"}
