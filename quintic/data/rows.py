"""Makes packed rows of tokens from a split: chunks of documents, in the order of an epoch.

    ChunkIndex   documents -> chunks of at most one row, and their tokens
    RowStream    an epoch's permutation of the chunks -> packed rows, one stream per source
    MixedRows    the streams of all sources -> rows in proportion to their weights

A position in the text is a few numbers: the epoch, the next index of its order, and the chunks in the buffer.
Tokens are read last, and only for the rows that a rank needs. `quintic.data.loader` explains chunks and order, and adds
tensors, threads and saved states.

Rows are packed as in nanochat (Andrej Karpathy, github.com/karpathy/nanochat, its "BOS-aligned best-fit" loader): a row
is filled again and again with the longest chunk in a buffer that fits entirely. If none fits, the shortest one is
cropped to fill the row exactly, and the rest of it is dropped. The price is the cropped fraction; in return every row
begins at a document's start and no row has padding.

There is one change: the first chunk of a row is the one that has been in the buffer longest, not the longest one. If it
were the longest, an epoch would begin with all its long documents and end with all its short ones, and a chunk that
suits no row could stay in the buffer for the whole epoch.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quintic.data.dataset import Dataset, DocumentSplit
from quintic.data.source import SplitName
from quintic.errors import DataError

__all__ = ["MixedRows", "Position"]

Int64s = npt.NDArray[np.int64]
Position = dict[str, Any]
"""The position of a stream after a row, as JSON values by the names that saved states use.

    epoch        number of the epoch, from 0
    next_place   index in the epoch's order of the next chunk for the buffer
    waiting      indices in the epoch's order of the chunks in the buffer, ascending
    served       number of tokens of all rows so far
    cropped      number of tokens dropped so far, by cropping and at the ends of epochs
"""


class ChunkIndex:
    """Finds the chunks of a split's documents, which are numbered in the order of documents.

    A chunk is a bos and up to `row_tokens - 1` tokens of one document. Chunk k of a document begins at its text token
    `k * (row_tokens - 1)`.
    """

    def __init__(self, split: DocumentSplit, bos_id: int, row_tokens: int, first: int, last: int) -> None:
        """Count the chunks of the documents from `first` up to, not including, `last`."""
        offsets = split.offsets[first : last + 1]
        self.row_tokens = row_tokens
        self._bos = np.array([bos_id], dtype=split.shards[0].dtype)
        self._split = split
        self._first_document = first
        # First text token of each document, after its bos: every chunk has a bos of its own.
        self._starts = offsets[:-1] + 1
        text_tokens = np.diff(offsets) - 1
        self._stride = row_tokens - 1
        # An empty document has one chunk, its bos.
        chunks = np.maximum(1, -(-text_tokens // self._stride))
        self._first_chunk = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(chunks)])
        # (num_chunks,) int32: number of tokens of each chunk, including its bos.
        self.lengths = np.full(self._first_chunk[-1], row_tokens, dtype=np.int32)
        self.lengths[self._first_chunk[1:] - 1] = 1 + text_tokens - (chunks - 1) * self._stride

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all chunks, including each chunk's bos."""
        return int(self.lengths.sum(dtype=np.int64))

    def read(self, chunks: Int64s, takes: Int64s) -> tuple[Int64s, Int64s]:
        """Return the first takes[i] tokens of each chunk chunks[i], and the index in the split of each one's document.

        `chunks` and `takes` are (n,) int64; tokens and documents are (sum of takes,) int64.
        """
        places = np.searchsorted(self._first_chunk, chunks, side="right") - 1
        starts = self._starts[places] + (chunks - self._first_chunk[places]) * self._stride
        pieces = []
        for start, take in zip(starts.tolist(), takes.tolist(), strict=True):
            pieces += [self._bos, self._split.tokens(start, start + take - 1)]
        return np.concatenate(pieces, dtype=np.int64), np.repeat(places + self._first_document, takes)


class _Row(NamedTuple):
    """A packed row whose tokens have not been read: the first takes[i] of each chunk chunks[i], both (n,) int64."""

    table: ChunkIndex
    chunks: Int64s
    takes: Int64s
    epoch: int


