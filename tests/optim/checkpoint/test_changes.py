"""State whose parameters got another view or algorithm since it was saved: refused, or loaded with `strict=False`."""

import copy
import re
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import quintic

LOAD = re.escape("optimizer.load_state_dict(state_dict, strict=False)")

# What a run gets later: rules that divide the group of matrices, or give all of it another view, or another algorithm.
HEADS = quintic.Split((2, 2, 2), groups=2)
CHANGES = {
    "a view for some": [quintic.Rule("mix.weight", "muon", HEADS)],
    "a view for all": [quintic.Rule("*.weight", "muon", HEADS)],
    "an algorithm for some": [quintic.Rule("mix.weight", "adamw", options={"lr": 1e-4})],
    "a view and an algorithm": [
        quintic.Rule("mix.weight", "adamw", options={"lr": 1e-4}),
        quintic.Rule("up.weight", "muon", HEADS),
    ],
}
# State that averages the updates of matrices, by `normalize`.
AVERAGES = {None: set(), "neuron": {"second_momentum_buffer"}, "element": {"element_second_moment"}}


def new(rules=(), *, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.ModuleDict({"mix": nn.Linear(8, 12), "up": nn.Linear(8, 12)}).to(dtype)
    return model, quintic.Muon(quintic.param_groups(model, rules=rules), lr=0.02, adamw_lr=1e-3, **options)


def step(model, optimizer, number=0):
    generator = torch.Generator().manual_seed(number)
    for _, param in sorted(model.named_parameters()):
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


def trained(rules=(), **options):
    model, optimizer = new(rules, **options)
    for number in range(2):
        step(model, optimizer, number)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # as a scheduler does
    return model, optimizer


def decided(optimizer):
    """{name: (algorithm, view, lr)}"""
    return {
        name: (group["algorithm"], str(group["view"]), group["lr"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("normalize", AVERAGES)
def test_changed_parameters_load_what_both_have_and_begin_the_rest_anew(change, normalize):
    model, optimizer = trained(normalize=normalize)
    saved = copy.deepcopy(optimizer.state_dict())
    twin_model, twin = new(CHANGES[change], normalize=normalize)
    step(twin_model, twin, 5)  # so that nothing is zero by itself
    # Strictly, it is refused, changes nothing, and names the way.
    before, present = copy.deepcopy(twin.state_dict()), decided(twin)
    with pytest.raises(ValueError, match=r"was saved with (view=Matrix|algorithm=muon).* has (Split|adamw).*" + LOAD):
        twin.load_state_dict(saved)
    assert str(twin.state_dict()) == str(before)
    # Otherwise, one warning names each kind of change.
    with pytest.warns(UserWarning, match="not what they were when the state was saved") as seen:
        twin.load_state_dict(saved, strict=False)
    assert len(seen) == 1
    text = str(seen[0].message)
    assert seen[0].filename == __file__
    was, params, twins = decided(optimizer), dict(model.named_parameters()), dict(twin_model.named_parameters())
    for name, (algorithm, view, lr) in decided(twin).items():
        own, theirs = twin.state[twins[name]], optimizer.state[params[name]]
        is_changed = (algorithm, view) != was[name][:2]
        anew = own.keys() - theirs.keys() | (AVERAGES[normalize] & own.keys() if is_changed else set())
        for key, value in own.items():
            assert torch.equal(value, torch.zeros_like(value) if key in anew else theirs[key]), f"{name}: {key}"
        if is_changed:
            assert all(key in text for key in anew)
        # The rate that was reached comes back, but not another algorithm's.
        assert lr == (was[name][2] if algorithm == was[name][0] else present[name][2])
    # The next step is that of an optimizer which had this state all along.
    step(twin_model, twin, 6)
    assert all(torch.isfinite(param).all() for param in twins.values())


def test_momentum_goes_on_in_the_new_matrices_to_the_last_bit():
    """As if the view had been given to the first optimizer between two of its steps."""
    model, optimizer = trained()
    rules = CHANGES["a view for all"]
    twin_model, twin = new(rules)
    twin_model.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="momentum_buffer loaded"):
        twin.load_state_dict(optimizer.state_dict(), strict=False)
    optimizer.param_groups[0]["view"] = HEADS
    for each, its_optimizer in ((model, optimizer), (twin_model, twin)):
        step(each, its_optimizer, 6)
    for name, param in model.named_parameters():
        assert torch.equal(param, dict(twin_model.named_parameters())[name]), name


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("master", ["fp32", "mantissa", "8bit"])
def test_masters_stay_since_they_complete_the_weights(change, master):
    model, optimizer = trained(dtype=torch.bfloat16, master=master)
    twin_model, twin = new(CHANGES[change], dtype=torch.bfloat16, master=master)
    key = {"fp32": "master", "mantissa": "mantissa", "8bit": "mantissa_byte"}[master]
    with pytest.warns(UserWarning, match="not what they were"):
        twin.load_state_dict(optimizer.state_dict(), strict=False)
    for name, param in model.named_parameters():
        own = twin.state[dict(twin_model.named_parameters())[name]][key]
        assert torch.equal(own.to(torch.float64), optimizer.state[param][key].to(torch.float64)), name
    # Where none was saved it begins with the weights.
    _, without = trained(dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="not what they were"):
        twin.load_state_dict(without.state_dict(), strict=False)
    for param in twin_model.parameters():
        weights = param.detach().float() if master == "fp32" else torch.zeros(param.shape)
        assert torch.equal(twin.state[param][key].float(), weights)


def test_multipliers_of_the_old_matrices_are_not_restored():
    _, optimizer = trained([quintic.Rule("*.weight", "muon", HEADS, options={"lr_multipliers": [1.0, 1.0, 0.5]})])
    halves = quintic.Split((6, 6))
    _, twin = new([quintic.Rule("*.weight", "muon", halves, options={"lr_multipliers": (1.0, 0.25)})])
    with pytest.warns(UserWarning, match="not what they were"):
        twin.load_state_dict(optimizer.state_dict(), strict=False)
    assert twin.param_groups[0]["lr_multipliers"] == (1.0, 0.25)
    assert twin.param_groups[0]["lr"] == 0.01


def test_frozen_parameters_that_changed_are_not_worth_a_warning():
    model, optimizer = new()
    model["mix"].weight.requires_grad_(False)
    twin_model, twin = new(CHANGES["a view for some"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin.load_state_dict(optimizer.state_dict(), strict=False)
    assert not twin.state[twin_model["mix"].weight]["momentum_buffer"].any()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_distributed_checkpoint_goes_on_by_way_of_the_old_rules(change, is_flat, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    model, optimizer = trained()
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    # As docs/how-to/checkpoints.md has it: an optimizer with the old rules takes the checkpoint.
    twin_model, old = new()
    weights, state = get_state_dict(twin_model, old, options=options)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(twin_model, old, model_state_dict=weights, optim_state_dict=state, options=options)
    twin = quintic.Muon(quintic.param_groups(twin_model, rules=CHANGES[change]), lr=0.02)
    with pytest.warns(UserWarning, match="not what they were"):
        twin.load_state_dict(old.state_dict(), strict=False)
    for name, param in model.named_parameters():
        own = dict(twin_model.named_parameters())[name]
        assert torch.equal(own, param)
        for key in twin.state[own].keys() & optimizer.state[param].keys():
            assert torch.equal(twin.state[own][key], optimizer.state[param][key]), f"{name}: {key}"
