"""The README's two commands as it gives them, on the GPUs of this machine: in a copy of its own, from nothing.

`make` sets up an environment there; where no package index can be reached, pip's own variables (PIP_NO_INDEX,
PIP_FIND_LINKS) may name a folder with the packages. What the commands print is kept in the folder that
QUINTIC_TEST_OUTPUT names, if it is set.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[1]
COPIED = ["Makefile", "README.md", "LICENSE", "pyproject.toml", "quintic", "scripts"]

# Of one H100 or H200, with everything that comes before and after the steps.
MOST_SECONDS = 120
# The text of an installation differs from one version of Python to the next: 0.94 with 3.12 on one H100.
MOST_BITS_PER_BYTE = 1.15


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands need, with an environment that the first target of make has set up."""
    folder = tmp_path_factory.mktemp("clone")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    command(folder, ["make", f"PYTHON={sys.executable}", "train", "ARGS=--help"], "set-up")
    return folder


def command(folder: Path, words: list[str], name: str) -> tuple[str, float]:
    """Run a command of the README; return what it printed and the seconds it took."""
    # The copy must use what it has installed, and not the checkout that the tests run from.
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "OMP_NUM_THREADS"))}
    variables["PYTHONPATH"] = os.environ.get("QUINTIC_TEST_SITE", "")
    began = time.perf_counter()
    done = subprocess.run(
        words, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )
    seconds = time.perf_counter() - began
    if kept := os.environ.get("QUINTIC_TEST_OUTPUT"):
        shown = (
            f"$ {' '.join(words)}\n{done.stdout}{done.stderr}\n({seconds:.1f} seconds, exit code {done.returncode})\n"
        )
        Path(kept, f"readme-{name}.txt").write_text(shown, "utf-8")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout, seconds


def check_training(printed: str, seconds: float) -> None:
    assert "Text: python" in printed
    assert "--- sample" in printed
    found = re.search(r"validation: ([\d.]+) bits per byte after", printed)
    assert found is not None, printed[-2000:]
    assert float(found[1]) < MOST_BITS_PER_BYTE
    assert re.search(r"^report: +runs/\S+/report\.html$", printed, re.MULTILINE)
    assert "Train for real" in printed
    assert "--data path/to/my/texts" in printed.splitlines()[-2]
    assert "--data hf:" in printed.splitlines()[-1]
    assert seconds < MOST_SECONDS


def test_make_train_trains(clone: Path) -> None:
    printed, seconds = command(clone, ["make", f"PYTHON={sys.executable}", "train"], "train")
    check_training(printed, seconds)
    assert 'make train ARGS="--data path/to/my/texts"' in printed


def test_make_compare_compares(clone: Path) -> None:
    printed, seconds = command(clone, ["make", f"PYTHON={sys.executable}", "compare"], "compare")
    found = re.search(r"Muon reached AdamW's final validation loss after (\d+) of (\d+) steps", printed)
    assert found is not None, printed[-2000:]
    assert int(found[1]) < int(found[2])
    assert seconds < 2 * MOST_SECONDS


def test_torchrun_on_two_gpus(clone: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    torchrun = [".venv/bin/python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed, seconds = command(clone, [*torchrun, "-m", "quintic", "train"], "train-on-2")
    check_training(printed, seconds)
    assert "torchrun --nproc-per-node 2 -m quintic train --data path/to/my/texts" in printed
