"""Lookup layers in a run: sizes from the options, allocation from the text, groups, resumed and sampled."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import course, error_of, final_weights, tiny_config, tiny_options

from quintic.cli import main
from quintic.data.dataset import Dataset
from quintic.data.loader import Loader
from quintic.errors import ConfigError
from quintic.model.allocation import allocate_rows
from quintic.model.gpt import GPT
from quintic.report.history import read_metrics
from quintic.train import loop
from quintic.train.checkpoint import checkpoints
from quintic.train.config import Config, ModelConfig, OptimConfig
from quintic.train.recipe import build_model, build_optimizer, model_config
from quintic.train.saved_config import load_config
from quintic.train.schedule import scale_of
from quintic.train.start import allocate_lookups

L3 = {"l3_layers": "0", "l3_embeddings": 700}


def config(optimizer: Any = "muon", **model: Any) -> Config:
    options = {"depth": 3, "head_dim": 32, "seq_len": 32, **model}
    return Config(model=ModelConfig(**options), optim=OptimConfig(optimizer=optimizer))


def build(wanted: Config, vocab_size: int = 300) -> GPT:
    sizes = model_config(wanted, vocab_size=vocab_size, bos_id=0)
    return build_model(sizes, device=torch.device("cpu"), dtype=torch.float32, attention="sdpa", seed=0)


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_without_layers_nothing_changes() -> None:
    assert model_config(config(l3_embeddings=5), vocab_size=300, bos_id=0) == model_config(
        config(), vocab_size=300, bos_id=0
    )


def test_the_number_of_embeddings_follows_from_the_parameters() -> None:
    wanted = config(depth=4, head_dim=64, l3_layers="1,2")
    with torch.device("meta"):
        plain = GPT(model_config(config(depth=4, head_dim=64), vocab_size=300, bos_id=0))
    width = 256
    parameters = sum(param.numel() for param in plain.parameters())
    parameters += 2 * (300 * width + 4 * width * width + 5 * width * width)
    sizes = model_config(wanted, vocab_size=300, bos_id=0)
    assert (sizes.l3_layers, sizes.l3_embeddings) == ((1, 2), parameters // 1000)
    assert parameters // 1000 > 300
    # At least the vocabulary, at most what its tokens may have.
    assert model_config(config(depth=1, l3_layers="0"), vocab_size=3000, bos_id=0).l3_embeddings == 3000
    assert model_config(dataclasses.replace(wanted, model=dataclasses.replace(wanted.model, l3_k_max=2)),
                        vocab_size=300, bos_id=0).l3_embeddings == 600  # fmt: skip
    assert model_config(config(l3_layers="1", l3_embeddings=501), vocab_size=300, bos_id=0).l3_embeddings == 501


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"l3_layers": "1;2"}, "--l3-layers 1;2: must be layer numbers separated by commas"),
        ({"l3_layers": "-1"}, "--l3-layers -1: must be layer numbers"),
        ({"l3_layers": "3"}, "--l3-layers 3: must be layers from 0 to 2"),
        ({"l3_layers": "1", "l3_embeddings": 299}, "--l3-embeddings 299: need at least one for each of 300 tokens"),
        ({"l3_layers": "1", "l3_embeddings": 601, "l3_k_max": 2}, r"at most 2 \(--l3-k-max 2\)"),
        ({"l3_layers": "1", "l3_embeddings": -1}, "--l3-embeddings -1"),
        ({"l3_layers": "1", "l3_d_up": -1}, "--l3-d-up -1"),
        ({"l3_layers": "1", "l3_k_max": 0}, "--l3-k-max 0"),
    ],
)
def test_sizes_that_do_not_fit_name_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config(config(**options), vocab_size=300, bos_id=0)


# -- groups, horizon ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("tied", [True, False])
def test_matrices_go_to_the_matrices_and_tables_to_adamw(kind: str, tied: bool) -> None:
    wanted = config(kind, l3_layers="0,2", l3_tied=tied)
    found: dict[str, list[str]] = {}
    rates = {}
    for group in build_optimizer(build(wanted), wanted).param_groups:
        found.setdefault(group["name"], []).extend(group["param_names"])
        rates[group["name"]] = group["lr"]
        assert group["algorithm"] == (kind if group["name"] == "matrices" else "adamw")
    matrices = {f"lookups.{layer}.{part}.weight" for layer in (0, 2) for part in ("up", "mix")}
    assert {name for name in found["matrices"] if name.startswith("lookups")} == matrices
    tables = ["keys"] if tied else ["keys", "values"]
    assert sorted(found["lookup tables"]) == [f"lookups.{layer}.{table}" for layer in (0, 2) for table in tables]
    width = 192
    assert rates["lookup tables"] == pytest.approx(rates["embedding"] * 0.5 * width**-0.5)


def test_the_matrices_lengthen_the_horizon_and_the_tables_do_not() -> None:
    def tokens(**options: Any) -> int:
        wanted = config(**options)
        schedule = dataclasses.replace(wanted.schedule, steps=None, tokens_per_param=100.0, batch_tokens=128 * 32)
        return scale_of(dataclasses.replace(wanted, schedule=schedule), build(wanted).config).steps * 128 * 32

    width = 192
    more = tokens(l3_layers="1", l3_d_up=64) - tokens()
    assert more == pytest.approx(100 * (64 * width + (64 + width) * width), abs=2 * 128 * 32)
    assert tokens(l3_layers="1", l3_d_up=64, l3_embeddings=900) == tokens(l3_layers="1", l3_d_up=64)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tiny_dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs_dir = tmp_path_factory.mktemp("l3")
    assert main(["train", *tiny_options(tiny_dataset, runs_dir, run="run", threads=1, **L3)]) == 0
    return runs_dir / "run"


def test_a_run_allocates_by_its_own_text(finished: Path, tiny_dataset: Dataset, tmp_path: Path) -> None:
    wanted = tiny_config(tiny_dataset, tmp_path, **L3)
    loader = Loader(tiny_dataset, "train", rows=1, seq_len=32, seed=wanted.run.seed, prefetch=0)
    rows = [next(loader).inputs[0].numpy() for _ in range(100)]
    loader.close()
    expected = allocate_rows(rows, vocab_size=300, total=700, most=512, bos_id=tiny_dataset.bos_id)
    saved = load_file(checkpoints(finished)[0] / "model.safetensors")
    assert np.array_equal(saved["lookup_offsets"].diff().numpy(), expected)
    assert len(np.unique(expected)) > 3
    assert float(saved["lookup_mean_rows"]) == pytest.approx(np.mean([expected[row].mean() for row in rows]))
    first = load_file(checkpoints(finished)[-1] / "model.safetensors")
    assert not torch.equal(first["lookups.0.keys"], saved["lookups.0.keys"])
    assert course(finished)[-1]["kind"] in ("final", "sample")


def test_operations_count_the_rows_that_tokens_have(finished: Path) -> None:
    """The log's, with the rows of the text's own tokens: frequent ones have more than an even share."""
    saved = load_file(checkpoints(finished)[0] / "model.safetensors")
    rows = float(saved["lookup_mean_rows"])
    assert rows > 1.2 * 700 / 300
    with torch.device("meta"):
        even = GPT(model_config(load_config(finished / "config.json"), vocab_size=300, bos_id=0))
    expected = even.flops_per_token() + 12 * even.config.width * (rows - 700 / 300)
    records = read_metrics(finished / "metrics.jsonl")
    assert records[0]["model"]["flops_per_token"] == pytest.approx(expected, abs=1)
    steps = [record for record in records if record["kind"] == "train"]
    rate = records[0]["machine"]["matrix_flops_per_second"]
    for step in steps:
        assert step["flops"] == pytest.approx(expected * step["tokens"], abs=step["tokens"])
        assert step["mfu"] == pytest.approx(expected * step["tokens_per_second"] / rate, rel=1e-3)


@pytest.mark.slow
def test_a_length_by_operations_is_that_of_the_plan_and_stays(
    tiny_dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever rows the tokens of the text get, which would make it 11 steps."""
    many = {**L3, "l3_embeddings": 20_000}
    wanted = tiny_config(tiny_dataset, tmp_path, **many)
    with torch.device("meta"):
        even = GPT(model_config(wanted, vocab_size=300, bos_id=0))
    flops = 12 * even.flops_per_token() * 256
    arguments = tiny_options(
        tiny_dataset, tmp_path, run="run", threads=1, steps=None, eval_every=0, target_flops=flops, **many
    )
    assert main(["plan", *arguments]) == 0
    planned = capsys.readouterr().out
    assert "in all, with equally many lookup rows for each token\nLength: 12 steps" in planned
    assert main(["train", *arguments]) == 0
    assert main(["train", "--resume", "--runs-dir", str(tmp_path)]) == 0
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (records[0]["total_steps"], records[-1]["step"]) == (12, 12)
    assert 1.05 * flops < next(record["flops"] for record in records if record["kind"] == "final") < 2 * flops


