"""Training runs of a second or less: their text, their options, and what they leave behind."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quintic.errors
from quintic.cli import main
from quintic.data.dataset import Dataset
from quintic.report.history import METRICS_FILE, read_metrics
from quintic.train.checkpoint import checkpoints
from quintic.train.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig, ScheduleConfig
from quintic.train.saved_config import values_of, with_options

ROOT = Path(quintic.errors.__file__).parents[1]
VOCAB_SIZE, VAL_FRAC = 300, 0.15


class Killed(BaseException):
    """Stands for SIGKILL: no code catches it."""


def write_text_folder(folder: Path, *, documents: int = 80, lines: int = 70) -> Path:
    """Write lines that look like Python; returns the folder."""
    rng = random.Random(0)
    names = [
        "model",
        "weight",
        "step",
        "loss",
        "batch",
        "token",
        "epoch",
        "rows",
        "cache",
        "state",
        "gradient",
        "résumé",
    ]
    folder.mkdir(parents=True)
    for number in range(documents):
        made = []
        for _ in range(lines):
            first, second, third = rng.choices(names, k=3)
            kinds = (f"def {first}_{second}({third}):", f"    {first} = {second}[{rng.randrange(1000)}] + {third}", "")
            made.append(rng.choice(kinds))
        (folder / f"{number:03d}.txt").write_text("\n".join(made) + "\n", encoding="utf-8")
    return folder


def tiny_config(dataset: Dataset, runs_dir: Path, **changes: Any) -> Config:
    """Return a configuration of 6 steps, each in two passes; `changes` are fields of any section."""
    config = Config(
        data=DataConfig(
            data=str(dataset.path.parent.parent / "text"),
            data_dir=dataset.path.parent,
            vocab_size=VOCAB_SIZE,
            val_frac=VAL_FRAC,
        ),
        model=ModelConfig(depth=1, head_dim=32, seq_len=32),
        # Spelled out: the tests do not depend on how the defaults are tuned.
        optim=OptimConfig(
            muon_lr=0.02, adamw_lr=0.003, embedding_lr=0.2, head_lr=0.006, scalar_lr=0.03, momentum_warmup_steps=4
        ),
        schedule=ScheduleConfig(steps=6, batch_tokens=256, rows=4, warmup_frac=0.02, warmdown_frac=0.4),
        run=RunConfig(
            runs_dir=runs_dir,
            device="cpu",
            dtype="float32",
            eval_every=2,
            eval_tokens=512,
            sample_tokens=8,
            save_every=2,
            rms_every=3,
        ),
    )
    return with_options(config, **changes)


def tiny_options(dataset: Dataset, runs_dir: Path, **changes: Any) -> list[str]:
    """Return the options that make `tiny_config`, as typed on the command line."""
    values, options = values_of(tiny_config(dataset, runs_dir, **changes)), []
    for name, default in values_of(Config()).items():
        wanted, option = values[name], "--" + name.replace("_", "-")
        if wanted == default:
            continue
        if isinstance(default, bool):
            options.append(option if wanted else option.replace("--", "--no-", 1))
        elif isinstance(wanted, tuple):
            options += [option, *wanted]
        else:
            options += [option, str(wanted)]
    return options


def start(arguments: list[str], folder: Path) -> "subprocess.Popen[str]":
    """Start `python -m quintic` in a folder, on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "quintic", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def final_weights(run_dir: Path) -> tuple[bytes, bytes]:
    """Return the weights and the optimizer state of a run's newest checkpoint, as bytes."""
    newest = checkpoints(run_dir)[0]
    return (newest / "model.safetensors").read_bytes(), (newest / "optimizer.safetensors").read_bytes()


def course(run_dir: Path) -> list[dict[str, Any]]:
    """Return a run's records of steps, evaluations and end, without fields that depend on the clock."""
    clock = {
        "seconds", "tokens_per_second", "times_ms", "time", "breakdown", "mfu", "peak_memory_bytes",
        "first_step_extra_seconds", "compile_seconds",
    }  # fmt: skip
    records = read_metrics(run_dir / METRICS_FILE)
    kept = [record for record in records if record["kind"] not in ("run", "resume")]
    return [{name: value for name, value in record.items() if name not in clock} for record in kept]


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail; returns its one line without the prefix."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("quintic: error: ")
    assert errors.endswith("\n")
    assert errors.count("\n") == 1
    assert "Error parsing" not in errors
    assert "Traceback" not in errors
    return errors.removeprefix("quintic: error: ").rstrip()
