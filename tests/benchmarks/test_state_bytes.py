"""Settings, jobs and page of `benchmarks.state_bytes`; and the whole of its part on losses, with a tiny model."""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import tiny_config

from benchmarks.optimizer_step.contestants import CONTESTANTS, SETS
from benchmarks.optimizer_step.layouts.contestants import LAYOUT_CONTESTANTS
from benchmarks.state_bytes import __main__ as script
from benchmarks.state_bytes import finetune
from benchmarks.state_bytes.page import loss_table, num_weights, step_tables
from benchmarks.state_bytes.run import BASELINE, SETTINGS, train
from quintic.data.dataset import Dataset
from quintic.train.saved_config import to_dict

# Bytes of weight and state: of matrices, and of AdamW's tables.
BYTES = {
    "float32": (8, 12),
    "bf16": (6, 8),
    "int8": (5, 6),
    "int8-momentum": (5, 12),
    "mantissa": (8, 12),
    "8bit": (7, 11),
    "mantissa-int8": (5, 6),
    "8bit-int8": (4, 5),
}


def test_jobs_train_with_their_setting(tiny_dataset: Dataset, tmp_path: Path) -> None:
    assert BYTES.keys() == SETTINGS.keys()
    losses = {}
    threads = torch.get_num_threads()
    try:
        for name, setting in SETTINGS.items():
            weights = "float32" if setting.master is None else "mantissa"
            config = tiny_config(tiny_dataset, tmp_path, weights=weights, eval_every=0)
            late = time.time() + 600
            job = {"config": to_dict(config), "data": str(tiny_dataset.path.resolve()), "setting": name}
            result = train({**job, "deadline": late, "start_by": late})
            losses[name] = result["loss"]
            assert result["bytes"]["muon"] == BYTES[name][0]
            # Scalars have float32 averages, and counts of steps take bytes, too.
            assert result["bytes"]["adamw"] == pytest.approx(BYTES[name][1], rel=0.02)
            assert "cut" in train({**job, "deadline": 0.0, "start_by": late})
    finally:
        torch.set_num_threads(threads)
    assert len({*losses.values()}) == len(losses)
    assert max(losses.values()) - min(losses.values()) < 0.1


def row(setting: str, seed: int, loss: float | None) -> dict[str, Any]:
    cell = {"setting": setting, "seed": seed}
    return {"cell": cell, "loss": loss, "training_seconds": 12.0, "bytes": {"muon": 8.0, "adamw": 12.0}}


def test_losses_are_compared_seed_by_seed() -> None:
    rows = [row(BASELINE, seed, 3.0 + seed) for seed in (1, 2, 3)]
    rows += [row("int8", seed, 3.01 + seed) for seed in (3, 2)] + [row("int8", 1, 4.04)]
    rows += [row("8bit", 1, None)]
    lines = loss_table(rows)
    assert lines[2] == "| float32 | 8.00 | 12.00 | 3 | 5.0000 |  |  | 12 |"
    assert lines[3] == "| int8 | 8.00 | 12.00 | 3 | 5.0200 | +0.0200 ± 0.0100 | 0.184 | 12 |"
    assert lines[4] == "| 8bit | 8.00 | 12.00 | 1 | inf | +inf | - | 12 |"
    assert len(lines) == 5


def test_the_table_of_steps_has_bytes_of_a_weight() -> None:
    of_set = {"set": "tiny", "dtype": "bf16"}
    mib = num_weights(SETS["tiny"]) / 2**20
    rows = [
        {**of_set, "contestant": "quintic", "weights_mib": 2 * mib, "state_mib": 4 * mib, "step_ms": {"median": 1.5}},
        {**of_set, "contestant": "flash-adamw", "error": "ModuleNotFoundError: No module named 'flashoptim'"},
        {**of_set, "contestant": "quintic-int8", "layout": "fsdp2", "ranks": 2, "weights_mib": mib,
         "state_mib": mib / 2, "peak_mib": 7.0, "step_ms": {"median": 2.0}, "device_ms": {"median": 1.0}},
    ]  # fmt: skip
    lines = step_tables(rows)
    assert "| quintic | 6.00 | 0 | - | 1.50 | - |" in lines
    assert "| flash-adamw | failed: ModuleNotFoundError: No module named 'flashoptim' |  |  |  |  |" in lines
    assert "| quintic-int8 | 3.00 | 0 | 7 | 2.00 | 1.00 |" in lines
    assert [line.partition(":")[0] for line in lines if line.startswith("#")] == [
        "### tiny",
        "### tiny, fsdp2 on 2 ranks",
    ]


