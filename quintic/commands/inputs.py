"""Checks that several commands make before they train, and the loading of a trained model."""

import dataclasses
import sys
from pathlib import Path
from typing import Literal

from quintic.data.dataset import Dataset
from quintic.data.loader import Loader, validation_rows
from quintic.errors import ConfigError
from quintic.eval.core_tasks import load_core
from quintic.model.gpt import GPT
from quintic.streams import say_waiting
from quintic.train.checkpoint import checkpoints, load_model_weights, newest_checkpoint
from quintic.train.config import Config
from quintic.train.hardware import choose_hardware
from quintic.train.loop import check_trackers
from quintic.train.recipe import build_model, model_config
from quintic.train.runs import CONFIG_FILE, find_run
from quintic.train.saved_config import load_config

__all__ = ["check_options", "check_text", "trained_model"]


def check_options(config: Config) -> None:
    """Find what would stop a run whatever its text is, before any text is prepared."""
    choose_hardware(config.run)
    check_trackers(config.run)
    if config.run.core is not None:
        load_core(config.run.core)
    model_config(config, vocab_size=config.data.vocab_size, bos_id=0)


def check_text(config: Config, dataset: Dataset) -> None:
    """Find whether there is text for a batch before the run's folder is made."""
    rows, seq_len = config.schedule.rows, config.model.seq_len
    Loader(dataset, "train", rows=rows, seq_len=seq_len).close()
    validation_rows(dataset, rows=rows, seq_len=seq_len, max_tokens=rows * seq_len)


def trained_model(
    runs_dir: Path, run: str | None, device: Literal["auto", "cpu", "cuda"] = "auto"
) -> tuple[GPT, Dataset, Config]:
    """Return the model of a run with the weights of its newest good checkpoint, its data and its configuration."""
    run_dir = find_run(runs_dir, run)
    config = load_config(run_dir / CONFIG_FILE)
    if not checkpoints(run_dir):
        hint = "it gets one every --save-every steps and when it ends or is stopped; wait, or name another --run"
        raise ConfigError(f"{run_dir}: has no checkpoint yet; {hint}")
    say_waiting(f"Loading the model of {run_dir}")
    checkpoint = newest_checkpoint(run_dir, message=lambda text: print(text, file=sys.stderr))
    path = Path(checkpoint.state()["dataset"]["path"])
    # Moved or copied together with the runs. The folder's name has the hash of what it was made from.
    moved = run_dir.resolve().parent.parent / path.parent.name / path.name
    dataset = Dataset.open(moved if moved.is_dir() and not path.is_dir() else path)
    # The precision of the training run, so that scores agree; not its attention, which may need another device.
    hardware = choose_hardware(dataclasses.replace(config.run, device=device, attention="auto"))
    sizes = model_config(config, vocab_size=dataset.vocab_size, bos_id=dataset.bos_id)
    model = build_model(
        sizes,
        device=hardware.device,
        dtype=hardware.dtype,
        attention=hardware.attention,
        seed=config.run.seed,
        weights=config.optim.weights,
    )
    load_model_weights(checkpoint, model)
    return model.eval(), dataset, config
