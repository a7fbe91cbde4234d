"""Best-fit packing: documents in, full rows out, no padding. Pure: it knows lengths, not tokens.

The scheme is that of nanochat (Andrej Karpathy, github.com/karpathy/nanochat, its "BOS-aligned best-fit" loader):
each row begins with a document, is filled with the longest waiting document that fits entirely, and where none fits
the shortest waiting one is cropped to fill the row exactly. What is cropped off is dropped. The price is the cropped
fraction, which the loader reports; the gain is that every row begins at a document's start and none has padding.

Read next: `quintic.data.loader`, which turns documents into pieces that pack well and rows into tensors.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable

__all__ = ["BestFitPacker"]


class BestFitPacker:
    """A buffer of waiting documents, and the rows made from it.

    Documents are `(index, length)` pairs with distinct indices. Among equal lengths the lowest index goes first, so
    an index that counts arrivals gives first come, first served; any other index would undo a shuffle, because
    long runs of equal lengths would leave the buffer sorted.
    """

    def __init__(self, row_tokens: int, buffer_documents: int, waiting: Iterable[tuple[int, int]] = ()) -> None:
        """Start with the documents a former packer had waiting, or with none.

        Args:
            row_tokens: length of a row, at least 1.
            buffer_documents: number of waiting documents to choose from, at least 1.
            waiting: `(index, length)` pairs.
        """
        self._row_tokens = row_tokens
        self._buffer_documents = buffer_documents
        # Sorted by length, then from the highest index to the lowest: the last entry of a length is its first come.
        self._buffer = sorted((length, -index) for index, length in waiting)
        self._buffered_tokens = sum(length for length, _ in self._buffer)

    @property
    def buffered_tokens(self) -> int:
        """Tokens of the waiting documents."""
        return self._buffered_tokens

    def waiting(self) -> tuple[int, ...]:
        """Return the indices of the waiting documents, in no particular order."""
        return tuple([-negative for _, negative in self._buffer])

    def pack_row(self, next_document: Callable[[], tuple[int, int] | None]) -> list[tuple[int, int]] | None:
        """Fill one row.

        The buffer is filled up before each choice, so what is chosen depends only on the documents' order.

        Args:
            next_document: returns the next `(index, length)` pair, length at least 1, or None when there are no more.

        Returns:
            `(index, take)` pairs in the order of the row; the takes sum to `row_tokens`, and each piece is the first
            `take` tokens of its document. None when the documents left do not fill a row; they stay waiting.
        """
        buffer = self._buffer
        pieces: list[tuple[int, int]] = []
        room = self._row_tokens
        while room:
            while len(buffer) < self._buffer_documents and (arrived := next_document()) is not None:
                insort(buffer, (arrived[1], -arrived[0]))
                self._buffered_tokens += arrived[1]
            if room == self._row_tokens and self._buffered_tokens < room and not self._fill(next_document):
                return None
            # The last entry no longer than the room; indices are never negative, so 1 sorts after each of them.
            place = bisect_right(buffer, (room, 1)) - 1
            if place < 0:  # none fits: crop the shortest, the first come of its length
                place = bisect_left(buffer, (buffer[0][0] + 1,)) - 1
            length, negative = buffer.pop(place)
            self._buffered_tokens -= length
            take = min(length, room)
            pieces.append((-negative, take))
            room -= take
        return pieces

    def _fill(self, next_document: Callable[[], tuple[int, int] | None]) -> bool:
        """Let in documents beyond the buffer's size until a row can be filled; False when they run out before.

        Needed where the buffer is small for the row: it keeps "does another row exist" answerable before the row
        is begun, so that documents are never taken into a row that cannot be finished.
        """
        while self._buffered_tokens < self._row_tokens:
            arrived = next_document()
            if arrived is None:
                return False
            insort(self._buffer, (arrived[1], -arrived[0]))
            self._buffered_tokens += arrived[1]
        return True
