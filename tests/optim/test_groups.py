import itertools

import pytest
import torch
from torch import nn

import quintic
from quintic import Experts, Matrix, Rule, Split


class Decoder(nn.Module):
    def __init__(self, vocab=50, width=8, *, tied=False, head_first=False):
        super().__init__()
        if head_first:
            self.projection = nn.Linear(width, vocab, bias=False)
        self.tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "attention": nn.MultiheadAttention(width, 2),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width, bias=False),
                    "gate": nn.Linear(width, 4, bias=False),
                }
            )
            for _ in range(2)
        )
        self.layer_scale = nn.Parameter(torch.ones(2))
        if not head_first:
            self.projection = nn.Linear(width, vocab, bias=False)
        if tied:
            self.projection.weight = self.tokens.weight


def treatment(groups):
    return {name: (g["algorithm"], g["view"]) for g in groups for name in g["param_names"]}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_modules_decide(device):
    with torch.device(device):
        found = treatment(quintic.param_groups(Decoder()))
    muon = {name: view for name, (algorithm, view) in found.items() if algorithm == "muon"}
    assert muon == {
        f"layers.{layer}.{name}": view
        for layer in range(2)
        for name, view in {
            "attention.in_proj_weight": Split((8, 8, 8)),
            "attention.out_proj.weight": Matrix(),
            "up.weight": Matrix(),
            "down.weight": Matrix(),
        }.items()
    }
    assert {"tokens.weight", "projection.weight", "layer_scale", "layers.0.gate.weight"} <= found.keys() - muon.keys()


def test_every_trainable_parameter_is_in_exactly_one_group():
    model = Decoder()
    model.tokens.weight.requires_grad_(False)
    listed = [p for group in quintic.param_groups(model) for p in group["params"]]
    assert len(listed) == len(set(listed)) == sum(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("head_first", [False, True])
def test_a_tied_head_is_an_embedding_in_any_order(head_first):
    found = treatment(quintic.param_groups(Decoder(tied=True, head_first=head_first)))
    name = "projection.weight" if head_first else "tokens.weight"
    assert found[name] == ("adamw", Matrix())
    assert sum("tokens" in name or "projection" in name for name in found) == 1


def test_a_layer_as_wide_as_the_vocabulary_is_no_head():
    found = treatment(quintic.param_groups(Decoder(vocab=32, width=8)))  # 4 * width == vocab
    assert found["layers.0.up.weight"][0] == "muon"
    assert found["projection.weight"][0] == "adamw"


@pytest.mark.parametrize("name", ["lm_head", "output", "score", "classifier"])
def test_heads_are_known_by_name_without_an_embedding(name):
    model = nn.ModuleDict({"body": nn.Linear(8, 8), name: nn.Linear(8, 5)})
    assert treatment(quintic.param_groups(model))[f"{name}.weight"][0] == "adamw"


def test_gates_with_one_output_go_to_adamw():
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "mix": nn.Linear(8, 1), "widen": nn.Linear(1, 8)})
    found = treatment(quintic.param_groups(model))
    assert (found["mix.weight"][0], found["widen.weight"][0], found["body.weight"][0]) == ("adamw", "adamw", "muon")


class Mixture(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.zeros(4, 6, 8)))


def test_stacked_experts_are_matrices():
    assert treatment(quintic.param_groups(Mixture("experts_up")))["experts_up"] == ("muon", Experts())


def test_convolutions_need_a_rule():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 8))
    assert treatment(quintic.param_groups(model))["0.weight"][0] == "adamw"
    found = treatment(quintic.param_groups(model, rules=[Rule("0.weight", "muon", quintic.Flatten())]))
    assert found["0.weight"] == ("muon", quintic.Flatten())


def test_a_matrix_nobody_decided_about_is_an_error_that_names_it():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.mystery = nn.Parameter(torch.zeros(4, 4))

    model = nn.ModuleDict({"odd": Odd(), "fine": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"odd\.mystery.*\(4, 4\).*quintic\.Rule\('odd\.mystery'"):
        quintic.param_groups(model)
    found = treatment(quintic.param_groups(model, rules=[Rule("odd.*", "muon")]))
    assert found["odd.mystery"] == ("muon", Matrix())


def test_the_first_matching_rule_wins_and_its_options_make_a_group():
    groups = quintic.param_groups(
        Decoder(),
        muon={"lr": 0.1},
        adamw={"lr": 0.2},
        rules=[Rule("*.up.weight", "muon", options={"lr": 0.3}), Rule("layers.*.weight", "adamw")],
    )
    lrs = {name: (g["algorithm"], g["lr"]) for g in groups for name in g["param_names"]}
    assert lrs["layers.0.up.weight"] == ("muon", 0.3)
    assert lrs["layers.0.down.weight"] == ("adamw", 0.2)
    assert lrs["layers.0.attention.in_proj_weight"] == ("muon", 0.1)


@pytest.mark.parametrize("patterns", list(itertools.permutations(["nothing.*", "tokens.weight"])))
def test_a_rule_that_matches_nothing_is_an_error(patterns):
    with pytest.raises(ValueError, match=r"'nothing\.\*'"):
        quintic.param_groups(Decoder(), rules=[Rule(p, "adamw") for p in patterns])


def test_a_model_without_parameters_is_an_error():
    with pytest.raises(ValueError, match="ReLU has no parameter"):
        quintic.param_groups(nn.ReLU())


def test_groups_construct_the_optimizer():
    optimizer = quintic.Muon(quintic.param_groups(Decoder()), lr=0.03, adamw_lr=0.004)
    assert {(g["algorithm"], g["lr"]) for g in optimizer.param_groups} == {("muon", 0.03), ("adamw", 0.004)}
