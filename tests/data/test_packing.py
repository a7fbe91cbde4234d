"""Best-fit packing against a naive oracle."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintic.data.rows import RowStream

Lengths = st.lists(st.integers(1, 30), max_size=120)


def stream_of(lengths: list[int], row: int, buffer: int) -> RowStream:
    table = SimpleNamespace(row_tokens=row, lengths=np.array(lengths, dtype=np.int32))
    return RowStream(table, seed=None, buffer_documents=buffer)


def next_pieces(stream: RowStream) -> list[tuple[int, int]] | None:
    row = stream.pack_row()
    return None if row is None else list(zip(row.chunks.tolist(), row.takes.tolist(), strict=True))


def pack_all(lengths: list[int], row: int, buffer: int) -> Iterator[list[tuple[int, int]]]:
    stream = stream_of(lengths, row, buffer)
    while (pieces := next_pieces(stream)) is not None:
        yield pieces


def naive(lengths: list[int], row: int, buffer_size: int) -> Iterator[list[tuple[int, int]]]:
    """The rule as its docstring states it, by scanning the whole buffer for each choice."""
    queue = list(enumerate(lengths))
    buffer: list[tuple[int, int]] = []
    while True:
        pieces: list[tuple[int, int]] = []
        room = row
        while room:
            while queue and len(buffer) < buffer_size:
                buffer.append(queue.pop(0))
            while queue and sum(length for _, length in buffer) < room:
                buffer.append(queue.pop(0))
            if sum(length for _, length in buffer) < room:
                assert not pieces
                return
            fitting = [document for document in buffer if document[1] <= room]
            if not pieces:
                chosen = min(buffer)
            elif fitting:
                chosen = min(fitting, key=lambda document: (-document[1], document[0]))
            else:
                chosen = min(buffer, key=lambda document: (document[1], document[0]))
            buffer.remove(chosen)
            pieces.append((chosen[0], min(chosen[1], room)))
            room -= pieces[-1][1]
        yield pieces


@given(Lengths, st.integers(1, 25), st.integers(1, 40))
def test_choices_are_those_of_the_naive_scan(lengths: list[int], row: int, buffer: int) -> None:
    assert list(pack_all(lengths, row, buffer)) == list(naive(lengths, row, buffer))


@given(Lengths, st.integers(1, 25), st.integers(1, 40))
def test_rows_are_full_and_no_document_is_used_twice(lengths: list[int], row: int, buffer: int) -> None:
    rows = list(pack_all(lengths, row, buffer))
    used = [index for pieces in rows for index, _ in pieces]
    assert len(used) == len(set(used))
    for pieces in rows:
        assert sum(take for _, take in pieces) == row
        # Only the last piece of a row may be cropped: what comes after it begins the next row.
        assert all(take == lengths[index] for index, take in pieces[:-1])
        assert 1 <= pieces[-1][1] <= lengths[pieces[-1][0]]


@given(Lengths, st.integers(1, 25), st.integers(1, 40))
def test_what_is_left_does_not_fill_a_row(lengths: list[int], row: int, buffer: int) -> None:
    stream = stream_of(lengths, row, buffer)
    used: set[int] = set()
    cropped = 0
    while (pieces := next_pieces(stream)) is not None:
        used |= {index for index, _ in pieces}
        cropped = stream.position()["cropped"]
    left = sum(length for index, length in enumerate(lengths) if index not in used)
    assert left == stream.position()["cropped"] - cropped < row
    assert stream.has_ended


@given(Lengths, st.integers(1, 25), st.integers(1, 40), st.integers(0, 10))
def test_a_stream_restored_from_a_position_goes_on(lengths: list[int], row: int, buffer: int, before: int) -> None:
    stream, other = stream_of(lengths, row, buffer), stream_of(lengths, row, buffer)
    for _ in range(before):
        if next_pieces(stream) is None:
            return
    position = stream.position()
    other.restore(position | {"waiting": position["waiting"][::-1]})
    assert other.position() == position
    while (pieces := next_pieces(stream)) is not None:
        assert next_pieces(other) == pieces
    assert next_pieces(other) is None


def test_equal_lengths_go_in_order_of_arrival() -> None:
    assert [pieces[0][0] for pieces in pack_all([5] * 20, 5, 8)] == list(range(20))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([3, 2, 7, 4], [[(0, 3), (2, 7)]]),  # the first come opens the row, then the longest that fits
        ([9, 8, 9], [[(0, 9), (1, 1)]]),  # none fits the last place: the shortest is cropped
        ([12, 11], [[(0, 10)], [(1, 10)]]),  # longer than a row
    ],
)
def test_rule_by_example(lengths: list[int], expected: list[list[tuple[int, int]]]) -> None:
    assert list(pack_all(lengths, 10, 10)) == expected
