"""Best-fit packing of documents into full rows without padding; it works with lengths, not tokens.

The scheme is that of nanochat (Andrej Karpathy, github.com/karpathy/nanochat, its "BOS-aligned best-fit" loader). A row
is filled again and again with the longest document in a buffer that fits entirely. If none fits, the shortest one is
cropped to fill the row exactly, and the rest of it is dropped. The price is the cropped fraction, which the loader
reports; in return every row begins at a document's start and no row has padding.

There is one change: the first document of a row is the one that has been in the buffer longest, not the longest one. If
it were the longest, an epoch would begin with all its long documents and end with all its short ones, and a document
that suits no row could stay in the buffer for the whole epoch.

Read next: `quintic.data.rows`, which turns documents into chunks that pack well, and rows into tokens.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable

__all__ = ["BestFitPacker"]


class BestFitPacker:
    """A buffer of documents from which rows are packed.

    Documents are `(index, length)` pairs with distinct indices that ascend in order of arrival. Of documents of equal
    length the one with the lowest index is used first: in any other order many documents of equal length would leave
    the buffer sorted, which would undo a shuffle.
    """

    def __init__(self, row_tokens: int, buffer_documents: int, buffered: Iterable[tuple[int, int]] = ()) -> None:
        """Start with an empty buffer, or with the documents in the buffer of a former packer.

        Args:
            row_tokens: length of a row, at least 1.
            buffer_documents: number of documents in the buffer to choose from, at least 1.
            buffered: `(index, length)` pairs in any order.
        """
        self._row_tokens = row_tokens
        self._buffer_documents = buffer_documents
        # index -> length, in order of arrival. The first entry of a plain dict is slow to find after many removals at
        # its front.
        self._arrived = OrderedDict(sorted(buffered))
        # Sorted by length, and for equal lengths from the highest index to the lowest, so that the last one came first.
        self._by_length = sorted((length, -index) for index, length in self._arrived.items())
        self.buffered_tokens = sum(self._arrived.values())
        """Number of tokens of the documents in the buffer."""

    def buffered(self) -> tuple[int, ...]:
        """Return the indices of the documents in the buffer, ascending."""
        return tuple(self._arrived)

    def pack_row(self, next_document: Callable[[], tuple[int, int] | None]) -> list[tuple[int, int]] | None:
        """Pack one row, and return which documents it consists of.

        The buffer is filled before each choice, so that rows depend only on the order of the documents. It holds more
        than `buffer_documents` only if that many do not fill a row.

        Args:
            next_document: returns the next `(index, length)` pair, length at least 1, or None at the end.

        Returns:
            `(index, take)` pairs in the order of the row: the row holds the first `take` tokens of each document, and
            the takes sum to `row_tokens`. None if the documents left do not fill a row; they stay in the buffer.
        """
        if not self._fill(next_document, self._row_tokens):
            return None
        first = next(iter(self._arrived))
        pieces = [(first, min(self._remove(first), self._row_tokens))]
        room = self._row_tokens - pieces[0][1]
        while room:
            self._fill(next_document, room)
            # The last entry of length at most `room`: second fields are -index <= 0, so that 1 sorts after them.
            place = bisect_right(self._by_length, (room, 1)) - 1
            if place < 0:
                # None fits: crop the shortest document, of equal ones the first to arrive.
                place = bisect_left(self._by_length, (self._by_length[0][0] + 1,)) - 1
            index = -self._by_length[place][1]
            take = min(self._remove(index), room)
            pieces.append((index, take))
            room -= take
        return pieces

    def _fill(self, next_document: Callable[[], tuple[int, int] | None], needed_tokens: int) -> bool:
        """Fill the buffer, with at least `needed_tokens` tokens; return False if there are too few documents."""
        while len(self._arrived) < self._buffer_documents or self.buffered_tokens < needed_tokens:
            arrived = next_document()
            if arrived is None:
                return self.buffered_tokens >= needed_tokens
            index, length = arrived
            self._arrived[index] = length
            insort(self._by_length, (length, -index))
            self.buffered_tokens += length
        return True

    def _remove(self, index: int) -> int:
        """Remove a document from the buffer, and return its length."""
        length = self._arrived.pop(index)
        del self._by_length[bisect_left(self._by_length, (length, -index))]
        self.buffered_tokens -= length
        return length
