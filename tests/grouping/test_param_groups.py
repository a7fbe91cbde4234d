import itertools
import re
import warnings

import pytest
import torch
from torch import nn

import quintic
from quintic import Experts, Heads, Matrix, Rule, Split
from quintic.grouping.assign import assign
from quintic.optim.groups.options import OPTIONS


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


def reasons(model, rules=()):
    return {decision.name: decision.why for decision in assign(model, rules).values()}


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


@pytest.mark.parametrize("function", [quintic.param_groups, quintic.explain])
def test_what_is_no_module_says_what_to_give(function):
    for wrong in (nn.Linear(3, 3).parameters(), [nn.Linear(3, 3)], nn.Parameter(torch.ones(3, 3))):
        with pytest.raises(TypeError, match=rf"model is a {type(wrong).__name__}: give the model itself, a torch\.nn"):
            function(wrong)


@pytest.mark.parametrize("function", [quintic.param_groups, quintic.explain])
@pytest.mark.parametrize(
    ("view", "words"),
    [
        (quintic.Split((5, 5)), r"^weight: .*12.* \(rule 'w\*'\)$"),
        (quintic.Heads(5), r"^weight: .*12.* \(rule 'w\*'\)$"),
        (quintic.Rows(5), r"^weight: .*12.* \(rule 'w\*'\)$"),
        (quintic.Experts(), r"^weight: .* \(rule 'w\*'\)$"),
    ],
)
def test_a_view_that_does_not_fit_is_an_error_of_the_rule(function, view, words):
    with pytest.raises(ValueError, match=words):
        function(nn.Linear(8, 12), rules=[Rule("w*", "muon", view)])
    # AdamW's parameters have no matrices, and nothing to fit.
    function(nn.Linear(8, 12), rules=[Rule("w*", "adamw", view)])


def test_names_that_the_page_about_adamw_gives_for_tables():
    """docs/how-to/coming-from/adamw.md: a parameter of one's own is AdamW's by some names, and an error by others."""
    for name, is_known in {"positions": 1, "pos_emb": 1, "token_embedding": 1, "wpe": 0, "memory": 0}.items():
        network = nn.Linear(3, 3)
        network.register_parameter(name, nn.Parameter(torch.zeros(16, 8)))
        if is_known:
            rows = {row.name: row for row in quintic.explain(network).rows}
            assert rows[name].algorithm == "adamw"
        else:
            with pytest.raises(ValueError, match=rf"no rule covers .*quintic\.Rule\('{name}', 'adamw'\).*example="):
                quintic.param_groups(network)


@pytest.mark.parametrize("function", [quintic.param_groups, quintic.explain])
def test_an_optimizer_in_place_of_the_model_is_told_what_its_groups_have(function):
    optimizer = quintic.Muon(quintic.param_groups(Decoder()))
    with pytest.raises(
        TypeError, match=r"model is a Muon: give the model itself.* an optimizer's own groups say what it has"
    ) as error:
        function(optimizer)
    [code] = re.findall(r"\{name: .*\}", str(error.value))
    found = eval(code, {"optimizer": optimizer})
    assert found == {row.name: row.algorithm for row in quintic.explain(Decoder()).rows}


def test_groups_construct_the_optimizer():
    optimizer = quintic.Muon(quintic.param_groups(Decoder()), lr=0.03, adamw_lr=0.004)
    assert {(g["algorithm"], g["lr"]) for g in optimizer.param_groups} == {("muon", 0.03), ("adamw", 0.004)}


# ------------------------------------------------------------------------------------------------------------ reasons


def test_every_decision_has_a_reason():
    model = Decoder(tied=True)
    assert reasons(model, [Rule("*.up.weight", "muon")]) == {
        "tokens.weight": "embedding; tied to projection.weight",
        "layer_scale": "1-D",
        **{
            f"layers.{layer}.{name}": why
            for layer in range(2)
            for name, why in {
                "norm.weight": "1-D",
                "norm.bias": "1-D",
                "attention.in_proj_weight": "fused queries, keys, values",
                "attention.in_proj_bias": "1-D",
                "attention.out_proj.weight": "linear layer",
                "attention.out_proj.bias": "1-D",
                "up.weight": "rule '*.up.weight'",
                "up.bias": "1-D",
                "down.weight": "linear layer",
                "gate.weight": "gate or router (by its name)",
            }.items()
        },
    }


def test_a_head_says_how_it_was_recognised():
    assert reasons(Decoder())["projection.weight"] == "output head (as many outputs as tokens has rows)"
    assert reasons(nn.ModuleDict({"lm_head": nn.Linear(2, 3)}))["lm_head.weight"] == "output head (by its name)"


