"""The Triton kernels against their plain twins (the cases are in the files triton_*.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from case_shares import cases_of_share

SETTINGS = Path(__file__).parents[2] / "pyproject.toml"
CASES = sorted(Path(__file__).parent.rglob("triton_*.py"))

# Files whose cases take longest, mostly to compile: workers of xdist share them.
SHARES = {"triton_cases": 4, "triton_loss": 4, "triton_lookup": 4, "triton_neuron": 4, "triton_linear": 4}

of_every_share = pytest.mark.parametrize(
    ("cases", "share"),
    [
        pytest.param(
            path, f"{number}/{shares}", id=path.stem if shares == 1 else f"{path.stem}-{number + 1}-of-{shares}"
        )
        for path in CASES
        for shares in [SHARES.get(path.stem, 1)]
        for number in range(shares)
    ],
)


def run_cases(cases, **environment):
    """Run the cases with the settings of pyproject.toml and none of this run's: it is no worker of xdist, and plugins
    that happen to be installed have no say (their warnings would be errors)."""
    options = ["-q", "-x", "-c", str(SETTINGS), "-p", "no:cacheprovider", "-p", "pytest_timeout"]
    command = [sys.executable, "-m", "pytest", *options, str(cases)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**inherited, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_every_case_is_in_one_share():
    cases = [f"file::test_{test}[{number}]" for test, count in enumerate((1, 1, 7, 3, 12)) for number in range(count)]
    for shares in (1, 2, 4):
        parts = [cases_of_share(cases, number, shares) for number in range(shares)]
        assert sorted(case for part in parts for case in part) == sorted(cases)
        assert max(map(len, parts)) <= len(cases) // shares + 3


@of_every_share
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kernels_agree_with_their_twins_in_the_interpreter(cases, share):
    pytest.importorskip("triton")
    run_cases(cases, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", QUINTIC_TEST_SHARE=share)


@of_every_share
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(600)
def test_kernels_agree_with_their_twins_on_the_device(cases, share):
    run_cases(cases, TRITON_INTERPRET="0", QUINTIC_TEST_SHARE=share)