class RowStream:
    """Packs the rows of one source, epoch after epoch; it works with lengths, not tokens."""

    def __init__(self, table: ChunkIndex, *, seed: int | None, buffer_documents: int) -> None:
        """Start at the beginning of epoch 0; for `seed` and `buffer_documents` see `MixedRows`."""
        self._table = table
        self._seed = seed
        self._buffer_documents = buffer_documents
        self._served = self._cropped = 0
        self._begin_epoch(0)

    def restore(self, position: Position) -> None:
        """Go to a position: the next row is the row that followed it.

        Raises:
            DataError: the position is damaged, or belongs to other text.
        """
        try:
            epoch, next_index, waiting = position["epoch"], position["next_place"], position["waiting"]
            served, cropped = int(position["served"]), int(position["cropped"])
            if min(epoch, next_index, served, cropped, *waiting) < 0 or epoch >= 2**64:
                raise ValueError("a number is out of range")
            if not max(waiting, default=-1) < next_index <= len(self._table.lengths):
                raise ValueError("it lies beyond the end of the text")
            self._begin_epoch(epoch, next_index, waiting)
            self._served, self._cropped = served, cropped
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(
                f"the saved data position is damaged or belongs to other text ({type(error).__name__}: {error})"
            ) from error

    def position(self) -> Position:
        """Return the position before the next row."""
        return {
            "epoch": self.epoch,
            "next_place": self._next_index,
            "waiting": list(self._buffer),
            "served": self._served,
            "cropped": self._cropped,
        }

    @property
    def num_rows(self) -> int:
        """Number of rows so far, of all epochs."""
        return self._served // self._table.row_tokens

    @property
    def has_ended(self) -> bool:
        """Whether the only epoch is over."""
        return self._seed is None and self.epoch > 0

    def pack_row(self) -> _Row | None:
        """Pack the next row without reading its tokens; None at the end of the only epoch."""
        row_tokens = self._table.row_tokens
        while not self._fill_buffer(row_tokens):
            # The end of the epoch: chunks that no longer fill a row are dropped.
            self._cropped += self._buffered_tokens
            self._begin_epoch(self.epoch + 1)
            if self.has_ended:
                return None
        indices: list[int] = []
        takes: list[int] = []
        room = row_tokens
        while room:
            self._fill_buffer(room)
            index = self._best_fit(room) if indices else next(iter(self._buffer))
            length = self._buffer.pop(index)
            del self._by_length[bisect_left(self._by_length, (length, -index))]
            self._buffered_tokens -= length
            indices.append(index)
            takes.append(min(length, room))
            room -= takes[-1]
            self._cropped += length - takes[-1]
        self._served += row_tokens
        return _Row(self._table, self._order[indices], np.array(takes, dtype=np.int64), self.epoch)

    def _best_fit(self, room: int) -> int:
        # The last entry of length at most `room`: second fields are -index <= 0, so that 1 sorts after them.
        place = bisect_right(self._by_length, (room, 1)) - 1
        if place < 0:
            # None fits: the shortest one, of equal ones the first to arrive, is cropped.
            place = bisect_left(self._by_length, (self._by_length[0][0] + 1,)) - 1
        return -self._by_length[place][1]

    def _fill_buffer(self, needed_tokens: int) -> bool:
        """Fill the buffer, with at least `needed_tokens` tokens; return False if the epoch has too few chunks left.

        It holds more than `buffer_documents` only if that many do not fill a row.
        """
        while len(self._buffer) < self._buffer_documents or self._buffered_tokens < needed_tokens:
            if self._next_index >= len(self._order):
                return self._buffered_tokens >= needed_tokens
            self._add_to_buffer(self._next_index)
            self._next_index += 1
        return True

    def _add_to_buffer(self, index: int) -> None:
        length = int(self._table.lengths[self._order[index]])
        self._buffer[index] = length
        insort(self._by_length, (length, -index))
        self._buffered_tokens += length

    def _begin_epoch(self, epoch: int, next_index: int = 0, buffered: Iterable[int] = ()) -> None:
        self.epoch = epoch
        """Number of the epoch, from 0."""
        self._next_index = next_index
        count = len(self._table.lengths)
        self._order = np.arange(count)
        if self._seed is not None:
            # Sorting raw random bits gives the same order in every version of numpy. `Generator.permutation` need not,
            # and a run that is resumed after an upgrade would silently see other text.
            key = np.array([self._seed % 2**64, epoch], dtype=np.uint64)
            self._order = np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
        # Index in the epoch's order -> length, of the chunks in the buffer as they arrived. The first entry of a plain
        # dict is slow to find after many removals at its front.
        self._buffer = OrderedDict[int, int]()
        # The same sorted by length, and for equal lengths from the highest index to the lowest, so that the last one
        # came first: in any other order many chunks of equal length would leave the buffer sorted, which would undo a
        # shuffle.
        self._by_length: list[tuple[int, int]] = []
        self._buffered_tokens = 0
        for index in sorted(buffered):
            self._add_to_buffer(index)


