"""Rows of lookup tables per token: the LZW pass and the sharing out, by hand and against a second implementation."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quintic.model.allocation import allocate_rows, count_phrases

ROWS = st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=5)


def phrases_of(rows, bos_id=None):
    """LZW by its definition: a dictionary of tuples, the longest phrase searched for at every place."""
    counts = {(token,): 0 for token in range(6)}
    for row in rows:
        starts = [0, *(place for place, token in enumerate(row) if token == bos_id), len(row)]
        for first, end in itertools.pairwise(starts):
            document, place = tuple(row[first:end]), 0
            while place < len(document):
                length = max(n for n in range(1, len(document) - place + 1) if document[place : place + n] in counts)
                counts[document[place : place + length]] += 1
                if place + length < len(document):
                    counts[document[place : place + length + 1]] = 1
                place += length
    return {phrase: count for phrase, count in counts.items() if len(phrase) > 1}


def test_phrases_by_hand():
    # 1 2 1 2 1 2 1: 1, then 2, then 12, then 121 -- which add 12, 21, 121 and nothing at the end.
    assert count_phrases([[1, 2, 1, 2, 1, 2, 1]]) == ([2, 1, 1], [2, 1, 2])
    # The dictionary goes on in the next row, a phrase does not.
    assert count_phrases([[1, 2], [1, 2]]) == ([2], [2])
    assert count_phrases([[1], [2]]) == ([], [])
    # 12 | 01, 12 | 01 and 012, 23: the second document's 12 is taken, its end adds nothing.
    assert count_phrases([[1, 2, 0, 1, 2, 0, 1, 2, 3]], bos_id=0) == ([2, 1, 2, 3], [2, 2, 1, 1])
    assert count_phrases([]) == ([], [])


@given(ROWS, st.sampled_from([None, 0]))
def test_phrases_are_those_of_the_definition(rows, bos_id):
    ends, counts = count_phrases([np.asarray(row, dtype=np.int64) for row in rows], bos_id=bos_id)
    expected = phrases_of(rows, bos_id)
    assert list(zip(ends, counts, strict=True)) == [(phrase[-1], count) for phrase, count in expected.items()]


def test_allocation_by_hand():
    rows = [[1, 2, 1, 2, 1, 2, 1]]  # 12 twice, 21 once, 121 twice: a row each for 2, 1 and 1, in the order 2, 1, 1

    def allocated(total, most):
        return allocate_rows(rows, vocab_size=4, total=total, most=most).tolist()

    assert allocated(4, 1) == [1, 1, 1, 1]
    assert allocated(5, 9) == [1, 1, 2, 1]
    assert allocated(7, 9) == [1, 3, 2, 1]
    # A second time through the list, then a token at its most, then those that the sample does not have.
    assert allocated(10, 9) == [1, 5, 3, 1]
    assert allocated(10, 4) == [1, 4, 4, 1]
    assert allocated(11, 4) == [2, 4, 4, 1]
    assert allocated(16, 4) == [4, 4, 4, 4]
    assert allocate_rows([], vocab_size=3, total=8, most=3).tolist() == [3, 3, 2]


def test_of_equally_frequent_phrases_the_earliest_come_first():
    # The phrases 01, 12, ... 38 39 once, and every fourth of them once more.
    rows = [range(40), *([token, token + 1] for token in range(0, 40, 4))]
    others = [token for token in range(1, 40) if token % 4 != 1]
    found = allocate_rows(rows, vocab_size=40, total=40 + 10 + 15, most=9)
    assert np.flatnonzero(found == 2).tolist() == sorted([*range(1, 40, 4), *others[:15]])


@given(ROWS, st.integers(1, 6), st.data())
def test_every_token_has_its_share(rows, most, data):
    total = data.draw(st.integers(6, 6 * most))
    found = allocate_rows(rows, vocab_size=6, total=total, most=most)
    assert (found.dtype, found.shape, found.sum()) == (np.int32, (6,), total)
    assert found.min() >= 1
    assert found.max() <= most
    assert np.array_equal(found, allocate_rows(rows, vocab_size=6, total=total, most=most))
    if total < 6 * most:
        more = allocate_rows(rows, vocab_size=6, total=total + 1, most=most)
        assert sorted(more - found) == [0] * 5 + [1]
    # Up to as many rows as there are phrases, a token has no more than phrases end in it, and one.
    ends = Counter(phrase[-1] for phrase in phrases_of(rows))
    if total <= 6 + sum(min(count, most - 1) for count in ends.values()):
        assert all(found[token] <= 1 + ends[token] for token in range(6))
