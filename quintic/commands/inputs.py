"""Checks that several commands make before they train, and the loading of a trained model."""

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from quintic.commands.presets import gpu_small_preset
from quintic.commands.text import prepared, verify
from quintic.data.dataset import MANIFEST_NAME, Dataset
from quintic.data.loader import Loader, validation_rows
from quintic.data.preparation import prepare_command
from quintic.data.tokenizer import Tokenizer
from quintic.errors import CheckpointError, ConfigError, DataError
from quintic.eval.core_tasks import load_core
from quintic.eval.row_models import BatchedSpeedrun, LanguageModel
from quintic.model.gpt import GPT
from quintic.model.speedrun import SpeedrunConfig, SpeedrunGPT
from quintic.report.formatting import duration
from quintic.streams import say_waiting
from quintic.train.checkpoint import (
    Checkpoint,
    checkpoint_of_step,
    checkpoints,
    load_model_weights,
    newest_checkpoint,
)
from quintic.train.config import Config, DataConfig, ModelConfig, RunConfig
from quintic.train.hardware import Hardware, choose_hardware, matrix_rate
from quintic.train.loop import check_trackers
from quintic.train.recipe import build_model, empty_model, model_config, scale_of
from quintic.train.runs import CONFIG_FILE, TOKENIZER_FILE, find_run
from quintic.train.saved_config import load_config
from quintic.train.schedule import Scale

__all__ = [
    "RaceText",
    "TrainedModel",
    "check_options",
    "check_text",
    "duration_lines",
    "text_to_resume",
    "trained_model",
]

# A run that takes longer says so before it begins, with the fastest that this machine could make it.
_LONG_SECONDS = 3600


class RaceText(NamedTuple):
    """The shard on which a speedrun was validated, and how much of it, in chunks of so many tokens."""

    path: Path
    tokens: int
    chunk: int


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The model of a run, and what it was trained with."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: Config
    """Of a speedrun no more than what scoring text needs."""
    dataset: Dataset | RaceText | DataError
    """The text as it was prepared; if it is gone or damaged, the error that says so. A speedrun scores its shard."""


def check_options(config: Config, *, ranks: int = 1) -> list[str]:
    """Check everything about a run that does not depend on its text, before any text is prepared.

    Returns:
        The lines of `duration_lines`, with a vocabulary as large as `--vocab-size` allows.
    """
    hardware = choose_hardware(config.run)
    check_trackers(config.run)
    if config.run.core is not None:
        load_core(config.run.core)
    sizes = model_config(config, vocab_size=config.data.vocab_size, bos_id=0)
    model = empty_model(sizes, dtype=hardware.dtype, attention=hardware.attention)
    return duration_lines(model, scale_of(config, model), hardware, ranks=ranks)


def duration_lines(model: GPT, scale: Scale, hardware: Hardware, *, ranks: int = 1) -> list[str]:
    """Say how long a run takes at least, where that is more than an hour, from the speed of products measured now.

    Args:
        model: on any device, the meta device too.
        scale: of the run.
        hardware: of each rank.
        ranks: devices that divide the work.
    """
    operations = model.flops_per_token() * scale.steps * scale.batch_tokens
    rate = matrix_rate(hardware) * ranks
    if operations / rate < _LONG_SECONDS:
        return []
    advice = "; --preset cpu trains a small model in minutes" if hardware.device.type == "cpu" else ""
    return [
        f"Duration: at least {duration(operations / rate)}, by {operations:.3g} operations at the {rate:.3g} a second "
        f"that {'this device' if ranks == 1 else f'{ranks} devices'} multiplies at{advice}"
    ]


def check_text(config: Config, dataset: Dataset) -> None:
    """Check that there is text for a batch, before the run's folder is made.

    Raises:
        DataError: there is too little; the message names the preset for little text where that would have enough.
    """
    rows, seq_len = config.schedule.rows, config.model.seq_len
    try:
        Loader(dataset, "train", rows=rows, seq_len=seq_len).close()
        validation_rows(dataset, rows=rows, seq_len=seq_len, max_tokens=rows * seq_len)
    except DataError as error:
        small = gpu_small_preset()
        needed = small.schedule.rows * (small.model.seq_len + 1)
        held_back = float(dataset.split("val").num_tokens)
        if config.data.val_data is None:
            held_back *= small.data.val_frac / config.data.val_frac
        if needed >= rows * (seq_len + 1) or needed > min(held_back, dataset.split("train").num_tokens):
            raise
        raise DataError(f"{error}; --preset gpu-small has sizes for a few megabytes of text") from None


def text_to_resume(run_dir: Path, config: Config) -> Dataset:
    """Return the text of a run to resume: as it was prepared, even if its source has changed since.

    Raises:
        DataError: it is damaged; or it is gone, and its source is, too.
    """
    dataset = None
    if config.data.data == load_config(run_dir / CONFIG_FILE).data.data:  # else it is said to be somewhere else
        for path in checkpoints(run_dir)[:1]:
            # Damaged text is made again from its source; a damaged checkpoint is told of later.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                state = Checkpoint(path=path).state()
                dataset = _text_of(run_dir, state["dataset"], config.data)
    if dataset is not None:
        verify(dataset, again=config.data.verify)
        return dataset
    try:
        return prepared(config.data)
    except DataError as error:
        where = "--data says where its text is now, --data-dir in which folder it was prepared"
        raise DataError(f"{error}; to resume {run_dir.name}: {where}") from None


