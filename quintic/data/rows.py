"""Makes packed rows of tokens from a split: chunks of documents, in the order of an epoch.

    ChunkIndex   documents -> chunks of at most one row, and their tokens
    RowStream    an epoch's permutation of the chunks -> packed rows, one stream per source
    MixedRows    several streams -> rows in proportion to their weights

A position in the text (`RowPosition`) is a few numbers: the epoch, the next index of its order, and the chunks in the
packer's buffer. Tokens are read last, and only for the rows that a rank needs. `quintic.data.loader` explains chunks
and order, and adds tensors, threads and saved states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quintic.data.packing import BestFitPacker
from quintic.data.preparation import DocumentSplit
from quintic.errors import DataError

__all__ = ["ChunkIndex", "MixedRows", "PackedRows", "RowPosition", "RowStream"]

# Chunks whose lengths are computed at a time.
_LOOKAHEAD = 1024
# One epoch without a full row can be an unlucky permutation of very little text. After this number of such epochs in a
# row, there is too little text.
_EMPTY_EPOCHS = 8

Int64s = npt.NDArray[np.int64]


class ChunkIndex:
    """Finds the chunks of a split's documents, which are numbered in the order of documents.

    A chunk is a bos and up to `row_tokens - 1` tokens of one document. Chunk k of a document begins at its text token
    `k * (row_tokens - 1)`.
    """

    def __init__(
        self, split: DocumentSplit, bos_id: int, row_tokens: int, documents: tuple[int, int] | None = None
    ) -> None:
        """Count the chunks of some documents.

        Args:
            split: the documents.
            bos_id: the token at the beginning of every chunk.
            row_tokens: length of the longest chunk, at least 2.
            documents: range of documents (first, one past the last); None for all of the split.
        """
        first, last = (0, split.num_documents) if documents is None else documents
        offsets = split.offsets[first : last + 1]
        self.row_tokens = row_tokens
        self._bos_id = bos_id
        self._shards = split.shards
        self._shard_offsets = split.shard_offsets
        self._first_document = first
        # First text token of each document, after its bos: every chunk has a bos of its own.
        self._starts = offsets[:-1] + 1
        self._text_tokens = np.diff(offsets) - 1
        self._stride = row_tokens - 1
        # An empty document has one chunk, its bos.
        chunks = np.maximum(1, -(-self._text_tokens // self._stride))
        self._first_chunk = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(chunks)])

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return int(self._first_chunk[-1])

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all chunks, including each chunk's bos."""
        return int(self._text_tokens.sum()) + self.num_chunks

    def lengths(self, chunks: Int64s) -> Int64s:
        """Return the number of tokens of each chunk, including its bos: int64 of the same shape."""
        documents, skipped = self._locate(chunks)
        return 1 + np.minimum(self._text_tokens[documents] - skipped, self._stride)

    def documents(self, chunks: Int64s) -> Int64s:
        """Return the index of each chunk's document in the split: int64 of the same shape."""
        return self._locate(chunks)[0] + self._first_document

    def fill(self, out: Int64s, chunks: Int64s, takes: Int64s) -> None:
        """Write the first `takes[i]` tokens of each chunk into `out`, one chunk after the other.

        Args:
            out: (sum of takes,) int64; overwritten.
            chunks: (n,) int64.
            takes: (n,) int64, each between 1 and the chunk's length.
        """
        documents, skipped = self._locate(chunks)
        starts = self._starts[documents] + skipped
        # A document lies in one shard. Its bos, at `starts - 1`, exists even if the document has no text.
        shards = np.searchsorted(self._shard_offsets, starts - 1, side="right") - 1
        starts -= self._shard_offsets[shards]
        ends = np.cumsum(takes)
        out[ends - takes] = self._bos_id
        places = zip(shards.tolist(), starts.tolist(), ends.tolist(), takes.tolist(), strict=True)
        for shard, start, end, take in places:
            out[end - take + 1 : end] = self._shards[shard][start : start + take - 1]

    def _locate(self, chunks: Int64s) -> tuple[Int64s, Int64s]:
        """Return each chunk's document, and the number of the document's text tokens before the chunk."""
        documents = np.searchsorted(self._first_chunk, chunks, side="right") - 1
        return documents, (chunks - self._first_chunk[documents]) * self._stride


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """Packed rows of tokens.

    Attributes:
        tokens: (rows, row_tokens) int64.
        documents: (rows, row_tokens) int64; index in the split of each token's document.
        epoch: epoch of the first row; for several sources, the lowest epoch of any source.
    """

    tokens: Int64s
    documents: Int64s
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPosition:
    """The position in the text after a row, and the counts so far.

    Attributes:
        epoch: number of the epoch, from 0.
        next_index: index in the epoch's order of the next chunk for the packer's buffer.
        buffered: indices in the epoch's order of the chunks in the buffer, ascending.
        served: number of tokens of all rows so far.
        cropped: number of tokens dropped so far, by cropping and at the ends of epochs.
    """

    epoch: int = 0
    next_index: int = 0
    buffered: tuple[int, ...] = ()
    served: int = 0
    cropped: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, by the names that saved states use."""
        place = {"epoch": self.epoch, "next_place": self.next_index, "waiting": list(self.buffered)}
        return {**place, "served": self.served, "cropped": self.cropped}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "RowPosition":
        """Return the position from the result of `to_json`.

        Raises:
            DataError: a field is missing, not a number, or negative.
        """
        try:
            position = cls(
                epoch=int(fields["epoch"]),
                next_index=int(fields["next_place"]),
                buffered=tuple(int(index) for index in fields["waiting"]),
                served=int(fields["served"]),
                cropped=int(fields["cropped"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the saved data position is damaged ({type(error).__name__}: {error})") from error
        if min(position.epoch, position.next_index, *position.buffered, position.served, position.cropped) < 0:
            raise DataError("the saved data position is damaged (a negative number)")
        return position


class RowStream:
    """Packs the rows of one source, epoch after epoch."""

    def __init__(
        self,
        table: ChunkIndex,
        *,
        seed: int,
        shuffle: bool,
        buffer_documents: int,
        max_epochs: int | None = None,
    ) -> None:
        """Start at the beginning of epoch 0.

        Args:
            table: the chunks.
            seed: seed of the permutations.
            shuffle: whether the chunks are permuted.
            buffer_documents: number of chunks that the packer chooses from.
            max_epochs: number of epochs after which to stop; None to never stop.
        """
        self._table = table
        self._seed, self._shuffle = seed, shuffle
        self._buffer_documents = buffer_documents
        self._max_epochs = max_epochs
        self._epoch = 0
        self._order: Int64s = np.empty(0, dtype=np.int64)
        self._next_index = 0
        # Lengths of the chunks from index `_looked_up` of the order on.
        self._looked_up = 0
        self._lookahead: list[int] = []
        self.restore(RowPosition())

    def restore(self, position: RowPosition) -> None:
        """Go to a position: the next row is the row that followed it.

        Raises:
            DataError: the position lies beyond the end of the epoch.
        """
        self._begin_epoch(position.epoch)
        if max(position.next_index, 0, *(index + 1 for index in position.buffered)) > len(self._order):
            raise DataError("the saved data position lies beyond the end of the text; it was made from other text")
        self._next_index = position.next_index
        buffered = np.array(position.buffered, dtype=np.int64)
        lengths = self._table.lengths(self._order[buffered])
        self._packer = self._new_packer(zip(position.buffered, lengths.tolist(), strict=True))
        self._served, self._cropped = position.served, position.cropped

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0."""
        return self._epoch

    @property
    def num_rows(self) -> int:
        """Number of rows so far, of all epochs."""
        return self._served // self._table.row_tokens

    def position(self) -> RowPosition:
        """Return the position before the next row."""
        return RowPosition(
            epoch=self._epoch,
            next_index=self._next_index,
            buffered=self._packer.buffered(),
            served=self._served,
            cropped=self._cropped,
        )

    def pack_row(self) -> "_RowChunks | None":
        """Pack the next row without reading its tokens; None at the end of the last epoch.

        Raises:
            DataError: several successive epochs did not fill a single row.
        """
        packed = self._next_row()
        if packed is None:
            return None
        # Indices of the order become chunks here, since the next row may already use the next epoch's permutation.
        chunks = self._order[[index for index, _ in packed]]
        takes = np.array([take for _, take in packed], dtype=np.int64)
        self._cropped += int((self._table.lengths(chunks) - takes).sum())
        self._served += self._table.row_tokens
        return _RowChunks(self._table, chunks, takes, self._epoch)

    def _next_row(self) -> list[tuple[int, int]] | None:
        for _ in range(_EMPTY_EPOCHS):
            if self._epoch == self._max_epochs:
                return None
            chunks = self._packer.pack_row(self._next_chunk)
            if chunks is not None:
                return chunks
            # The end of the epoch: chunks that no longer fill a row are dropped.
            self._cropped += self._packer.buffered_tokens
            self._begin_epoch(self._epoch + 1)
            self._packer = self._new_packer(())
        raise DataError(
            f"too little text: an epoch does not fill one row of {self._table.row_tokens} tokens; use a smaller "
            "--seq-len or more text"
        )

    def _next_chunk(self) -> tuple[int, int] | None:
        """Return the next chunk as (index in the order, length); None at the end of the epoch."""
        index = self._next_index
        if index >= len(self._order):
            return None
        # Lengths are looked up for many chunks at a time, since a numpy call takes as long for one.
        if not self._looked_up <= index < self._looked_up + len(self._lookahead):
            self._looked_up = index
            self._lookahead = self._table.lengths(self._order[index : index + _LOOKAHEAD]).tolist()
        self._next_index = index + 1
        return index, self._lookahead[index - self._looked_up]

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_index = 0
        self._looked_up = 0
        self._lookahead = []
        self._order = self._permutation(epoch)

    def _permutation(self, epoch: int) -> Int64s:
        count = self._table.num_chunks
        if not self._shuffle:
            return np.arange(count)
        # Sorting raw random bits gives the same order in every version of numpy. `Generator.permutation` need not, and
        # a run that is resumed after an upgrade would silently see other text.
        key = np.array([self._seed % 2**64, epoch], dtype=np.uint64)
        bits = np.random.Philox(key=key).random_raw(count)
        return np.argsort(bits, kind="stable")

    def _new_packer(self, buffered: Any) -> BestFitPacker:
        return BestFitPacker(self._table.row_tokens, self._buffer_documents, buffered)


