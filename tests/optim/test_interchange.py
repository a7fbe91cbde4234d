import copy

import pytest
import torch
from torch import nn

import quintic
from quintic import Muon
from quintic.optim.interchange import export_torch_state, import_torch_state

CONVENTIONS = {"orthogonalizer": "newton_schulz", "lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}


def model_of(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 9), nn.Linear(9, 6, bias=False), nn.Linear(6, 7)).to(dtype)


def theirs(model, named=True):
    """PyTorch's two optimizers over the parameters as Quintic divides them."""
    groups = {group["algorithm"]: group for group in quintic.param_groups(model)}

    def params(algorithm):
        group = groups[algorithm]
        return list(zip(group["param_names"], group["params"], strict=True)) if named else group["params"]

    muon = torch.optim.Muon(params("muon"), lr=0.02, weight_decay=0.1, momentum=0.95)
    adamw = torch.optim.AdamW(params("adamw"), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    return muon, adamw


def ours(model):
    return Muon(quintic.param_groups(model), adamw_lr=0.01, **CONVENTIONS)


def step(model, *optimizers, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    for optimizer in optimizers:
        optimizer.step()


def assert_close(first, second):
    # Both orthogonalise in bfloat16, with the normalisation in different precision.
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-2)


@pytest.mark.parametrize("named", [True, False])
def test_training_begun_with_pytorch_continues_with_quintic(named):
    first = model_of()
    muon, adamw = theirs(first, named)
    for seed in range(5):
        step(first, muon, adamw, seed=seed)
    second = copy.deepcopy(first)
    optimizer = ours(second)
    import_torch_state(optimizer, adamw.state_dict(), muon.state_dict())
    for seed in range(5, 8):
        step(first, muon, adamw, seed=seed)
        step(second, optimizer, seed=seed)
    assert_close(first, second)


def test_training_begun_with_quintic_continues_with_pytorch():
    first = model_of()
    optimizer = ours(first)
    for seed in range(5):
        step(first, optimizer, seed=seed)
    second = copy.deepcopy(first)
    muon, adamw = theirs(second)
    exported = export_torch_state(optimizer)
    muon.load_state_dict(exported["muon"])
    adamw.load_state_dict(exported["adamw"])
    for seed in range(5, 8):
        step(first, optimizer, seed=seed)
        step(second, muon, adamw, seed=seed)
    assert_close(first, second)


def test_exporting_and_importing_gives_the_state_back():
    model = model_of()
    optimizer = ours(model)
    step(model, optimizer, seed=0)
    twin = ours(copy.deepcopy(model))
    exported = export_torch_state(optimizer)
    import_torch_state(twin, exported["muon"], exported["adamw"])
    for group, twin_group in zip(optimizer.param_groups, twin.param_groups, strict=True):
        for p, q in zip(group["params"], twin_group["params"], strict=True):
            for key, value in optimizer.state[p].items():
                assert torch.equal(value, twin.state[q][key])


def test_float32_momentum_stays_float32():
    model = model_of(torch.bfloat16)
    muon, adamw = theirs(model)
    step(model, muon, adamw, seed=0)
    optimizer = ours(model)
    import_torch_state(optimizer, muon.state_dict(), adamw.state_dict())
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s["param_groups"][0]["param_names"].__setitem__(0, "other"), "other: saved with the state of muon"),
        (
            lambda s: s["state"][0].update(momentum_buffer=torch.zeros(2, 2)),
            r"1.weight: saved .*shape \(2, 2\).*\(9, 6\)",
        ),
        (lambda s: s["state"][0].update(sum=torch.zeros(2)), "1.weight: its state .*neither"),
        (lambda s: (s["param_groups"][0].pop("param_names"), s["param_groups"][0]["params"].append(9)), "3 parameters"),
    ],
)
def test_what_does_not_fit_changes_nothing(damage, message):
    model = model_of()
    muon, adamw = theirs(model)
    step(model, muon, adamw, seed=0)
    saved = copy.deepcopy(muon.state_dict())
    damage(saved)
    optimizer = ours(model)
    with pytest.raises(ValueError, match=message):
        import_torch_state(optimizer, adamw.state_dict(), saved)
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())
