"""Loading the weights of another run or of an exported model as a run's initial weights (`--init-from`)."""

from collections.abc import Callable
from pathlib import Path

from quintic.data.tokenizer import Tokenizer
from quintic.durable import json_object
from quintic.errors import CheckpointError, ConfigError
from quintic.model.gpt import GPT
from quintic.train.checkpoint import copy_weights, load_model_weights, newest_checkpoint

__all__ = ["load_initial_weights"]


def load_initial_weights(model: GPT, folder: Path, tokenizer: Tokenizer, *, message: Callable[[str], None]) -> str:
    """Copy the weights of a run's newest undamaged checkpoint, or of an export, into a model; ranks keep their shards.

    The new run's tokenizer must be the one that the weights were trained with.

    Returns:
        A line for the user that names the source of the weights.

    Raises:
        ConfigError: the folder is missing or is neither a run nor an export, or its tokenizer differs.
        CheckpointError: there are no weights, or they do not fit the model.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--init-from {folder}: does not exist any more; restore it, or start a new run")
    if Tokenizer.load(folder / "tokenizer.json").fingerprint() != tokenizer.fingerprint():
        raise ConfigError(
            f"--tokenizer: the weights of --init-from {folder} were trained with another one; leave --tokenizer out"
        )
    # A run's config.json has no `model_type`; an export's has "quintic".
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
