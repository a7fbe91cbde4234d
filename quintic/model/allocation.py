"""Allocates the table rows of lookup layers to tokens: a token gets a row for each LZW phrase that ends in it.

LZW (T. Welch, A Technique for High-Performance Data Compression, 1984) reads text phrase by phrase: it matches the
longest phrase of its dictionary, adds this phrase extended by the next token, and continues at that token. Frequent
phrases are contexts worth remembering, and a token that ends many phrases occurs in many contexts. So L3 (Tseng and De
Sa, https://arxiv.org/abs/2601.21461) gives such a token more rows.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["allocate_rows", "count_phrases"]


def count_phrases(rows: Iterable[npt.ArrayLike], *, bos_id: int | None = None) -> tuple[list[int], list[int]]:
    """Return the last token and the count of each phrase of at least two tokens that one LZW pass finds.

    A phrase is counted once when it is added to the dictionary, and once each time it is matched. Each row and each
    document starts a new phrase, but all share the dictionary. Single tokens are in the dictionary from the start and
    are not returned.

    Args:
        rows: 1-D sequences of token ids.
        bos_id: token that starts a document; None if there is no such token.

    Returns:
        Last tokens and counts, in the order in which the phrases were added.
    """
    children: dict[tuple[int, int], int] = {}  # (phrase, next token) -> phrase; ~token is the phrase of a single token
    ends: list[int] = []
    counts: list[int] = []
    for row in rows:
        phrase: int | None = None
        for token in np.asarray(row).tolist():
            if phrase is not None:
                # Extend the phrase while the dictionary has it.
                longer = children.get((phrase, token))
                if longer is not None:
                    phrase = longer
                    continue
                # The longest match: count it, and add it extended by this token, unless a document starts here.
                if phrase >= 0:  # single tokens are not counted
                    counts[phrase] += 1
                if token != bos_id:
                    children[phrase, token] = len(ends)
                    ends.append(token)
                    counts.append(1)
            phrase = ~token
        if phrase is not None and phrase >= 0:
            counts[phrase] += 1
    return ends, counts


def allocate_rows(
    rows: Iterable[npt.ArrayLike], *, vocab_size: int, total: int, most: int, bos_id: int | None = None
) -> npt.NDArray[np.int32]:
    """Return the number of table rows of each token: from 1 to `most`, with the sum `total`.

    1. Every token gets one row.
    2. The phrases of `count_phrases`, most frequent first and among equals the earliest, each add a row to the token
       that they end in, unless that token has `most` rows. This pass is repeated until the rows are used up, so that
       tokens get rows in proportion to their phrases.
    3. If all tokens that end a phrase have `most` rows, the other tokens get the rest, one row each in order of ids.

    The result is the same on every machine.

    Args:
        rows: 1-D sequences of token ids below `vocab_size`.
        vocab_size: number of tokens.
        total: number of rows, from `vocab_size` to `vocab_size * most`.
        most: largest number of rows of a token, at least 1.
        bos_id: as for `count_phrases`.

    Returns:
        (vocab_size,) int32.
    """
    ends, counts = count_phrases(rows, bos_id=bos_id)
    # A stable sort keeps equally frequent phrases in the order in which they were added.
    by_count = np.argsort(-np.asarray(counts, dtype=np.int64), kind="stable")
    candidates = [ends[phrase] for phrase in by_count]
    allocated = [1] * vocab_size
    left = total - vocab_size
    while left:
        candidates = [token for token in candidates or range(vocab_size) if allocated[token] < most]
        for token in candidates:
            if left and allocated[token] < most:
                allocated[token] += 1
                left -= 1
    return np.asarray(allocated, dtype=np.int32)
