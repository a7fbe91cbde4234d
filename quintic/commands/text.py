"""`quintic prepare`, which turns text into tokens on disk, and preparing and verifying text for other commands."""

from quintic.data.dataset import Dataset
from quintic.data.preparation import prepare
from quintic.train.config import DataConfig

__all__ = ["prepared", "run", "verify"]

# Verifying less than this takes at most about a second, unless the disk is slow.
_LONG_CHECK_BYTES = 1 << 30


def run(options: DataConfig) -> int:
    """Run the command; return its exit code."""
    # With --verify the user asks whether the data is damaged, so do not repair it first.
    dataset = prepared(options, repair=not options.verify)
    summary = dataset.summary()
    for split in ("train", "val"):
        documents, tokens, size = (summary[f"{split}_{count}"] for count in ("documents", "tokens", "bytes"))
        unit = "document " if documents == 1 else "documents"
        print(
            f"{split:5}  {documents:>9,} {unit}  {tokens:>13,} tokens  {size / 1e6:>9.2f} MB  "
            f"{size / tokens:.2f} bytes per token"
        )
    print(f"ready: {dataset.path}")
    return 0


def prepared(data: DataConfig, *, repair: bool = True) -> Dataset:
    """Return the text of a configuration as tokens, preparing it if needed, with verified checksums.

    Raises:
        QuinticError: the source cannot be used, or prepared data is damaged and not to be prepared again (`repair`).
    """
    settings = {name: value for name, value in vars(data).items() if name not in ("data", "verify")}
    dataset = prepare(
        data.data, **settings, repair=repair, say=lambda line: print(f"Preparing data: {line}", flush=True)
    )
    verify(dataset, again=data.verify)
    return dataset


def verify(dataset: Dataset, *, again: bool) -> None:
    """Compare prepared data with its checksums, and print a line first if that takes long.

    With `again`, also compare files that this machine has compared before and that have not changed since.
    """

    def begin(num_bytes: int) -> None:
        if num_bytes >= _LONG_CHECK_BYTES:
            print(f"Checking data: {num_bytes / 1e9:.1f} GB of {dataset.path} ...", flush=True)

    dataset.verify(once=not again, begin=begin)
