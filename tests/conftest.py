"""Settings of every test: one thread per xdist worker, a fixed seed, and `gpu` tests skipped without a GPU."""

import faulthandler
import functools
import gc
import importlib.util
import os
import random
import re
import shutil
import signal
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from processes import search_path

# xdist's workers share the cores; PyTorch's own threads would only fight over them. Set before torch is
# imported, so that the processes a test starts inherit it.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IS_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts tests in the background lets them, and every process that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Set here, before a test starts the server that forks the ranks of distributed tests.
if PACKAGE := importlib.util.find_spec("quintic"):
    os.environ["PYTHONPATH"] = search_path(PACKAGE.origin, os.environ.get("PYTHONPATH", ""))

# Until the first test, all that is made stays: looking through it for garbage takes a fifth of the time.
gc.disable()

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from _pytest.faulthandler import fault_handler_stderr_fd_key  # noqa: E402  # the real stderr: tests have theirs captured

if TYPE_CHECKING:
    from quintic.data.dataset import Dataset

if IS_WORKER:
    torch.set_num_threads(1)

# A first call may compile or import for seconds: a deadline per example would only measure the machine.
hypothesis.settings.register_profile("quintic", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("quintic"), max_examples=25)
hypothesis.settings.load_profile("quintic")


class _TestFile(pytest.Module):
    """A file of tests; skipped, with its reason, if it imports a package of an extra that is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return list(super().collect())
        except self.CollectError as error:
            missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
            if extra := _extras_of_modules().get(missing or ""):
                pytest.skip(f"{missing} is not installed: pip install 'quintic[{extra}]'", allow_module_level=True)
            raise


def _extras_of_modules() -> dict[str, str]:
    """Return for each module that an extra of pyproject.toml installs the first extra that does."""
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text("utf-8"))["project"]
    found: dict[str, str] = {}
    for extra, needs in project["optional-dependencies"].items():
        for need in needs:
            distribution = re.split(r"[<>=~! ;\[]", need, maxsplit=1)[0]
            found.setdefault({"pyyaml": "yaml"}.get(distribution, distribution.replace("-", "_")), extra)
    return found


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Let a file that this environment cannot import be skipped."""
    return _TestFile.from_parent(parent, path=module_path)


# Seconds that a phase of a test may go on for after its time-out.
_GRACE = 120.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """End the process if the test hangs, see `_ending`."""
    return (yield from _ending(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """End the process if the test hangs, see `_ending`."""
    return (yield from _ending(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """End the process if the test hangs, see `_ending`."""
    return (yield from _ending(item))


def _ending(item: pytest.Item) -> Iterator[None]:
    """Run one phase of a test; if it is not over long after its time-out, print all stacks and end the process.

    pytest-timeout interrupts a test once, by a signal. Code that waits in C++, or that waits again while it cleans up,
    would hang for ever. A worker of xdist that ends is replaced, and the test counts as failed.
    """
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker is not None else item.config.getini("timeout")) + _GRACE
    faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples where the slow tests are left out."""
    if "not slow" in (config.option.markexpr or ""):
        hypothesis.settings.load_profile("quick")


@pytest.fixture(autouse=True)
def fixed_seed() -> int:
    """Seed Python's, NumPy's and PyTorch's generators alike before every test; returns the seed."""
    value = 0
    random.seed(value)
    torch.manual_seed(value)
    try:
        import numpy
    except ImportError:
        return value
    numpy.random.seed(value)
    return value


@pytest.fixture(scope="session", autouse=True)
def unfreeze() -> Iterator[Callable[[], None]]:
    """Let nothing unfreeze what the garbage collector need not look through; yields what really does, `gc.unfreeze`.

    Modules and thousands of tests take it half a second each time, which is once in every run, as long as the rest of a
    tiny run takes. Runs freeze what they have, too, and give it back at their end: here it stays frozen, with the rest.
    """
    really = gc.unfreeze
    gc.freeze()
    gc.enable()
    gc.unfreeze = lambda: None
    yield really
    gc.unfreeze = really


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect(unfreeze: Callable[[], None]) -> None:
    """Freeze what the files before this one left behind: libraries, and models that they share."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _machine_measured_once() -> Iterator[None]:
    """Measure the speed of products in the first run of this process only: it takes a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        if trainer := sys.modules.get("quintic.train.trainer"):
            patch.setattr(trainer, "matrix_rate", functools.cache(trainer.matrix_rate))
        yield


@pytest.fixture
def same_threads() -> Iterator[None]:
    """Give PyTorch its number of threads back after a test that sets it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of generated text, some 200 KB."""
    from tiny_runs import write_text_folder

    return write_text_folder(tmp_path_factory.mktemp("tiny") / "text")


@pytest.fixture(scope="session")
def tiny_dataset(tiny_text: Path) -> "Dataset":
    """`tiny_text`, prepared as the options of `tiny_runs` ask for."""
    from tiny_runs import VAL_FRAC, VOCAB_SIZE

    from quintic.data.preparation import prepare

    return prepare(str(tiny_text), data_dir=tiny_text.parent / "data", vocab_size=VOCAB_SIZE, val_frac=VAL_FRAC)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, on a machine without GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


@pytest.fixture(scope="session")
def trained(tiny_dataset: "Dataset", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, the only one in its parent; not to be changed."""
    from tiny_runs import tiny_options

    from quintic.cli import main

    runs_dir = tmp_path_factory.mktemp("trained")
    threads = torch.get_num_threads()
    assert main(["train", *tiny_options(tiny_dataset, runs_dir, run="run", threads=1)]) == 0
    torch.set_num_threads(threads)
    return runs_dir / "run"


@pytest.fixture
def mine(trained: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to do harm to."""
    return Path(shutil.copytree(trained, tmp_path / "mine" / "run"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    has_gpu = torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(no_gpu)
