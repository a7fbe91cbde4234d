"""`quintic plan` of a training run: what it knows without data, network or GPU, and the memory it predicts."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_config

from quintic.cli import main
from quintic.commands.plan import planned_vocabulary, prepared_text, training_memory
from quintic.commands.presets import preset
from quintic.commands.text import prepared
from quintic.data.dataset import MANIFEST_NAME, Dataset
from quintic.errors import DataError
from quintic.simulate.memory import peak
from quintic.train.config import Config, DataConfig, ModelConfig, OptimConfig, ScheduleConfig
from quintic.train.recipe import build_model, build_optimizer, empty_model, model_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("depth", "steps", "batch"), [(12, "2,205", "524,288"), (20, "4,357", "1,048,576"), (26, "9,196", "1,048,576")]
)
def test_a_gpu_run_is_planned_without_one(
    depth: int, steps: str, batch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--preset", "gpu", "--recipe", "seed", "--depth", str(depth)]
    assert main([*arguments, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "Vocabulary: 32,768 tokens, assumed from --vocab-size" in printed
    assert f"Length: {steps} steps" in printed
    assert f"Batch: {batch} tokens (automatic)" in printed
    assert "Precision: bfloat16 activations" in printed
    assert "Memory: about " in printed


@pytest.mark.parametrize(
    ("more", "last"),
    [
        ([], "graphs, which keep the activations, are estimated"),
        (["--no-capture"], "only the larger one of the last two is needed at a time"),
        (["--attention", "sdpa"], "only the larger one of the last two is needed at a time"),
    ],
    ids=str,
)
def test_the_memory_of_a_plan_has_what_graphs_keep(
    more: list[str], last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--preset", "gpu", "--device", "cpu", "--depth", "4", *more]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Memory: about ")]
    assert line.endswith(last)
    total, *parts = map(float, re.findall(r"\d+\.\d\d", line))
    assert len(parts) == 5
    assert total == pytest.approx(sum(parts) - (0 if "graphs" in line else min(parts[3:])), abs=0.04)


def test_the_vocabulary_is_that_of_the_run(tiny_dataset: Dataset, tmp_path: Path) -> None:
    data = tiny_config(tiny_dataset, tmp_path).data
    assert planned_vocabulary(data) == (tiny_dataset.vocab_size, f"read from {tiny_dataset.path}")
    # Of two that fit, the one that was prepared last: a folder of text may have changed.
    for name, age in (("0", 100), ("zz", -100)):
        twin = shutil.copytree(tiny_dataset.path, tmp_path / "prepared" / name)
        os.utime(twin / MANIFEST_NAME, (time.time() - age,) * 2)
    newer = dataclasses.replace(data, data_dir=tmp_path / "prepared")
    assert planned_vocabulary(newer) == (300, f"read from {tmp_path / 'prepared' / 'zz'}")
    os.utime(tmp_path / "prepared" / "0" / MANIFEST_NAME, (time.time() + 200,) * 2)
    assert planned_vocabulary(newer) == (300, f"read from {tmp_path / 'prepared' / '0'}")
    for other in ({"vocab_size": 301}, {"val_frac": 0.2}, {"max_bytes": 10**6}, {"data": "elsewhere"}):
        changed: Any = dataclasses.replace(data, **other)
        assert planned_vocabulary(changed)[0] == changed.vocab_size
        assert "assumed" in planned_vocabulary(changed)[1]
    assert planned_vocabulary(DataConfig(tokenizer="gpt2", data_dir=tmp_path))[0] == 50_257
    given = str(tiny_dataset.path / "tokenizer.json")
    assert planned_vocabulary(DataConfig(tokenizer=given)) == (tiny_dataset.vocab_size, f"read from {given}")
    with pytest.raises(DataError, match="no such tokenizer"):
        planned_vocabulary(DataConfig(tokenizer=str(tmp_path / "none.json")))


def test_a_plan_finds_the_text_that_the_options_name(tmp_path: Path) -> None:
    records = [{"text": f"short {number}", "body": f"a longer text {number}"} for number in range(40)]
    for name, some in (("a.jsonl", records), ("v.jsonl", records[:3])):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in some))
    plain = DataConfig(data=str(tmp_path / "a.jsonl"), vocab_size=300, data_dir=tmp_path / "data")
    tokenizer = tmp_path / "tokenizer.json"
    prepared(plain).tokenizer.save(tokenizer)
    asked = [
        dataclasses.replace(plain, text_field="body"),
        dataclasses.replace(plain, val_data=str(tmp_path / "v.jsonl")),
        dataclasses.replace(plain, data=f"{tmp_path / 'a.jsonl'}=1 {tmp_path / 'v.jsonl'}=2", val_frac=0.5),
        dataclasses.replace(plain, tokenizer=str(tokenizer)),
    ]
    for data in asked:
        assert prepared_text(data) is None
        dataset = prepared(data)
        text = prepared_text(data)
        assert text is not None
        assert text.path == dataset.path
    text = prepared_text(plain)
    assert text is not None


def test_a_run_that_exists_is_planned_with_its_own_options(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan", "--run", mine.name, "--runs-dir", str(mine.parent)]
    assert main(options) == 2
    assert "exists: choose another --run, or continue it with --resume --run" in capsys.readouterr().err
    assert main([*options, "--resume"]) == 0
    assert "Model: depth 1," in capsys.readouterr().out


@pytest.mark.parametrize("content", ["[", "[]", "{}", "[" * 100_000])
def test_damaged_data_does_not_stop_a_plan(content: str, tiny_dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / MANIFEST_NAME).write_text(content)
    data = dataclasses.replace(tiny_config(tiny_dataset, tmp_path).data, data_dir=tmp_path)
    assert "assumed" in planned_vocabulary(data)[1]


def small(**optim: Any) -> Config:
    return Config(
        model=ModelConfig(depth=3, head_dim=32, seq_len=64),
        optim=OptimConfig(**optim),
        schedule=ScheduleConfig(rows=4, batch_tokens=256, steps=10),
    )


@pytest.mark.parametrize(
    "optim",
    [
        {},
        {"optimizer": "adamw"},
        {"state_dtype": "bf16"},
        {"normalize": "neuron"},
        {"normalize": "neuron", "state_dtype": "bf16"},
        {"recipe": "nanochat"},
        {"weights": "mantissa", "normalize": "neuron"},
        {"weights": "8bit", "state_dtype": "bf16"},
    ],
)
def test_weights_gradients_and_state_are_predicted_to_the_byte(optim: dict[str, Any]) -> None:
    config = small(**optim)
    sizes = model_config(config, vocab_size=300, bos_id=0)
    weights = config.optim.weights
    planned = empty_model(sizes, dtype=torch.float32, attention="sdpa", weights=weights)
    memory = training_memory(planned, build_optimizer(planned, config), rows=4, on_gpu=False)
    model = build_model(sizes, device=CPU, dtype=torch.float32, attention="sdpa", seed=0, weights=weights)
    optimizer = build_optimizer(model, config)
    tokens = torch.randint(0, 300, (4, 64))
    model(tokens, tokens).backward()
    optimizer.step()
    size = {param: param.numel() * param.element_size() for param in model.parameters()}
    assert memory["weights"] == sum(size.values())
    assert memory["gradients"] == sum(p.grad.numel() * p.grad.element_size() for p in size if p.grad is not None)
    held = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    assert memory["state"] == sum(t.numel() * t.element_size() for t in held)


@pytest.mark.parametrize(("depth", "gib"), [(12, 23.0), (6, 6.17)])
def test_the_peak_of_a_gpu_is_predicted_within_a_tenth(depth: int, gib: float) -> None:
    # Measured on one NVIDIA H200: benchmarks/results/2026-11-23-h200-train-throughput.md and -variants.md.
    config = preset("gpu")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, depth=depth))
    sizes = model_config(config, vocab_size=32_768, bos_id=0)
    model = empty_model(sizes, dtype=torch.bfloat16, attention="sdpa")
    optimizer = build_optimizer(model, config, on_gpu=True)
    memory = training_memory(model, optimizer, rows=32, on_gpu=True, compiled=True)
    assert peak(memory) / 2**30 == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize(("compiled", "gib"), [(False, 3.29), (True, 3.14)])
def test_the_peak_of_captured_passes_is_predicted_within_a_tenth(compiled: bool, gib: float) -> None:
    # Measured on one NVIDIA H200: benchmarks/results/2026-11-27-h200-captured-passes.md.
    config = preset("gpu-small")
    model = empty_model(model_config(config, vocab_size=4096, bos_id=0), dtype=torch.bfloat16, attention="sdpa")
    optimizer = build_optimizer(model, config, on_gpu=True)
    memory = training_memory(model, optimizer, rows=8, on_gpu=True, compiled=compiled, captured=True)
    assert peak(memory) / 2**30 == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize(("depth", "seq_len", "rows"), [(2, 128, 4), (4, 64, 8)])
def test_activations_are_predicted_within_a_tenth(depth: int, seq_len: int, rows: int) -> None:
    config = Config(
        model=ModelConfig(depth=depth, seq_len=seq_len), schedule=ScheduleConfig(rows=rows, batch_tokens=None)
    )
    sizes = model_config(config, vocab_size=512, bos_id=0)
    model = build_model(sizes, device=CPU, dtype=torch.float32, attention="sdpa", seed=0)
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(1, 512, (rows, seq_len))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens, tokens)
    assert loss.isfinite()
    # The mask of "sdpa" is no activation: other implementations have none.
    counted = sum(t.untyped_storage().nbytes() for t in kept.values() if t.shape != (rows, 1, seq_len, seq_len))
    gradients_of_the_head = 4 * model.head.weight.numel()  # the loss computes them on the way
    predicted = training_memory(model, build_optimizer(model, config), rows=rows, on_gpu=False)["activations"]
    assert predicted == pytest.approx(counted - gradients_of_the_head, rel=0.1)


def test_a_run_is_fitted_into_the_memory_of_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan", "--preset", "cpu", "--device", "cpu", "--depth", "8", "--batch-tokens", "8192"]
    assert main([*options, "--rows", "32", "--memory", "1GiB"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("setting  "))
    rows = [line.split() for line in itertools.takewhile(bool, lines[head + 1 :])]
    changes = ["--weights mantissa", "--state-dtype bf16", "--state-dtype int8", "--weights 8bit"]
    changes += [f"--rows {rows}" for rows in (16, 8, 4, 2, 1)]
    assert [" ".join(row[1:3]) for row in rows[1:]] == changes[: len(rows) - 1]
    sums = [float(row[-2]) for row in rows]
    assert sums == sorted(sums, reverse=True)
    assert [row[-1] for row in rows] == ["yes" if size <= 1 else "no" for size in sums]
    # The first sum is the one of the plan without the option; 8-bit state makes bfloat16 state unneeded.
    assert f"Memory: about {sums[0]:.2f} GiB" in printed
    [cheapest] = [line for line in lines if line.startswith("Cheapest that fits")]
    size, chosen = cheapest.removeprefix("Cheapest that fits, with ").split(" GiB: ")
    assert chosen == "--weights mantissa --state-dtype int8 --rows 16"
    assert main([*options, *chosen.split()]) == 0
    assert f"Memory: about {size} GiB" in capsys.readouterr().out
    assert main([*options, "--rows", "12", "--batch-tokens", "3072", "--memory", "200GB"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^Cheapest that fits, with \d\.\d\d GiB: these options$", printed, re.MULTILINE)
    assert re.findall(r"--rows (\d+)", printed)[:3] == ["6", "4", "3"]


@pytest.mark.parametrize("excluding", [["--recipe", "nanochat"], ["--beta2", "0.99"]])
def test_options_that_the_run_excludes_are_left_out(excluding: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "cpu", "--device", "cpu", "--memory", "1MiB", *excluding]) == 0
    printed = capsys.readouterr().out
    assert "+ --weights mantissa" in printed
    assert "+ --rows 8" in printed
    assert "state-dtype" not in printed
    assert "None of these fits: a smaller --depth or --seq-len needs less." in printed
