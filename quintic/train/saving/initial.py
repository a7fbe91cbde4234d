"""The weights of another run or of an exported model, for a run that starts from them (`--init-from`)."""

from collections.abc import Callable
from pathlib import Path

from quintic.data.tokenizer import Tokenizer
from quintic.durable import json_object
from quintic.errors import CheckpointError, ConfigError
from quintic.model.gpt import GPT
from quintic.train.checkpoint import copy_weights, load_model_weights, newest_checkpoint

__all__ = ["load_initial_weights"]


def load_initial_weights(model: GPT, folder: Path, tokenizer: Tokenizer, *, message: Callable[[str], None]) -> str:
    """Copy the weights of a run's newest good checkpoint, or of an export, into a model; every rank its part.

    Args:
        model: of the same sizes.
        folder: of the run or the export.
        tokenizer: of the new run, which must be that of the weights.
        message: takes a warning about a damaged checkpoint.

    Returns:
        What was loaded, in words.

    Raises:
        ConfigError: the folder is gone or is neither, or its tokenizer is another one.
        CheckpointError: there are no weights, or they do not fit.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--init-from {folder}: does not exist any more; restore it, or start a new run")
    if Tokenizer.load(folder / "tokenizer.json").fingerprint() != tokenizer.fingerprint():
        raise ConfigError(
            f"--tokenizer: is not the one that the weights of --init-from {folder} were trained with; leave it out"
        )
    if json_object(folder / "config.json").get("model_type") != "quintic":
        try:
            checkpoint = newest_checkpoint(folder, message=message)
        except CheckpointError as error:
            raise CheckpointError(f"--init-from {folder}: {str(error).partition(';')[0]}") from None
        load_model_weights(checkpoint, model)
        return f"Starting from the weights of {folder} after step {checkpoint.state()['step']:,}"
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"--init-from {folder}: {path.name} cannot be read ({error}); export it again") from None
    copy_weights(saved, model, path)
    return f"Starting from the weights of the exported model {folder}"
