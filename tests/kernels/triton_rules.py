"""Cases of test_triton.py: rules whose stages run in plain PyTorch between kernels, against steps without kernels."""

import pytest
import torch
from on_device import DEVICE, assert_host_memory_changes_no_bit
from torch import nn

from quintic import Heads, Matrix, Muon
from quintic.optim.rules.table import RULES

VIEWS = [(Matrix(transposed=True), (37, 21)), (Heads(3), (36, 20))]
ROUNDING = 2e-5


def twins(view, shape, dtype=torch.float32, **options):
    """Return two equal parameters, and an optimizer with kernels and one without."""
    values = torch.randn(shape).to(DEVICE, dtype)
    params = [nn.Parameter(values.clone()) for _ in range(2)]
    options = {"lr": 0.05, "momentum": 0.8, "compute_dtype": torch.float32, **options}
    optimizers = [
        Muon([{"params": [param], "view": view}], kernels=kernels, **options)
        for param, kernels in zip(params, ("triton", "torch"), strict=True)
    ]
    assert optimizers[0].plan().buckets[0].kernels == "triton"
    return params, optimizers


def give(params):
    gradient = torch.randn(params[0].shape)
    for param in params:
        param.grad = torch.empty_like(param).copy_(gradient)


def assert_alike(params, optimizers):
    torch.testing.assert_close(params[0], params[1], rtol=ROUNDING, atol=ROUNDING)
    first, second = (optimizer.state[param] for optimizer, param in zip(optimizers, params, strict=True))
    assert first.keys() == second.keys()
    for key, value in first.items():
        if value.dtype != torch.uint16:
            torch.testing.assert_close(value, second[key], rtol=10 * ROUNDING, atol=ROUNDING, msg=key)


@pytest.mark.parametrize(("view", "shape"), VIEWS, ids=str)
@pytest.mark.parametrize("name", sorted(RULES))
def test_rules_step_as_without_kernels(name, view, shape):
    params, optimizers = twins(view, shape, update_rule=name, weight_decay=0.1, on_nonfinite="skip")
    for number in range(3):
        give(params)
        if number == 1:
            for param in params:
                param.grad.view(-1)[5] = float("nan")
        before = [param.detach().clone() for param in params]
        for optimizer in optimizers:
            optimizer.step()
        assert all(torch.equal(param, old) == (number == 1) for param, old in zip(params, before, strict=True))
        assert_alike(params, optimizers)


@pytest.mark.parametrize("name", sorted(RULES))
def test_masters_of_rules_are_those_without_kernels(name):
    dtype = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    params, optimizers = twins(Matrix(), (20, 33), dtype, update_rule=name, master="fp32")
    for _ in range(3):
        give(params)
        for optimizer in optimizers:
            optimizer.step()
    masters = [optimizer.state[param]["master"] for optimizer, param in zip(optimizers, params, strict=True)]
    torch.testing.assert_close(*masters, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("name", sorted(name for name, rule in RULES.items() if rule.constrain or rule.drift))
def test_rules_in_host_memory_have_the_same_bits(name):
    assert_host_memory_changes_no_bit((36, 20), (36, 20), update_rule=name)
