"""Frozen parameters on one device, as `torch.optim.AdamW` has them: no state until they are stepped.

Quintic makes state for all trainable parameters at once, PyTorch for those that have a gradient; here all of them do.
"""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import quintic
from quintic.interchange import export_torch_state, import_state


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def muon(model, **options):
    return quintic.Muon(quintic.param_groups(model), lr=0.01, **options)


BOTH = pytest.mark.parametrize("make", [adamw, muon], ids=["adamw", "muon"])


def steps(model, optimizer, first=0, last=1):
    for number in range(first, last):
        optimizer.zero_grad()
        torch.manual_seed(number)
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()


def stateful(model, optimizer):
    """Names of the parameters that have state, for which nothing is made by asking."""
    state = vars(optimizer)["state"]
    return [name for name, param in model.named_parameters() if state.get(param)]


def counts(model, optimizer):
    """Steps that the biases have been stepped; None for those without state."""
    state = vars(optimizer)["state"]
    return [int(state[layer.bias]["step"]) if state.get(layer.bias) else None for layer in model]


@BOTH
def test_state_is_made_when_a_parameter_is_unfrozen_and_kept_when_it_is_frozen_again(make):
    model = model_of()
    optimizer = make(model)
    model[0].requires_grad_(False)
    before = copy.deepcopy(model)
    steps(model, optimizer, 0, 2)
    assert counts(model, optimizer) == [None, 2, 2]
    assert torch.equal(model[0].weight, before[0].weight)
    assert len(optimizer.state) == len(optimizer.state_dict()["state"]) == 4
    model[0].requires_grad_(True)
    model[1].requires_grad_(False)
    steps(model, optimizer, 2, 5)
    assert counts(model, optimizer) == [3, 2, 5]
    assert len(optimizer.state_dict()["state"]) == 6
    twin_model = copy.deepcopy(model)
    twin = make(twin_model) if make is adamw else quintic.Muon(quintic.param_groups(twin_model.requires_grad_(True)))
    twin_model[1].requires_grad_(False)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert counts(twin_model, twin) == [3, 2, 5]
    model[1].requires_grad_(True)
    twin_model[1].requires_grad_(True)
    steps(model, optimizer, 5, 6)
    steps(twin_model, twin, 5, 6)
    assert counts(model, optimizer) == counts(twin_model, twin) == [4, 3, 6]


