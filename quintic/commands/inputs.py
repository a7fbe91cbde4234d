"""Checks of options and text before training, and loading a trained model, for several commands."""

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from quintic.commands.options import TrainedOptions
from quintic.commands.presets import preset
from quintic.commands.text import prepared, verify
from quintic.data.dataset import MANIFEST_NAME, Dataset
from quintic.data.loader import Loader, validation_rows
from quintic.data.preparation import prepare_command
from quintic.data.tokenizer import Tokenizer
from quintic.errors import CheckpointError, ConfigError, DataError, QuinticError
from quintic.eval.core_tasks import load_core
from quintic.eval.row_models import BatchedSpeedrun, LanguageModel
from quintic.model.sizes import GPTConfig
from quintic.model.speedrun import SpeedrunConfig, SpeedrunGPT
from quintic.report.formatting import duration
from quintic.report.history import RunHistory
from quintic.streams import say_waiting
from quintic.train.checkpoint import (
    checkpoint_of_step,
    checkpoints,
    load_model_weights,
    newest_checkpoint,
    read_state,
    step_of,
)
from quintic.train.config import Config, DataConfig, ModelConfig, RunConfig
from quintic.train.hardware import Hardware, check_memory, choose_hardware, matrix_rate
from quintic.train.metrics import check_trackers
from quintic.train.recipe import empty_model, model_config
from quintic.train.runs import CONFIG_FILE, TOKENIZER_FILE, find_run
from quintic.train.saved_config import load_config
from quintic.train.schedule import scale_of

__all__ = [
    "RaceText",
    "TrainedModel",
    "check_options",
    "check_text",
    "duration_lines",
    "text_to_resume",
    "trained_model",
]

# Longer runs print a lower bound of their duration before they start.
_LONG_SECONDS = 3600


class RaceText(NamedTuple):
    """The validation shard of a speedrun: its first `tokens` tokens, scored in chunks of `chunk` tokens."""

    path: Path
    tokens: int
    chunk: int


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The model of a run with its tokenizer, configuration and text."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: Config
    """For a speedrun, only the fields that scoring text needs are set."""
    dataset: Dataset | RaceText | DataError
    """The prepared text, or the validation shard of a speedrun; if it is missing or damaged, the error to raise."""
    origin: str
    """The run, the step of the weights, and whether the run is finished, in words."""

    def say_origin(self) -> None:
        """Print the origin; on standard error, since redirected output only holds results."""
        print(self.origin, file=sys.stderr, flush=True)


def check_options(config: Config, *, ranks: int = 1) -> list[str]:
    """Check all that does not need a run's text; return `duration_lines` for the largest possible vocabulary."""
    hardware = choose_hardware(config.run)
    check_trackers(config.run)
    if config.run.core is not None:
        load_core(config.run.core)
    sizes = model_config(config, vocab_size=config.data.vocab_size, bos_id=0)
    return duration_lines(config, sizes, hardware, ranks=ranks)


def duration_lines(config: Config, sizes: GPTConfig, hardware: Hardware, *, ranks: int = 1) -> list[str]:
    """Return a line with a lower bound of a run's duration if that is more than an hour, else an empty list.

    The bound assumes that all operations run at the speed of a large matrix product, measured now, on all devices
    (`ranks`). Loading data, evaluations and small kernels only add to it.
    """
    scale = scale_of(config, sizes)
    operations = sizes.flops_per_token() * scale.steps * scale.batch_tokens
    rate = matrix_rate(hardware) * ranks
    if operations / rate < _LONG_SECONDS:
        return []
    advice = "; --preset cpu trains a small model in minutes" if hardware.device.type == "cpu" else ""
    return [
        f"Duration: at least {duration(operations / rate)}, by {operations:.3g} operations at the {rate:.3g} a second "
        f"that {'this device' if ranks == 1 else f'{ranks} devices'} multiplies at{advice}"
    ]


