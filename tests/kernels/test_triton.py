"""The Triton kernels against their plain twins (the cases are in the files triton_*.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SETTINGS = Path(__file__).parents[2] / "pyproject.toml"
CASES = sorted(Path(__file__).parent.rglob("triton_*.py"))

of_every_file = pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)


def run_cases(cases, **environment):
    """Run the cases with the settings of pyproject.toml and none of this run's: it is no worker of xdist, and plugins
    that happen to be installed have no say (their warnings would be errors)."""
    options = ["-q", "-x", "-c", str(SETTINGS), "-p", "no:cacheprovider", "-p", "pytest_timeout"]
    command = [sys.executable, "-m", "pytest", *options, str(cases)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**inherited, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.fixture
def noisy_plugin(tmp_path, monkeypatch):
    """An installed plugin that warns as soon as pytest starts, where xdist is in the environment or not."""
    (tmp_path / "noisy.py").write_text(
        "import warnings\ndef pytest_configure(config):\n    warnings.warn('noise', stacklevel=1)\n"
    )
    info = tmp_path / "noisy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: noisy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nnoisy = noisy\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("PYTEST_ADDOPTS", "--of-this-run-alone")
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    probe = tmp_path / "probe.py"
    probe.write_text("import os\ndef test_a(): assert not [name for name in os.environ if 'XDIST' in name]\n")
    return probe


def test_cases_run_beside_any_plugin(noisy_plugin):
    run_cases(noisy_plugin)


@of_every_file
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kernels_agree_with_their_twins_in_the_interpreter(cases):
    pytest.importorskip("triton")
    run_cases(cases, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@of_every_file
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(600)
def test_kernels_agree_with_their_twins_on_the_device(cases):
    run_cases(cases, TRITON_INTERPRET="0")
