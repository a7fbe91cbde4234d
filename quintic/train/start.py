"""Before the first step of a run: the weights that it starts from, rows of lookup tables, and a larger `--steps`."""

import json
from pathlib import Path

import torch

from quintic.data.dataset import Dataset
from quintic.data.loader import Loader
from quintic.data.tokenizer import Tokenizer
from quintic.durable import json_object, write_atomically
from quintic.errors import CheckpointError, ConfigError
from quintic.model.allocation import allocate_rows
from quintic.model.gpt import GPT
from quintic.streams import say
from quintic.train.checkpoint import load_model_weights, newest_checkpoint, step_of
from quintic.train.recipe import apply_schedule
from quintic.train.runs import CONFIG_FILE
from quintic.train.saved_config import check_longer, load_config, to_dict, with_options
from quintic.train.schedule import scale_of
from quintic.train.trainer import Trainer

__all__ = ["allocate_lookups", "extend_run", "load_initial_weights"]

# Rows of training text that the allocation is counted on (as in jhspaybar's fork of nanochat, pull request 559).
_SAMPLE_ROWS = 100


def load_initial_weights(model: GPT, folder: Path, tokenizer: Tokenizer) -> str:
    """Copy the weights of a run's newest undamaged checkpoint, or of an export, into a model; ranks keep their shards.

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
    if json_object(folder / "config.json").get("model_type") == "quintic":
        try:
            load_model_weights(folder, model)
        except CheckpointError as error:
            raise CheckpointError(f"--init-from {error}; export it again") from None
        return f"Starting from the weights of the exported model {folder}"
    try:
        checkpoint = newest_checkpoint(folder)
    except CheckpointError as error:
        raise CheckpointError(f"--init-from {folder}: {str(error).partition(';')[0]}") from None
    load_model_weights(checkpoint, model)
    return f"Starting from the weights of {folder} after step {step_of(checkpoint):,}"


def allocate_lookups(model: GPT, dataset: Dataset, *, seed: int) -> str:
    """Assign the table rows of the lookup layers to tokens, by token counts in the first rows of the training text.

    Ranks need not communicate: the result depends only on the text, the seed and the sizes.

    Returns:
        A line that describes the allocation; "" for a model without lookup layers.

    Raises:
        DataError: the text does not fill a row.
    """
    sizes = model.config
    if not sizes.l3_layers:
        return ""
    # One row at a time: the result must not depend on the rows per pass or the number of ranks.
    with Loader(dataset, "train", rows=1, seq_len=sizes.seq_len, seed=seed, prefetch=0) as loader:
        sample = torch.cat([next(loader).inputs for _ in range(_SAMPLE_ROWS)])  # (_SAMPLE_ROWS, seq_len)
    rows_per_token = torch.from_numpy(  # (vocab_size,)
        allocate_rows(
            sample.numpy(),
            vocab_size=sizes.vocab_size,
            total=sizes.l3_embeddings,
            most=sizes.l3_k_max,
            bos_id=sizes.bos_id,
        )
    )
    mean_rows = float(rows_per_token[sample].double().mean())
    model.allocate_lookups(rows_per_token, mean_rows=mean_rows)
    mean = sizes.l3_embeddings / sizes.vocab_size
    return (
        f"L3 allocation: {sizes.l3_embeddings:,} rows for {sizes.vocab_size:,} tokens, {int(rows_per_token.min())} to "
        f"{int(rows_per_token.max())} each (--l3-k-max {sizes.l3_k_max}), {mean:.1f} on average, {mean_rows:.1f} for a "
        "token of the text"
    )


def extend_run(run: Trainer) -> dict[str, int]:
    """Save a larger `--steps` in the run's configuration and tell the user how the rates change; all ranks call it.

    All further steps follow the schedules of a run of the new length, so learning rates and weight decay jump when the
    run continues.

    Returns:
        Fields for the log: the numbers of steps before and now; {} if the number has not changed.

    Raises:
        ConfigError: the run would become shorter.
    """
    # Rank 0 reads it for all: a rank that reads later may find what rank 0 writes below.
    file = run.run_dir / CONFIG_FILE
    saved = run.ranks.from_rank0(lambda: load_config(file))
    if run.config.schedule.steps == saved.schedule.steps:
        return {}
    before = scale_of(saved, run.model.config).steps
    check_longer(run.total, before)
    # Compare the rates of the last step made and of the next one. `apply_schedule` sets the groups' rates, but each
    # step sets them again.
    if run.step:
        made = apply_schedule(run.optimizer, saved, run.step - 1, before)
        coming = apply_schedule(run.optimizer, run.config, run.step, run.total)
        changes = [f"{name} from {made['lr'][name]:.3g} to {rate:.3g}" for name, rate in coming["lr"].items()]
        decay = f"the weight decay from {made['weight_decay']:.3g} to {coming['weight_decay']:.3g}"
        say(
            f"From {before:,} to {run.total:,} steps: from step {run.step + 1:,} on, rates are those of a run of that "
            f"length. At that step, learning rates change: {', '.join(changes)}; {decay}"
        )
    longer = with_options(saved, steps=run.config.schedule.steps)
    content = json.dumps(to_dict(longer), indent=2) + "\n"
    run.ranks.from_rank0(lambda: write_atomically(file, content))
    return {"steps_before": before, "total_steps": run.total}
