"""Linear layers whose outputs no layer takes: perhaps heads, routers, or several matrices in one."""

import pytest
import torch
from torch import nn

import quintic
from quintic.grouping.doubts import UNTAKEN


def doubtful(model, **options):
    return [row.name for row in quintic.explain(model, **options).rows if UNTAKEN in row.why]


def policy(**more):
    """A network for reinforcement learning, whose layers have the numbers 8, 16 and 3."""
    body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    return nn.ModuleDict({"body": body, "actions": nn.Linear(16, 3), **more})


def owner(**params):
    module = nn.Module()
    for name, shape in params.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return module


def test_a_layer_that_none_takes_is_doubtful():
    assert doubtful(policy()) == ["actions.weight"]
    with pytest.warns(
        UserWarning, match=r"heads, routers .*: actions\.weight; say .*Rule\('actions\.weight', 'adamw'\)"
    ):
        quintic.param_groups(policy())


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 1), (1, 1, 3), (1, 3, 1, 1)])
@pytest.mark.parametrize("name", ["log_std", "bias", "offset"])
def test_what_is_added_to_outputs_does_not_take_them(name, shape):
    assert doubtful(policy(own=owner(**{name: shape}))) == ["actions.weight"]


@pytest.mark.parametrize(
    "taker",
    [nn.Linear(3, 16), nn.Conv1d(3, 16, 1), nn.LayerNorm(3), nn.GRU(3, 16)],
    ids=["linear", "convolution", "norm", "recurrent"],
)
def test_what_a_layer_takes_is_not_doubtful(taker):
    assert "actions.weight" not in doubtful(policy(taker=taker))


def test_a_matrix_of_the_users_own_may_take_outputs():
    rules = [quintic.Rule("own.mixing", "muon")]
    assert doubtful(policy(own=owner(mixing=(3, 16))), rules=rules) == []


def test_keys_and_values_of_grouped_queries_are_not_doubtful():
    layers = {"q": nn.Linear(16, 16), "k": nn.Linear(16, 4), "v": nn.Linear(16, 4), "o": nn.Linear(16, 16)}
    assert doubtful(nn.ModuleDict(layers)) == []
    assert doubtful(nn.ModuleDict({**layers, "k": nn.Linear(16, 5)})) == ["k.weight", "v.weight"]


def test_numbers_of_features_prove_nothing_where_no_layer_takes_those_of_another():
    assert doubtful(nn.ModuleDict({"one": nn.Linear(8, 3), "other": nn.Linear(8, 5)})) == []