@pytest.mark.slow
def test_a_resumed_run_never_allocates_and_ends_the_same(
    finished: Path, tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["train", *tiny_options(tiny_dataset, tmp_path, run="run", threads=1, **L3)]
    train_step = loop.Trainer.train_step

    def interrupted(run: loop.Trainer) -> Any:
        if run.step == 4:
            raise KeyboardInterrupt
        return train_step(run)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "train_step", interrupted)
        assert main(options) != 0
    with monkeypatch.context() as patch:
        patch.setattr("quintic.train.start.allocate_rows", lambda *_, **__: pytest.fail("allocated again"))
        assert main(["train", "--resume", "--run", "run", "--runs-dir", str(tmp_path)]) == 0
    assert final_weights(tmp_path / "run") == final_weights(finished)


def test_a_trained_run_is_scored_and_sampled(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--run", "run", "--runs-dir", str(finished.parent)]
    assert main(["sample", *where, "--tokens", "5", "--prompts", "def"]) == 0
    assert main(["eval", *where, "--device", "cpu"]) == 0
    assert "bits per byte" in capsys.readouterr().out


def test_the_plan_shows_the_tables(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--depth", "2", "--l3-layers", "1"]) == 0
    assert re.search(r"^lookup tables +adamw ", capsys.readouterr().out, flags=re.MULTILINE)
    assert "--l3-layers 2: must be layers from 0 to 1" in error_of(capsys, "plan", "--depth", "2", "--l3-layers", "2")


def test_people_are_told_how_the_rows_are_allocated(tiny_dataset: Dataset, tmp_path: Path) -> None:
    wanted = tiny_config(tiny_dataset, tmp_path, l3_layers="0", l3_embeddings=700, l3_k_max=6)
    model = build(wanted, tiny_dataset.vocab_size)
    line = allocate_lookups(model, tiny_dataset, seed=0)
    shares = model.lookup_offsets.diff().tolist()
    assert line == (
        f"L3 allocation: 700 rows for {tiny_dataset.vocab_size} tokens, {min(shares)} to 6 each (--l3-k-max 6), "
        f"{700 / tiny_dataset.vocab_size:.1f} on average, {model.lookup_mean_rows.item():.1f} for a token of the text"
    )
    assert max(shares) == 6
    assert allocate_lookups(build(config(), tiny_dataset.vocab_size), tiny_dataset, seed=0) == ""
