import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import model_families
import pytest
import torch
from model_families import FAMILIES
from torch import nn

import quintic
from quintic import Flatten, Heads, Matrix, Muon, Rule, Split
from quintic.grouping.explain import explain
from quintic.optim.groups.names import mask_layer_indices
from quintic.tables import shortened


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(8), "attention": nn.MultiheadAttention(8, 2), "up": nn.Linear(8, 32)})
            for _ in range(3)
        )
        self.down = nn.Linear(32, 8, bias=False)
        self.head = nn.Linear(8, 30, bias=False)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


def rows_by_name(explanation):
    return {row.name: row for row in explanation.rows}


# ------------------------------------------------------------------------------------------ it says what really happens


@pytest.mark.parametrize("family", FAMILIES)
def test_it_agrees_with_param_groups(family):
    _, model = model_families.build(family, "small")
    explanation = explain(model, muon={"lr": 0.5}, adamw={"lr": 0.25})
    groups = quintic.param_groups(model, muon={"lr": 0.5}, adamw={"lr": 0.25})
    trained = [row for row in explanation.rows if row.algorithm != "frozen"]
    said = {row.name: (row.algorithm, row.view or Matrix(), row.lr) for row in trained}
    assert said == {name: (g["algorithm"], g["view"], g["lr"]) for g in groups for name in g["param_names"]}
    assert [row.name for row in explanation.rows] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", ["small", "full"])
def test_totals_are_sums_over_the_parameters(family, size):
    _, model = model_families.build(family, size)
    *parts, everything = explain(model).totals
    params = list(model.parameters())
    assert everything.tensors == len(params) == sum(part.tensors for part in parts)
    assert everything.parameters == sum(p.numel() for p in params) == sum(part.parameters for part in parts)
    assert everything.weight_bytes == sum(p.numel() * p.element_size() for p in params)
    assert everything.matrices == sum(part.matrices for part in parts)
    assert everything.state_bytes == sum(part.state_bytes for part in parts)
    assert [part.algorithm for part in parts][:2] == ["muon", "adamw"]
    frozen = sum(p.numel() for p in params if not p.requires_grad)  # Whisper's sinusoids
    assert sum(part.parameters for part in parts[2:]) == frozen


def test_all_entries_of_a_muon_parameter_are_in_its_matrices():
    for family in FAMILIES:
        for row in explain(model_families.build(family, "small")[1]).rows:
            if row.algorithm == "muon":
                assert sum(b * m * n for b, m, n in row.matrices) == row.numel, row.name


@pytest.mark.parametrize("options", [{}, {"normalize": "neuron"}, {"adjust_lr": "match_rms_adamw", "lr": 0.1}])
@pytest.mark.parametrize("master", [None, "fp32", "mantissa", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_bytes_and_rates_are_those_of_the_optimizer(options, master, dtype):
    options = {**options, "master": master}
    model = Model().to(dtype)
    optimizer = Muon(quintic.param_groups(model), **options)
    explanation = rows_by_name(explain(model, **options))
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            row = explanation[name]
            state = optimizer.state[param].values()
            assert row.state_bytes == sum(t.numel() * t.element_size() for t in state)
            assert (row.lr, row.dtype, row.shape) == (group["lr"], dtype, tuple(param.shape))


def test_the_scale_is_that_of_each_kind_of_matrix():
    rules = [
        Rule("*.up.weight", "muon", Split((8, 24))),
        Rule("*.in_proj_weight", "muon", Heads(6)),
        Rule("*.out_proj.weight", "muon", options={"adjust_lr": lambda m, n: 7.0}),
    ]
    rows = rows_by_name(explain(Model(), rules=rules))
    up, fused, out = (
        rows[f"layers.0.{name}"] for name in ("up.weight", "attention.in_proj_weight", "attention.out_proj.weight")
    )
    assert (up.matrices, up.lr_scale) == (((1, 8, 8), (1, 24, 8)), (1.0, 3**0.5))
    assert (fused.matrices, fused.lr_scale) == (((6, 4, 8),), (1.0,))
    assert out.lr_scale == (7.0,)
    assert (rows["tokens.weight"].matrices, rows["tokens.weight"].lr_scale) == ((), ())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_features():
    """As the last clusters of an `AdaptiveLogSoftmaxWithLoss` have, which divides them away."""
    model = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10])
    assert 0 in model.tail[1][1].weight.shape
    for adjust_lr in ("spectral", "match_rms_adamw", "unit_rms", None, lambda m, n: m / n):
        rows = {row.name: row for row in quintic.explain(model, adjust_lr=adjust_lr).rows}
        assert rows["tail.1.1.weight"].numel == 0


