"""The update rules that states were saved with: names are restored, rules of a user's own are compared."""

import copy
import io
import re

import pytest
import torch
from torch import nn

import quintic
from quintic.optim.rules.library.hyperball import HYPERBALL
from quintic.optim.rules.library.muoneq import Equalize
from quintic.optim.rules.library.radial import RadialBrake
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.table import RULES

BOTH = UpdateRule(title="mine", before=(Equalize("both"),))
COLUMNS = UpdateRule(title="mine", before=(Equalize("columns"),))
LOOSELY = re.escape("or load with optimizer.load_state_dict(state_dict, strict=False)")


def trained(rule, steps=2, **options):
    weight = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    optimizer = quintic.Muon([("w", weight)], lr=0.05, update_rule=rule, **options)
    for number in range(steps):
        step(weight, optimizer, number)
    return weight, optimizer


def step(weight, optimizer, number):
    weight.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
    optimizer.step()


def saved_by(optimizer):
    """Return a state as a file holds it."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_a_rule_of_a_users_own_is_saved_as_text_with_its_settings():
    _, optimizer = trained(UpdateRule(title="mine", before=(Equalize("both"),), constrain=RadialBrake(outward=0.25)))
    (group,) = saved_by(optimizer)["param_groups"]
    assert group["update_rule"] == "mine: Equalize(of='both'), RadialBrake(outward=0.25, inward=1.0)"


def test_the_library_is_saved_by_name():
    _, optimizer = trained("nanochat")
    (group,) = saved_by(optimizer)["param_groups"]
    assert (group["update_rule"], group["normalize"]) == ("nanochat", None)


@pytest.mark.parametrize("strict", [True, False])
def test_the_same_rule_goes_on_bit_for_bit(strict):
    weight, optimizer = trained(BOTH)
    # Another object of the same value.
    own = UpdateRule(title="mine", before=(Equalize("both"),))
    twin_weight, twin = trained(own, steps=0)
    twin_weight.data.copy_(weight.data)
    twin.load_state_dict(saved_by(optimizer), strict=strict)
    assert twin.param_groups[0]["update_rule"] is own
    for each in ((weight, optimizer), (twin_weight, twin)):
        step(*each, 5)
    assert torch.equal(weight, twin_weight)


@pytest.mark.parametrize(
    ("saved_rule", "own_rule", "texts"),
    [
        (COLUMNS, BOTH, ("mine: Equalize(of='columns')", "mine: Equalize(of='both')")),
        (None, BOTH, ("None", "mine: Equalize(of='both')")),
        ("muoneq", BOTH, ("MuonEq: Equalize(of='rows')", "mine: Equalize(of='both')")),
        (BOTH, None, ("mine: Equalize(of='both')", "None")),
        (BOTH, "muoneq", ("mine: Equalize(of='both')", "MuonEq: Equalize(of='rows')")),
    ],
    ids=["settings", "muon to own", "name to own", "own to muon", "own to name"],
)
def test_another_rule_is_refused_and_loaded_loosely_keeps_the_optimizers_own(saved_rule, own_rule, texts):
    _, optimizer = trained(saved_rule)
    weight, twin = trained(own_rule)
    saved, before = saved_by(optimizer), copy.deepcopy(twin.state_dict())
    message = "parameter group 0 was saved with update_rule={!r}, and has {!r}; give the rule that it was saved with"
    with pytest.raises(ValueError, match=re.escape(message.format(*texts)) + ", " + LOOSELY):
        twin.load_state_dict(saved)
    assert str(twin.state_dict()) == str(before)
    twin.load_state_dict(saved, strict=False)
    assert twin.param_groups[0]["update_rule"] is own_rule
    step(weight, twin, 3)
    assert weight.isfinite().all()


@pytest.mark.parametrize(("saved_rule", "own_rule"), [("hyperball", HYPERBALL), (HYPERBALL, "hyperball")], ids=str)
def test_a_name_and_its_rule_are_the_same(saved_rule, own_rule):
    _, optimizer = trained(saved_rule)
    _, twin = trained(own_rule)
    twin.load_state_dict(saved_by(optimizer))
    assert twin.param_groups[0]["update_rule"] is own_rule


@pytest.mark.parametrize("name", sorted(RULES))
def test_names_are_restored_where_state_fits_and_else_refused(name):
    _, optimizer = trained(name)
    _, twin = trained("muon")
    saved = saved_by(optimizer)
    if RULES[name].state == RULES["muon"].state:
        twin.load_state_dict(saved)
        assert twin.param_groups[0]["update_rule"] == name
    else:
        with pytest.raises(ValueError, match=r"^w: saved state has .*; make it with the master and the update rule of"):
            twin.load_state_dict(saved)
    _, same = trained(name, steps=0)
    same.load_state_dict(saved)
    assert same.param_groups[0]["update_rule"] == name


@pytest.mark.parametrize(("short", "name"), [("neuron", "normuon"), ("element", "adamuon")])
def test_short_forms_and_names_load_each_others_state(short, name):
    _, by_name = trained(name)
    _, by_short = trained(None, normalize=short)
    by_short.load_state_dict(saved_by(by_name))
    assert (by_short.param_groups[0]["update_rule"], by_short.param_groups[0]["normalize"]) == (name, None)
    _, by_short = trained(None, normalize=short)
    by_name.load_state_dict(saved_by(by_short))
    assert (by_name.param_groups[0]["update_rule"], by_name.param_groups[0]["normalize"]) == (None, short)


def test_states_saved_before_there_were_rules_load():
    _, optimizer = trained(None, normalize="neuron")
    saved = saved_by(optimizer)
    del saved["param_groups"][0]["update_rule"]
    _, twin = trained(None, normalize="neuron")
    twin.load_state_dict(saved)
    assert twin.param_groups[0]["normalize"] == "neuron"


def test_a_copied_optimizer_has_its_rule():
    weight, optimizer = trained(BOTH)
    twin_weight, twin = copy.deepcopy((weight, optimizer))
    for each in ((weight, optimizer), (twin_weight, twin)):
        step(*each, 5)
    assert twin.param_groups[0]["update_rule"] == BOTH
    assert torch.equal(weight, twin_weight)
