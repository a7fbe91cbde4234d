"""Rows of tokens from a split: pieces of documents, their order per epoch, packed and copied out.

numpy only; tensors, threads and saved states are `quintic.data.loader`, whose docstring explains pieces and order.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quintic.data.packing import BestFitPacker
from quintic.data.shards import DocumentSplit
from quintic.errors import DataError

__all__ = ["MixedRows", "PackedRows", "PieceTable", "RowPosition", "RowStream"]

_LOOKAHEAD = 1024
# An epoch without a full row can be an unlucky permutation of very little text; this many in a row are no luck.
_EMPTY_EPOCHS = 8

Int64s = npt.NDArray[np.int64]


class PieceTable:
    """The pieces of a split's documents, numbered in document order.

    A piece is a bos and up to `row_tokens - 1` tokens of one document. Piece k of a document holds its text tokens from
    `k * (row_tokens - 1)` on.
    """

    def __init__(
        self, split: DocumentSplit, bos_id: int, row_tokens: int, documents: tuple[int, int] | None = None
    ) -> None:
        """Count the pieces.

        Args:
            split: the documents.
            bos_id: the token every piece begins with.
            row_tokens: longest piece, at least 2.
            documents: number of the first document and the one behind the last; all of the split when None.
        """
        first, last = (0, split.num_documents) if documents is None else documents
        offsets = split.offsets[first : last + 1]
        self.row_tokens = row_tokens
        self._bos_id = bos_id
        self._shards = split.shards
        self._shard_offsets = split.shard_offsets
        self._first_document = first
        self._starts = offsets[:-1] + 1  # behind the document's own bos, which a piece brings along
        self._text_tokens = np.diff(offsets) - 1
        self._stride = row_tokens - 1
        pieces = np.maximum(1, -(-self._text_tokens // self._stride))
        self._first_piece = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(pieces)])

    @property
    def num_pieces(self) -> int:
        """Number of pieces."""
        return int(self._first_piece[-1])

    @property
    def num_tokens(self) -> int:
        """Tokens of all pieces, each with its bos."""
        return int(self._text_tokens.sum()) + self.num_pieces

    def lengths(self, pieces: Int64s) -> Int64s:
        """Return the tokens of each piece, its bos included: int64 of the same shape."""
        documents, skipped = self._locate(pieces)
        return 1 + np.minimum(self._text_tokens[documents] - skipped, self._stride)

    def documents(self, pieces: Int64s) -> Int64s:
        """Return the number of each piece's document in the split: int64 of the same shape."""
        return self._locate(pieces)[0] + self._first_document

    def fill(self, out: Int64s, pieces: Int64s, takes: Int64s) -> None:
        """Write the first `takes[i]` tokens of each piece one after the other into `out`.

        Args:
            out: (sum of takes,) int64; overwritten.
            pieces: (n,) int64.
            takes: (n,) int64, each between 1 and the piece's length.
        """
        documents, skipped = self._locate(pieces)
        starts = self._starts[documents] + skipped
        shards = np.searchsorted(self._shard_offsets, starts - 1, side="right") - 1
        starts -= self._shard_offsets[shards]
        ends = np.cumsum(takes)
        out[ends - takes] = self._bos_id
        places = zip(shards.tolist(), starts.tolist(), ends.tolist(), takes.tolist(), strict=True)
        for shard, start, end, take in places:
            out[end - take + 1 : end] = self._shards[shard][start : start + take - 1]

    def _locate(self, pieces: Int64s) -> tuple[Int64s, Int64s]:
        """Return each piece's document and the text tokens of the document before it."""
        documents = np.searchsorted(self._first_piece, pieces, side="right") - 1
        return documents, (pieces - self._first_piece[documents]) * self._stride


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """Packed rows.

    Attributes:
        tokens: (rows, row_tokens) int64.
        documents: (rows, row_tokens) int64; the number, in the split, of the document that each token comes from.
        epoch: that of the first row; of several sources, the least that any is in.
    """

    tokens: Int64s
    documents: Int64s
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPosition:
    """The place behind a row, and the counts so far.

    Attributes:
        epoch: number of the epoch, from 0.
        next_place: the next place of the epoch's order to let into the buffer.
        waiting: places in the buffer, ascending.
        served: tokens of all rows so far.
        cropped: tokens dropped so far, by cropping and at the ends of epochs.
    """

    epoch: int = 0
    next_place: int = 0
    waiting: tuple[int, ...] = ()
    served: int = 0
    cropped: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields, fit for JSON."""
        return {**asdict(self), "waiting": list(self.waiting)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "RowPosition":
        """Return the position `to_json` described.

        Raises:
            DataError: a field is missing, is no number, or is negative.
        """
        try:
            position = cls(
                epoch=int(fields["epoch"]),
                next_place=int(fields["next_place"]),
                waiting=tuple(int(place) for place in fields["waiting"]),
                served=int(fields["served"]),
                cropped=int(fields["cropped"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the saved data position is damaged ({type(error).__name__}: {error})") from error
        if min(position.epoch, position.next_place, *position.waiting, position.served, position.cropped) < 0:
            raise DataError("the saved data position is damaged (a negative number)")
        return position


class RowStream:
    """The packed rows of a split, epoch after epoch."""

    def __init__(
        self,
        table: PieceTable,
        *,
        seed: int,
        shuffle: bool,
        buffer_documents: int,
        max_epochs: int | None = None,
    ) -> None:
        """Start at the beginning of epoch 0.

        Args:
            table: the pieces.
            seed: of the permutations.
            shuffle: whether the pieces are permuted.
            buffer_documents: pieces to choose from when packing.
            max_epochs: stop after so many; never when None.
        """
        self._table = table
        self._seed, self._shuffle = seed, shuffle
        self._buffer_documents = buffer_documents
        self._max_epochs = max_epochs
        self._epoch = 0
        self._order: Int64s = np.empty(0, dtype=np.int64)
        self._next_place = 0
        self._looked_up = 0  # the place whose length is the first of the look-ahead
        self._lookahead: list[int] = []
        self.restore(RowPosition())

    def restore(self, position: RowPosition) -> None:
        """Go to a position: the next row is the one that came after it.

        Raises:
            DataError: the position names places beyond the end of the epoch.
        """
        self._begin_epoch(position.epoch)
        if max(position.next_place, 0, *(place + 1 for place in position.waiting)) > len(self._order):
            raise DataError("the saved data position lies beyond the end of the text; it was made from other text")
        self._next_place = position.next_place
        waiting = np.array(position.waiting, dtype=np.int64)
        lengths = self._table.lengths(self._order[waiting])
        self._packer = self._new_packer(zip(position.waiting, lengths.tolist(), strict=True))
        self._served, self._cropped = position.served, position.cropped

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0."""
        return self._epoch

    @property
    def num_rows(self) -> int:
        """Rows so far, of all epochs."""
        return self._served // self._table.row_tokens

    def position(self) -> RowPosition:
        """Return the place of the next row."""
        return RowPosition(
            epoch=self._epoch,
            next_place=self._next_place,
            waiting=self._packer.waiting(),
            served=self._served,
            cropped=self._cropped,
        )

    def pack_row(self) -> "_RowPieces | None":
        """Pack the next row and read none of its tokens; None when there is none.

        Raises:
            DataError: several epochs in a row did not fill one row.
        """
        packed = self._next_row()
        if packed is None:
            return None
        # The permutation of an epoch ends with it, so places are turned into pieces row by row.
        pieces = self._order[[place for place, _ in packed]]
        takes = np.array([take for _, take in packed], dtype=np.int64)
        self._cropped += int((self._table.lengths(pieces) - takes).sum())
        self._served += self._table.row_tokens
        return _RowPieces(self._table, pieces, takes, self._epoch)

    def _next_row(self) -> list[tuple[int, int]] | None:
        for _ in range(_EMPTY_EPOCHS):
            if self._epoch == self._max_epochs:
                return None
            pieces = self._packer.pack_row(self._next_piece)
            if pieces is not None:
                return pieces
            self._cropped += self._packer.buffered_tokens
            self._begin_epoch(self._epoch + 1)
            self._packer = self._new_packer(())
        raise DataError(
            f"too little text: an epoch does not fill one row of {self._table.row_tokens} tokens; use a smaller "
            "--seq-len or more text"
        )

    def _next_piece(self) -> tuple[int, int] | None:
        place = self._next_place
        if place >= len(self._order):
            return None
        if not self._looked_up <= place < self._looked_up + len(self._lookahead):
            self._looked_up = place
            self._lookahead = self._table.lengths(self._order[place : place + _LOOKAHEAD]).tolist()
        self._next_place = place + 1
        return place, self._lookahead[place - self._looked_up]

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_place = 0
        self._looked_up = 0
        self._lookahead = []
        self._order = self._permutation(epoch)

    def _permutation(self, epoch: int) -> Int64s:
        count = self._table.num_pieces
        if not self._shuffle:
            return np.arange(count)
        # The raw bits of a bit generator are the same in every numpy; `Generator.permutation` need not be, and a run
        # that is resumed after an upgrade would silently see other text.
        key = np.array([self._seed % 2**64, epoch], dtype=np.uint64)
        bits = np.random.Philox(key=key).random_raw(count)
        return np.argsort(bits, kind="stable")

    def _new_packer(self, waiting: Any) -> BestFitPacker:
        return BestFitPacker(self._table.row_tokens, self._buffer_documents, waiting)