def test_nothing_of_the_model_changes():
    model = Model()
    before = {name: (param.data_ptr(), param._version) for name, param in model.named_parameters()}
    explain(model)
    assert {name: (param.data_ptr(), param._version) for name, param in model.named_parameters()} == before


# ---------------------------------------------------------------------------------------------------- it fails loudly


def test_an_undecided_matrix_is_an_error():
    model = Model()
    model.mystery = nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"no rule covers.*mystery of shape \(3, 4\).*quintic\.Rule\('mystery'"):
        explain(model)
    assert rows_by_name(explain(model, rules=[Rule("mystery", "adamw")]))["mystery"].why == "rule 'mystery'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rules": [Rule("*.up.weight", "muon", Heads(5))]}, r"layers\.0\.up\.weight: Heads.*does not divide"),
        ({"rules": [Rule("*.up.bias", "muon")]}, r"layers\.0\.up\.bias: a 1-D parameter"),
        ({"momentum": 2.0}, "momentum=2.0 must be"),
        ({"muon": {"momentun": 0.9}}, "did you mean 'momentum'"),
    ],
)
def test_what_muon_refuses_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        explain(Model(), **arguments)


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="learning_rate"):
        explain(Model(), learning_rate=1)


# -------------------------------------------------------------------------------------------------------- how it reads


def test_the_table():
    model = Model()
    model.tokens.weight.requires_grad_(False)
    text = str(explain(model, rules=[Rule("*.in_proj_weight", "muon", Split((4, 4), groups=3))]))
    assert text == repr(explain(model, rules=[Rule("*.in_proj_weight", "muon", Split((4, 4), groups=3))]))
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines["tokens.weight"][1:3] == ["30x8", "frozen"]
    assert lines["layers.*.attention.in_proj_weight"][1:5] == ["x3", "24x8", "Muon", "Split((4,"]
    assert "Split((4, 4), groups=3)  0.02 x 1.22      0  " in text
    assert lines["layers.*.norm.bias"][1:6] == ["x3", "8", "AdamW", "0.0003", "0"]
    assert lines["head.weight"][-3:] == ["(by", "its", "name)"]
    assert lines["frozen"] == ["frozen", "1", "240", "0", "960", "B", "0", "B"]
    assert lines["all"][1:3] == [str(len(list(model.parameters()))), f"{sum(p.numel() for p in model.parameters()):,}"]


def test_only_what_is_equal_is_folded():
    layers = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False)])
    explanation = explain(layers)
    assert [line.split()[:3] for line in str(explanation).splitlines()[1:3]] == [
        ["*.weight", "x2", "4x4"],
        ["2.weight", "8x4", "Muon"],
    ]
    unfolded = explanation.to_table(fold=False).splitlines()
    assert [line.split()[0] for line in unfolded[1:4]] == ["0.weight", "1.weight", "2.weight"]