class MixedRows:
    """Packs the rows of a split, from its sources in proportion to their weights.

    The next row comes from the stream that is furthest behind its fraction of all rows so far (the first one of
    several). So the order depends only on the numbers of rows, and after n rows each stream has contributed its
    fraction to within a row or two.
    """

    def __init__(
        self, dataset: Dataset, split: SplitName, row_tokens: int, *, seed: int | None, buffer_documents: int
    ) -> None:
        """Start at the beginning of each source.

        `seed` is that of the permutations, one for each epoch without end; with None there is one epoch in stored
        order. Rows are filled from a buffer of `buffer_documents` chunks.

        Raises:
            DataError: a source does not fill one row, so that its epochs would be empty.
        """
        self._dataset = dataset
        self.num_tokens: dict[str, int] = {}
        """Number of tokens of each source."""
        self._streams: list[RowStream] = []
        sources = dataset.source_ranges(split)
        for number, source in enumerate(sources):
            table = ChunkIndex(dataset.split(split), dataset.bos_id, row_tokens, source.first, source.last)
            self.num_tokens[source.source] = table.num_tokens
            if seed is not None and table.num_tokens < row_tokens:
                raise DataError(
                    f"too little text: {source.source} does not fill one row of {row_tokens} tokens; use a smaller "
                    "--seq-len or more text"
                )
            # Each source has a seed of its own; the first one's is that of a dataset with a single source.
            own_seed = None if seed is None else seed + number * 2**32
            self._streams.append(RowStream(table, seed=own_seed, buffer_documents=buffer_documents))
        # A source of validation text has weight 0, and is then the only one of its split.
        total = sum(source.weight for source in sources)
        self._weights = [source.weight / total if total else 1.0 for source in sources]

    def restore(self, positions: Sequence[Position]) -> None:
        """Go to the positions that `positions` returned: the next row is the row that followed them.

        Raises:
            DataError: the positions are damaged, or belong to other text.
        """
        if len(positions) != len(self._streams):
            raise DataError(
                f"the saved data position has {len(positions)} sources, the text has {len(self._streams)}; it was "
                "made from other text"
            )
        for stream, position in zip(self._streams, positions, strict=True):
            stream.restore(position)

    def positions(self) -> list[Position]:
        """Return each stream's position before its next row."""
        return [stream.position() for stream in self._streams]

    def next_rows(self, rows: int, *, rank: int = 0, world_size: int = 1) -> tuple[Int64s, Int64s, int] | None:
        """Pack the next `world_size * rows` rows, and read the rows of one rank; None if the text ends before.

        Returns:
            Tokens and the indices in the split of their documents, (rows, row_tokens) int64 each; and the epoch of the
            first row, for several sources the lowest epoch of any source.

        Raises:
            DataError: the text has an id outside of the vocabulary.
        """
        packed: list[_Row] = []
        while len(packed) < world_size * rows:
            stream = self._next_stream()
            if stream is None:
                return None
            row = stream.pack_row()
            if row is not None:
                packed.append(row)
        own = packed[rank * rows : (rank + 1) * rows]
        tokens, documents = map(np.stack, zip(*(row.table.read(row.chunks, row.takes) for row in own), strict=True))
        # The file may have changed since it was verified, and on a GPU an id outside of the vocabulary would abort the
        # process without a message.
        if (largest := int(tokens.max())) >= self._dataset.vocab_size:
            raise DataError(
                f"{self._dataset.path}: token id {largest} is outside of the vocabulary of {self._dataset.vocab_size}; "
                f"find the wrong file with: {self._dataset.manifest['command']} --verify"
            )
        epoch = packed[0].epoch if len(self._streams) == 1 else min(stream.epoch for stream in self._streams)
        return tokens, documents, epoch

    def _next_stream(self) -> RowStream | None:
        """Return the stream whose number of rows is furthest below its due number; None if all have ended."""
        going = [pair for pair in zip(self._streams, self._weights, strict=True) if not pair[0].has_ended]
        if not going:
            return None
        total = sum(stream.num_rows for stream, _ in going) + 1
        weights = sum(weight for _, weight in going)
        return max(going, key=lambda pair: total * pair[1] / weights - pair[0].num_rows)[0]