@dataclass(frozen=True, slots=True)
class _RowChunks:
    """A packed row whose tokens have not been read: the first takes[i] of each chunk chunks[i], both (n,) int64."""

    table: ChunkIndex
    chunks: Int64s
    takes: Int64s
    epoch: int


def _read(rows: Sequence[_RowChunks], *, epoch: int) -> PackedRows:
    shape = (len(rows), rows[0].table.row_tokens)
    tokens, documents = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
    for number, row in enumerate(rows):
        row.table.fill(tokens[number], row.chunks, row.takes)
        documents[number] = np.repeat(row.table.documents(row.chunks), row.takes)
    return PackedRows(tokens=tokens, documents=documents, epoch=epoch)


class MixedRows:
    """Mixes the rows of several streams in proportion to their weights.

    The next row comes from the stream that is furthest behind its fraction of all rows so far (the first one of
    several). So the order depends only on the numbers of rows, and after n rows each stream has contributed its
    fraction to within a row or two.
    """

    def __init__(self, streams: Sequence[RowStream], weights: Sequence[float]) -> None:
        """Start at the beginning of each stream.

        Args:
            streams: one stream for each source, with rows of one length.
            weights: weight of each stream, above 0.
        """
        self._streams = list(streams)
        self._weights = [weight / sum(weights) for weight in weights]
        self._counts = [0] * len(streams)
        self._ended: set[int] = set()

    def restore(self, positions: Sequence[RowPosition]) -> None:
        """Go to the positions that `positions` returned: the next row is the row that followed them.

        Raises:
            DataError: the positions belong to other text.
        """
        if len(positions) != len(self._streams):
            raise DataError(
                f"the saved data position has {len(positions)} sources, the text has {len(self._streams)}; it was "
                "made from other text"
            )
        for stream, position in zip(self._streams, positions, strict=True):
            stream.restore(position)
        self._counts = [stream.num_rows for stream in self._streams]
        self._ended = set()

    def positions(self) -> tuple[RowPosition, ...]:
        """Return each stream's position before its next row."""
        return tuple(stream.position() for stream in self._streams)

    def next_rows(self, rows: int, *, rank: int = 0, world_size: int = 1) -> PackedRows | None:
        """Pack the next `world_size * rows` rows and return those of one rank; None if the text ends before.

        Args:
            rows: number of rows per rank.
            rank: the rank whose rows are returned; only their tokens are read.
            world_size: number of ranks.

        Raises:
            DataError: several successive epochs of a source did not fill a single row.
        """
        packed: list[_RowChunks] = []
        while len(packed) < world_size * rows:
            if len(self._ended) == len(self._streams):
                return None
            number = self._next_stream()
            row = self._streams[number].pack_row()
            if row is None:
                self._ended.add(number)
            else:
                self._counts[number] += 1
                packed.append(row)
        epoch = packed[0].epoch if len(self._streams) == 1 else min(stream.epoch for stream in self._streams)
        return _read(packed[rank * rows : (rank + 1) * rows], epoch=epoch)

    def _next_stream(self) -> int:
        # Of the streams that have not ended, the one whose number of rows is furthest below its due number.
        going = [number for number in range(len(self._streams)) if number not in self._ended]
        total = sum(self._counts[number] for number in going) + 1
        weight = sum(self._weights[number] for number in going)
        return max(
            going,
            key=lambda number: (total * self._weights[number] / weight - self._counts[number], -number),
        )