def test_state_of_folded_parameters_is_added_up():
    layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(4))
    assert "  16.0 MiB  " in str(explain(layers))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_fits_the_terminal(family):
    explanation = explain(model_families.build(family, "full")[1], normalize="neuron", weight_decay=0.1)
    assert len(str(explanation).splitlines()) < 110
    for width in (80, 100, 120, 160, 250):
        text = explanation.to_table(width=width)
        assert max(map(len, text.splitlines())) <= width
        for row in explanation.rows:  # whatever is wrapped or shortened, nothing is left out
            words = [*re.findall("[a-z]+", mask_layer_indices(row.why)), type(row.view).__name__ if row.view else ""]
            assert [word for word in words if word not in text] == [], (row.name, width)


@pytest.mark.slow
def test_a_terminal_decides_how_wide_the_table_is(monkeypatch):
    explanation = explain(model_families.build("gpt2", "full")[1])
    monkeypatch.setenv("COLUMNS", "80")
    assert str(explanation) == explanation.to_table(width=80) != explanation.to_table(width=160)
    monkeypatch.delenv("COLUMNS")
    code = "import torch, quintic; print(quintic.explain(torch.nn.Linear(3, 3)).to_table() == "
    code += "quintic.explain(torch.nn.Linear(3, 3)).to_table(width=160))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"  # no terminal


