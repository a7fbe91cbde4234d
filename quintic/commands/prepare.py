"""`quintic prepare`: turns text into tokens on disk."""

from quintic.commands.options import prepare_options
from quintic.commands.text import prepared

__all__ = ["run"]


def run(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = prepare_options(arguments)
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
