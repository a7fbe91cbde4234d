"""Models, optimizers and jobs of `benchmarks.finetune`."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.finetune import run
from quintic.data.dataset import Dataset

# What peft asks of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SIZES = {"width": 16, "depth": 1, "heads": 2, "seq_len": 16}


@pytest.fixture
def model() -> Any:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    return run.make_model(SIZES, 300)


def test_muon_has_the_matrices_and_one_rate(model: Any) -> None:
    optimizer = run.make_optimizer(model, "muon", 0.01)
    algorithms = {g["algorithm"]: g["param_names"] for g in optimizer.param_groups}
    assert any("q_proj" in name for name in algorithms["muon"])
    assert any("embed_tokens" in name for name in algorithms["adamw"])
    for group in [*optimizer.param_groups, *run.make_optimizer(model, "adamw", 0.01).param_groups]:
        assert group["lr"] == 0.01
        assert group["weight_decay"] == 0.0
        assert tuple(group["betas"]) == (0.9, 0.95)


def test_adapters_alone_are_trained(model: Any) -> None:
    pytest.importorskip("peft")
    adapted = run.with_adapters(model)
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 7  # two factors for each of the linear maps of the one layer
    assert all("lora_" in name for name in names)
    factor = next(p for name, p in adapted.named_parameters() if name.endswith("q_proj.lora_A.default.weight"))
    assert factor.shape == (8, 16)
    groups = run.make_optimizer(adapted, "muon", 0.01).param_groups
    assert {g["algorithm"] for g in groups if g["params"]} == {"muon"}


def job(dataset: Dataset, **changed: Any) -> dict[str, Any]:
    return {
        "sizes": SIZES, "device": "cpu", "threads": 1, "rows": 4, "eval_tokens": 256, "deadline": time.time() + 100,
        "optimizer": "adamw", "rate": 0.01, "seed": 1, "mode": "full", "steps": 8, "weights": None, "save": None,
        "data": str(dataset.path), "other": str(dataset.path), **changed,
    }  # fmt: skip


def test_a_job_pretrains_and_fine_tunes(tiny_dataset: Dataset, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    threads, weights = torch.get_num_threads(), str(tmp_path / "weights.pt")
    try:
        first = run.train(job(tiny_dataset, save=weights))
        assert first["before"] == pytest.approx(math.log(300), abs=0.2)
        assert first["loss"] < first["before"] - 0.5
        assert first["other"] == first["loss"]  # the same text
        for mode in ("full", "lora"):
            tuned = run.train(job(tiny_dataset, mode=mode, optimizer="muon", rate=0.05, weights=weights))
            assert tuned["before"] == pytest.approx(first["loss"], rel=1e-5)  # a new adapter changes nothing
            assert tuned["loss"] < tuned["before"] - 0.01
        assert "at step 0 of 8" in run.train(job(tiny_dataset, deadline=0.0))["cut"]
    finally:
        torch.set_num_threads(threads)
