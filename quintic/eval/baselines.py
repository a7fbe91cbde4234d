"""Two reference values for bits per byte on a text: a general-purpose compressor (``xz -9``) and a byte-bigram model.

They put a model's bits per byte into perspective, by methods that are easy to check: a language model that needs fewer
bits than ``xz`` has learnt something that a compressor cannot see. `quintic.eval.score` scores models.

``xz``, which has no training phase, compresses the text or its first 16 MiB; its bits per byte therefore fall a little
as the text gets longer. The bigram model is trained on the run's training text and predicts each byte ``b`` from the
byte ``a`` before it, with the counts ``c`` of the training text and the unigram as prior:

    p(b)     = (c(b) + 1) / (c + 256)
    p(b | a) = (c(a, b) + k * p(b)) / (c(a) + k)          k = BIGRAM_PRIOR_BYTES

Adding one to the counts of all 256 successors would be worse, since it gives probability to bytes that never occur. The
first byte of the text has no predecessor and is scored with p(b).
"""

import lzma
import math
from collections.abc import Iterable, Iterator

import numpy as np

from quintic.data.dataset import Dataset
from quintic.data.loader import Batch
from quintic.data.tokenizer import Tokenizer

__all__ = ["MAX_XZ_BYTES", "ScoredText", "reference_scores", "training_text"]

BIGRAM_PRIOR_BYTES = 64.0
"""Weight of the unigram in each context of the bigram model, as a number of bytes."""

# Enough text for a table of byte pairs; more text takes longer and changes nothing.
_MAX_TRAIN_BYTES = 32 * 10**6

MAX_XZ_BYTES = 16 << 20
"""Largest number of bytes that `xz` compresses, from the beginning of the text; it needs ten times as much memory."""


class ScoredText:
    """Statistics of a text for the reference values, collected in one pass: byte counts and the text's beginning."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._beginning = bytearray()
        self._last = b""
        self._unigrams = np.zeros(256, dtype=np.int64)
        self._bigrams = np.zeros((256, 256), dtype=np.int64)

    def add(self, piece: bytes) -> None:
        """Append bytes to the text; takes 20 times their memory."""
        self.num_bytes += len(piece)
        self._beginning += piece[: MAX_XZ_BYTES - len(self._beginning)]
        # With the last byte before, whose pair with the first new byte counts, too.
        codes = np.frombuffer(self._last + piece, dtype=np.uint8).astype(np.uint16)
        self._unigrams += np.bincount(codes[len(self._last) :], minlength=256)
        self._bigrams += np.bincount(codes[:-1] * np.uint16(256) + codes[1:], minlength=256 * 256).reshape(256, 256)
        self._last = (self._last + piece)[-1:]

    def watched(self, tokenizer: Tokenizer, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and append the text of each batch's targets."""
        for batch in batches:
            self.add(b"".join(tokenizer.decode_bytes(row) for row in batch.targets.tolist()))
            yield batch

    def xz_bpb(self) -> float:
        """Return the bits per byte of `xz -9` on the beginning of the text, including the container."""
        return 8 * len(lzma.compress(self._beginning, preset=9)) / len(self._beginning)

    def bigram_bpb(self, train: "ScoredText") -> float:
        """Return the bits per byte of the bigram model with the counts of a training text."""
        unigram_probs = (train._unigrams + 1.0) / (train.num_bytes + 256.0)
        context_totals = train._bigrams.sum(axis=1, keepdims=True)
        bigram_probs = (train._bigrams + BIGRAM_PRIOR_BYTES * unigram_probs) / (context_totals + BIGRAM_PRIOR_BYTES)
        bits = -math.log2(unigram_probs[self._beginning[0]]) - (self._bigrams * np.log2(bigram_probs)).sum()
        return float(bits) / self.num_bytes


def reference_scores(dataset: Dataset, batches: Iterable[Batch]) -> dict[str, float]:
    """Return `xz_bpb`, `bigram_bpb` and `bytes`, the length, of the text of the targets in `batches`.

    `xz` takes about half a second per megabyte. The batches are made with the tokenizer of `dataset`.
    """
    text = ScoredText()
    for _ in text.watched(dataset.tokenizer, batches):
        pass
    return {"xz_bpb": text.xz_bpb(), "bigram_bpb": text.bigram_bpb(training_text(dataset)), "bytes": text.num_bytes}


def training_text(dataset: Dataset) -> ScoredText:
    """Return the statistics of the text on which the bigram model is trained."""
    split, text = dataset.split("train"), ScoredText()
    for index in range(split.num_documents):
        text.add(dataset.tokenizer.decode_bytes(split.document(index).tolist()))
        if text.num_bytes >= _MAX_TRAIN_BYTES:
            break
    return text
