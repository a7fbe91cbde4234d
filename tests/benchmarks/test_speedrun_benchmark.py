"""The speedrun's benchmark: what it reads from contestants' lines, and how it changes the race's script."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speedrun.__main__ import against_peer, cells, heads, parse, summary, the_track
from benchmarks.speedrun.peer import FILES, write_peer
from benchmarks.speedrun.shards import main as make_shards
from quintic.data.tokenizer import Tokenizer
from quintic.speedrun.shards import read_shard, vocabulary_of, write_shard
from quintic.speedrun.stages import SPEEDRUN

OPTIONS = ["--shards", "s", "--out", "o", "--only", "quintic", "--steps", "8", "--eval-every", "4"]


def lines_of(step_line: str, score_line: str) -> list[tuple[float, str]]:
    lines = [(50.0, score_line.format(step=0, loss=10.5, ms=0))]
    for step in range(1, 9):
        lines.append((60.0 + step, step_line.format(step=step, ms=100 * step)))
    return [*lines, (90.0, score_line.format(step=8, loss=7.25, ms=801))]


@pytest.mark.parametrize(
    ("step_line", "score_line"),
    [
        (
            "step {step}/8  train time {ms} ms  mean 1.00 ms",
            "step {step}/8  validation {loss}  train time {ms} ms  mean",
        ),
        (
            "step:{step}/8 train_time:{ms}ms step_avg:1.00ms",
            "step:{step}/8 val_loss:{loss} train_time:{ms}ms step_avg:1",
        ),
    ],
    ids=["ours", "peer"],
)
def test_the_lines_of_both_are_read_alike(step_line: str, score_line: str) -> None:
    track = the_track(parse(OPTIONS))
    assert track.starts == (0, 2, 4, 6)
    found = summary(lines_of(step_line, score_line), track)
    assert found["losses"] == {0: 10.5, 8: 7.25}
    assert found["start_seconds"] == 61.0
    assert found["train_ms"] == 801
    assert found["stage_ms"] == [100.0] * 4
    assert found["score_ms"] == {0: 0, 8: 801}
    row = {"contestant": "x", "seed": 1, **json.loads(json.dumps(found))}
    shown = dict(zip(heads({"rows": [row]}), cells(row, {"rows": [row]}), strict=True))
    assert shown["loss, 8 steps"] == "7.2500"
    assert shown["ms, stage 3"] == "100.00"


def test_the_difference_of_losses_comes_with_its_standard_error() -> None:
    def rows(name: str, losses: list[float], ms: float) -> list[dict[str, Any]]:
        common = {"contestant": name, "stage_ms": [ms, None], "start_seconds": ms}
        return [{**common, "losses": {"0": 10.0, "8": loss}} for loss in losses]

    ours, failed = rows("quintic", [3.0, 3.02, 3.04], 90.0), {**rows("quintic", [9.0], 1.0)[0], "error": "exit code 1"}
    _, line = against_peer({"rows": [*ours, failed, *rows("peer", [3.0, 3.04], 100.0)]})
    # Variances 0.0004 and 0.0008.
    assert line == (
        "Ours over the peer's: milliseconds by stage 0.900, -; start 0.900; last loss +0.0000 (standard error 0.0231)."
    )
    _, line = against_peer({"rows": [*ours, *rows("peer", [3.0], 100.0)]})
    assert "last loss +0.0200 (standard error unknown: it takes two runs of each)." in line
    assert against_peer({"rows": ours}) == []


def test_the_first_steps_of_a_stage_do_not_count() -> None:
    track = SPEEDRUN.scaled(40)
    times = {step: 10.0 * step + (1000 if step > track.starts[1] else 0) for step in range(1, 41)}
    lines = [(0.0, f"step {step}/40  train time {ms:.0f} ms  mean") for step, ms in times.items()]
    assert summary(lines, track)["stage_ms"][:3] == [10.0] * 3


def test_hosts_that_wait_in_every_second_step_do_not_change_the_times_of_stages() -> None:
    """By the host's clock steps take 19 and 1 ms in turns, on a device 10 each."""
    track = SPEEDRUN.scaled(120)
    for late in (0, 9):
        times = {step: 10 * step + (late if step % 2 else 9 - late) for step in range(1, 121)}
        lines = [(0.0, f"step {step}/120  train time {ms} ms  mean") for step, ms in times.items()]
        assert summary(lines, track)["stage_ms"] == [10.0] * 4


CHECKOUT = {
    "train_gpt.py": """
torch.cuda.set_device(device)
class Hyperparameters:
    val_tokens: int = 10
    val_batch_size: int = 4 * 64
    num_scheduled_iterations: int = 1
    num_extension_iterations: int = 2
    val_loss_every: int = 3
def momentum(step, muon_warmup_steps=300, muon_cooldown_steps=50): pass
""",
    "triton_kernels.py": "scale_a=activation_scale,\nscale_b=W2_scale,\n",
    "dc_triton_kernels.py": "",
}


def write_checkout(folder: Path) -> None:
    folder.mkdir()
    for name, text in CHECKOUT.items():
        (folder / name).write_text(text, encoding="utf-8")
    assert CHECKOUT.keys() == set(FILES)


def test_the_races_script_gets_our_lengths(tmp_path: Path) -> None:
    write_checkout(tmp_path / "checkout")
    for name in ("a_train_1.bin", "a_val_1.bin"):
        write_shard(tmp_path / name, [1, 2])
    out = tmp_path / "out"
    out.mkdir()
    track = the_track(parse([*OPTIONS, "--steps", "200", "--val-tokens", "8192"]))
    settings = {"shards": tmp_path, "vocabulary": [b"a", b"ab", b""], "track": track, "seed": 5}
    write_peer(tmp_path / "checkout", out, **settings)
    text = (out / "train_gpt.py").read_text("utf-8")
    for line in (
        "torch.manual_seed(5)",
        "val_tokens: int = 8192",
        "val_batch_size: int = 8192",
        "num_scheduled_iterations: int = 198",
        "num_extension_iterations: int = 2",
        "val_loss_every: int = 4",
        "muon_warmup_steps=47, muon_cooldown_steps=8",
    ):
        assert line in text
    assert "scale_a=activation_scale," not in (out / "triton_kernels.py").read_text("utf-8")
    program = "import tiktoken; print(tiktoken.get_encoding('gpt2')._mergeable_ranks)"
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=out, capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == "{b'a': 0, b'ab': 1}"
    linked = sorted((out / "data" / "fineweb10B").iterdir())
    assert linked[0].name == "fineweb_train_000001.bin"
    assert read_shard(linked[-1]).tolist() == [1, 2]


def test_shards_hold_the_tokens_of_the_text(tmp_path: Path) -> None:
    texts = ["one two three", "four five six seven"]
    tokenizer = Tokenizer.train(texts, 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    words = [f"--{name}={tmp_path / name}.jsonl" for name in ("train", "val")]
    tokens = str(tmp_path / "tokenizer.json")
    assert make_shards([*words, "--tokenizer", tokens, "--out", str(tmp_path / "o"), "--max-tokens", "5"]) == 0
    expected = [token for text in texts for token in (tokenizer.bos_id, *tokenizer.encode(text))]
    assert read_shard(tmp_path / "o" / "train_000001.bin").tolist() == expected[:5]
    assert read_shard(tmp_path / "o" / "val_000001.bin").tolist() == expected
    vocabulary = vocabulary_of(Tokenizer.load(tmp_path / "o" / "tokenizer.json"), bos_id=tokenizer.bos_id)
    assert [len(token) for token in vocabulary] == tokenizer.token_bytes().tolist()
