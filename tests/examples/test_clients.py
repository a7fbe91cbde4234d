"""Examples of other libraries: they run, the loss falls, and what is the plain loop in other hands has its losses."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import needs, run_example
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

SAME = {"rel": 1e-3}
"""See test_examples.py."""

# Each imports its libraries, for seconds.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TIMEOUT = 240.0


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return run_example("plain")[0]


def check_falls(losses: list[float], by: float) -> None:
    assert losses[-1] < losses[0] - by, losses


def saved(folder: Path) -> dict[str, Any]:
    """The optimizer's state and the weights in a checkpoint of `Trainer`: path in the file -> value."""
    for pieces in [*folder.glob("optimizer_0"), *folder.glob("pytorch_model_fsdp_0")]:
        dcp_to_torch_save(pieces, pieces.with_suffix(".pt"))
    found: dict[str, Any] = {path.name: path.read_bytes() for path in folder.glob("model.safetensors")}

    def flatten(name: str, value: Any) -> None:
        if not isinstance(value, dict | list):
            found[name] = value
            return
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            flatten(f"{name}/{key}", inner)

    for path in [*folder.glob("optimizer*.pt"), *folder.glob("pytorch_model_fsdp_0.pt")]:
        flatten(path.name, torch.load(path, weights_only=True))
    return found


def same(first: Any, second: Any) -> bool:
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def check_trainer_resumes(folder: Path, ranks: int, **arguments: Any) -> None:
    checkpoint = folder / "whole" / "checkpoint-10"
    calls = (
        {"steps": 20, "folder": str(folder / "whole"), **arguments},
        {"steps": 20, "folder": str(folder / "resumed"), "resume": str(checkpoint), **arguments},
    )
    whole, resumed = run_example("hf_trainer", *calls, ranks=ranks, timeout=TIMEOUT)
    check_falls(whole, by=1.5)
    assert resumed == whole
    whole, resumed = saved(folder / "whole" / "checkpoint-20"), saved(folder / "resumed" / "checkpoint-20")
    assert any(name.endswith("momentum_buffer") for name in whole)
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not same(whole[name], resumed[name])] == []


def test_trainer_resumes_to_the_last_bit(tmp_path):
    needs("transformers", "accelerate")
    check_trainer_resumes(tmp_path, ranks=1)


def test_trainer_makes_the_optimizer_that_it_could_be_given():
    needs("transformers", "accelerate")
    made, given = run_example("hf_trainer", {"steps": 9}, {"steps": 9, "factory": False}, ranks=2, timeout=TIMEOUT)
    assert made == given


def test_trainer_under_fsdp2_resumes_to_the_last_bit(tmp_path):
    needs("transformers", "accelerate")
    check_trainer_resumes(tmp_path, ranks=2, fsdp=True)


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_accelerate_has_the_losses_of_the_plain_loop(plain, fsdp):
    needs("accelerate")
    assert run_example("hf_accelerate", {"fsdp": fsdp}, ranks=2, timeout=TIMEOUT)[0] == pytest.approx(plain, **SAME)


def test_lightning_has_the_losses_of_the_plain_loop(plain):
    needs("lightning")
    automatic, manual = run_example("lightning_loops", {}, {"loop": "manual"}, timeout=TIMEOUT)
    assert automatic == plain
    assert manual == plain


def test_lightning_under_fsdp2_has_the_losses_of_the_plain_loop(plain):
    needs("lightning")
    assert run_example("lightning_loops", {"loop": "fsdp2"}, ranks=2, timeout=TIMEOUT)[0] == pytest.approx(
        plain, **SAME
    )


def test_trl_trains_the_adapters_that_it_adds():
    needs("trl", "peft", "datasets")
    check_falls(run_example("trl_lora", timeout=TIMEOUT)[0], by=0.5)


def test_torchtitan_resumes_to_the_last_bit(tmp_path):
    needs("torchtitan")
    folder = str(tmp_path)
    calls = {"steps": 10, "folder": folder}, {"steps": 10, "folder": folder, "resume": 5}
    whole, resumed = run_example("titan", *calls, ranks=2, timeout=TIMEOUT)
    check_falls(whole, by=2.0)
    assert resumed == whole[5:]


def test_qk_clip_bounds_the_logits_of_a_llama():
    needs("transformers")
    (losses, clipped), (_, free) = run_example("hf_qk_clip", {}, {"threshold": 1000.0}, ranks=2, timeout=TIMEOUT)
    check_falls(losses, by=2.0)
    # A clip brings the logits of its batch down to the threshold, 1; those of the next batch are near that.
    assert max(free) > 2.0
    assert max(clipped) < 1.3


def test_timm_models_learn():
    needs("timm", "torchvision")
    answer = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
    if answer.returncode:
        pytest.skip(f"torchvision does not fit this PyTorch: {answer.stderr.splitlines()[-1]}")
    for losses in run_example("timm_images", {"model": "vit"}, {"model": "resnet"}, ranks=2, timeout=TIMEOUT):
        check_falls(losses, by=0.5)
