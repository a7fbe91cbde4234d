"""`--recipe nanochat` and the model against the constants of nanochat that docs/reference/nanochat.md lists.

Where NANOCHAT names a checkout of https://github.com/karpathy/nanochat, the list is compared with its code, too.
"""

import ast
import functools
import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from quintic.commands.presets import preset, with_recipe
from quintic.model.gpt import GPT, GPTConfig
from quintic.model.layers import GATE_CHANNELS, QK_GAIN
from quintic.model.sizes import SMEAR_CHANNELS
from quintic.optim.polar.coefficients import polar_express_coefficients
from quintic.train.recipe import build_optimizer, model_config
from quintic.train.saved_config import with_options

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "nanochat.md"


class Constant(NamedTuple):
    """A line of the page's second table: a file of nanochat, an option or function there, and its numbers."""

    file: str
    place: str
    values: tuple[float, ...]
    ours: str


def constants() -> list[Constant]:
    """Return the lines of the table."""
    lines = PAGE.read_text("utf-8").partition("## Constants")[2].splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return [Constant(file, place, tuple(map(float, values.split(", "))), ours) for file, place, values, ours in rows]


CONSTANTS = constants()


def test_the_table_is_read():
    assert len(CONSTANTS) > 20
    assert {constant.file for constant in CONSTANTS} == {"base_train.py", "gpt.py", "optim.py"}


# ------------------------------------------------------------------------------------------------ ours


@pytest.mark.parametrize("constant", [c for c in CONSTANTS if c.ours.startswith("--")], ids=lambda c: c.place)
def test_options_of_the_recipe_have_the_constants(constant):
    config = with_recipe(preset("gpu"), "nanochat")
    sections = [config.model, config.optim, config.schedule]
    names = [name.removeprefix("--").replace("-", "_") for name in constant.ours.replace("`", "").split(", ")]
    found = [getattr(section, name) for name in names for section in sections if hasattr(section, name)]
    assert found == list(constant.values)


@functools.cache
def groups() -> dict[str, dict]:
    """Return the groups of a run of depth 12 with nanochat's batch, at which its rates are given."""
    config = with_options(with_recipe(preset("gpu"), "nanochat"), batch_tokens=2**19)
    sizes = GPTConfig.from_depth(12, vocab_size=32_768, seq_len=2048, bos_id=0, head_dim=128)
    with torch.device("meta"):
        model = GPT(sizes)
    return {group["name"]: group for group in build_optimizer(model, config, on_gpu=True).param_groups}


@pytest.mark.parametrize("constant", [c for c in CONSTANTS if c.ours.startswith("group ")], ids=lambda c: c.ours)
def test_groups_have_the_constants(constant):
    names, _, options = constant.ours.removeprefix("group ").partition(": ")
    for name in names.split(" and "):
        group, values = groups()[name], iter(constant.values)
        for option in options.split(", "):
            wanted = tuple(next(values) for _ in range(2)) if option == "betas" else next(values)
            assert group[option] == pytest.approx(wanted), (name, option)
        assert not list(values)


def test_the_model_has_the_constants():
    by_place = {constant.ours: constant.values for constant in CONSTANTS if constant.ours.startswith("model")}
    config = with_options(with_recipe(preset("cpu"), "nanochat"), seq_len=2048, window_pattern="SL", rows=2)
    sizes = model_config(config, vocab_size=4096, bos_id=0)
    model = GPT(sizes)
    model.init_weights(0)
    block = model.blocks[1]
    bound = 3**0.5 * sizes.width**-0.5
    embedding, head, mlp, first, fall, x0, x0_fall, backout, gate = by_place["model: initial values"]
    assert model.embedding.weight.std().item() == pytest.approx(embedding, rel=0.01)
    assert model.head.weight.std().item() == pytest.approx(head, rel=0.01)
    assert block.attention.query.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert block.mlp.up.weight.abs().max().item() == pytest.approx(mlp * bound, rel=0.01)
    assert model.residual_scales[[0, -1]].tolist() == pytest.approx([first, first - fall])
    assert model.x0_scales[[0, -1]].tolist() == pytest.approx([x0, x0 - x0_fall])
    assert model.backout_scale.item() == pytest.approx(backout)
    assert 0.5 * gate < block.attention.value_gate.weight.max().item() <= gate
    assert by_place["model: softcap, smear"] == (sizes.softcap, SMEAR_CHANNELS)
    assert by_place["model: gates"] == (GATE_CHANNELS,)
    assert by_place["model: gates, queries and keys"] == (block.attention.value_gate_gain, QK_GAIN)
    assert by_place["model: rotary base"] == (sizes.rotary_base,)
    part, multiple = by_place["model: short window"]
    assert sizes.windows[0] == multiple * -(-2048 // part // multiple)


def test_the_polar_step_has_the_constants():
    values = next(constant.values for constant in CONSTANTS if constant.place == "polar_express_coeffs")
    assert [x for triple in polar_express_coefficients(5) for x in triple] == pytest.approx(values, rel=1e-9)


# ---------------------------------------------------------------------------------------------- theirs


@pytest.mark.skipif("NANOCHAT" not in os.environ, reason="NANOCHAT names no checkout of nanochat")
@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: f"{constant.file} {constant.place}")
def test_the_table_agrees_with_a_checkout(constant):
    folder = "scripts" if constant.file == "base_train.py" else "nanochat"
    tree = ast.parse((Path(os.environ["NANOCHAT"]) / folder / constant.file).read_text("utf-8"))
    if constant.place.startswith("--"):
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
        call = next(call for call in calls if getattr(call.args[0], "value", None) == constant.place)
        default = next(keyword.value for keyword in call.keywords if keyword.arg == "default")
        assert (ast.literal_eval(default),) == constant.values
        return
    name, _, params = constant.place.partition(" ")
    found: list[ast.AST] = [tree]
    for part in name.split("."):
        found = [node for node in ast.walk(found[0]) if part in (getattr(node, "name", ""), _target(node))]
        assert found, f"{constant.file} has no {name}"
    if params:  # the record of a group of parameters
        records = [node for node in ast.walk(found[0]) if isinstance(node, ast.Call)]
        found = [
            node for node in records if any(k.arg == "params" and ast.unparse(k.value) == params for k in node.keywords)
        ]
    numbers = {
        node.value for node in ast.walk(found[0]) if isinstance(node, ast.Constant) and not isinstance(node.value, str)
    }
    assert {abs(value) for value in constant.values} <= numbers  # a minus is an operator


def _target(node: ast.AST) -> str:
    """Return the name that an assignment gives a value, "" for other nodes."""
    return getattr(node.targets[0], "id", "") if isinstance(node, ast.Assign) else ""
