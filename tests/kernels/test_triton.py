"""The Triton kernels against their plain twins (the cases are in triton_cases.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("triton_cases.py")


def run_cases(**environment):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_kernels_agree_with_their_twins_in_the_interpreter():
    pytest.importorskip("triton")
    run_cases(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(600)
def test_kernels_agree_with_their_twins_on_the_device():
    run_cases(TRITON_INTERPRET="0")