class Long(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict({"encoder_of_the_left_side": nn.ModuleDict({"gate_projection": nn.Linear(8, 8)})})


def test_how_it_is_laid_out_in_different_widths():
    explanation = explain(Long(), weight_decay=0.1)
    wide = [
        "parameter                                              shape  optimizer  view      lr x scale  decay  state  "
        "why",
        "model.encoder_of_the_left_side.gate_projection.weight  8x8    Muon       Matrix()  0.02 x 1      0.1  256 B  "
        "linear layer",
    ]
    assert explanation.to_table(width=130).splitlines()[:2] == wide
    assert explanation.to_table(width=100).splitlines()[:2] == [
        "parameter                         shape  optimizer  view      lr x scale  decay  state  why",
        "model.encod..._projection.weight  8x8    Muon       Matrix()  0.02 x 1      0.1  256 B  linear layer",
    ]
    assert explanation.to_table(width=70).splitlines()[:4] == [
        "parameter                                              shape",
        "    optimizer  lr x scale  decay  state  view: why",
        "model.encoder_of_the_left_side.gate_projection.weight  8x8",
        "    Muon       0.02 x 1      0.1  256 B  Matrix(): linear layer",
    ]
    assert explanation.to_table(width=53).splitlines()[:5] == [
        "parameter                                       shape",
        "    optimizer  lr x scale  decay  state",
        "        view: why",
        "model.encoder_of_...ide.gate_projection.weight  8x8",
        "    Muon       0.02 x 1      0.1  256 B",
    ]


@pytest.mark.parametrize("size", [12, 13, 20, 40])
def test_names_are_shortened_in_the_middle(size):
    name = "model.layers.*.self_attn.q_proj.weight"
    short = shortened(name, size)
    if size >= len(name):
        assert short == name
        return
    assert len(short) == size
    ends = [(name[:head], name[len(name) - (size - 3 - head) :]) for head in range(1, (size - 3) // 2)]
    assert short in [f"{head}...{tail}" for head, tail in ends]  # more of the end than of the beginning


def test_the_optimizer_and_its_decay_are_named():
    model = Model()
    model.head.weight.requires_grad_(False)
    rules = [Rule("*.up.weight", "muon", options={"normalize": None, "weight_decay": 0.5})]
    explanation = explain(model, rules=rules, normalize="neuron", weight_decay=0.1, adamw_weight_decay=0.01)
    rows = rows_by_name(explanation)
    said = {name: (rows[name].optimizer, rows[name].weight_decay) for name in rows}
    assert said["layers.0.up.weight"] == ("Muon", 0.5)
    assert said["layers.0.attention.in_proj_weight"] == ("NorMuon", 0.1)
    assert said["tokens.weight"] == said["layers.1.norm.bias"] == ("AdamW", 0.01)
    assert said["head.weight"] == ("frozen", 0.0)
    optimizer = Muon(
        quintic.param_groups(model, rules=rules), normalize="neuron", weight_decay=0.1, adamw_weight_decay=0.01
    )
    for group in optimizer.param_groups:
        for name in group["param_names"]:
            assert said[name][1] == group["weight_decay"]
    lines = str(explanation).splitlines()
    assert lines[0].split() == ["parameter", "shape", "optimizer", "view", "lr", "x", "scale", "decay", "state", "why"]
    cells = {line.split()[0]: line.split() for line in lines if line}
    assert cells["layers.*.up.weight"][3:9] == ["Muon", "Matrix()", "0.02", "x", "2", "0.5"]
    assert cells["tokens.weight"][2:5] == ["AdamW", "0.0003", "0.01"]
    assert cells["head.weight"][2:5] == ["frozen", "0", "B"]
    assert "Muon, NorMuon" in lines[-4]
    assert "rule" not in lines[0]


def test_layers_that_decay_differently_are_not_folded():
    rules = [Rule("layers.1.up.weight", "muon", options={"weight_decay": 0.5})]
    lines = str(explain(Model(), rules=rules)).splitlines()
    assert [line.split()[:2] for line in lines if ".up.weight" in line] == [
        ["layers.*.up.weight", "x2"],
        ["layers.1.up.weight", "32x8"],
    ]


def test_the_table_in_the_documentation(capsys):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "parameter-groups.md").read_text("utf-8")
    code, rest = page.partition("```python\n")[2].split("```", 1)
    exec(compile(code, "<page>", "exec"), {})
    shown = rest.partition("```text\n")[2].partition("```")[0]
    assert shown == capsys.readouterr().out


def test_layers_that_look_fused_are_counted():
    text = str(explain(nn.ModuleDict({"qkv_proj": nn.Linear(8, 24), "other": nn.Linear(8, 24)})))
    assert "1 parameter may be several matrices: example= decides it by a forward pass, quintic.Rule by name" in text
    assert "may be" not in str(explain(Model()))


def test_convolutions_as_matrices():
    model = nn.ModuleDict({"stem": nn.Conv2d(3, 8, 2)})
    assert rows_by_name(explain(model))["stem.weight"].why == "convolution"
    row = rows_by_name(explain(model, rules=[Rule("stem.weight", "muon", Flatten())]))["stem.weight"]
    assert row.matrices == ((1, 8, 12),)


# -------------------------------------------------------------------------------------------------------- how it scales


@pytest.mark.slow
def test_a_model_of_70_billion_parameters_takes_no_time_and_no_memory():
    # In a process of its own: what counts is the peak memory of the whole process, before and after.
    model_families.transformers_class("LlamaForCausalLM")
    code = f"""
        import resource, sys, time
        sys.path.insert(0, {str(model_families.__file__).rpartition("/")[0]!r})
        import torch, model_families, quintic
        _, model = model_families.build("llama", "full")
        quintic.explain(torch.nn.Linear(2, 2))
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        text = str(quintic.explain(model, normalize="neuron"))
        seconds = time.perf_counter() - start
        print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        print(text)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    first, *table = result.stdout.splitlines()
    seconds, kilobytes = map(float, first.split())
    assert seconds < 20
    assert kilobytes < 100_000
    assert len(table) < 24
    assert "70,553,706,496" in result.stdout
    assert (
        "model.layers.*.mlp.gate_proj.weight             x80  28672x8192   NorMuon    Matrix()  0.02 x 1.87      0"
        in result.stdout
    )


@pytest.mark.slow
def test_many_modules_take_time_in_proportion():
    def seconds(count):
        with torch.device("meta"):
            model = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 8), "qkv": nn.Linear(8, 24)}) for _ in range(count))
        start = time.perf_counter()
        str(explain(model))
        return time.perf_counter() - start

    seconds(10)
    assert seconds(2000) < 40 * max(seconds(200), 0.02)
