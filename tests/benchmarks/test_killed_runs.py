"""Runs that are killed on purpose: what the benchmark compares."""

import json
from pathlib import Path

from benchmarks.killed_runs import ending, first_difference


def finished(folder: Path, losses: list[float], weights: bytes) -> Path:
    newest = folder / "checkpoints" / "step-000002"
    newest.mkdir(parents=True)
    (folder / "checkpoints" / "step-000001").mkdir()
    (newest / "model.safetensors").write_bytes(weights)
    records = [{"kind": "run"}, *({"kind": "train", "step": i, "loss": loss} for i, loss in enumerate(losses, 1))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return folder


def test_every_loss_and_the_weights_are_compared(tmp_path: Path) -> None:
    whole = ending(finished(tmp_path / "a", [2.0, 1.0], b"weights"))
    assert first_difference(whole, ending(finished(tmp_path / "b", [2.0, 1.0], b"weights"))) is None
    assert first_difference(whole, ending(finished(tmp_path / "c", [2.0, 1.0], b"other"))) == "final weights"
    late = ending(finished(tmp_path / "d", [2.0, 1.0000001], b"other"))
    assert first_difference(whole, late) == "step 2: loss 1.0000001 instead of 1.0"
    assert first_difference(whole, ending(finished(tmp_path / "e", [2.0], b"weights"))) is not None
