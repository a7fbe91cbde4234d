"""`quintic plan --model`: which models there are, what is printed, and mistakes."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import quintic
from quintic.cli import main
from quintic.errors import DataError
from quintic.optim.state.placement import state_bytes
from quintic.simulate.planned_models import KNOWN_MODELS, planned_model

# As their authors state them.
PARAMETERS = {
    "gpt2": 124_439_808,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-30b-a3b": 30_532_122_624,
}


def llama(layers, width, heads, hidden):
    return {
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "model_type": "llama",
    }


CONFIGURATIONS = {
    "gpt2": {"model_type": "gpt2"},
    "llama-3-8b": llama(32, 4096, 32, 14336),
    "llama-3-70b": llama(80, 8192, 64, 28672),
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "vocab_size": 151936,
    },
}


def shapes(model):
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_described_model_has_the_parameters_of_the_real_one(name, tmp_path):
    described = planned_model(name, torch.bfloat16)
    assert sum(param.numel() for param in described.parameters()) == PARAMETERS[name]
    assert {(param.dtype, param.device.type) for param in described.parameters()} == {(torch.bfloat16, "meta")}
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) < 5 and "a3b" in name:
        pytest.skip("experts are stacked since transformers 5")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGURATIONS[name]))
    for source in (path, tmp_path):
        real = planned_model(str(source), torch.float32)
        assert shapes(described) == shapes(real)
        assert {(param.dtype, param.device.type) for param in real.parameters()} == {(torch.float32, "meta")}


def numbers(text):
    return [float(number.replace(",", "")) for number in re.findall(r"[\d,.]*\d", text)]


def test_plan_prints_a_table_and_totals(capsys):
    assert main(["plan", "--model", "gpt2", "--mesh", "4x2", "--layout", "fsdp,tp", "--normalize=neuron"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gpt2: 124,439,808 parameters of bfloat16, matrices by NorMuon"
    assert lines[1] == "8 ranks as 4x2 (fsdp, tp); the most / the mean of the ranks"
    rows = {" ".join(line.split()[:5]): line for line in lines[4:8]}
    assert "polar_express fp16 48 x 768x768" in rows
    assert "gram fp16 12 x 3072x768" in rows
    totals = {line[:18].strip(): line[18:] for line in lines[9:]}
    assert list(totals) == ["operations", "sent", "state", "temporary memory"]
    most, mean, balance = numbers(totals["operations"])
    assert balance == pytest.approx(most / mean, abs=0.01)


def test_plan_counts_the_state_of_a_named_rule(capsys):
    printed = {}
    for rule in ("muon", "two_rate", "muown"):
        assert main(["plan", "--model", "gpt2", "--mesh", "2", "--layout", "fsdp", "--update-rule", rule]) == 0
        printed[rule] = capsys.readouterr().out.splitlines()
    assert printed["two_rate"][0].endswith(", matrices by two-rate momentum")
    states = {rule: numbers(next(x for x in lines if x.startswith("state")))[1] for rule, lines in printed.items()}
    # 48 + 36 M entries of the matrices, in float32 on two ranks, for the slow average.
    assert states["two_rate"] - states["muon"] == pytest.approx(12 * 12 * 768**2 * 4 / 2 / 2**20, rel=1e-3)
    assert states["muon"] < states["muown"] < states["two_rate"]


def test_a_model_of_a_hub_that_does_not_answer(capsys, monkeypatch):
    asked = []

    def refuse(repo, name, **where):
        asked.append((repo, name, where["repo_type"]))
        raise DataError("no answer")

    monkeypatch.setattr("quintic.commands.plan.download", refuse)
    assert main(["plan", "--model", "owner/name"]) == 2
    assert asked == [("owner/name", "config.json", "model")]
    assert capsys.readouterr().err == "quintic: error: no answer\n"


def test_plan_tells_what_crosses_between_nodes(capsys):
    printed = {}
    for replicas in ("divide", "repeat", "auto"):
        arguments = ["--mesh=8x2", "--layout=replicate,fsdp", "--node-size=2", f"--replicas={replicas}"]
        assert main(["plan", "--model", "gpt2", *arguments]) == 0
        printed[replicas] = capsys.readouterr().out
    assert "sent between nodes" in printed["divide"]
    assert "sent between nodes" not in printed["repeat"]
    assert "copies on 16 ranks: those of each copy divide the work" in printed["auto"].splitlines()[-1]


def test_plan_counts_bfloat16_state(capsys):
    found = []
    for more in ([], ["--state-dtype", "bf16"]):
        assert main(["plan", "--model", "gpt2", "--mesh", "2", "--layout", "fsdp", *more]) == 0
        [state] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("state")]
        found.append(numbers(state)[0])
    assert found[1] == pytest.approx(found[0] / 2, rel=0.01)


def rows_of(text):
    """The rows of a table of memory: setting -> column -> text."""
    lines = text.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("setting  "))
    names = re.split(r" {2,}", lines[head])
    rows = {}
    for line in itertools.takewhile(bool, lines[head + 1 :]):
        # Right-aligned columns end where their names end; the first two are left-aligned, and the second may be empty.
        start = lines[head].index("costs")
        cells = [line[:start].strip(), line[start:].split("  ")[0].strip(), *line.split()[-len(names[2:]) :]]
        rows[cells[0]] = dict(zip(names, cells, strict=True))
    return rows


def test_plan_names_the_cheapest_settings_that_fit(capsys):
    assert main(["plan", "--model", "gpt2", "--memory", "1GiB", "--mesh", "2"]) == 0
    printed = capsys.readouterr().out
    rows = rows_of(printed)
    assert list(rows) == [
        'bfloat16 weights, master="fp32"',
        '+ master="mantissa"',
        "+ release_gradients=True",
        '+ state_dtype="bf16"',
        "+ fsdp on 2 ranks",
        "+ max_workspace_bytes=2**28",
        '+ state_dtype="int8"',
        '+ master="8bit"',
        "+ offload=True",
    ]
    costs = ["", "nothing", "graphs", "loss", "messages", "time", "loss", "loss", "copies"]
    assert [row["costs"] for row in rows.values()] == costs
    assert [row["fits"] for row in rows.values()] == ["no"] * 4 + ["yes"] * 5
    for row in rows.values():
        parts = [float(row[name]) for name in ("weights", "gradients", "state", "step")]
        assert float(row["sum"]) == pytest.approx(sum(parts), abs=0.03)
        assert float(row["bytes a weight"]) == pytest.approx(sum(parts[:3]) * 2**30 / PARAMETERS["gpt2"], abs=0.15)
    # bfloat16 state, which costs some loss, is not needed on two ranks.
    assert printed.splitlines()[-2:] == [
        "    groups = quintic.param_groups(model)  # bfloat16 weights, fsdp on 2 ranks",
        '    optimizer = quintic.Muon(groups, master="mantissa")',
    ]


@pytest.mark.parametrize(
    ("memory", "more"), [("1.3GiB", []), ("600GiB", ["--update-rule=normuon"]), ("1.3GiB", ["--state-dtype=bf16"])]
)
def test_the_printed_python_makes_an_optimizer_of_the_printed_size(memory, more, capsys):
    assert main(["plan", "--model=gpt2", f"--memory={memory}", *more]) == 0
    *_, summary, first, second = capsys.readouterr().out.splitlines()
    model = planned_model("gpt2", torch.bfloat16)
    names = {"model": model, "quintic": quintic}
    exec(f"{first.strip()}\n{second.strip()}", names)
    assert 'master="mantissa"' in second
    groups = names["optimizer"]._plans.current_groups()
    state = sum(state_bytes(param, group) for group in groups for param in group.params)
    kept = 2 * sum(param.nbytes for param in model.parameters()) + state
    left = re.search(r"activations may take ([\d.]+) GiB", summary)[1]
    assert float(left) == pytest.approx(float(memory.removesuffix("GiB")) - kept / 2**30, abs=0.006)


def test_without_a_fit_plan_says_how_many_gpus_would(capsys):
    found = {}
    for ranks in (2, 4):
        assert main(["plan", "--model", "gpt2", "--memory", "480MiB", "--mesh", str(ranks)]) == 0
        found[ranks] = capsys.readouterr().out
    last = found[2].splitlines()[-1]
    size = re.fullmatch(
        r"None of these fits; 4 GPUs would, with all of these settings and fsdp: (0\.\d\d) GiB each\.", last
    )[1]
    assert "Cheapest that fits" in found[4]
    *_, last_row = rows_of(found[4]).values()
    # What saves nothing on two ranks may save a little on four.
    assert float(last_row["sum"]) == pytest.approx(float(size), abs=0.015)


def test_a_memory_that_no_number_of_gpus_has_enough_of(capsys):
    assert main(["plan", "--model", "gpt2", "--memory", "2MiB"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "None of these fits, nor would they with fsdp on 1,024 GPUs."


def test_help_names_the_options_of_both(capsys):
    assert main(["plan", "--model", "gpt2", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(option in printed for option in ("--model", "--mesh", "--layout", "--normalize"))
    assert main(["plan", "--help"]) == 0
    assert "quintic plan --model NAME --help" in " ".join(capsys.readouterr().out.split())


MISTAKES = [
    (["--mesh", "8"], "--mesh needs --model NAME"),
    (["--layout=tp"], "--layout needs --model NAME"),
    (["--model=gpt2", "--memory", "80G"], "--memory 80G: give a number with a unit, such as 80GiB, 80GB or 24000MiB"),
    (["--model=gpt2", "--memory=80"], "--memory 80: 80 bytes are less than a MiB; give the memory of a device"),
    (["--model=gpt2", "--memory"], "--memory needs a value"),
    (["--model=gpt3", "--memory=80GB"], "--model gpt3: unknown; did you mean gpt2? choose gpt2, "),
    (["--model=gpt2", "--memory=80GB", "--mesh=8x4"], "--layout fsdp: 1 names for the 2 dimensions of mesh 8x4"),
    (["--model=gpt2", "--memory=80GB", "--mesh=0"], "--mesh 0: give at least one rank per dimension"),
    (["--model=gpt2", "--memory=80GB", "--mesh=4", "--layout=ep"], "--layout ep: ep shards nothing"),
    (["--memory", "nothing"], "--memory nothing: give a number with a unit"),
    (["--memory"], "--memory needs a value"),
    (["--model=gpt2", "--update-rule=mine"], "--update-rule mine: give muon or normuon or adamuon or "),
    (["--model=gpt2", "--normalize=neuron", "--update-rule=muown"], "--normalize neuron: is short "),
    (["--model"], "--model needs a value"),
    (["--model", "llama-3-70"], "--model llama-3-70: unknown; did you mean llama-3-70b? choose gpt2, "),
    (["--model", "nothing/here.json"], "--model nothing/here.json: unknown; choose gpt2, "),
    (["--model", "gpt2", "--mesh", "8x"], "--mesh 8x: give the number of ranks per dimension, such as 8 or 8x4"),
    (["--model", "gpt2", "--mesh", "0"], "--mesh 0: give at least one rank per dimension"),
    (["--model", "gpt2", "--mesh", "9" * 5000], "--mesh 999"),
    (["--model", "gpt2", "--mesh", "8x4"], "--layout fsdp: 1 names for the 2 dimensions of mesh 8x4"),
    (["--model", "gpt2", "--layout", "zero"], "--layout zero: 'zero' is unknown; choose from dp, replicate, fsdp"),
    (["--model", "gpt2", "--layout", "ep"], "--layout ep: ep shards nothing"),
    (["--model", "gpt2", "--node-size", "0"], "--node-size 0: give at least one rank per node"),
    (["--model", "gpt2", "--dtype", "fp8"], "--dtype fp8: give bfloat16 or float32"),
    (["--model", "gpt2", "--depth", "3"], "unknown option --depth"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda value: " ".join(value)[:40])
def test_a_mistake_is_one_line_that_names_the_option(arguments, message, capsys):
    assert main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"quintic: error: {message}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "has no model_type; give the config.json of a transformers model"),
        ('{"model_type": "quintessence"}', "transformers cannot read its configuration"),
        (None, "cannot be read as JSON"),
        (
            '{"model_type": "quintic", "auto_map": {"AutoConfig": "modeling.Config", "AutoModel": "modeling.Model"}}',
            "needs code that comes with the model, which is not run",
        ),
    ],
)
def test_a_configuration_that_is_none_is_an_error(content, message, tmp_path, capsys):
    pytest.importorskip("transformers")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main(["plan", "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"quintic: error: --model {tmp_path}: ")
    assert message in error


def test_code_that_comes_with_a_model_is_not_run_nor_asked_about(tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers")
    answered = []
    monkeypatch.setattr("builtins.input", lambda *prompt: answered.append(prompt) or "y")
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')\n", encoding="utf-8")
    classes = {name: f"own.{name}" for name in ("AutoConfig", "AutoModelForCausalLM")}
    config = {"model_type": "quintic", "auto_map": classes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert main(["plan", "--model", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert (answered, printed.out) == ([], "")
    assert printed.err.startswith(f"quintic: error: --model {tmp_path}: needs code that comes with the model, which is")
    assert printed.err.endswith("`quintic export`: quintic plan --config runs/NAME/config.json\n")


def test_without_transformers_the_error_says_how_to_install_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main(["plan", "--model", str(tmp_path)]) == 2
    assert "pip install transformers" in capsys.readouterr().err
    assert main(["plan", "--model", "gpt2"]) == 0


def test_a_parameter_that_nobody_decided_about_is_an_error(tmp_path, capsys, monkeypatch):
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.strange = torch.nn.Parameter(torch.empty(3, 4, device="meta"))

    monkeypatch.setattr("quintic.simulate.table.planned_model", lambda name, dtype: Odd())
    assert main(["plan", "--model", "odd"]) == 2
    assert re.match(r"quintic: error: --model odd: no rule covers .* strange", capsys.readouterr().err)


@pytest.mark.parametrize("memory", [[], ["--memory", "80GiB"]], ids=["mesh", "memory"])
@pytest.mark.parametrize("installed", [True, False])
def test_a_plan_without_triton_says_so(memory, installed, monkeypatch, capsys):
    monkeypatch.setattr("quintic.simulate.table.triton_is_installed", lambda: installed)
    assert main(["plan", "--model", "gpt2", *memory]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "Triton is not installed" in line]
    assert [line.split(", since ")[0].split()[-3:] for line in notes] == [["of", "plain", "PyTorch"]] * (not installed)


def test_the_tables_in_the_guide_are_what_is_printed(capsys):
    pytest.importorskip("triton")  # how much fits into a bucket depends on the kernels
    page = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "plan.md").read_text("utf-8")
    blocks = re.findall(r"```text\n\$ quintic (plan [^\n]*)\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for command, table in blocks:
        assert main(command.split()) == 0
        printed = capsys.readouterr().out
        if "--memory" not in command:
            assert without_memory(table) == without_memory(printed)
            continue
        # The step's memory depends on the kernels here.
        depends = {"step", "sum"}
        shown, found = (
            {name: {key: row[key] for key in row.keys() - depends} for name, row in rows_of(text).items()}
            for text in (table, printed)
        )
        assert shown == found
        assert table.splitlines()[-2:] == printed.splitlines()[-2:]


def without_memory(table):
    """The words of a table without what it says of memory and time."""
    lines = [line.split() for line in table.splitlines() if not line.startswith(("temporary memory", "one step"))]
    return [line[:-3] if line[-2:-1] == ["/"] else line for line in lines]
