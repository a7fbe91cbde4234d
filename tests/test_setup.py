"""The setup of `.venv`: which PyTorch is chosen, and when there is nothing to do."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up here
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pick() -> Iterator[ModuleType]:
    yield load("pick_torch")
    sys.modules.pop("pick_torch")


@pytest.fixture
def setup(pick: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """setup.py, working on an empty checkout in a temporary folder."""
    module = load("setup")
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["torch>=2.11"]\n')
    venv = tmp_path / ".venv"
    for name, value in {
        "ROOT": tmp_path,
        "VENV": venv,
        "VENV_PYTHON": venv / "bin" / "python",
        "RECORD": venv / ".quintic-setup",
    }.items():
        monkeypatch.setattr(module, name, value)
    yield module
    sys.modules.pop("setup")


def offer(pick: ModuleType, version: str, cuda: bool = False):
    return pick.Offer(version=version, cuda=cuda, origin="here", options=(), environment={})


def chosen(pick: ModuleType, **facts) -> list[str]:
    """The steps of a plan in short, those with a warning marked."""
    defaults = {"system": "Linux", "nvidia_gpu": False, "floor": "2.11"}
    steps = pick.decide(pick.Facts(**(defaults | facts)))
    return [(step.offer.version if step.offer else step.source) + ("!" if step.warning else "") for step in steps]


# --------------------------------------------------------------------------------------- decide


@pytest.mark.parametrize("system", ["Linux", "Darwin", "Windows"])
@pytest.mark.parametrize("gpu", [False, True])
def test_torch_of_the_machine_is_used_whatever_else_there_is(pick, system, gpu):
    plan = chosen(pick, system=system, nvidia_gpu=gpu, host_torch="2.11.0", offers=(offer(pick, "2.15.0", cuda=True),))
    assert plan == ["host"]


CPU_BUILD, CUDA_BUILD = ("2.13.0+cpu", False), ("2.14.1", True)


@pytest.mark.parametrize(
    ("facts", "offers", "expected"),
    [
        ({"host_torch": "2.10.1"}, [], ["cpu-index", "index!"]),  # too old
        ({}, [], ["cpu-index", "index!"]),
        ({}, [CPU_BUILD], ["2.13.0+cpu", "cpu-index", "index!"]),
        ({}, [CPU_BUILD, CUDA_BUILD], ["2.13.0+cpu", "cpu-index", "2.14.1!", "index!"]),
        ({}, [CUDA_BUILD, CPU_BUILD], ["2.13.0+cpu", "cpu-index", "2.14.1!", "index!"]),
        ({"nvidia_gpu": True}, [], ["index"]),
        ({"nvidia_gpu": True}, [CPU_BUILD, CUDA_BUILD], ["2.14.1", "index", "2.13.0+cpu!"]),
        ({"system": "Darwin"}, [], ["index"]),
        ({"system": "Windows"}, [("2.13.0", False)], ["2.13.0", "index"]),
    ],
)
def test_offers_of_this_machine_come_before_downloads_that_fit_it(pick, facts, offers, expected):
    assert chosen(pick, **facts, offers=tuple(offer(pick, *one) for one in offers)) == expected


@pytest.mark.parametrize(
    ("version", "enough"),
    [
        ("2.11", True),
        ("2.11.0", True),
        ("2.11.1+cu130", True),
        ("2.13.0+cpu", True),
        ("2.12.0a0+gitabc1234", True),
        ("2.11.0a0+gitabc1234", False),
        ("2.11.0.dev20260301", False),
        ("2.9.1", False),
        ("1.13", False),
        ("unknown", False),
    ],
)
def test_versions_compare_as_numbers_and_previews_come_before_their_release(pick, version, enough):
    assert pick.at_least(version, "2.11") is enough


def test_the_floor_is_read_from_pyproject(pick):
    project = {"dependencies": ["numpy", "torch>=2.8"], "optional-dependencies": {"train": ["torch>=2.11"], "dev": []}}
    assert pick.torch_floor({"project": project}, []) == "2.8"
    assert pick.torch_floor({"project": project}, ["dev"]) == "2.8"
    assert pick.torch_floor({"project": project}, ["dev", "train"]) == "2.11"  # as a number: "2.8" > "2.11" as text
    with pytest.raises(ValueError, match="torch>="):
        pick.torch_floor({"project": {"dependencies": ["torchvision>=1"]}}, [])


# ----------------------------------------------------------------------------------------- look


def test_local_indexes_are_found_among_the_others(pick):
    config = "\n".join(
        [
            "global.cert='/etc/certs.crt'",
            "global.index-url='https://example.org/simple'",
            "global.extra-index-url='file:///srv/a file:///srv/b https://example.org/c'",
            "install.extra-index-url='\\nfile:///srv/b\\nfile:///srv/d'",
            ":env:.find-links='file:///srv/wheels'",
        ]
    )
    assert pick.local_indexes(config) == ["file:///srv/a", "file:///srv/b", "file:///srv/d"]


@pytest.mark.parametrize(
    ("needs", "cuda"),
    [(["sympy", "nvidia-cudnn-cu13==9.1"], True), (["cuda-bindings<14"], True), (["sympy", "filelock"], False)],
)
def test_an_offer_knows_whether_it_brings_cuda(pick, needs, cuda):
    def pip(*arguments, environment=None):
        report = next(text for text in arguments if text.startswith("--report=")).removeprefix("--report=")
        package = {"name": "torch", "version": "2.14.1", "requires_dist": needs}
        Path(report).write_text(json.dumps({"install": [{"metadata": package}]}))
        return SimpleNamespace(returncode=0, stdout="")

    found = pick.ask_pip(pip, "2.11", "here", ("--no-index",), {})
    assert (found.version, found.cuda) == ("2.14.1", cuda)


def test_no_offer_when_pip_finds_nothing(pick):
    def pip(*arguments, environment=None):
        return SimpleNamespace(returncode=1, stdout="ERROR: no matching distribution")

    assert pick.ask_pip(pip, "2.11", "here", (), {}) is None


# ------------------------------------------------------------------------------------- remember


def complete(setup: ModuleType, extras: list[str]) -> None:
    """Leave what a finished setup leaves, without installing anything."""
    setup.VENV_PYTHON.parent.mkdir(parents=True, exist_ok=True)
    setup.VENV_PYTHON.touch()
    for extra in extras:
        setup.stamp(extra).write_text(setup.fingerprint())
    setup.write_record("complete", torch_folder=str(setup.VENV))


@pytest.fixture
def builds(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The setups that were really done, instead of doing them."""
    done: list[list[str]] = []
    monkeypatch.setattr(setup, "build", lambda extras, exact: done.append(extras))
    monkeypatch.setattr(setup.signal, "signal", lambda *_: None)
    monkeypatch.setattr(setup, "take_lock", lambda: None)
    return done


