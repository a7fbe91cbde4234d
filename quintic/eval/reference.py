"""Reference scores: bits per byte of simple methods on exactly the text that a model is scored on."""

from collections.abc import Iterator, Sequence

from quintic.data.dataset import Dataset
from quintic.data.loader import Batch
from quintic.eval.baselines import compression_baselines

__all__ = ["reference_scores"]

# Enough to fill a table of byte pairs; more changes nothing but the time.
_MAX_TRAIN_BYTES = 32 * 10**6


def reference_scores(dataset: Dataset, batches: Sequence[Batch]) -> dict[str, float]:
    """Return bits per byte of `xz -9` and of a byte-bigram model on the text of the targets in `batches`.

    Args:
        dataset: the model's training text; the bigram model is trained on the same.
        batches: made with the tokenizer of `dataset`.

    Returns:
        `xz_bpb`, `bigram_bpb` and `bytes` of `compression_baselines`.
    """
    tokenizer = dataset.tokenizer
    val_text = b"".join(tokenizer.decode_bytes(row) for batch in batches for row in batch.targets.tolist())
    return compression_baselines(val_text, _train_text(dataset))


def _train_text(dataset: Dataset) -> Iterator[bytes]:
    split = dataset.split("train")
    taken = 0
    for index in range(split.num_documents):
        text = dataset.tokenizer.decode_bytes(split.document(index).tolist())
        yield text
        taken += len(text)
        if taken >= _MAX_TRAIN_BYTES:
            return
