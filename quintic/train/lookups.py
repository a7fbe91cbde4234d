"""Lookup layers (L3) of a run: their sizes from the options, and the allocation of table rows to tokens."""

import dataclasses
import re

import torch

from quintic.data.dataset import Dataset
from quintic.data.loader import Loader
from quintic.model.allocation import allocate_rows
from quintic.model.gpt import GPT, GPTConfig
from quintic.train.config import ModelConfig

__all__ = ["allocate_lookups", "with_lookups"]

# Rows of training text that the allocation is counted on, and, where --l3-embeddings is 0, the model's parameters per
# table row (both as in jhspaybar's fork of nanochat, pull request 559).
_SAMPLE_ROWS = 100
_PARAMETERS_PER_EMBEDDING = 1000


def with_lookups(sizes: GPTConfig, model: ModelConfig) -> GPTConfig:
    """Return the model's sizes with the lookup layers that the options ask for.

    Raises:
        ValueError: the lookup layers do not fit the model.
    """
    if model.l3_layers is None:
        return sizes
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", model.l3_layers):
        raise ValueError(f"l3_layers={model.l3_layers}: must be layer numbers separated by commas, such as 2,5")
    sizes = dataclasses.replace(
        sizes,
        l3_layers=tuple(int(layer) for layer in model.l3_layers.split(",")),
        l3_embeddings=model.l3_embeddings or sizes.vocab_size,
        l3_d_up=model.l3_d_up,
        l3_k_max=model.l3_k_max,
        l3_tied=model.l3_tied,
    )
    if model.l3_embeddings:
        return sizes
    # A row per 1,000 parameters of the model, whose own tables have the placeholder size of one row per token here.
    with torch.device("meta"):
        parameters = sum(param.numel() for param in GPT(sizes).parameters())
    embeddings = max(sizes.vocab_size, parameters // _PARAMETERS_PER_EMBEDDING)
    return dataclasses.replace(sizes, l3_embeddings=min(embeddings, sizes.vocab_size * sizes.l3_k_max))


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
