"""The table of options: the constructor agrees with it, and each row says the truth."""

import inspect

import pytest
import torch
from torch import nn

import quintic
from quintic.optim import muon
from quintic.optim.comms.comparing import described
from quintic.optim.groups.group import Group
from quintic.optim.groups.options import OPTIONS, STEP_OPTIONS, group_defaults
from quintic.optim.layout.layouts import replicated_layout
from quintic.optim.validate import check_options

# Keywords of the optimizer, and not of its groups.
OF_THE_OPTIMIZER = {"params", "comm_order", "compute_order", "release_gradients"}

# Another valid value than the default.
OTHER = {
    "view": quintic.Heads(2),
    "lr": 0.5,
    "weight_decay": 0.5,
    "momentum": 0.5,
    "betas": (0.5, 0.5),
    "eps": 0.5,
    "normalize_beta": 0.5,
    "nesterov": False,
    "decay_coupling": "lr_squared",
    "scale_decay": True,
    "cautious": True,
    "orthogonalizer": "svd",
    "orthogonalizer_steps": 2,
    "coefficients": (2.0, -1.5, 0.5),
    "compute_dtype": torch.float64,
    "update_rule": "muoneq",
    "normalize": "neuron",
    "adjust_lr": "unit_rms",
    "lr_multipliers": (0.5,),
    "adamw_lr_ratio": 0.5,
    "step_every": 2,
    "qk_clip": quintic.QKClip(),
    "replicas": "repeat",
    "offload": True,
    "max_workspace_bytes": 64,
    "kernels": "torch",
    "master": "fp32",
    "state_dtype": "bf16",
    "on_nonfinite": "skip",
    "telemetry_every": 1,
}
# Options that need another parameter, algorithm or process group to change.
COMPANIONS = {"algorithm", "tied_to", "comms", "process_group"}


def optimizer_of(**options):
    """An optimizer with a Muon group and an AdamW group, whose gradients are drawn."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 4), (6,))]
    groups = [{"params": [("weight", params[0])]}, {"params": [("bias", params[1])], "algorithm": "adamw"}]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return quintic.Muon(groups, **{"weight_decay": 0.1, "adamw_weight_decay": 0.1, **options}), params


def test_the_constructor_has_the_keywords_and_defaults_of_the_table():
    signature = {name: parameter.default for name, parameter in inspect.signature(quintic.Muon).parameters.items()}
    declared = {name: option.default for name, option in OPTIONS.items() if option.is_keyword}
    assert {name: signature[name] for name in signature.keys() - OF_THE_OPTIMIZER} == declared


def test_the_constructor_hands_every_keyword_over_under_its_name(monkeypatch):
    given = {name: object() for name, option in OPTIONS.items() if option.is_keyword}

    def stop(**keywords):
        assert keywords == given
        raise InterruptedError

    monkeypatch.setattr(muon, "group_defaults", stop)
    with pytest.raises(InterruptedError):
        quintic.Muon([], **given)


def test_groups_have_every_option():
    optimizer, _ = optimizer_of()
    assert optimizer.defaults.keys() == OPTIONS.keys()
    assert all(group.keys() == {*OPTIONS, "params", "param_names"} for group in optimizer.param_groups)


def test_completion_shows_what_users_call():
    """Attributes for other files of the library begin with an underscore."""
    optimizer, _ = optimizer_of()
    of_torch = dir(torch.optim.Optimizer([nn.Parameter(torch.ones(1))], {}))
    own = {name for name in set(dir(optimizer)) - set(of_torch) if not name.startswith("_")}
    assert own == {
        "announce_rows",
        "carry_state",  # deprecated
        "copy_state",
        "found_inf",  # set by GradScaler
        "grad_scale",  # set by GradScaler
        "last_step",
        "offload",
        "plan",
        "telemetry",
        "tie",
        "untie",
        "upload_hyperparameters",
        "withdraw_rows",
    }


def test_the_examples_below_leave_no_option_out():
    assert {*OTHER, *COMPANIONS} == {*STEP_OPTIONS}


@pytest.mark.parametrize("name", STEP_OPTIONS)
def test_every_option_accepts_its_default_and_refuses_a_wrong_value(name):
    group = {**group_defaults(), "params": [], "param_names": []}
    check_options(0, group)
    if name in OTHER:
        check_options(0, {**group, name: OTHER[name]})
    if name not in ("algorithm", "view", "process_group"):  # checked with the group's parameters, or by PyTorch
        with pytest.raises(ValueError, match=name):
            check_options(0, {**group, name: "nothing like it"})


@pytest.mark.parametrize("name", [name for name in OTHER if OPTIONS[name].algorithm is not None])
def test_an_option_for_one_algorithm_changes_no_step_of_the_other(name):
    number = {"muon": 1, "adamw": 0}[OPTIONS[name].algorithm]  # of the group that it must not change
    stepped = []
    for change in ({}, {name: OTHER[name]}):
        optimizer, params = optimizer_of()
        optimizer.param_groups[number].update(change)
        for _ in range(2):
            optimizer.step()
        stepped.append(params[number])
    assert torch.equal(*stepped)


@pytest.mark.parametrize("name", [*OTHER, "algorithm"])
def test_a_changed_option_rebuilds_the_plan_where_the_table_says_so(name):
    optimizer, _ = optimizer_of()
    optimizer.step()
    plan = optimizer.plan()
    optimizer.param_groups[0][name] = "adamw" if name == "algorithm" else OTHER[name]
    assert (optimizer.plan() is plan) is ("plan" not in OPTIONS[name].affects)


@pytest.mark.parametrize("name", OTHER)
def test_ranks_compare_an_option_where_the_table_says_so(name):
    texts = []
    for value in (OPTIONS[name].default, OTHER[name]):
        optimizer, [weight, _] = optimizer_of()
        group = {**optimizer.param_groups[0], name: value}
        [(_, text)] = described([Group.of(0, group)], [[replicated_layout(weight.shape, (0, 1))]])[0, 1]
        texts.append(text)
    assert (texts[0] != texts[1]) is ("ranks" in OPTIONS[name].affects)