@BOTH
@pytest.mark.parametrize("copied", ["deepcopy", "file"])
def test_a_state_saved_while_some_were_frozen_loads_when_none_is(make, copied):
    model = model_of()
    optimizer = make(model)
    model[0].requires_grad_(False)
    steps(model, optimizer, 0, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    if copied == "file":
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    twin_model = copy.deepcopy(model).requires_grad_(True)
    twin = make(twin_model)
    if copied == "file":
        steps(twin_model, twin, 9, 10)  # there is other state when it is loaded
        twin_model.load_state_dict(model.state_dict())
    twin.load_state_dict(saved)
    model.requires_grad_(True)
    steps(model, optimizer, 2, 4)
    steps(twin_model, twin, 2, 4)
    assert counts(twin_model, twin) == counts(model, optimizer) == [2, 4, 4]
    assert all(map(torch.equal, model.parameters(), twin_model.parameters()))


@BOTH
def test_a_state_saved_while_none_was_frozen_loads_when_some_are(make):
    model = model_of()
    optimizer = make(model)
    steps(model, optimizer, 0, 2)
    twin_model = copy.deepcopy(model)
    twin = make(twin_model)
    twin_model[0].requires_grad_(False)
    twin.load_state_dict(optimizer.state_dict())
    assert counts(twin_model, twin) == [2, 2, 2]
    steps(twin_model, twin, 2, 3)
    assert counts(twin_model, twin) == [2, 3, 3]


@BOTH
@pytest.mark.parametrize("ignores", [True, False])
@pytest.mark.parametrize("option", [None, "full_state_dict", "flatten_optimizer_state_dict"])
def test_distributed_checkpoints(make, ignores, option):
    options = StateDictOptions(ignore_frozen_params=ignores, **({option: True} if option else {}))
    model = model_of()
    optimizer = make(model)
    model[0].requires_grad_(False)
    steps(model, optimizer, 0, 2)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    twin_model = model_of()
    twin = make(twin_model)
    twin_model[0].requires_grad_(False)
    set_optimizer_state_dict(twin_model, twin, saved, options=options)
    assert counts(twin_model, twin) == [None, 2, 2]
    twin_model.load_state_dict(model.state_dict())
    steps(model, optimizer, 2, 3)
    steps(twin_model, twin, 2, 3)
    assert all(map(torch.equal, model.parameters(), twin_model.parameters()))


def test_state_of_frozen_parameters_that_distributed_checkpoints_ignore_is_dropped():
    options = StateDictOptions(ignore_frozen_params=True)
    for make in (adamw, muon):
        model = model_of()
        optimizer = make(model)
        steps(model, optimizer, 0, 2)
        model[0].requires_grad_(False)
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(model, optimizer, saved, options=options)
        assert counts(model, optimizer) == [None, 2, 2]
        steps(model, optimizer, 2, 3)
        assert counts(model, optimizer) == [None, 3, 3]
        model[0].requires_grad_(True)
        steps(model, optimizer, 3, 4)
        assert counts(model, optimizer) == [1, 4, 4]


@BOTH
def test_a_frozen_parameter_is_stepped_if_it_is_given_a_gradient(make):
    """Frozen between the backward pass and the step, or given a gradient by hand."""
    model = model_of()
    optimizer = make(model)
    model(torch.ones(4, 6)).square().sum().backward()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert counts(model, optimizer) == [1, 1, 1]
    model = model_of()
    optimizer = make(model)
    model.requires_grad_(False)
    optimizer.step()
    assert stateful(model, optimizer) == []
    model[1].bias.grad = torch.ones(6)
    optimizer.step()
    assert stateful(model, optimizer) == ["1.bias"]
    assert len(optimizer.state_dict()["state"]) == 1


@BOTH
@pytest.mark.parametrize("way", ["step", "state", "state_dict", "deepcopy"])
def test_nothing_is_made_for_a_model_that_is_frozen_as_a_whole(make, way):
    model = model_of()
    optimizer = make(model)
    model.requires_grad_(False)
    {
        "step": optimizer.step,
        "state": lambda: optimizer.state,
        "state_dict": optimizer.state_dict,
        "deepcopy": lambda: copy.deepcopy(optimizer).step(),
    }[way]()
    assert len(optimizer.state) == len(optimizer.state_dict()["state"]) == 0


def test_other_options_and_calls_leave_frozen_parameters_without_state():
    model = model_of().bfloat16()
    optimizer = muon(model, master="mantissa", normalize="neuron", qk_clip=quintic.QKClip())
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    trained = ["1.weight", "1.bias", "2.weight"]
    for name, param in model.named_parameters():
        param.grad = torch.randn_like(param) if name in trained else None
    optimizer.step()
    optimizer.offload(True)
    optimizer.step()
    optimizer.offload(False)
    for group in optimizer.param_groups:
        group["master"] = "fp32"
    optimizer.step()
    assert stateful(model, optimizer) == trained
    assert str(quintic.verify(model, optimizer)).startswith("the step is right")
    exported = export_torch_state(optimizer)
    assert [len(exported[name]["state"]) for name in ("muon", "adamw")] == [2, 1]
    assert stateful(model, optimizer) == trained
    with pytest.raises(ValueError, match=r"cannot be copied to 0\.weight: 0\.weight is frozen and has no state; call"):
        optimizer.copy_state("1.weight", "0.weight")
    with pytest.raises(ValueError, match=r"cannot be copied to 1\.weight: 0\.weight is frozen and has no state; call"):
        optimizer.copy_state("0.weight", "1.weight")
    model[0].weight.requires_grad_(True)
    optimizer.copy_state("1.weight", "0.weight")
    assert torch.equal(
        optimizer.state[model[0].weight]["momentum_buffer"], optimizer.state[model[1].weight]["momentum_buffer"]
    )
    assert "2.bias" not in stateful(model, optimizer)


def test_frozen_parameters_take_no_part_in_the_plan():
    model = model_of()
    optimizer = muon(model)
    model[0].requires_grad_(False)
    steps(model, optimizer)
    assert sorted(name for bucket in optimizer.plan() for name in bucket.names) == [
        "1.bias", "1.weight", "2.bias", "2.weight",
    ]  # fmt: skip
    plan = optimizer.plan()
    model[1].requires_grad_(False)  # and keeps its state: nothing has to be planned anew, also where it comes back
    steps(model, optimizer, 1, 2)
    model[1].requires_grad_(True)
    steps(model, optimizer, 2, 3)
    assert optimizer.plan() is plan


def test_imported_state_needs_a_place():
    model = model_of()
    before = adamw(model)
    steps(model, before)
    before.zero_grad()
    optimizer = muon(model)
    names = [None, "0.bias", None, "1.bias", None, "2.bias"]
    model[0].requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"^0\.bias: has saved state, but is frozen here .*; call requires_grad_\(True\)"
    ):
        import_state(optimizer, before.state_dict(), source="torch", names=names)
    names[1] = None
    assert import_state(optimizer, before.state_dict(), source="torch", names=names) == ["1.bias", "2.bias"]
    assert counts(model, optimizer) == [None, 1, 1]


def test_a_frozen_parameter_that_is_replaced_stays_without_state_and_keeps_what_it_has():
    model = model_of()
    optimizer = muon(model)
    model[0].requires_grad_(False)
    optimizer.state[model[0].weight]["mine"] = 3
    steps(model, optimizer)
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            layer = next(layer for layer in model if any(param is own for own in layer.parameters()))
            name = "weight" if param is layer.weight else "bias"
            new = nn.Parameter(param.detach().double(), requires_grad=param.requires_grad)
            setattr(layer, name, new)
            group["params"][index] = new
    model.double()
    model[0](torch.ones(1, 6).double())
    optimizer.zero_grad()
    model(torch.ones(4, 6).double()).square().sum().backward()
    optimizer.step()
    assert counts(model, optimizer) == [None, 2, 2]
    assert optimizer.state[model[0].weight] == {"mine": 3}
    model[0].requires_grad_(True)
    assert optimizer.state[model[0].weight].keys() == {"mine", "momentum_buffer"}


def test_state_that_frozen_parameters_load_in_inference_mode():
    model = model_of()
    optimizer = muon(model)
    steps(model, optimizer, 0, 2)
    twin_model = copy.deepcopy(model)
    twin = muon(twin_model)
    twin_model[0].requires_grad_(False)
    with torch.inference_mode():
        twin.load_state_dict(optimizer.state_dict())
    twin_model[0].requires_grad_(True)
    steps(model, optimizer, 2, 3)
    steps(twin_model, twin, 2, 3)
    assert all(map(torch.equal, model.parameters(), twin_model.parameters()))