def check_text(config: Config, dataset: Dataset, chosen: str | None = None) -> None:
    """Check that the text suffices for a batch, before the run's folder is made.

    Raises:
        DataError: there is too little text. For a larger model, of another preset (`chosen`), the message suggests
            --preset gpu-small if that has enough.
    """
    rows, seq_len = config.schedule.rows, config.model.seq_len
    try:
        Loader(dataset, "train", rows=rows, seq_len=seq_len).close()
        next(validation_rows(dataset, rows=rows, seq_len=seq_len))
    except DataError as error:
        small = preset("gpu-small")
        is_small = chosen == "gpu-small" or config.model.depth <= small.model.depth
        if is_small or dataset.split("train").num_tokens < small.schedule.rows * (small.model.seq_len + 1):
            raise
        raise DataError(f"{error}; or use --preset gpu-small, which suits a few megabytes of text") from None


def text_to_resume(run_dir: Path, config: Config) -> Dataset:
    """Return the text of a run to resume, as it was prepared, even if its source has changed since.

    Raises:
        DataError: the prepared text is damaged, or both the prepared text and its source are missing.
    """
    dataset, newest = None, checkpoints(run_dir)[:1]
    # With another --data the user says that the text has moved, so it is prepared from there.
    if newest and config.data.data == load_config(run_dir / CONFIG_FILE).data.data:
        # Missing or damaged text is prepared again below. `loop.train` reports a damaged checkpoint.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            dataset = _text_of(run_dir, read_state(newest[0])["dataset"], config.data)
    if dataset is not None:
        verify(dataset, again=config.data.verify)
        return dataset
    try:
        return prepared(config.data)
    except DataError as error:
        advice = "give the place of its text with --data, or the folder of its prepared text with --data-dir"
        raise DataError(f"{error}; to resume {run_dir.name}, {advice}") from None


def _text_of(run_dir: Path, summary: Mapping[str, Any], data: DataConfig) -> Dataset:
    """Open the prepared text that a run was trained on; `summary` describes it in a checkpoint."""
    path = Path(summary["path"])
    # The summary's key is the end of the folder's name. Look in --data-dir, where the text was, and beside the runs'
    # folder: runs and data may have been moved together.
    for folder in (data.data_dir, path.parent, run_dir.resolve().parent.parent / path.parent.name):
        for manifest in sorted(folder.glob(f"*-{summary['key']}/{MANIFEST_NAME}")):
            return Dataset.open(manifest.parent)
    names = ("data_dir", "tokenizer", "vocab_size", "val_frac", "max_bytes", "text_field", "val_data")
    command = prepare_command(data.data, **{name: getattr(data, name) for name in names})
    raise DataError(
        f"{path}: the text of {run_dir.name} does not exist any more; if its source has not changed, prepare it again "
        f"with: {command}"
    )


def trained_model(
    options: TrainedOptions, device: Literal["auto", "cpu", "cuda"] = "auto", threads: int | None = None
) -> TrainedModel:
    """Load the model of a run with the weights of a checkpoint; `threads` is None for the run's own number.

    Raises:
        QuinticError: there is no such run or checkpoint, or the run has no tokenizer.
    """
    run_dir = find_run(options.runs_dir, options.run, allow_speedrun=True)
    if not checkpoints(run_dir):
        is_race = not (run_dir / CONFIG_FILE).is_file()
        end = "when the run ends" if is_race else "when the run ends or is stopped"
        hint = f"one is written every --save-every steps, and {end}; wait for it, or choose another --run"
        raise ConfigError(f"{run_dir}: has no checkpoint yet; {hint}")
    say_waiting(f"Loading the model of {run_dir}")
    if options.step is None:
        checkpoint = newest_checkpoint(run_dir, message=lambda text: print(text, file=sys.stderr))
    else:
        checkpoint = checkpoint_of_step(run_dir, options.step, option="--step")
    if not (run_dir / CONFIG_FILE).is_file():
        return _trained_race(run_dir, checkpoint, RunConfig(device=device, threads=threads))
    config = load_config(run_dir / CONFIG_FILE)
    if not (run_dir / TOKENIZER_FILE).exists():
        raise ConfigError(f"{run_dir}: has no {TOKENIZER_FILE}; copy it there, its prepared text has the same")
    tokenizer = Tokenizer.load(run_dir / TOKENIZER_FILE)
    # A missing text is not an error yet: sampling and exporting only need the tokenizer.
    dataset: Dataset | DataError
    try:
        dataset = _text_of(run_dir, read_state(checkpoint)["dataset"], config.data)
    except DataError as error:
        dataset = error
    # Use the precision of the training run, so that scores agree, but not its attention, which may need another device.
    threads = config.run.threads if threads is None else threads
    hardware = choose_hardware(dataclasses.replace(config.run, device=device, attention="auto", threads=threads))
    sizes = model_config(config, vocab_size=tokenizer.vocab_size, bos_id=tokenizer.bos_id)
    model = empty_model(sizes, dtype=hardware.dtype, attention=hardware.attention, weights=config.optim.weights)
    _load_weights(checkpoint, model, hardware.device)
    origin = _origin(run_dir, checkpoint)
    return TrainedModel(model=model.eval(), tokenizer=tokenizer, config=config, dataset=dataset, origin=origin)


