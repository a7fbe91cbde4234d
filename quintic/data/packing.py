"""Best-fit packing: documents in, full rows out, no padding. Pure: it knows lengths, not tokens.

The scheme is that of nanochat (Andrej Karpathy, github.com/karpathy/nanochat, its "BOS-aligned best-fit" loader): a
row is filled with the longest waiting document that fits entirely, again and again; where none fits, the shortest
waiting one is cropped to fill the row exactly. What is cropped off is dropped. The price is the cropped fraction,
which the loader reports; the gain is that every row begins at a document's start and none has padding.

One change: a row is opened by the document that waits longest, not by the longest document. With the longest first,
an epoch begins with all its long documents and ends with all its short ones, and a document that suits no row can
wait for the whole epoch.

Read next: `quintic.data.rows`, which turns documents into pieces that pack well and rows into tokens.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable

__all__ = ["BestFitPacker"]


class BestFitPacker:
    """A buffer of waiting documents, and the rows made from it.

    Documents are `(index, length)` pairs with distinct indices that ascend in order of arrival. Among equal lengths
    the lowest index goes first: any other order would undo a shuffle, because runs of equal lengths would leave the
    buffer sorted.
    """

    def __init__(self, row_tokens: int, buffer_documents: int, waiting: Iterable[tuple[int, int]] = ()) -> None:
        """Start with the documents a former packer had waiting, or with none.

        Args:
            row_tokens: length of a row, at least 1.
            buffer_documents: number of waiting documents to choose from, at least 1.
            waiting: `(index, length)` pairs in any order.
        """
        self._row_tokens = row_tokens
        self._buffer_documents = buffer_documents
        # A dict would do, but finding its first entry gets slow when entries are always taken from the front.
        self._arrived = OrderedDict(sorted(waiting))
        # Sorted by length, then from the highest index to the lowest: the last entry of a length came first.
        self._by_length = sorted((length, -index) for index, length in self._arrived.items())
        self.buffered_tokens = sum(self._arrived.values())
        """Tokens of the waiting documents."""

    def waiting(self) -> tuple[int, ...]:
        """Return the indices of the waiting documents, ascending."""
        return tuple(self._arrived)

    def pack_row(self, next_document: Callable[[], tuple[int, int] | None]) -> list[tuple[int, int]] | None:
        """Fill one row.

        The buffer is filled up before each choice, so what is chosen depends only on the documents' order. It holds
        more than `buffer_documents` only where that many do not fill a row.

        Args:
            next_document: returns the next `(index, length)` pair, length at least 1, or None when there are no more.

        Returns:
            `(index, take)` pairs in the order of the row; the takes sum to `row_tokens`, and each piece is the first
            `take` tokens of its document. None when the documents left do not fill a row; they stay waiting.
        """
        if not self._fill(next_document, self._row_tokens):
            return None
        first = next(iter(self._arrived))
        pieces = [(first, min(self._remove(first), self._row_tokens))]
        room = self._row_tokens - pieces[0][1]
        while room:
            self._fill(next_document, room)
            # The last entry no longer than the room; indices are never negative, so 1 sorts after each of them.
            place = bisect_right(self._by_length, (room, 1)) - 1
            if place < 0:  # none fits: crop the shortest, the first come of its length
                place = bisect_left(self._by_length, (self._by_length[0][0] + 1,)) - 1
            index = -self._by_length[place][1]
            take = min(self._remove(index), room)
            pieces.append((index, take))
            room -= take
        return pieces

    def _fill(self, next_document: Callable[[], tuple[int, int] | None], needed_tokens: int) -> bool:
        """Let documents in until the buffer is full and holds so many tokens; False when there are too few."""
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
        """Take a document out of the buffer; return its length."""
        length = self._arrived.pop(index)
        del self._by_length[bisect_left(self._by_length, (length, -index))]
        self.buffered_tokens -= length
        return length
