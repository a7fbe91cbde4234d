"""The pages of update rules: tables that say what the rules declare, and a rule that passes its own check."""

import re
from pathlib import Path

import pytest
import torch

import quintic
from quintic.testing.stages import check_stages
from quintic.testing.steps import check_one_device
from quintic.update_rules import RULES, StageOptions

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "reference" / "rules.md").read_text("utf-8")
OF_DECAY = {"cautious": True, "decay_coupling": "lr_squared", "scale_decay": True}


def table(heading):
    """{name of a rule: the other cells} of the first table below a heading; several rules may share a row."""
    text = PAGE[PAGE.index(heading) :]
    found = {}
    for row in re.findall(r"^\| (`\"[^\n]*) \|$", text.split("\n\n## ")[0], re.MULTILINE):
        names, *cells = re.split(r"(?<!\\) \| ?", row)
        for name in re.findall(r"`\"(\w+)\"`", names):
            assert name not in found, f"{name} has two rows below {heading}"
            found[name] = cells
    return found


def entries(specs, state_dtype):
    """Bytes per weight of state that has the parameter's shape."""
    return sum(spec.dtype_for(torch.float32, state_dtype).itemsize for spec in specs if spec.shape == "param")


def both(specs):
    wide = entries(specs, None)
    return f"{wide} ({entries(specs, 'bf16')})" if wide else "0"


def test_every_rule_is_in_every_table():
    for heading in ("# Update rules", "## State and messages", "## Options"):
        assert set(table(heading)) == set(RULES), heading


@pytest.mark.parametrize("name", RULES)
def test_the_bytes_of_a_rule_are_those_that_it_declares(name):
    state, sent = table("## State and messages")[name]
    rule = RULES[name]
    shapes = [spec.shape for spec in rule.vector_state]
    words = {"neurons": "neuron", "rows": "row", "matrix": "matrix"}
    vectors = [f"{4 * shapes.count(shape)} for each {word}" for shape, word in words.items() if shape in shapes]
    assert state == ", ".join([both(rule.state), *vectors])
    assert sent.split(":")[0] == f"{both(rule.sent_state)}, {both(rule.matrix_state)}"
    assert ("weights" in sent) == rule.reads_weights


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("key", "value"), [("adjust_lr", "unit_rms"), *OF_DECAY.items()])
def test_an_option_is_an_error_where_the_page_says_so(name, key, value):
    _, without = table("## Options")[name]
    weight = torch.nn.Parameter(torch.ones(4, 3))
    if "error" in without and f"`{key}`" in without.split(";")[0]:
        with pytest.raises(ValueError, match=f"{key}="):
            quintic.Muon([weight], update_rule=name, **{key: value})
    else:
        quintic.Muon([weight], update_rule=name, **{key: value})


@pytest.fixture(scope="module")
def how_to():
    """What the code of the page makes, from nothing."""
    page = (DOCS / "how-to" / "write-an-update-rule.md").read_text("utf-8")
    namespace = {}
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(compile(code, "page", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("name", ["rule", "nanochat", "ahead", "by_size", "max_norm"])
def test_the_rules_of_the_how_to_page_pass_on_one_device(how_to, name):
    assert check_stages(how_to[name]) == []
    _, findings = check_one_device(how_to[name], "bfloat16 with mantissas", {})
    assert findings == []


@torch.no_grad()
def test_the_examples_compute_what_the_page_says(how_to):
    weight = torch.tensor([[[3.0, 4.0], [0.3, 0.4]]])
    state = {how_to["MOMENTUM"]: torch.zeros(2)}
    options = StageOptions(lr=0.5, momentum=torch.tensor(0.75, dtype=torch.float64))
    assert how_to["AheadMomentum"](ahead=0.5).apply(torch.tensor([1.0, 2.0]), state, options).tolist() == [0.625, 1.25]
    assert state[how_to["MOMENTUM"]].tolist() == [0.25, 0.5]
    _, size = how_to["BySize"]().apply(weight, {how_to["WEIGHT"]: weight}, options)
    torch.testing.assert_close(size, weight.square().mean().sqrt().view(1, 1, 1))
    update, scales = torch.ones(1, 2, 2), torch.tensor([[[0.2]]])
    keep, rate = how_to["MaxNorm"]().apply(weight, update, scales, {}, options)
    rows = (keep * weight - rate * update).norm(dim=-1)
    torch.testing.assert_close(rows, torch.tensor([[1.0, (weight[0, 1] - 0.1).norm().item()]]))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_rule_of_the_how_to_page_passes_its_check(how_to):
    how_to["test_my_rule"]()
