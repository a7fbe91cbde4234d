"""Examples run and their losses fall; those that are the plain loop in another layout have its losses."""

import re
import subprocess
import sys

import pytest
from launching import EXAMPLES, ROOT, run_example

SAME = {"rel": 1e-3}
"""Tolerance after thirty steps: other last bits in the sums of a gradient round bfloat16 products differently."""


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return run_example("plain")[0]


def check_falls(losses: list[float], by: float) -> None:
    assert losses[-1] < losses[0] - by, losses


def test_the_plain_loop_learns(plain):
    check_falls(plain, by=2.0)


@pytest.mark.slow
def test_the_largest_model_of_a_small_memory_learns():
    check_falls(run_example("largest_model", {"width": 64, "steps": 8, "memory": 5e5})[0], by=0.3)


def test_ddp_has_the_losses_of_the_plain_loop(plain):
    assert run_example("ddp", ranks=2)[0] == pytest.approx(plain, **SAME)


@pytest.mark.slow
def test_fsdp2_has_the_losses_of_the_plain_loop_and_resumes_to_the_last_bit(plain, tmp_path):
    checkpoint = str(tmp_path / "checkpoint")
    calls = {}, {"until": 15, "save": checkpoint}, {"resume": checkpoint}
    whole, begun, resumed = run_example("fsdp2", *calls, ranks=2)
    assert whole == pytest.approx(plain, **SAME)
    assert begun + resumed == whole


def test_sharded_state_has_the_losses_of_the_plain_loop(plain):
    assert run_example("sharded", ranks=2)[0] == pytest.approx(plain, **SAME)


@pytest.mark.slow
def test_hsdp_has_the_losses_of_the_plain_loop(plain):
    assert run_example("hsdp", ranks=4)[0] == pytest.approx(plain, **SAME)


@pytest.mark.slow
def test_tensor_parallelism_with_fsdp2_has_the_losses_of_the_plain_loop(plain):
    assert run_example("tp_fsdp2", ranks=4)[0] == pytest.approx(plain, **SAME)


@pytest.mark.slow
def test_expert_parallelism_has_the_losses_of_one_process():
    alone = run_example("moe_ep")[0]
    check_falls(alone, by=2.0)
    # A last bit may send a token to another expert.
    assert run_example("moe_ep", ranks=2)[0] == pytest.approx(alone, rel=1e-2)


# ------------------------------------------------------------------------------- what a stranger reads

SHARED = ("tiny.py", "shims.py", "titan_data.py")
FILES = sorted(path for path in EXAMPLES.glob("*.py") if path.name not in SHARED)


def commands(path):
    """The lines of an example's docstring that start it."""
    docstring = path.read_text("utf-8").split('"""')[1]
    return re.findall(rf"^(?:torchrun --nproc-per-node \d|python) examples/{path.name}.*$", docstring, re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_are_short_and_say_how_they_are_started(path):
    assert commands(path)
    assert len(path.read_text("utf-8").splitlines()) <= 90


def test_every_example_has_a_test_and_a_line_in_the_documentation():
    tests = "".join(test.read_text("utf-8") for test in (ROOT / "tests" / "examples").glob("test_*.py"))
    page = (ROOT / "docs" / "how-to" / "clients" / "index.md").read_text("utf-8")
    for path in FILES:
        assert f'"{path.stem}"' in tests, f"no test runs {path.name}"
        assert f"../../../examples/{path.name})" in page, f"docs/how-to/clients/index.md has no link to {path.name}"


@pytest.mark.slow
def test_torchrun_starts_an_example_as_its_docstring_says():
    command = commands(EXAMPLES / "ddp.py")[0].split()
    assert command[0] == "torchrun"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    answer = subprocess.run([*launcher, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert answer.returncode == 0, answer.stderr
    assert re.search(r"^loss \d\.\d+ -> \d\.\d+ in 30 steps$", answer.stdout, re.MULTILINE)
