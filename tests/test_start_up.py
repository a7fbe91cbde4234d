"""The times of imports: the command line answers without PyTorch, and public names are imported when they are used."""

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import quintic
from quintic.cli import main

# PyTorch cannot be imported: robust, where a limit of time is not.
BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "triton", "pyarrow"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
"""

ANSWER = """
import contextlib, io, json
from quintic.cli import main
answers = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(arguments)
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""

COMMANDS = ["train", "compare", "prepare", "sample", "eval", "report", "plan", "export"]


def without_torch(*commands: list[str]) -> list[tuple[int, str, str]]:
    """Run commands in one process that cannot import PyTorch; return (exit code, output, errors) of each."""
    code = [sys.executable, "-c", BLOCK + ANSWER, json.dumps(commands)]
    done = subprocess.run(code, capture_output=True, text=True, check=True, timeout=100)
    return [tuple(answer) for answer in json.loads(done.stdout)]


@pytest.mark.usefixtures("elsewhere")
def test_help_of_every_command_needs_no_torch() -> None:
    asked = [[], ["--help"], *([command, "--help"] for command in COMMANDS), ["plan", "--model", "gpt2", "--help"]]
    asked += [["train", "--preset", "gpu", "--help"], ["train", "--resume", "--help"], ["--version"]]
    answers = without_torch(*asked)
    assert [code for code, _, _ in answers] == [2] + [0] * (len(asked) - 1)
    for arguments, (_, output, errors) in zip(asked, answers, strict=True):
        assert errors == "", arguments
        assert len(output.splitlines()) > 10 or arguments == ["--version"], arguments
    of = {" ".join(arguments): output for arguments, (_, output, _) in zip(asked, answers, strict=True)}
    assert "The defaults shown are those of --preset cpu." in of["train --help"]
    assert "The defaults shown are those of --preset gpu." in of["train --preset gpu --help"]
    assert "--mesh {None}|STR" in of["plan --model gpt2 --help"]
    assert "--mesh" not in of["plan --help"]


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_the_terminal(
    command: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    main([*command.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    longest = max(lines, key=len)
    assert len(longest) <= (columns if command else 100), longest
    assert any(line.startswith(f"usage: quintic {command}") for line in lines)


@pytest.mark.usefixtures("elsewhere")
def test_mistakes_are_told_without_torch() -> None:
    asked = [line.split() for line in MISTAKES]
    for (line, message), (code, output, errors) in zip(MISTAKES.items(), without_torch(*asked), strict=True):
        assert (code, output) == (2, ""), line
        assert errors.startswith(f"quintic: error: {message}"), line
        assert errors.count("\n") == 1, line


MISTAKES = {
    "nonsense": "unknown command 'nonsense': choose one of train, compare, ",
    "trian": "unknown command 'trian': did you mean 'train'?",
    "train --nonsense": "unknown option --nonsense: quintic train --help lists the options",
    "train --depht 3": "unknown option --depht: did you mean --depth?",
    "train --depth three": "--depth three: give a whole number",
    "train --resume": "runs holds no run yet; start one with: quintic train",
    "train --config x.json": "x.json: no such file; give the config.json of a run",
    "plan --mesh 8": "--mesh needs --model NAME",
    "plan --model gpt2 --dtype int8": "--dtype int8: give bfloat16 or float32",
    "prepare --val-frac 2": "--val-frac 2.0: must lie strictly between 0 and 1",
    "sample --tokens 0": "--tokens 0: must be at least 1",
    "eval --core-items 0": "--core-items 0: must be at least 1",
    "report --rum x": "unknown option --rum: did you mean --run?",
    "export --to onnx": "--to onnx: give hf",
}


@pytest.mark.usefixtures("elsewhere")
def test_wrong_options_are_told_before_a_gpu_is_looked_for(tmp_path: Path) -> None:
    # The defaults depend on a GPU, which PyTorch looks for: it must not be imported for what is wrong without them.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')")
    wrong = {
        "--nonsense": "unknown option --nonsense: ",
        "--depht 3": "unknown option --depht: did you mean --depth?",
        "--depth three": "--depth three: give a whole number",
    }
    asked = [(command, options) for command in ("train", "compare", "plan") for options in wrong]
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})" + ANSWER
    arguments = json.dumps([[command, *options.split()] for command, options in asked])
    done = subprocess.run(
        [sys.executable, "-c", code, arguments], capture_output=True, text=True, check=True, timeout=100
    )
    for (command, options), (exit_code, _, errors) in zip(asked, json.loads(done.stdout), strict=True):
        assert exit_code == 2, command
        assert errors.startswith(f"quintic: error: {wrong[options]}"), (command, errors)


@pytest.mark.slow
def test_a_report_needs_no_torch(trained: Path, tmp_path: Path) -> None:
    code = "import sys\nfrom quintic.cli import main\nprint(main(sys.argv[1:]), 'torch' in sys.modules)"
    options = ["--runs-dir", str(trained.parent), "--run", trained.name, "--out", str(tmp_path / "report.html")]
    command = [sys.executable, "-c", code, "report", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.splitlines()[-1] == "0 False"


def test_the_module_answers_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "quintic", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"quintic", "quintic.cli"} <= imported
    assert not {"torch", "numpy", "tyro", "rich"} & imported


def test_help_looks_for_the_driver_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quintic.commands import presets

    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(presets, "_GPU_DRIVERS", (str(tmp_path),))
    for data, preset in ((None, "gpu-small"), ("python", "gpu-small"), ("texts", "gpu"), ("hf:owner/name", "gpu")):
        assert presets.suitable_preset(None, data, guess=True) == preset
    monkeypatch.setattr(presets, "_GPU_DRIVERS", (str(tmp_path / "missing"),))
    assert presets.suitable_preset(None, "texts", guess=True) == "cpu"
    assert "torch" not in sys.modules
    assert presets.suitable_preset("cpu", None, guess=False) == "cpu"


# -- public names -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_import_quintic_imports_nothing_until_a_name_is_used() -> None:
    code = "import quintic, sys; print('torch' in sys.modules); quintic.Muon; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.split() == ["False", "True"]


def test_type_checkers_and_python_see_the_same_names() -> None:
    tree = ast.parse(Path(quintic.__file__).read_text("utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    typed = {alias.name: node.module for node in block.body for alias in node.names}
    assert typed == {name: f"quintic.{module}" for name, module in quintic._MODULES.items()}
    assert {*typed, "__version__"} == set(quintic.__all__)
    for name, module in typed.items():
        assert getattr(quintic, name) is getattr(sys.modules[module], name)
        assert vars(quintic)[name] is getattr(quintic, name)  # kept: the second use costs nothing


def test_names_behave_as_if_they_were_there() -> None:
    assert set(quintic.__all__) <= set(dir(quintic))
    namespace: dict[str, object] = {}
    exec("from quintic import *", namespace)
    assert set(quintic.__all__) <= namespace.keys()
    assert pickle.loads(pickle.dumps(quintic.Heads(4))) == quintic.Heads(4)
    assert pickle.loads(pickle.dumps(quintic.Muon)) is quintic.Muon
    assert not hasattr(quintic, "Moun")
    with pytest.raises(AttributeError, match="module 'quintic' has no attribute 'Moun'"):
        _ = quintic.Moun
    with pytest.raises(ImportError, match="cannot import name 'Moun'"):
        exec("from quintic import Moun")


@pytest.mark.slow
def test_parts_of_the_library_are_attributes() -> None:
    code = "import quintic; print(quintic.kernels.active('cpu')['attention'], quintic.errors.ConfigError.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.split()[1] == "ConfigError"
