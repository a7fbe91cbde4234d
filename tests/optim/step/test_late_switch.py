"""A group that goes over from Muon to AdamW, or back, in mid-run."""

import copy

import pytest
import torch
from torch import nn

import quintic


def model_of():
    torch.manual_seed(0)
    return nn.ModuleDict({"up": nn.Linear(6, 8, bias=False), "down": nn.Linear(8, 6)})


def give(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def switch(optimizer, algorithm="adamw", **options):
    """What a training loop writes at the step of its choice."""
    for group in optimizer.param_groups:
        if group["algorithm"] != algorithm and "up.weight" in group["param_names"]:
            group.update(algorithm=algorithm, **options)


def trained(options, before=3):
    model = model_of()
    optimizer = quintic.Muon(quintic.param_groups(model), lr=0.05, **options)
    for seed in range(before):
        give(model, seed)
        optimizer.step()
    return model, optimizer


ADAMW = {"lr": 0.01, "weight_decay": 0.1}


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"normalize": "neuron"}])
def test_from_the_switch_on_it_is_a_new_adamw(options):
    model, optimizer = trained(options)
    switch(optimizer, **ADAMW)
    twin = copy.deepcopy(model)
    matrices = [twin["up"].weight, twin["down"].weight]
    reference = torch.optim.AdamW(matrices, **ADAMW, betas=(0.9, 0.95), eps=1e-8)
    bias = optimizer.state[model["down"].bias]
    moments = bias["exp_avg"].clone(), float(bias["step"])
    for seed in range(10, 14):
        for one in (model, twin):
            give(one, seed)
        optimizer.step()
        reference.step()
        for name in ("up", "down"):
            torch.testing.assert_close(model[name].weight, twin[name].weight, rtol=1e-6, atol=1e-7)
    state = optimizer.state[model["up"].weight]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert float(state["step"]) == 4
    # Groups that stayed what they were have the moments of all steps.
    assert float(optimizer.state[model["down"].bias]["step"]) == moments[1] + 4 == 7


def test_the_way_back_begins_with_momentum_zero():
    model, optimizer = trained({})
    switch(optimizer, **ADAMW)
    give(model, 10)
    optimizer.step()
    switch(optimizer, "muon", lr=0.05, weight_decay=0.0)
    before = {name: model[name].weight.detach().clone() for name in model}
    give(model, 11)
    optimizer.step()
    fresh = model_of()
    with torch.no_grad():
        for name in fresh:
            fresh[name].weight.copy_(before[name])
    reference = quintic.Muon([fresh[name].weight for name in fresh], lr=0.05)
    give(fresh, 11)
    reference.step()
    for name in fresh:
        assert torch.equal(model[name].weight, fresh[name].weight)


def test_a_state_saved_after_the_switch_needs_the_switch_before_it_is_loaded():
    model, optimizer = trained({})
    switch(optimizer, **ADAMW)
    give(model, 10)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other, resumed = trained({}, before=0)
    kept = copy.deepcopy(resumed.state_dict())
    with pytest.raises(ValueError, match=r"up.weight was saved with algorithm=adamw, parameter group 0 has muon"):
        resumed.load_state_dict(saved)
    assert str(resumed.state_dict()) == str(kept)
    switch(resumed)
    resumed.load_state_dict(saved)
    other.load_state_dict(model.state_dict())
    for one, its_optimizer in ((model, optimizer), (other, resumed)):
        give(one, 11)
        its_optimizer.step()
    for (name, param), twin in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(param, twin), name
    assert resumed.param_groups[0]["lr"] == ADAMW["lr"]


def test_vectors_and_tables_cannot_go_over_to_muon_unnoticed():
    model, optimizer = trained({})
    optimizer.param_groups[1]["algorithm"] = "muon"
    give(model, 10)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=r"down.bias: a 1-D parameter"):
        optimizer.step()
    assert all(torch.equal(param, value) for param, value in zip(model.parameters(), before, strict=True))