def test_qwen3_8b_has_its_shapes() -> None:
    from quintic.simulate.planned_models import Decoder, Sizes

    sizes = Sizes(
        layers=36, width=4096, heads=32, kv_heads=8, head_dim=128, hidden=12288, vocab_size=151936, qk_norm=True
    )
    with torch.device("meta"):
        shapes = sorted(tuple(param.shape) for param in Decoder(sizes).parameters())
    parts = (*SETS["qwen8b"].matrices, *SETS["qwen8b"].others)
    assert sorted(shape for count, *of_part in parts for shape in [tuple(of_part)] * count) == shapes
    assert math.isclose(num_weights(SETS["qwen8b"]), 8.19e9, rel_tol=1e-3)


def test_contestants_are_known_on_one_device_and_under_fsdp2() -> None:
    assert {*script.CONTESTANTS} <= {one.name for one in CONTESTANTS if "bf16" in one.dtypes}
    assert {*script.CONTESTANTS} <= {
        one.name for one in LAYOUT_CONTESTANTS if "fsdp2" in one.layouts and "bf16" in one.dtypes
    }


@pytest.mark.slow
def test_parts_are_added_and_runs_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--out", str(tmp_path / "out"), "--data-dir", str(tmp_path / "data"), "--commit", "abc"]
    losses = ["--parts", "loss", "--size", "tiny", "--settings", "8bit-int8", "--at-once", "1", "--set", "steps=4"]
    assert script.main([*common, *losses, "--seeds", "1"]) == 0
    assert "2 runs, 0 made before" in capsys.readouterr().out
    assert script.main([*common, *losses, "--seeds", "1", "2"]) == 0
    assert "4 runs, 2 made before" in capsys.readouterr().out
    steps = ["--parts", "step", "--sets", "tiny", "--contestants", "quintic-int8-8bit"]
    assert script.main([*common, *steps]) == 0
    text = (tmp_path / "out" / "state-bytes.md").read_text("utf-8")
    assert "| float32 | 8.00 | 12.00 | 2 |" in text
    assert "| 8bit-int8 | 4.00 | 5.0" in text
    assert "| quintic-int8-8bit | 4.52 |" in text
    assert script.main(["--page", str(tmp_path / "out" / "state-bytes.json")]) == 0
    assert (tmp_path / "out" / "state-bytes.md").read_text("utf-8") == text


def test_the_shipped_speller_reads_words_and_learns(tmp_path):
    dictionary = tmp_path / "cmudict.dict"
    dictionary.write_text("a AH0 # comment\ncat K AE1 T\n'tis T IH1 Z\nhello(2) HH EH0 L OW1\nabout AH0 B AW1 T\n")
    words = finetune.read_words(dictionary)
    assert [len(letters) for letters, _ in words] == [2, 4, 6]  # the end of a word counts
    assert words[1][1][2] == finetune._PHONEMES.index("AE0")
    sizes = {"emb": (29, 256), "w_ih": (768, 256), "w_hh": (768, 256), "b_ih": (768,), "b_hh": (768,)}
    shapes = {f"{gru}_{name}": shape for gru in ("enc", "dec") for name, shape in sizes.items()}
    shapes |= {"dec_emb": (74, 256), "fc_w": (74, 256), "fc_b": (74,)}
    rng = np.random.default_rng(0)
    model = finetune.Speller({k: rng.normal(0, 0.1, shape).astype(np.float32) for k, shape in shapes.items()})
    (letters, lengths, phonemes), targets = finetune.batch_of(words)
    assert lengths.tolist() == [2, 4, 6]
    assert (targets[0] == -100).sum() == 3  # two phonemes and the end, of at most five
    logits = model(letters, lengths, phonemes)
    alone = finetune.batch_of(words[:1])
    torch.testing.assert_close(logits[0, :2], model(*alone[0])[0])  # padding changes nothing
    before = finetune.loss_of(model, words)
    before.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert finetune.loss_of(model, words) < before
