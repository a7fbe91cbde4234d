"""Runs with bfloat16 weights: what they keep of float32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import tiny_options

from quintic.cli import main
from quintic.data.dataset import Dataset
from quintic.report.history import RunHistory
from quintic.train.checkpoint import checkpoints


@pytest.mark.usefixtures("same_threads")
@pytest.mark.slow
def test_weights_with_8_more_bits_learn_as_float32_does(
    tiny_dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {}
    for weights in ("float32", "mantissa", "8bit"):
        options = tiny_options(tiny_dataset, tmp_path, run=weights, weights=weights, threads=1)
        assert main(["train", *options]) == 0
        losses[weights] = RunHistory.load(tmp_path / weights).final["loss"]
    # Six steps from a loss of 5.7: the passes see bfloat16 weights, and between the last two only 8 bits are lost.
    assert losses["mantissa"] == pytest.approx(losses["float32"], rel=0.005)
    assert losses["8bit"] == pytest.approx(losses["mantissa"], rel=0.001)
    saved = checkpoints(tmp_path / "8bit")[0]
    state = load_file(saved / "optimizer.safetensors")
    for name, weight in load_file(saved / "model.safetensors").items():
        assert weight.dtype == torch.bfloat16
        assert state[f"{name}/mantissa_byte"].dtype == torch.uint8
        assert state[f"{name}/mantissa_byte"].shape == weight.shape
    capsys.readouterr()
    assert main(["eval", "--run", "8bit", "--runs-dir", str(tmp_path), "--tokens", "512"]) == 0
    assert f"{RunHistory.load(tmp_path / '8bit').final['bpb']:.4f} bits per byte" in capsys.readouterr().out