def test_reasons_never_split_a_group():
    model = nn.ModuleDict({"tokens": nn.Embedding(9, 4), "norm": nn.LayerNorm(4), "mystery": Mixture("mystery")})
    rules = [Rule("mystery.*", "adamw")]
    assert len(set(reasons(model, rules).values())) > 2
    assert len(quintic.param_groups(model, rules=rules)) == 1


def test_decisions_are_in_the_order_of_the_model_and_muon_groups_come_first():
    model = Decoder()
    assert [d.name for d in assign(model).values()] == [name for name, _ in model.named_parameters()]
    assert [g["algorithm"] for g in quintic.param_groups(model)] == ["muon", "muon", "adamw"]


# ----------------------------------------------------------------------------------------------- tied, in every order


class Named(nn.Module):
    """Registers modules under names, in the order given."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


@pytest.mark.parametrize("names", list(itertools.permutations(["inner", "lm_head", "other"])))
def test_a_module_registered_twice_is_a_head_under_either_name(names):
    shared = nn.Linear(4, 7, bias=False)
    model = Named(**{name: nn.Linear(4, 4, bias=False) if name == "other" else shared for name in names})
    found = treatment(quintic.param_groups(model))
    assert found.pop("other.weight")[0] == "muon"
    assert [algorithm for algorithm, _ in found.values()] == ["adamw"]


@pytest.mark.parametrize("names", list(itertools.permutations(["a", "tokens", "z"])))
def test_a_tensor_with_three_uses_is_an_embedding_in_every_order(names):
    modules = {"a": nn.Linear(4, 9, bias=False), "tokens": nn.Embedding(9, 4), "z": nn.Linear(4, 9, bias=False)}
    modules["a"].weight = modules["z"].weight = modules["tokens"].weight
    (decision,) = assign(Named(**{name: modules[name] for name in names})).values()
    assert decision.algorithm == "adamw"
    assert decision.name == f"{names[0]}.weight"
    assert decision.why == f"embedding; tied to {names[1]}.weight and 1 more"


@pytest.mark.parametrize("pattern", ["tokens.weight", "projection.weight"])
@pytest.mark.parametrize("head_first", [False, True])
def test_a_rule_matches_any_name_of_a_tied_tensor(pattern, head_first):
    model = Decoder(tied=True, head_first=head_first)
    groups = quintic.param_groups(model, rules=[Rule(pattern, "adamw", options={"lr": 0.5})])
    (name,) = next(g["param_names"] for g in groups if g.get("lr") == 0.5)
    assert name in ("tokens.weight", "projection.weight")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_without_names_the_layer_with_the_highest_number_is_the_head(order):
    layers = {"2": nn.Embedding(9, 4), "9": nn.Linear(4, 9), "10": nn.Linear(9, 9)}
    model = nn.ModuleDict()
    for index in order:
        name = list(layers)[index]
        model[name] = layers[name]
    found = treatment(quintic.param_groups(model))
    assert (found["9.weight"][0], found["10.weight"][0]) == ("muon", "adamw")


# -------------------------------------------------------------------------------------------------------------- heads


def test_the_last_layer_of_attention_may_be_called_output():
    model = Named(layers=nn.ModuleList([nn.ModuleDict({"output": nn.Linear(4, 4)})]), output=nn.Linear(4, 9))
    found = treatment(quintic.param_groups(model))
    assert (found["layers.0.output.weight"][0], found["output.weight"][0]) == ("muon", "adamw")


def test_a_model_may_say_which_layer_is_its_head():
    class Model(Named):
        def get_output_embeddings(self):
            return self.decoder

    model = Model(tokens=nn.Embedding(9, 4), wide=nn.Linear(4, 9), decoder=nn.Linear(4, 9))
    assert reasons(model)["decoder.weight"] == "output head (the model says so)"
    assert reasons(model)["wide.weight"] == "linear layer"  # the vocabulary has its head already


def test_a_layer_with_as_many_outputs_as_there_are_positions_is_no_head():
    model = Named(
        wte=nn.Embedding(50, 8), wpe=nn.Embedding(16, 8), position_embeddings=nn.Embedding(24, 8),
        pooler=nn.Linear(8, 16), other=nn.Linear(8, 24), decoder=nn.Linear(8, 50),
    )  # fmt: skip
    found = treatment(quintic.param_groups(model))
    assert [found[f"{name}.weight"][0] for name in ("pooler", "other", "decoder")] == ["muon", "muon", "adamw"]


# ----------------------------------------------------------------------------------- parameters of no known module


class Holder(nn.Module):
    def __init__(self, name, *shape):
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("cls_token", (1, 1, 8), "1-D, stored with 3 dimensions"),
        ("layer_scale", (8, 1, 1), "1-D, stored with 3 dimensions"),
        ("position_embeddings", (1, 5, 8), "embedding (by its name)"),
        ("pos_embed", (1, 5, 8), "embedding (by its name)"),
        ("register_tokens", (1, 4, 8), "embedding (by its name)"),
        ("rel_pos_h", (7, 8), "embedding (by its name)"),
        ("gate_up_proj_bias", (4, 8), "bias"),
        ("relative_position_bias_table", (9, 4), "bias"),
    ],
)
def test_parameters_that_no_module_owns(name, shape, why):
    (decision,) = assign(Holder(name, *shape)).values()
    assert (decision.algorithm, decision.why) == ("adamw", why)


class HeadNorm(Holder):
    def __init__(self):
        super().__init__("weight", 4, 8)


class TopKRouter(Holder):
    def __init__(self):
        super().__init__("weight", 4, 8)


def test_norms_and_routers_are_known_by_their_class():
    model = Named(q_norm=HeadNorm(), gate=TopKRouter())
    assert reasons(model) == {"q_norm.weight": "norm", "gate.weight": "router"}


def test_everything_inside_a_router_is_one():
    model = Named(router=Named(layer=nn.Linear(8, 4, bias=False)))
    assert reasons(model) == {"router.layer.weight": "router"}


def test_the_gate_of_a_gated_mlp_is_a_matrix():
    model = Named(gate=nn.Linear(8, 24), up=nn.Linear(8, 24), down=nn.Linear(24, 8))
    assert {one.algorithm for param, one in assign(model).items() if param.ndim == 2} == {"muon"}


def test_all_undecided_parameters_are_named():
    model = nn.ModuleList(Holder("mystery", 4, 3 + index) for index in range(7))
    with pytest.raises(
        ValueError, match=r"these 7 parameters: 0\.mystery of shape \(4, 3\), .* 4\.mystery .*and 2 more"
    ):
        quintic.param_groups(model)


def test_a_lazy_parameter_asks_for_a_first_batch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of PyTorch warn that lazy modules are new
        model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet: run one batch"):
        quintic.param_groups(model)


# -------------------------------------------------------------------------------------------------------------- rules


def test_a_rule_without_a_view_keeps_the_view():
    groups = quintic.param_groups(Decoder(), rules=[Rule("*.in_proj_weight", "muon", options={"lr": 0.3})])
    assert treatment(groups)["layers.0.attention.in_proj_weight"] == ("muon", Split((8, 8, 8)))
    groups = quintic.param_groups(Decoder(), rules=[Rule("*.in_proj_weight", "muon", Heads(6))])
    assert treatment(groups)["layers.0.attention.in_proj_weight"] == ("muon", Heads(6))


def test_options_need_not_be_hashable():
    rules = [Rule("*.up.weight", "muon", options={"lr_multipliers": [0.5]}), Rule("*.down.weight", "muon")]
    groups = quintic.param_groups(Decoder(), rules=[*rules, Rule("*.up.bias", "adamw", options={"betas": [0.8, 0.9]})])
    given = [group.get("lr_multipliers") or group.get("betas") for group in groups]
    assert [value for value in given if value] == [[0.5], [0.8, 0.9]]


def test_a_rule_for_a_frozen_parameter_says_that_it_is_frozen():
    model = Decoder()
    model.tokens.weight.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"rule 'tok\*' matches no trainable .* are frozen and need none: tokens\.weight$"
    ):
        quintic.param_groups(model, rules=[Rule("tok*", "adamw")])
    with pytest.raises(ValueError, match=r"rule 'nothing' matches no trainable parameter that an earlier rule left$"):
        quintic.param_groups(model, rules=[Rule("nothing", "adamw")])


def test_a_rule_that_an_earlier_one_leaves_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"rule 'tokens\.weight' matches no trainable parameter"):
        quintic.param_groups(Decoder(), rules=[Rule("tokens.*", "adamw"), Rule("tokens.weight", "adamw")])
    with pytest.raises(ValueError, match=r"rule 'tokens\.\*' matches no trainable parameter"):
        quintic.param_groups(Decoder(), rules=[Rule("tokens.*", "adamw"), Rule("tokens.*", "adamw")])


@pytest.mark.parametrize("key", ["params", "param_names", "algorithm", "view"])
def test_what_a_group_consists_of_is_no_hyperparameter(key):
    model = nn.Linear(4, 4)
    for what, options in (
        ("muon", {"muon": {key: "adamw"}}),
        ("adamw", {"adamw": {key: "adamw"}}),
        ("options of the rule for weight", {"rules": [Rule("weight", "muon", options={key: "adamw"})]}),
    ):
        for function in (quintic.param_groups, quintic.explain):
            with pytest.raises(ValueError, match=f"{what}: '{key}' is no hyperparameter"):
                function(model, **options)


def test_rules_may_come_from_a_generator():
    names = ("*.up.weight", "*.down.weight")
    groups = quintic.param_groups(Decoder(), rules=(Rule(name, "adamw") for name in names))
    assert {name for name, (algorithm, _) in treatment(groups).items() if algorithm == "adamw"} >= {
        f"layers.{number}.{which}.weight" for number in range(len(Decoder().layers)) for which in ("up", "down")
    }


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (None, r"rules=None must be a list of rules: \[quintic\.Rule\(pattern, algorithm, view\), ...\]"),
        ("adamw", "rules='adamw' must be a list of rules"),
        ({"*.bias": "adamw"}, "rules={.*} must be a list of rules"),
        (Rule("*", "adamw"), r"rules=Rule\(pattern='\*'.* must be a list of rules"),
        ([{"pattern": "*", "algorithm": "adamw"}], r"rules\[0\] is {'pattern'.*: give quintic\.Rule\(pattern"),
        ([Rule("*", "adamw"), ("*", "adamw")], r"rules\[1\] is \('\*', 'adamw'\): give quintic\.Rule"),
        ([None], r"rules\[0\] is None: give quintic\.Rule"),
    ],
)
def test_what_is_no_list_of_rules_says_what_to_give(rules, message):
    for function in (quintic.param_groups, quintic.explain):
        with pytest.raises(TypeError, match=message):
            function(Decoder(), rules=rules)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, "adamw"), TypeError, "pattern=3 of a rule must be a string"),
        (("*", "sgd"), ValueError, r"rule '\*': unknown algorithm 'sgd'; choose 'muon' or 'adamw'"),
        (("adamw", "*"), ValueError, r"rule 'adamw': unknown algorithm '\*'"),
        (("*", "muon", Heads), TypeError, r"rule '\*': view=<class .* is not a view"),
        (("*", "muon", "matrix"), TypeError, r"rule '\*': view='matrix' is not a view"),
        (("*", "muon", None, 0.1), TypeError, r"rule '\*': options=0\.1 must be a dictionary"),
    ],
)
def test_a_rule_is_checked_where_it_is_made(arguments, error, message):
    with pytest.raises(error, match=message):
        Rule(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"muon": 0.1}, TypeError, "muon=0.1 must be a dictionary of hyperparameters"),
        ({"adamw": [("lr", 0.1)]}, TypeError, "adamw=.* must be a dictionary of hyperparameters"),
        ({"convolutions": "yes"}, ValueError, "convolutions='yes': choose 'muon' or 'adamw'"),
    ],
)
def test_other_arguments_are_checked(options, error, message):
    for function in (quintic.param_groups, quintic.explain):
        with pytest.raises(error, match=message):
            function(Decoder(), **options)


# ------------------------------------------------------------------------------------- options that would do nothing


ONE_ALGORITHM = {name: option for name, option in OPTIONS.items() if option.algorithm is not None and option.is_keyword}


@pytest.mark.parametrize("name", ONE_ALGORITHM)
def test_an_option_is_warned_of_where_groups_do_not_read_it(name):
    model = nn.ModuleDict({"up": nn.Linear(8, 16), "table": nn.Embedding(4, 8)})
    reader, value = ONE_ALGORITHM[name].algorithm, ONE_ALGORITHM[name].default
    other, pattern = ("adamw", "table.weight") if reader == "muon" else ("muon", "up.weight")
    told = f"only groups of '{reader}' read '{name}', so it does nothing here; give it in {reader}=, or to quintic.Muon"
    with pytest.warns(UserWarning, match=f"^{other}: {told}$") as caught:
        quintic.param_groups(model, **{other: {name: value}})
    assert [one.filename for one in caught] == [__file__]
    with pytest.warns(UserWarning, match=f"^options of rule '{pattern}': {told}$"):
        quintic.param_groups(model, rules=[quintic.Rule(pattern, other, options={name: value})])
    # Where it is read there is nothing to warn of.
    quintic.param_groups(model, **{reader: {name: value}})


def test_keys_of_the_user_and_options_of_both_algorithms_are_not_warned_of():
    options = {"lr": 0.1, "weight_decay": 0.1, "cautious": True, "layer_id": 3, "lr_scale": 0.5}
    quintic.param_groups(nn.Linear(8, 16), muon=options, adamw=options)