@dataclass(frozen=True, slots=True)
class _RowPieces:
    """A packed row whose tokens are not read yet.

    Attributes:
        table: of the pieces.
        pieces: (n,) int64.
        takes: (n,) int64; tokens of each.
        epoch: of the text.
    """

    table: PieceTable
    pieces: Int64s
    takes: Int64s
    epoch: int


def _read(rows: Sequence[_RowPieces], *, epoch: int) -> PackedRows:
    shape = (len(rows), rows[0].table.row_tokens)
    tokens, documents = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
    for number, row in enumerate(rows):
        row.table.fill(tokens[number], row.pieces, row.takes)
        documents[number] = np.repeat(row.table.documents(row.pieces), row.takes)
    return PackedRows(tokens=tokens, documents=documents, epoch=epoch)


class MixedRows:
    """Rows of several streams, in the shares of their weights.

    The next row is of the stream that is furthest behind its share of all rows so far, the first of several. So the
    order depends on the counts of rows alone, and after n rows each stream has its share of them to within a row
    or two.
    """

    def __init__(self, streams: Sequence[RowStream], weights: Sequence[float]) -> None:
        """Start at the beginning of each stream.

        Args:
            streams: one for each source, of equal row lengths.
            weights: their shares, above 0.
        """
        self._streams = list(streams)
        self._weights = [weight / sum(weights) for weight in weights]
        self._counts = [0] * len(streams)
        self._ended: set[int] = set()

    def restore(self, positions: Sequence[RowPosition]) -> None:
        """Go to the positions that `positions` returned: the next row is the one that came after them.

        Raises:
            DataError: they are of other text.
        """
        if len(positions) != len(self._streams):
            raise DataError(
                f"the saved data position is of {len(positions)} sources, the text has {len(self._streams)}; it was "
                "made from other text"
            )
        for stream, position in zip(self._streams, positions, strict=True):
            stream.restore(position)
        self._counts = [stream.num_rows for stream in self._streams]
        self._ended = set()

    def positions(self) -> tuple[RowPosition, ...]:
        """Return the place of each stream's next row."""
        return tuple(stream.position() for stream in self._streams)

    def next_rows(self, rows: int, *, part: int = 0, parts: int = 1) -> PackedRows | None:
        """Pack the next `parts * rows` rows and return one part of them, or None when there are not so many.

        Args:
            rows: rows of a part.
            part: number of the part to return, from 0; only its tokens are read.
            parts: number of equal parts.

        Raises:
            DataError: several epochs of a source in a row did not fill one row.
        """
        packed: list[_RowPieces] = []
        while len(packed) < parts * rows:
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
        return _read(packed[part * rows : (part + 1) * rows], epoch=epoch)

    def _next_stream(self) -> int:
        going = [number for number in range(len(self._streams)) if number not in self._ended]
        total = sum(self._counts[number] for number in going) + 1
        weight = sum(self._weights[number] for number in going)
        return max(
            going,
            key=lambda number: (total * self._weights[number] / weight - self._counts[number], -number),
        )
