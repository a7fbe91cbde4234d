"""Optimizers as training libraries wrap them: functions that take `quintic.Muon` find it inside."""

import pytest
import torch
from torch import nn

import quintic
from quintic.interchange import export_torch_state, import_state, import_torch_state


class Wrapper:
    """Keeps the optimizer where Accelerate's and Lightning's wrappers keep it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def with_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16, bias=False))
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return model, quintic.Muon(quintic.param_groups(model), lr=0.1)


def test_clipping_finds_the_optimizer_in_its_wrappers():
    model, optimizer = with_gradients()
    expected = model[0].weight.grad.double().norm().float()  # the matrix is not counted
    assert torch.equal(quintic.clip_grad_norm_(Wrapper(Wrapper(optimizer)), 0.5), expected)
    torch.testing.assert_close(model[0].weight.grad.norm(), torch.tensor(0.5), rtol=1e-5, atol=0)


def test_a_wrapped_step_is_checked_and_made_by_the_reference():
    model, optimizer = with_gradients()
    other, bare = with_gradients()
    assert quintic.verify(model, Wrapper(optimizer)).ok
    quintic.reference_step(Wrapper(optimizer))
    quintic.reference_step(bare)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert not torch.equal(model[1].weight, with_gradients()[0][1].weight)


def test_state_is_imported_into_a_wrapped_optimizer():
    _, stepped = with_gradients()
    stepped.step()
    saved = export_torch_state(stepped)
    expected = stepped.state_dict()["state"]
    _, first = with_gradients()
    assert import_state(Wrapper(first), saved["adamw"], source="torch") == ["0.weight"]
    _, second = with_gradients()
    assert set(import_torch_state(Wrapper(second), *saved.values())) == {"0.weight", "1.weight"}
    for number, state in second.state_dict()["state"].items():
        assert all(torch.equal(value, expected[number][key]) for key, value in state.items())


@pytest.mark.parametrize(
    "call", [lambda o: quintic.clip_grad_norm_(o, 1.0), quintic.reference_step], ids=["clip", "reference"]
)
def test_another_optimizer_in_a_wrapper_is_an_error_that_names_it(call):
    with pytest.raises(TypeError, match="SGD"):
        call(Wrapper(torch.optim.SGD([nn.Parameter(torch.zeros(2))])))


class Posing:
    """Passes for the wrapped class, as Lightning's wrapper does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.__class__ = type("Posing", (Posing, type(optimizer)), {})


def test_a_wrapper_that_passes_for_the_optimizer_is_not_taken_for_it():
    model, optimizer = with_gradients()
    wrapper = Posing(optimizer)
    assert isinstance(wrapper, quintic.Muon)
    assert torch.equal(
        quintic.clip_grad_norm_(wrapper, 0.5), with_gradients()[0][0].weight.grad.double().norm().float()
    )
    assert quintic.verify(model, wrapper).ok


@pytest.mark.slow
def test_lightning_keeps_the_optimizer_there():
    core = pytest.importorskip("lightning.pytorch.core.optimizer", reason="Lightning is not installed")
    model, optimizer = with_gradients()
    gradient = model[0].weight.grad.clone()
    norm = quintic.clip_grad_norm_(core.LightningOptimizer(optimizer), 0.5)
    assert torch.equal(norm, gradient.double().norm().float())


@pytest.mark.slow
def test_accelerate_keeps_the_optimizer_there():
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = with_gradients()
    gradient = model[0].weight.grad.clone()
    _, wrapped = accelerator.prepare(model, optimizer)
    assert wrapped is not optimizer
    assert torch.equal(quintic.clip_grad_norm_(wrapped, 0.5), gradient.double().norm().float())
