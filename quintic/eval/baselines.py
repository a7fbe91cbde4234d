"""Two reference figures for bits per byte, from methods that are easy to check, on the text that a model is scored on.

Here: the bits per byte of a general-purpose compressor (``xz -9``) and a byte-bigram model on the validation text. They
give a reader who has no feeling for bits per byte a ruler: a language model that needs fewer bits than ``xz`` has
learnt something that a compressor cannot see. Not here: the bits per byte of a trained model.
"""

import lzma
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from quintic.data.dataset import Dataset
from quintic.data.loader import Batch
from quintic.data.tokenizer import Tokenizer
from quintic.errors import DataError

__all__ = ["BIGRAM_PRIOR_BYTES", "compression_baselines", "reference_scores", "target_text", "xz_bpb"]

BIGRAM_PRIOR_BYTES = 64.0
"""Weight of the unigram in each context of the bigram model, in bytes of evidence (see below)."""

# Bytes counted at once: bincount widens its input to 8 bytes per element, so this bounds the workspace to some 16 MB.
_CHUNK_BYTES = 1 << 20

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
    return compression_baselines(target_text(dataset.tokenizer, batches), _train_text(dataset))


def target_text(tokenizer: Tokenizer, batches: Iterable[Batch]) -> bytes:
    """Return the text of the targets in `batches`."""
    return b"".join(tokenizer.decode_bytes(row) for batch in batches for row in batch.targets.tolist())


def xz_bpb(text: bytes) -> float:
    """Return the bits per byte of `xz -9` on a text of at least one byte, the container included."""
    return 8 * len(lzma.compress(text, preset=9)) / len(text)


def _train_text(dataset: Dataset) -> Iterator[bytes]:
    split = dataset.split("train")
    taken = 0
    for index in range(split.num_documents):
        text = dataset.tokenizer.decode_bytes(split.document(index).tolist())
        yield text
        taken += len(text)
        if taken >= _MAX_TRAIN_BYTES:
            return


def compression_baselines(val_text: bytes, train_text: Iterable[bytes]) -> dict[str, float]:
    """Measure ``xz -9`` and a byte-bigram model on the validation text.

    ``xz`` compresses the validation text alone (it has no training phase); its bits per byte therefore fall a little as
    the text gets longer. The bigram model is trained on ``train_text`` alone and predicts each validation
    byte ``b`` from the byte ``a`` before it, with the counts ``c`` of the training text and the unigram as prior:

        p(b)     = (c(b) + 1) / (c + 256)
        p(b | a) = (c(a, b) + k * p(b)) / (c(a) + k)          k = BIGRAM_PRIOR_BYTES

    Add-one over all 256 successors would be weaker: it spends probability on bytes that never occur anywhere. The first
    byte of the text has no predecessor and is scored with p(b).

    Args:
        val_text: the whole validation text, documents concatenated; at least one byte.
        train_text: consecutive pieces of the training text; where it is cut does not change the result. Read once.

    Returns:
        `xz_bpb` and `bigram_bpb`, in bits per byte (`xz` with its container), and `bytes`, the length of the validation
        text. `xz` takes nearly all of the time, about half a second per megabyte; the other some hundredths.

    Raises:
        DataError: if either text is empty.
    """
    if not val_text:
        raise DataError("the validation text is empty: baselines need at least one byte of it")
    unigrams, bigrams = _count(train_text)
    if not unigrams.any():
        raise DataError("the training text is empty: the byte-bigram baseline needs at least one byte of it")
    return {
        "xz_bpb": xz_bpb(val_text),
        "bigram_bpb": _bigram_bits(val_text, unigrams, bigrams) / len(val_text),
        "bytes": len(val_text),
    }


def _count(pieces: Iterable[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count bytes, (256,) int64, and pairs of neighbours, (256, 256) int64, in the concatenation of ``pieces``."""
    unigrams = np.zeros(256, dtype=np.int64)
    bigrams = np.zeros(256 * 256, dtype=np.int64)
    previous = b""  # the last byte of the piece before, so that no pair is lost at a cut
    for piece in pieces:
        for start in range(0, len(piece), _CHUNK_BYTES):
            chunk = piece[start : start + _CHUNK_BYTES]
            unigrams += np.bincount(np.frombuffer(chunk, dtype=np.uint8), minlength=256)
            codes = np.frombuffer(previous + chunk, dtype=np.uint8).astype(np.uint16)
            bigrams += np.bincount(codes[:-1] * np.uint16(256) + codes[1:], minlength=256 * 256)
            previous = chunk[-1:]
    return unigrams, bigrams.reshape(256, 256)


def _bigram_bits(text: bytes, unigrams: NDArray[np.int64], bigrams: NDArray[np.int64]) -> float:
    """Bits (not per byte) that the bigram model of these training counts needs for ``text``."""
    unigram_probs = (unigrams + 1.0) / (unigrams.sum() + 256.0)
    context_totals = bigrams.sum(axis=1, keepdims=True)
    bigram_probs = (bigrams + BIGRAM_PRIOR_BYTES * unigram_probs) / (context_totals + BIGRAM_PRIOR_BYTES)
    _, text_bigrams = _count([text])
    return float(-math.log2(unigram_probs[text[0]]) - (text_bigrams * np.log2(bigram_probs)).sum())
