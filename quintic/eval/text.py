"""Makes batches for scoring a whole text, without a split into training and validation text and without cropping.

Batches are made lazily, so that a text of any size needs only a few megabytes of memory.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice

import numpy as np

from quintic.data.files.documents import sections_of
from quintic.data.loader import Batch, batch_of
from quintic.data.tokenizer import Tokenizer

__all__ = ["encoded", "text_batches"]

# Longer documents are encoded section by section.
_SECTION_BYTES = 1 << 18
# Largest number of rows that are filled at the same time.
_ROWS_WITH_ROOM = 256

# (token, index of its document) for each position of a row.
_Row = list[tuple[int, int]]


def encoded(tokenizer: Tokenizer, documents: Iterable[bytes]) -> Iterator[Iterable[int]]:
    """Yield the tokens of each document, given as UTF-8; a long document is encoded while its tokens are read."""
    for document in documents:
        if len(document) <= _SECTION_BYTES:
            yield tokenizer.encode(document.decode())
        else:
            sections = (section.decode() for section in sections_of(document, _SECTION_BYTES))
            yield chain.from_iterable(tokenizer.encode_parts(sections))


def text_batches(
    documents: Iterable[Iterable[int]],
    *,
    bos_id: int,
    rows: int,
    seq_len: int,
    max_tokens: int | None = None,
) -> Iterator[Batch]:
    """Yield batches in which each token of each document is a target exactly once.

    A document longer than a row continues in other rows, after a `bos_id` in each, as in training. The rest of a row is
    filled with `bos_id`, which has no bytes and is not scored.

    Args:
        documents: tokens of each document, without `bos_id`.
        bos_id: token that starts a document.
        rows: B, number of rows of a batch; the last batch may have fewer.
        seq_len: T, number of inputs of a row.
        max_tokens: limit of the number of tokens; None for no limit.

    Returns:
        Batches on the CPU; documents are numbered in their order.
    """
    length = seq_len + 1
    waiting: list[_Row] = []
    finished: list[_Row] = []
    left = sys.maxsize if max_tokens is None else max_tokens
    for number, document in enumerate(documents):
        tokens = iter(document)
        while taken := list(islice(tokens, min(left, seq_len))):
            piece = [bos_id, *taken]
            # First fit packs nearly as tightly as sorting by length, without reading all documents first.
            row = next((row for row in waiting if len(row) + len(piece) <= length), None)
            if row is None:
                row = []
                waiting.append(row)
            row += [(token, number) for token in piece]
            # A full row, or too many rows to search: the fullest one is finished.
            if len(row) == length or len(waiting) > _ROWS_WITH_ROOM:
                fullest = max(waiting, key=len)
                waiting.remove(fullest)
                finished.append(fullest)
            if len(finished) == rows:
                yield _batch(finished, bos_id, length)
                finished = []
            left -= len(taken)
        if left == 0:
            break
    finished += waiting
    for start in range(0, len(finished), rows):
        yield _batch(finished[start : start + rows], bos_id, length)


def _batch(rows: list[_Row], bos_id: int, length: int) -> Batch:
    cells = np.array([row + [(bos_id, 0)] * (length - len(row)) for row in rows], dtype=np.int64)
    return batch_of(cells[..., 0], bos_id, documents=cells[..., 1])
