"""Rules that warnings and errors tell to add: pasted as they are, they decide about what was named and nothing else."""

import ast
import re
import warnings

import pytest
import torch
from torch import nn

import quintic
from quintic import Rule
from quintic.grouping.patterns import patterns_of


def tree(**children):
    return nn.ModuleDict(children)


def with_name(name):
    return nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8), name: nn.Linear(8, 24)})


def mystery():
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(4, 4))
    return module


DOUBTFUL = {
    "a list of layers": lambda: nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)
    ),
    "a table first": lambda: nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)),
    "one layer of several": lambda: nn.ModuleList(
        [tree(mix=nn.Linear(8, 8)), tree(mix=nn.Linear(8, 24), out=nn.Linear(8, 8))]
    ),
    "layers alike": lambda: nn.ModuleList(tree(qkv=nn.Linear(8, 24), out=nn.Linear(8, 8)) for _ in range(3)),
    "brackets": lambda: with_name("[q]kv"),
    "brackets in layers": lambda: nn.ModuleList(with_name("[q]kv") for _ in range(2)),
    "a question mark": lambda: with_name("kv?"),
}


def pasted(text):
    """The rule that a message tells to add, as AdamW's."""
    return Rule(ast.literal_eval(re.search(r"quintic\.Rule\(('[^']*'), '(?:muon|adamw)'", text).group(1)), "adamw")


def rules_of_warnings(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quintic.param_groups(model)
    return [pasted(str(one.message)) for one in caught]


@pytest.mark.parametrize("model", DOUBTFUL.values(), ids=DOUBTFUL)
def test_the_rule_of_a_warning_decides_about_what_was_warned_of_and_nothing_else(model):
    model = model()
    before = {row.name: row for row in quintic.explain(model).rows}
    rules = rules_of_warnings(model)
    assert rules
    for rule in rules:
        changed = [row.name for row in quintic.explain(model, rules=[rule]).rows if row != before[row.name]]
        assert changed
        # Of a layer without doubt the reason is "linear layer" alone.
        assert all(before[name].why.startswith("linear layer; ") for name in changed)


def test_layers_alike_share_a_rule():
    (rule,) = rules_of_warnings(DOUBTFUL["layers alike"]())
    assert rule.pattern == "*.qkv.weight"


def test_the_rules_of_an_error_cover_one_kind_of_parameter_each():
    model = nn.ModuleDict(
        {
            "blocks": nn.ModuleList(nn.ModuleList([mystery(), nn.Linear(4, 4)]) for _ in range(12)),
            "alike": nn.ModuleList(tree(mixing=mystery()) for _ in range(12)),
        }
    )
    rules = []
    for _ in range(13):
        with pytest.raises(ValueError, match=r"of shape \(4, 4\)") as caught:
            quintic.explain(model, rules=rules)
        rules.append(pasted(str(caught.value)))
    rows = quintic.explain(model, rules=rules).rows
    # `blocks.*.*.weight` would match the linear layers, too.
    assert [rule.pattern for rule in rules] == [*(f"blocks.{n}.0.weight" for n in range(12)), "alike.*.mixing.weight"]
    assert sum(row.algorithm == "muon" for row in rows) == 12


def test_an_error_lists_layers_alike_once():
    model = nn.ModuleList(tree(mixing=mystery()) for _ in range(12))
    with pytest.raises(ValueError, match=r"these 12 parameters: \*\.mixing\.weight of shape \(4, 4\); add quintic"):
        quintic.param_groups(model)


def test_a_model_without_matrices_is_told_of_by_names_of_its_own():
    model = nn.ModuleList([nn.Linear(8, 1), nn.LayerNorm(8)])
    with pytest.warns(UserWarning, match=r"no matrix of this ModuleList: 0\.weight \(one output or one input\); "):
        quintic.param_groups(model)


@pytest.mark.parametrize("key", ["[a]", "a*", "a?b", "[!x]"])
def test_a_pattern_matches_the_name_that_it_is(key):
    model = nn.ModuleDict({key: nn.Linear(8, 8), "other": nn.Linear(8, 8)})
    rows = quintic.explain(model, rules=[Rule(f"{key}.weight", "adamw")]).rows
    assert [row.name for row in rows if row.why.startswith("rule")] == [f"{key}.weight"]


def test_a_pattern_is_the_name_where_a_wider_one_would_match_others():
    assert patterns_of(["0.weight", "2.weight"], {"1.weight"}) == {"0.weight": "0.weight", "2.weight": "2.weight"}
    assert patterns_of(["0.weight", "2.weight"], {"1.bias"}) == dict.fromkeys(["0.weight", "2.weight"], "*.weight")
    # Stars match dots as well.
    assert patterns_of(["0.weight"], {"head.weight"}) == {"0.weight": "0.weight"}
