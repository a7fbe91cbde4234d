"""The Triton kernels against their plain twins (the cases are in the files triton_*.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = sorted(Path(__file__).parent.glob("triton_*.py"))

pytestmark = pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)


def run_cases(cases, **environment):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kernels_agree_with_their_twins_in_the_interpreter(cases):
    pytest.importorskip("triton")
    run_cases(cases, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(600)
def test_kernels_agree_with_their_twins_on_the_device(cases):
    run_cases(cases, TRITON_INTERPRET="0")