def _text_of(run_dir: Path, summary: Mapping[str, Any], data: DataConfig) -> Dataset:
    """Open the text that a run was trained on: in --data-dir, where it was, or moved or copied with the runs.

    Args:
        run_dir: the run's folder.
        summary: of the text, from a checkpoint. Its key is the end of the folder's name.
        data: the options of text.

    Raises:
        DataError: it is nowhere, or damaged; the message has the command that makes it again.
    """
    path = Path(summary["path"])
    for folder in (data.data_dir, path.parent, run_dir.resolve().parent.parent / path.parent.name):
        for manifest in sorted(folder.glob(f"*-{summary['key']}/{MANIFEST_NAME}")):
            return Dataset.open(manifest.parent)
    settings = (data.vocab_size, data.tokenizer, data.val_frac, data.max_bytes, data.text_field, data.val_data)
    command = prepare_command(data.data, data.data_dir, *settings)
    raise DataError(
        f"{path}: the text of {run_dir.name} does not exist any more; unless its source has changed since, run again: "
        f"{command}"
    )


def trained_model(
    runs_dir: Path, run: str | None, device: Literal["auto", "cpu", "cuda"] = "auto", *, step: int | None = None
) -> TrainedModel:
    """Load the model of a run, with the weights of a checkpoint.

    Args:
        runs_dir: the folder of all runs.
        run: name of the run; None for the one started last.
        device: to compute on.
        step: of the checkpoint (`--step`); None for the newest good one.

    Raises:
        QuinticError: there is no such model, or its text is gone and the run has kept no tokenizer.
    """
    run_dir = find_run(runs_dir, run, is_speedrun_enough=True)
    if not checkpoints(run_dir):
        is_race = not (run_dir / CONFIG_FILE).is_file()
        end = "when it ends" if is_race else "when it ends or is stopped"
        hint = f"it gets one every --save-every steps, and {end}; if it has, name another --run"
        raise ConfigError(f"{run_dir}: has no checkpoint yet; {hint}")
    say_waiting(f"Loading the model of {run_dir}")
    if step is None:
        checkpoint = newest_checkpoint(run_dir, message=lambda text: print(text, file=sys.stderr))
    else:
        checkpoint = checkpoint_of_step(run_dir, step, option="--step")
    if not (run_dir / CONFIG_FILE).is_file():
        return _trained_race(run_dir, checkpoint, device)
    config = load_config(run_dir / CONFIG_FILE)
    dataset: Dataset | DataError
    try:
        dataset = _text_of(run_dir, checkpoint.state()["dataset"], config.data)
        tokenizer = dataset.tokenizer
    except DataError as error:
        dataset = error
        if not (run_dir / TOKENIZER_FILE).exists():
            raise
        tokenizer = Tokenizer.load(run_dir / TOKENIZER_FILE)
    # The precision of the training run, so that scores agree; not its attention, which may need another device.
    hardware = choose_hardware(dataclasses.replace(config.run, device=device, attention="auto"))
    sizes = model_config(config, vocab_size=tokenizer.vocab_size, bos_id=tokenizer.bos_id)
    model = build_model(
        sizes,
        device=hardware.device,
        dtype=hardware.dtype,
        attention=hardware.attention,
        seed=config.run.seed,
        weights=config.optim.weights,
    )
    load_model_weights(checkpoint, model)
    return TrainedModel(model=model.eval(), tokenizer=tokenizer, config=config, dataset=dataset)


def _trained_race(run_dir: Path, checkpoint: Checkpoint, device: Literal["auto", "cpu", "cuda"]) -> TrainedModel:
    """Load a model that a speedrun saved, in the dtype of its weights.

    Raises:
        CheckpointError: the checkpoint is of a version with another model.
        DataError: the run had no tokenizer, or one that starts documents with another token than its shards.
    """
    state = checkpoint.state()
    try:
        sizes = SpeedrunConfig(**state["speedrun"])
        text = RaceText(Path(state["validation"]), state["validation_tokens"], state["validation_chunk"])
        computing = RunConfig(device=device, dtype=state["dtype"])
        seq_len = state["document_tokens"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: does not describe a speedrun's model of this version of quintic ({error}); use the "
            "version that made the run"
        ) from None
    if not (run_dir / TOKENIZER_FILE).exists():
        raise DataError(
            f"{run_dir}: was trained without a tokenizer, so its tokens are no text; put the one that made the shards "
            f"there, as {TOKENIZER_FILE}"
        )
    tokenizer = Tokenizer.load(run_dir / TOKENIZER_FILE)
    if tokenizer.bos_id != sizes.bos_id:
        raise DataError(
            f"{run_dir / TOKENIZER_FILE}: starts documents with token {tokenizer.bos_id}, the run's shards with "
            f"{sizes.bos_id}; put the tokenizer that made the shards there"
        )
    hardware = choose_hardware(computing)
    with torch.device("meta"):
        model = SpeedrunGPT(sizes, attention=hardware.attention, dtype=hardware.dtype)
    model = model.to_empty(device=hardware.device)
    load_model_weights(checkpoint, model)
    return TrainedModel(
        model=BatchedSpeedrun(model, vocab_size=tokenizer.vocab_size, seq_len=seq_len).eval(),
        tokenizer=tokenizer,
        config=Config(model=ModelConfig(seq_len=seq_len)),
        dataset=text if text.path.is_file() else DataError(f"{text.path}: the run's validation shard is gone"),
    )
