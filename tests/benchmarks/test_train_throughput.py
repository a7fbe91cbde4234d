"""The comparison of training runs: what it reads out of records, and the constants of the peer's schedule."""

import argparse
import math

import pytest

from benchmarks.train_throughput import page, parse, summary
from benchmarks.training.nanochat_loop import set_rates

WORDS = ["--out", "o", "--data", "text", "--peers", "p", "--steps", "4", "--skip", "2", "--batch-tokens", "1000"]


def records(seconds: list[float]) -> list[dict[str, object]]:
    steps = [
        {"kind": "train", "step": index + 1, "seconds": taken, "optimizer_ms": 2.0, "loss": 3.0}
        for index, taken in enumerate(seconds)
    ]
    facts = {"kind": "final", "parameters": 7, "flops_per_token": 10**9, "peak_bytes": 3 * 2**30}
    return [*steps, {"kind": "eval", "step": 4, "bpb": 1.5}, facts]


def test_first_steps_are_left_out_and_speeds_are_compared() -> None:
    options = parse(WORDS)
    rows = [
        {"contestant": name, **summary(records(seconds), options)}
        for name, seconds in (("quintic", [9.0, 2.0, 0.5, 0.5]), ("nanochat", [9.0, 2.0, 1.0, 1.0]))
    ]
    assert rows[0]["tokens_per_second"]["median"] == 2000
    assert rows[0]["tokens_per_second"]["n"] == 2
    assert rows[0]["first_step_seconds"] == 9
    assert rows[0]["mfu"] == pytest.approx(2000 * 1e9 / (989e12 * options.ranks))
    names = ("depth", "rows", "seq_len", "batch_tokens", "steps", "skip")
    result = {
        **{"command": "c", "commit": "abc", "machine": "1x GPU", "versions": {"torch": "2"}, "rows": rows},
        "options": {name: getattr(options, name) for name in names},
    }
    text = page(result, options)
    assert "quintic: 2.000 times the tokens per second of nanochat." in text
    assert "| 2,000 (2,000 to 2,000) | 500.0 (500.0 to 500.0) | 2.00 (2.00 to 2.00) | - |" in text
    assert "1.5000 (4 steps)" in text


@pytest.mark.parametrize(
    ("step", "rate", "momentum", "decay"),
    [
        (0, 1 / 40, 0.85, 1.0),
        (39, 1.0, 0.85 + 0.12 * 39 / 400, 0.5 * (1 + math.cos(math.pi * 0.0195))),
        (350, 1.0, 0.85 + 0.12 * 350 / 400, 0.5 * (1 + math.cos(math.pi * 0.175))),
        (1350, 0.525, 0.935, 0.5 * (1 + math.cos(math.pi * 0.675))),
    ],
)
def test_the_peers_schedule(step: int, rate: float, momentum: float, decay: float) -> None:
    groups = [{"kind": "adamw", "initial_lr": 2.0}, {"kind": "muon", "initial_lr": 1.0}]
    set_rates(argparse.Namespace(param_groups=groups), step, 2000, 1.0)
    assert groups[0]["lr"] == pytest.approx(2 * rate)
    found = [groups[1][name] for name in ("lr", "momentum", "weight_decay")]
    assert found == pytest.approx([rate, momentum, decay])
