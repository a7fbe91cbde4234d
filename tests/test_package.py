"""The package as it is installed: a wheel and an sdist, beside PyTorch and nothing else.

Built with hatchling and installed with pip, neither of which needs the network. The fresh environment sees PyTorch and
what PyTorch needs through links, and nothing else that is installed here.
"""

import email
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import quintic

PACKAGE = Path(quintic.__file__).parent
ROOT = PACKAGE.parent

# What must be in the package besides modules: read with importlib.resources, or by type checkers.
TEMPLATES = ("comparison.html", "macros.html", "page.html", "run.html")
DATA = {"py.typed", *(f"report/templates/{name}" for name in TEMPLATES)}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="needs a checkout"),
    pytest.mark.skipif(os.name == "nt", reason="needs symbolic links"),
]


class Built(NamedTuple):
    wheel: Path
    sdist: Path
    unpacked: Path
    """The sdist, unpacked."""
    again: Path
    """The wheel that was built from it."""


def installed(name):
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def needs(name, extra="dev"):
    # By its metadata: setuptools has a finder of its own, which warns when it is asked for pip in a process with
    # distutils.
    if installed(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'quintic[{extra}]'")


def run(*command, cwd=None, check=True):
    """Run a command without anything from this process's environment that finds modules."""
    settings = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    settings |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONWARNINGS": ""}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def tool(module, *arguments, cwd):
    """Run a module that is installed here, wherever this process has it from."""
    place = installed(module).locate_file("")
    code = f"import runpy, sys; sys.path.append({str(place)!r}); sys.argv[0] = {module!r}; "
    return run(sys.executable, "-c", f"{code}runpy.run_module({module!r}, run_name='__main__')", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    needs("hatchling")
    folder = tmp_path_factory.mktemp("built")
    tool("hatchling", "build", "-d", folder, "-t", "sdist", "-t", "wheel", cwd=ROOT)
    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    tool("hatchling", "build", "-d", folder / "again", "-t", "wheel", cwd=unpacked)
    [again] = (folder / "again").glob("*.whl")
    return Built(wheel, sdist, unpacked, again)


def requirements(name, found):
    """Collect the distributions that one needs, itself included, by their normalised names."""
    distribution = installed(name)
    if distribution is None:
        return found  # of another platform
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key not in found:
        found[key] = distribution
        for requirement in distribution.requires or []:
            if "extra ==" not in requirement:
                requirements(re.match(r"[\w.-]+", requirement)[0], found)
    return found


def environment(folder, wheel):
    """Return the Python of a new environment with the wheel, and with PyTorch alone."""
    needs("pip")
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for distribution in requirements("torch", {}).values():
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            source = Path(distribution.locate_file(top))
            if source.suffix != ".pth" and not (packages / top).exists():
                (packages / top).symlink_to(source)
    executable = folder / "bin" / "python"
    tool("pip", "--python", executable, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return executable


@pytest.fixture(scope="module")
def python(built, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("environment"), built.wheel)


def contents(wheel):
    """{name: bytes} of the package's own files."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.startswith("quintic/")}


def test_wheel_and_sdist_hold_the_whole_package_and_no_more(built):
    expected = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {f"quintic/{name}" for name in DATA} <= expected.keys()
    assert contents(built.wheel) == expected
    assert contents(built.again) == expected
    tops = {path.name for path in built.unpacked.iterdir()}
    assert {"LICENSE", "README.md", "pyproject.toml", "tests", "docs"} <= tops
    assert not tops & {".venv", ".git", "runs", "data", "dist", "build", ".pytest_cache", ".mypy_cache"}


def test_metadata_says_what_pyproject_says(built):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    with zipfile.ZipFile(built.wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == project["version"] == quintic.__version__
    assert f"\nversion: {quintic.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    plain = [need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need]
    assert plain == project["dependencies"] == ["torch>=2.8"]
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata["License-Expression"] == "Apache-2.0"


STEP = """
import importlib.resources, importlib.util, json, sys
missing = [name for name in ("numpy", "rich", "tyro", "tokenizers", "safetensors") if importlib.util.find_spec(name)]
import torch, quintic
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(5, 8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02, normalize="neuron", weight_decay=0.1)
before = [param.detach().clone() for param in model.parameters()]
model(torch.arange(5)).square().mean().backward()
optimizer.step()
assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters()))
assert quintic.verify(model, optimizer).ok
data = {name: (importlib.resources.files("quintic") / name).read_text("utf-8") for name in json.loads(sys.argv[1])}
print(json.dumps([quintic.__file__, missing, optimizer.last_step().num_matrices, list(data)]))
"""


@pytest.mark.parametrize("source", ["wheel", "sdist"])
def test_the_optimizer_needs_torch_alone(source, built, request, tmp_path):
    python = request.getfixturevalue("python") if source == "wheel" else environment(tmp_path, built.again)
    # NumPy's absence is PyTorch's own warning.
    flags = ["-I", "-W", "error", "-W", "ignore:Failed to initialize NumPy"]
    file, missing, matrices, data = json.loads(run(python, *flags, "-c", STEP, json.dumps(sorted(DATA))).stdout)
    assert python.parents[1] in Path(file).parents
    assert (missing, matrices, data) == ([], 2, sorted(DATA))


OWN_RULE = """
import dataclasses, quintic.testing, quintic.update_rules

@dataclasses.dataclass(frozen=True)
class Halved(quintic.update_rules.MatrixStage):
    label = "halved"

    def apply(self, matrices, state, options):
        return matrices / 2, None

print(*quintic.testing.check_update_rule(quintic.UpdateRule(title="mine", after=(Halved(),))), sep=chr(10))
"""


@pytest.mark.timeout(400)
def test_a_users_script_checks_its_rule(python, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(OWN_RULE, "utf-8")
    done = run(python, "-W", "ignore:Failed to initialize NumPy", script, cwd=tmp_path, check=False)
    assert "RuntimeError: check_update_rule needs NumPy" in done.stderr
    needs("numpy")
    place = str(installed("numpy").locate_file(""))
    code = f"import runpy, sys; sys.path.append({place!r}); runpy.run_path({str(script)!r}, run_name='__main__')"
    done = run(python, "-c", code, cwd=tmp_path)
    assert {"float32, FSDP2", "checkpoints"} <= set(done.stdout.splitlines())


def test_the_command_line_says_what_is_missing(python):
    command = python.with_name("quintic")
    assert run(command, "--help").stdout.startswith("usage: quintic COMMAND")
    assert run(python, "-I", "-m", "quintic", "--version").stdout == f"quintic {quintic.__version__}\n"
    done = run(command, "train", "--help", check=False)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    missing = re.fullmatch(r"quintic: error: the package '\w+' is missing: run \S+python -m pip install (.+)", last)
    # An index knows these names, but none of a package of ours.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = [need.replace("_", "-") for need in project["optional-dependencies"]["train"]]
    assert [need.replace("_", "-") for need in shlex.split(missing[1])] == asked


# -- type checkers, on a user's file -----------------------------------------------------------------------------------


@pytest.fixture
def user(tmp_path):
    return Path(shutil.copy(ROOT / "tests" / "typed_user.py", tmp_path / "user.py"))


@pytest.mark.timeout(600)
def test_a_users_file_is_right_for_mypy(python, user, request):
    needs("mypy")
    # PyTorch takes mypy a minute; the second time it knows it.
    cache = request.config.cache.mkdir("mypy")
    arguments = ["--strict", "--untyped-calls-exclude=torch", "--config-file=", f"--cache-dir={cache}"]
    found = tool("mypy", *arguments, f"--python-executable={python}", user, cwd=user.parent)
    assert "Success: no issues found in 1 source file" in found.stdout


@pytest.mark.timeout(300)
def test_a_users_file_is_right_for_pyright(python, user):
    needs("basedpyright", "pyright")
    settings = {
        "typeCheckingMode": "strict",
        "reportUnnecessaryTypeIgnoreComment": "error",
        "reportUnknownMemberType": "none",  # PyTorch's own methods have parameters without types
    }
    (user.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    found = tool("basedpyright", "--pythonpath", python, "-p", user.parent, user, cwd=user.parent)
    assert "0 errors" in found.stdout