def test_a_finished_setup_is_not_repeated(setup, builds):
    complete(setup, ["train", "dev"])
    assert setup.main(["train"]) == 0
    assert setup.main(["train", "dev"]) == 0
    assert builds == []


def test_further_extras_are_added(setup, builds):
    complete(setup, ["train"])
    setup.main(["train", "dev"])
    assert builds == [["train", "dev"]]


def test_a_changed_pyproject_is_applied(setup, builds):
    complete(setup, ["train"])
    with (setup.ROOT / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    setup.main(["train"])
    assert builds == [["train"]]


def test_an_interrupted_setup_is_not_used(setup, builds):
    complete(setup, ["train"])
    setup.write_record("building")
    setup.main(["train"])
    assert builds == [["train"]]


def test_a_moved_checkout_is_set_up_again(setup, builds, monkeypatch, tmp_path):
    complete(setup, ["train"])
    monkeypatch.setattr(setup, "ROOT", tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "pyproject.toml").rename(tmp_path / "elsewhere" / "pyproject.toml")
    setup.main(["train"])
    assert builds == [["train"]]


def test_a_vanished_torch_is_noticed(setup, builds):
    complete(setup, ["train"])
    setup.write_record("complete", torch_folder=str(setup.ROOT / "gone"))
    setup.main(["train"])
    assert builds == [["train"]]


def test_another_python_counts_only_when_it_was_asked_for(setup, builds, monkeypatch):
    complete(setup, ["train"])
    monkeypatch.setattr(setup.sys, "prefix", "/another/python")
    setup.main(["train"])
    assert builds == []
    setup.main(["--exact", "train"])
    assert builds == [["train"]]


def test_starting_afresh_empties_our_own_venv(setup):
    complete(setup, ["train"])
    (setup.VENV / "lib64").symlink_to("bin")
    setup.start_afresh()
    assert list(setup.VENV.iterdir()) == [setup.RECORD]
    assert setup.read_record()["state"] == "building"


def test_a_foreign_venv_is_left_alone(setup):
    setup.VENV.mkdir()
    (setup.VENV / "pyvenv.cfg").touch()
    with pytest.raises(setup.SetupError, match="not made by this script"):
        setup.start_afresh()
    assert (setup.VENV / "pyvenv.cfg").exists()


def test_errors_are_one_message_and_a_status(setup, builds, capsys, monkeypatch):
    def fail(extras, exact):
        raise setup.SetupError("no space\n\nfree some")

    monkeypatch.setattr(setup, "build", fail)
    assert setup.main(["train"]) == 1
    assert capsys.readouterr().err == "no space\n\nfree some\n"


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("NewConnectionError: Name or service not known", "network"),
        ("Readme file does not exist", "pip's own words"),
    ],
)
def test_a_failure_of_pip_comes_with_its_output_and_a_hint(setup, output, words):
    with pytest.raises(setup.SetupError, match=words) as caught:
        setup.check_pip(SimpleNamespace(returncode=1, stdout=output))
    assert output in str(caught.value)


def test_what_the_setup_imports_is_compiled_once_for_all(setup, monkeypatch):
    monkeypatch.setattr(setup, "VENV_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert setup.in_venv("import sys; print(sys.dont_write_bytecode)") == "False"


def test_failed_steps_fall_back_only_for_lack_of_a_network(setup, pick, monkeypatch):
    said: list[tuple[str, ...]] = []

    def pip(*arguments, environment=None):
        said.append(arguments)
        return SimpleNamespace(returncode=1, stdout="OSError: No space left on device")

    monkeypatch.setattr(setup, "pip", pip)
    steps = (pick.Step(source="offer", offer=offer(pick, "2.13.0+cpu")), pick.Step(source="index"))
    with pytest.raises(setup.SetupError, match="disk is full"):
        setup.install_torch(steps, "2.11", "/empty")
    assert said == [("install", "--no-compile", "--no-deps", "torch==2.13.0+cpu")]