def _load_weights(checkpoint: Path, model: torch.nn.Module, device: torch.device) -> None:
    """Allocate the weights of a model on the meta device once, without initialising them, and load them."""
    check_memory(sum(weight.nbytes for weight in model.parameters()), device)
    load_model_weights(checkpoint, model.to_empty(device=device))


def _origin(run_dir: Path, checkpoint: Path) -> str:
    """Return the run and the step of a checkpoint in words, and whether the run is finished if its log tells."""
    step = step_of(checkpoint)
    try:
        history = RunHistory.load(run_dir)
    except QuinticError:  # without its log, or with a damaged one, the model can still be used
        return f"Model: {run_dir} after step {step:,}"
    of = "" if history.total_steps is None else f" of {history.total_steps:,}"
    return f"Model: {run_dir} after step {step:,}{of} (the run is {'' if history.final else 'not '}finished)"


def _trained_race(run_dir: Path, checkpoint: Path, computing: RunConfig) -> TrainedModel:
    """Load a model that a speedrun saved, with its weights in their dtype."""
    state = read_state(checkpoint)
    try:
        sizes = SpeedrunConfig(**state["speedrun"])
        text = RaceText(Path(state["validation"]), state["validation_tokens"], state["validation_chunk"])
        computing = dataclasses.replace(computing, dtype=state["dtype"])
        seq_len = state["document_tokens"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint}: is not a speedrun's model of this version of quintic ({error}); use the version that "
            "made the run"
        ) from None
    if not (run_dir / TOKENIZER_FILE).exists():
        raise DataError(
            f"{run_dir}: was trained without a tokenizer, so its tokens cannot be turned into text; put the tokenizer "
            f"that made the shards there, as {TOKENIZER_FILE}"
        )
    tokenizer = Tokenizer.load(run_dir / TOKENIZER_FILE)
    if tokenizer.bos_id != sizes.bos_id:
        raise DataError(
            f"{run_dir / TOKENIZER_FILE}: starts documents with token {tokenizer.bos_id}, but the run's shards start "
            f"them with {sizes.bos_id}; replace it by the tokenizer that made the shards"
        )
    hardware = choose_hardware(computing)
    with torch.device("meta"):
        model = SpeedrunGPT(sizes, attention=hardware.attention, dtype=hardware.dtype)
    _load_weights(checkpoint, model, hardware.device)
    return TrainedModel(
        model=BatchedSpeedrun(model, vocab_size=tokenizer.vocab_size, seq_len=seq_len).eval(),
        tokenizer=tokenizer,
        config=Config(model=ModelConfig(seq_len=seq_len)),
        origin=_origin(run_dir, checkpoint),
        dataset=text if text.path.is_file() else DataError(f"{text.path}: the run's validation shard is missing"),
    )
