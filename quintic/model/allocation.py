"""The rows of a lookup layer's tables that each token gets: one for each phrase of an LZW dictionary that ends in it.

LZW (T. Welch, A Technique for High-Performance Data Compression, 1984) reads text phrase by phrase: it takes the
longest phrase of its dictionary that comes next, adds that phrase with the token behind it, and goes on at that token.
Phrases taken often are contexts worth remembering, and a token that ends many of them occurs in many contexts: with L3
(Tseng and De Sa, https://arxiv.org/abs/2601.21461) it gets as many rows.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["allocate_rows", "count_phrases"]


def count_phrases(rows: Iterable[npt.ArrayLike], *, bos_id: int | None = None) -> tuple[list[int], list[int]]:
    """Return the phrases of two tokens and more that one LZW pass finds: the token each ends in, and its count.

    A phrase counts once when it is added to the dictionary, and once each time it is taken from it. Phrases begin anew
    with each row and each document; the dictionary goes on. Single tokens are in the dictionary from the start, and
    not among the phrases that are returned.

    Args:
        rows: 1-D token ids.
        bos_id: token that starts a document; None if there is none.

    Returns:
        Last tokens and counts, in the order in which phrases were added.
    """
    children: dict[tuple[int, int], int] = {}  # (phrase, next token) -> phrase; ~token stands for a single token
    ends: list[int] = []
    counts: list[int] = []
    for row in rows:
        phrase: int | None = None
        for token in [*np.asarray(row).tolist(), None]:
            if phrase is None:
                phrase = None if token is None else ~token
                continue
            longer = None if token is None else children.get((phrase, token))
            if longer is not None and token != bos_id:
                phrase = longer
                continue
            if phrase >= 0:
                counts[phrase] += 1
            if token is None:
                break
            if token != bos_id:
                children[phrase, token] = len(ends)
                ends.append(token)
                counts.append(1)
            phrase = ~token
    return ends, counts


def allocate_rows(
    rows: Iterable[npt.ArrayLike], *, vocab_size: int, total: int, most: int, bos_id: int | None = None
) -> npt.NDArray[np.int32]:
    """Return the number of table rows of each token: at least one, at most `most`, `total` together.

    After one row for each token, the phrases of `count_phrases` give one row each to the token that they end in, the
    most frequent first and of equal ones the earliest, unless that token has `most`. Where the sample has fewer phrases
    than there are rows, the list is gone through again and again, so that tokens share in proportion; where all its
    tokens have `most`, the others get the rest, one row at a time in the order of their ids. The same rows give the
    same answer on every machine.

    Args:
        rows: 1-D token ids, below `vocab_size`.
        vocab_size: number of tokens.
        total: number of rows, from `vocab_size` to `vocab_size * most`.
        most: most rows of one token, >= 1.
        bos_id: as for `count_phrases`.

    Returns:
        (vocab_size,) int32.

    Raises:
        ValueError: `total` is out of range.
    """
    if not vocab_size <= total <= vocab_size * most:
        raise ValueError(
            f"{total:,} rows for {vocab_size:,} tokens: must be at least one and at most {most} for each, "
            f"{vocab_size:,} to {vocab_size * most:,}"
        )
    ends, counts = count_phrases(rows, bos_id=bos_id)
    by_count = np.argsort(-np.asarray(counts, dtype=np.int64), kind="stable")
    waiting = [ends[phrase] for phrase in by_count]
    allocated = [1] * vocab_size
    left = total - vocab_size
    while left:
        waiting = [token for token in waiting or range(vocab_size) if allocated[token] < most]
        for token in waiting:
            if left and allocated[token] < most:
                allocated[token] += 1
                left -= 1
    return np.asarray(allocated, dtype=np.int32)
