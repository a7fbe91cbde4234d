"""`quintic prepare`: turn text into tokens."""

from quintic.commands.options import prepare_options
from quintic.commands.text import prepared

__all__ = ["run"]


def run(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = prepare_options(arguments)
    # Asked whether the data is whole, the answer is no good when it was made anew first.
    dataset = prepared(options, repair=not options.verify)
    summary = dataset.summary()
    for split in ("train", "val"):
        documents, tokens, size = (summary[f"{split}_{what}"] for what in ("documents", "tokens", "bytes"))
        unit = "document " if documents == 1 else "documents"
        print(
            f"{split:5}  {documents:>9,} {unit}  {tokens:>13,} tokens  {size / 1e6:>9.2f} MB  "
            f"{size / tokens:.2f} bytes per token"
        )
    print(f"ready: {dataset.path}")
    return 0
