"""Text for several commands: prepared, with its checksums compared, and with messages about long work."""

from quintic.data.dataset import Dataset
from quintic.data.preparation import prepare
from quintic.train.config import DataConfig

__all__ = ["prepared", "verify"]

# Comparing less with its checksums takes about a second at most, unless the disk is slow.
_LONG_CHECK_BYTES = 1 << 30


def prepared(data: DataConfig, *, repair: bool = True) -> Dataset:
    """Return the text of a configuration as tokens, made first if need be, with its checksums compared.

    Args:
        data: the options of text.
        repair: make damaged data anew rather than refuse it.

    Raises:
        QuinticError: the source or the prepared data cannot be used.
    """
    shown = ""
    words = {
        "survey": "reading the text",
        "tokenizer": "making a tokenizer from it",
        "tokens": "turning it into tokens",
    }

    def progress(stage: str, done: int, total: int | None) -> None:
        nonlocal shown
        if stage != shown and stage in words:
            print(f"Preparing data: {words[stage]} ...", flush=True)
        shown = stage

    dataset = prepare(
        data.data,
        data_dir=data.data_dir,
        vocab_size=data.vocab_size,
        tokenizer=data.tokenizer,
        val_frac=data.val_frac,
        max_bytes=data.max_bytes,
        repair=repair,
        progress=progress,
        text_field=data.text_field,
        val_data=data.val_data,
        note=lambda line: print(f"Preparing data: {line}", flush=True),
    )
    verify(dataset, again=data.verify)
    return dataset


def verify(dataset: Dataset, *, again: bool) -> None:
    """Compare prepared data with its checksums, saying so where that takes a while.

    Args:
        dataset: the data.
        again: also what this machine has compared before.
    """

    def begin(num_bytes: int) -> None:
        if num_bytes >= _LONG_CHECK_BYTES:
            print(f"Checking data: {num_bytes / 1e9:.1f} GB of {dataset.path} ...", flush=True)

    dataset.verify(once=not again, begin=begin)
