"""A tensor that several models share, or several stages of one: who decides about it, and that it is stepped once."""

import pytest
import torch
from torch import nn

import quintic


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.up = nn.Embedding(12, 4), nn.Linear(4, 4)


class Last(nn.Module):
    """The end of the same model, whose head is a linear layer with the embedding's weight."""

    def __init__(self, first):
        super().__init__()
        self.down, self.project = nn.Linear(4, 4), nn.Linear(4, 12, bias=False)
        self.project.weight = first.tokens.weight


def algorithms(groups):
    return {name: group["algorithm"] for group in groups for name in group["param_names"]}


@pytest.mark.parametrize("is_reversed", [False, True])
def test_groups_made_together_have_one_owner(is_reversed):
    first = First()
    parts = nn.ModuleList([first, Last(first)][:: -1 if is_reversed else 1])
    groups = quintic.param_groups(parts)
    name = "0.project.weight" if is_reversed else "0.tokens.weight"
    found = algorithms(groups)
    assert found[name] == "adamw"
    assert sum(param is first.tokens.weight for group in groups for param in group["params"]) == 1
    optimizer = quintic.Muon(groups, adamw_lr=0.1)
    before = first.tokens.weight.detach().clone()
    for param in parts.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    torch.testing.assert_close(first.tokens.weight, before - 0.1)


def test_groups_made_apart_are_an_error_that_names_the_tensor():
    first = First()
    groups = quintic.param_groups(first) + quintic.param_groups(Last(first))
    with pytest.raises(ValueError, match=r"parameter group 2: project\.weight is the same tensor as tokens\.weight of"):
        quintic.Muon(groups)
    optimizer = quintic.Muon(quintic.param_groups(first))
    with pytest.raises(
        ValueError, match=r"again is the same tensor as tokens\.weight of parameter group 1.*ModuleList"
    ):
        optimizer.add_param_group({"params": [("again", first.tokens.weight)]})
    assert len(optimizer.param_groups) == 2


def test_a_name_twice_is_an_error_that_names_it():
    """Telemetry, `verify` and saved state knew one of the two only."""
    actor, critic = (nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
    with pytest.raises(
        ValueError, match=r"group 2: 0\.weight is also the name of another parameter, of group 0.*Module"
    ):
        quintic.Muon(quintic.param_groups(actor) + quintic.param_groups(critic))
    with pytest.raises(ValueError, match=r"parameter group 0: w is also the name of another parameter, of group 0"):
        quintic.Muon([("w", actor[0].weight), ("w", critic[0].weight)])
    optimizer = quintic.Muon(quintic.param_groups(nn.ModuleDict({"actor": actor, "critic": critic})))
    with pytest.raises(ValueError, match=r"actor\.0\.weight is also the name"):
        optimizer.add_param_group({"params": [("actor.0.weight", nn.Parameter(torch.ones(2, 2)))]})
    optimizer.add_param_group({"params": [("target.0.weight", nn.Parameter(torch.ones(2, 2)))]})
    assert len({name for group in optimizer.param_groups for name in group["param_names"]}) == 5


def test_a_tensor_twice_in_a_group_is_an_error():
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"b is the same tensor as a of the same group"):
        quintic.Muon([("a", weight), ("b", weight)])
    with pytest.raises(ValueError, match=r"group0\.param1 is the same tensor as group0\.param0 of the same group"):
        quintic.Muon([weight, weight])
