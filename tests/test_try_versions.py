"""The command that runs the optimizer's tests under other versions of PyTorch."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def trial() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("try_versions", ROOT / "scripts" / "try_versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["try_versions"] = module  # dataclasses look their own module up here
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("try_versions")


@pytest.fixture
def environments(trial: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The environments that were prepared, each a folder with nothing in it, in place of downloads."""
    prepared: list[str] = []

    def prepare(environment: Path, version: str) -> None:
        prepared.append(version)
        environment.mkdir(exist_ok=True)

    monkeypatch.setattr(trial, "prepare", prepare)
    return prepared


def outcome(trial: ModuleType, **changed: object) -> object:
    facts = {"torch": "2.8.0", "triton": "3.4.0", "python": "3.11.7", "passed": 4000, "failed": 0, "skipped": 7}
    return trial.Outcome(**{**facts, "seconds": 301.6, **changed})


@pytest.mark.usefixtures("environments")
def test_a_failure_is_a_row_and_a_status_and_what_stops_keeps_the_rows_before(trial, monkeypatch, tmp_path, capsys):
    def run_tests(python: Path, log: Path, options: list[str]) -> object:
        if "2.9" in log.name:
            raise trial.TrialError("pytest stopped with status 4")
        return outcome(trial, failed=2)

    monkeypatch.setattr(trial, "run_tests", run_tests)
    assert trial.main(["2.8", "--folder", str(tmp_path)]) == 1
    assert "| 4,000 | 2 | 7 |" in capsys.readouterr().out
    assert trial.main(["2.8", "2.9", "--folder", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 3
    assert "pytest stopped with status 4" in output.err


@pytest.mark.parametrize("version", ["2", "new", "2.8.0rc1", "2.8.0+cpu", "../2.8"])
def test_what_is_no_version_is_said_before_anything_is_downloaded(trial, version, environments, tmp_path, capsys):
    assert trial.main(["2.8", version, "--folder", str(tmp_path)]) == 1
    assert f"{version}: give versions of PyTorch as 2.8 or 2.8.0" in capsys.readouterr().err
    assert environments == []


def test_the_tests_need_little_beside_pytorch(trial):
    needs = trial.requirements("2.8")
    assert needs[0] == "torch==2.8.*"
    assert trial.requirements("2.8.0")[0] == "torch==2.8.0"
    assert {need.partition(">=")[0] for need in needs[1:]} == set(trial.PACKAGES)


@pytest.mark.slow
def test_tests_are_counted_as_pytest_counts_them(trial, tmp_path):
    """Run under this Python, on a file with one of each kind and on one that cannot be collected."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_kinds.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('number', range(5))\n"
        "def test_passes(number): pass\n"
        "def test_fails(): assert 0\n"
        "@pytest.mark.skip(reason='not here')\n"
        "def test_skipped(): pass\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError\n"
        "def test_error(broken): pass\n"
    )
    (tests / "test_nothing.py").write_text("import no_such_module\n")
    log = tmp_path / "log"
    options = ["-c", "/dev/null", "--rootdir", str(tests), "-W", "ignore", str(tests)]
    found = trial.run_tests(Path(sys.executable), log, options)
    assert (found.passed, found.failed, found.skipped) == (5, 3, 1)
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert "test_fails" in log.read_text()
    with pytest.raises(trial.TrialError, match=f"pytest stopped with status 4, see {log}"):
        trial.run_tests(Path(sys.executable), log, ["--no-such-option"])
