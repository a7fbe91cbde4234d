"""The update rules that states were saved with: they are compared, and the optimizer keeps its own."""

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
LOOSELY = re.escape("optimizer.load_state_dict(state_dict, strict=False)")


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
        (None, BOTH, ("muon", "mine: Equalize(of='both')")),
        ("muoneq", BOTH, ("muoneq", "mine: Equalize(of='both')")),
        (BOTH, None, ("mine: Equalize(of='both')", "muon")),
        (BOTH, "muoneq", ("mine: Equalize(of='both')", "muoneq")),
        (None, "muoneq", ("muon", "muoneq")),
        ("muoneq", "muon_plus", ("muoneq", "muon_plus")),
    ],
    ids=["settings", "muon to own", "name to own", "own to muon", "own to name", "muon to name", "names"],
)
def test_another_rule_is_refused_and_loaded_loosely_keeps_the_optimizers_own(saved_rule, own_rule, texts):
    _, optimizer = trained(saved_rule)
    weight, twin = trained(own_rule)
    saved, before = saved_by(optimizer), copy.deepcopy(twin.state_dict())
    message = "w was saved with update_rule={!r}, parameter group 0 has {!r}; make the optimizer with the rules"
    with pytest.raises(ValueError, match=f"{re.escape(message.format(*texts))}.*{LOOSELY}"):
        twin.load_state_dict(saved)
    assert str(twin.state_dict()) == str(before)
    with pytest.warns(UserWarning, match=re.escape(f"update_rule={texts[0]!r} when saved and {texts[1]!r} now")):
        twin.load_state_dict(saved, strict=False)
    assert twin.param_groups[0]["update_rule"] is own_rule
    assert torch.equal(twin.state[weight]["momentum_buffer"], saved["state"][0]["momentum_buffer"])
    step(weight, twin, 3)
    assert weight.isfinite().all()


@pytest.mark.parametrize(("saved_rule", "own_rule"), [("hyperball", HYPERBALL), (HYPERBALL, "hyperball")], ids=str)
def test_a_name_and_its_rule_are_the_same(saved_rule, own_rule):
    _, optimizer = trained(saved_rule)
    _, twin = trained(own_rule)
    twin.load_state_dict(saved_by(optimizer))
    assert twin.param_groups[0]["update_rule"] is own_rule


@pytest.mark.parametrize("name", sorted(RULES.keys() - {"muon"}))
@pytest.mark.parametrize("is_loaded", [False, True])
def test_with_another_rule_common_state_loads_loosely_and_the_rest_begins_anew(name, is_loaded):
    rules = ("muon", name) if is_loaded else (name, "muon")
    (_, optimizer), (weight, twin) = map(trained, rules)
    saved = saved_by(optimizer)
    with pytest.raises(
        ValueError, match=f"w was saved with update_rule={rules[0]!r}, parameter group 0 has {rules[1]!r}"
    ):
        twin.load_state_dict(saved)
    with pytest.warns(UserWarning, match="w: update_rule="):
        twin.load_state_dict(saved, strict=False)
    rule, state = RULES[rules[1]], twin.state[weight]
    of_stages = {spec.name for stage in rule.stages for spec in stage.state}
    for spec in rule.state:
        if spec.name in saved["state"][0] and spec.name not in of_stages:
            assert torch.equal(state[spec.name], saved["state"][0][spec.name])
        else:
            assert not state[spec.name].any()
    step(weight, twin, 3)
    assert weight.isfinite().all()


@pytest.mark.parametrize(("short", "name"), [("neuron", "normuon"), ("element", "adamuon")])
def test_short_forms_and_names_load_each_others_state(short, name):
    _, by_name = trained(name)
    _, by_short = trained(None, normalize=short)
    by_short.load_state_dict(saved_by(by_name))
    assert (by_short.param_groups[0]["update_rule"], by_short.param_groups[0]["normalize"]) == (None, short)
    by_name.load_state_dict(saved_by(by_short))
    assert (by_name.param_groups[0]["update_rule"], by_name.param_groups[0]["normalize"]) == (name, None)


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
