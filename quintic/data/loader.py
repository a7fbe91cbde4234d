"""Batches for training and validation: documents of a split, packed into rows, as tensors.

Long documents. A document with more than `row_tokens = seq_len + 1` tokens is served as pieces of at most `row_tokens`,
each later one behind a bos of its own. So every row begins with a bos and hardly any text is lost, at a price: such a
piece pretends that a document begins in the middle of the text. A bos is never wrong as a target: all pieces of a
document but its last fill a row exactly, so the only document ends a model learns to predict are real ones.

Order. Each epoch is a permutation of all pieces, drawn from the seed and the epoch; pieces rather than whole
documents, or the rows of one long document would be one batch. Packing is `quintic.data.packing`; at the end of an
epoch what no longer fills a row is dropped.

Ranks. All ranks pack the same rows, and each reads only the tokens of its own: of every w * B rows, rank r of w has the
rows from r * B to (r + 1) * B. So the text of a step does not depend on the number of ranks, and a saved position is
that of the stream: any number of ranks goes on from it.

Read next: `quintic.data.rows`, where pieces and order are made.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quintic.data.prefetch import Prefetcher
from quintic.data.rows import MixedRows, PackedRows, PieceTable, RowPosition, RowStream
from quintic.data.shards import Dataset, SplitName
from quintic.errors import DataError

__all__ = ["Batch", "Loader", "batch_of", "iterate_validation_rows", "numbered", "validation_rows"]

_STATE_VERSION = 2
_ONE_RANK_VERSION = 1  # the same position, with the rank and the number of ranks it was of
_VALIDATION_BUFFER = 1000


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents, or one flat row of them (`quintic.speedrun.stream`).

    Attributes:
        inputs: (B, T) int64; each row begins with bos. (T,) where there is one flat row.
        targets: likewise; the token after each input.
        document_starts: (num_docs + 1,) int32; where each document begins in the flattened inputs, and their number at
            the end, of a flat row again and again. No document reaches over the end of a row.
        epoch: the epoch of the first row, from 0; of all ranks' rows.
        documents: (B, T) int64 on the CPU; the number of each input's document, for batches that are scored.
    """

    inputs: Tensor
    targets: Tensor
    document_starts: Tensor
    epoch: int = 0
    documents: Tensor | None = None

    def pinned(self, device: torch.device, *, starts: bool = False) -> "Batch":
        """Return it with inputs, targets and, with `starts`, starts pinned, if they are to go to a CUDA device."""
        if device.type != "cuda":
            return self
        # In a prefetching thread the current device is the first one; pinning there would open a context on it.
        with torch.cuda.device(device):
            return self._with(Tensor.pin_memory, starts)

    def to(self, device: torch.device, *, starts: bool = False) -> "Batch":
        """Return it with the same tensors on a device; from pinned memory without waiting."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True), starts)

    def _with(self, change: Callable[[Tensor], Tensor], starts: bool) -> "Batch":
        places = change(self.document_starts) if starts else self.document_starts
        return replace(self, inputs=change(self.inputs), targets=change(self.targets), document_starts=places)


def batch_of(
    tokens: npt.NDArray[np.int64], bos_id: int, *, documents: npt.NDArray[np.int64] | None = None, epoch: int = 0
) -> Batch:
    """Return rows of tokens as a batch: all but the last token of each are inputs, all but the first are targets.

    NumPy does it in the thread that calls, while PyTorch would start threads of its own beside the training's.

    Args:
        tokens: (B, T + 1) int64.
        bos_id: token that starts a document.
        documents: (B, T + 1) int64; the number of each token's document.
        epoch: of the first row.
    """
    inputs = np.ascontiguousarray(tokens[:, :-1])
    starts = np.append(np.flatnonzero(inputs == bos_id), inputs.size)
    return Batch(
        inputs=torch.from_numpy(inputs),
        targets=torch.from_numpy(np.ascontiguousarray(tokens[:, 1:])),
        document_starts=torch.from_numpy(starts.astype(np.int32)),
        epoch=epoch,
        documents=None if documents is None else torch.from_numpy(np.ascontiguousarray(documents[:, :-1])),
    )


def numbered(device: torch.device | str) -> torch.device:
    """Return a device with its number, for "cuda" that of the current one, which depends on the thread."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


class Loader(Iterator[Batch]):
    """Endless batches of one rank, made ahead in a background thread, with a state that resumes exactly.

    Use it in a `with` block, or `close` it; the thread ends with the loader either way.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: SplitName,
        *,
        rows: int,
        seq_len: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 1337,
        shuffle: bool = True,
        buffer_documents: int = 1000,
        prefetch: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        """Check that there is text for a batch; the thread starts with the first batch.

        Args:
            dataset: the prepared text.
            split: `train` or `val`.
            rows: B, rows per batch of this rank.
            seq_len: T, inputs per row.
            rank: this process among those that share the text.
            world_size: number of those processes.
            seed: of the permutations.
            shuffle: whether each epoch is permuted; in stored order when False.
            buffer_documents: pieces to choose from when packing: more means less cropping, and a longer state.
            prefetch: batches made ahead; 0 makes them when asked, without a thread.
            device: where inputs and targets go; through pinned memory and without waiting when it is a CUDA device.

        Raises:
            DataError: a number is out of range, or the split has too little text for one batch on every rank.
        """
        _check_sizes(rows=rows, seq_len=seq_len, rank=rank, world_size=world_size)
        if buffer_documents < 1 or prefetch < 0:
            raise DataError(f"buffer_documents {buffer_documents} and prefetch {prefetch} must be at least 1 and 0")
        tables = _tables(dataset, split, seq_len)
        num_tokens = sum(table.num_tokens for table in tables)
        if num_tokens < rows * (seq_len + 1) * world_size:
            raise _too_little_text(split, num_tokens, rows, seq_len, world_size)
        self._depth = prefetch
        self._device = numbered(device)
        self._identity = {
            "version": _STATE_VERSION,
            "dataset": dataset.key,
            "split": split,
            "seq_len": seq_len,
            "seed": seed,
            "shuffle": shuffle,
            "buffer_documents": buffer_documents,
        }
        self._shares = dataset.shares(split)
        self._tokens = [table.num_tokens for table in tables]
        self._stream = MixedRows(
            [
                # Each source has permutations of its own; the first those of a text without others.
                RowStream(table, seed=seed + number * 2**32, shuffle=shuffle, buffer_documents=buffer_documents)
                for number, table in enumerate(tables)
            ],
            [share.weight or 1.0 for share in self._shares],
        )
        self._positions = self._stream.positions()
        # The thread gets what it needs and not this object, so that dropping the loader ends the thread.
        self._make = functools.partial(
            _next_batch, self._stream, dataset, self._device, rows=rows, part=rank, parts=world_size
        )
        self._prefetcher: Prefetcher[tuple[Batch, tuple[RowPosition, ...]]] | None = None
        self._closed = False

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            DataError: the text does not fill a row, or has an id that is not in the vocabulary.
            ValueError: the loader is closed.
        """
        if self._closed:
            raise ValueError("the loader is closed")
        if self._depth == 0:
            batch, positions = self._make()
        else:
            if self._prefetcher is None:
                self._prefetcher = Prefetcher(self._make, self._depth)
            batch, positions = self._prefetcher.get()
        self._positions = positions
        return batch.to(self._device)

    @property
    def cropped_frac(self) -> float:
        """Fraction of the tokens that was dropped rather than served, over all batches returned so far."""
        cropped = sum(position.cropped for position in self._positions)
        return cropped / max(1, cropped + sum(position.served for position in self._positions))

    @property
    def epochs(self) -> dict[str, float]:
        """How often each source has been read so far: source -> tokens served and dropped over tokens there are."""
        return {
            share.source: (position.served + position.cropped) / max(1, tokens)
            for share, position, tokens in zip(self._shares, self._positions, self._tokens, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the place behind the last batch returned, fit for JSON; batches made ahead do not count."""
        positions = [position.to_json() for position in self._positions]
        if len(positions) == 1:
            return {**self._identity, "position": positions[0]}
        return {**self._identity, "positions": positions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place: the next batch is the one that followed when the state was taken.

        The number of rows per batch and of ranks may differ from the saved ones; everything else that decides which
        text comes next must be the same.

        Raises:
            DataError: the state is damaged, or was made with another dataset or another setting; the message names
                it.
        """
        if state.get("version") == _ONE_RANK_VERSION and state.get("world_size") == 1:
            state = {**state, "version": _STATE_VERSION}
        for name, value in self._identity.items():
            if name not in state:
                raise DataError(f"the saved data state has no {name!r}; it was not made by this loader")
            if state[name] != value:
                raise DataError(
                    f"the saved data state was made with {name} {state[name]!r}, this run has {value!r}; resume with "
                    f"the {name} of the saved run, or start a new one"
                )
        saved = state.get("positions", [state.get("position")])
        if not isinstance(saved, list) or not all(isinstance(position, dict) for position in saved):
            raise DataError("the saved data state has no 'position'; it was not made by this loader")
        positions = tuple(map(RowPosition.from_json, saved))
        self._stop()
        try:
            self._stream.restore(positions)
        except DataError:
            self._stream.restore(self._positions)
            raise
        self._positions = positions

    def close(self) -> None:
        """Stop the thread; no more batches. May be called twice."""
        self._closed = True
        self._stop()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _stop(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None


def validation_rows(dataset: Dataset, *, rows: int, seq_len: int, max_tokens: int | None = None) -> list[Batch]:
    """Return the batches of `iterate_validation_rows`, to be used again and again."""
    return list(iterate_validation_rows(dataset, rows=rows, seq_len=seq_len, max_tokens=max_tokens))


def iterate_validation_rows(
    dataset: Dataset, *, rows: int, seq_len: int, max_tokens: int | None = None
) -> Iterator[Batch]:
    """Yield one pass over the validation split in stored order, packed as for training, on the CPU.

    An incomplete batch at the end is left out.

    Args:
        dataset: the prepared text.
        rows: B, rows per batch.
        seq_len: T, inputs per row.
        max_tokens: at most so many inputs, rounded down to batches, but one batch at least; all text when None.

    Raises:
        DataError: a number is out of range, or there is too little text for one batch.
    """
    _check_sizes(rows=rows, seq_len=seq_len, rank=0, world_size=1)
    tables = _tables(dataset, "val", seq_len)
    wanted = None if max_tokens is None else max(1, max_tokens // (rows * seq_len))
    stream = MixedRows(
        [
            RowStream(table, seed=0, shuffle=False, buffer_documents=_VALIDATION_BUFFER, max_epochs=1)
            for table in tables
        ],
        [share.weight or 1.0 for share in dataset.shares("val")],
    )
    count = 0
    while (wanted is None or count < wanted) and (block := stream.next_rows(rows)) is not None:
        yield _to_batch(block, dataset, numbered=True)
        count += 1
    if not count:
        raise _too_little_text("val", sum(table.num_tokens for table in tables), rows, seq_len, 1)


def _tables(dataset: Dataset, split: SplitName, seq_len: int) -> list[PieceTable]:
    """Return the pieces of each source's documents in a split."""
    documents = dataset.split(split)
    return [
        PieceTable(documents, dataset.bos_id, seq_len + 1, (share.first, share.last)) for share in dataset.shares(split)
    ]


def _next_batch(
    stream: MixedRows, dataset: Dataset, device: torch.device, *, rows: int, part: int, parts: int
) -> tuple[Batch, tuple[RowPosition, ...]]:
    block = stream.next_rows(rows, part=part, parts=parts)
    assert block is not None  # a stream without max_epochs does not end
    return _to_batch(block, dataset).pinned(device), stream.positions()


def _to_batch(block: PackedRows, dataset: Dataset, *, numbered: bool = False) -> Batch:
    # The file may have changed since it was verified; on a GPU such an id would end the process without a word.
    largest = int(block.tokens.max())
    if largest >= dataset.vocab_size:
        raise DataError(
            f"{dataset.path}: token id {largest} is outside the vocabulary of {dataset.vocab_size}; find the wrong "
            f"file with: {dataset.manifest['command']} --verify"
        )
    documents = block.documents if numbered else None
    return batch_of(block.tokens, dataset.bos_id, documents=documents, epoch=block.epoch)


def _check_sizes(*, rows: int, seq_len: int, rank: int, world_size: int) -> None:
    for name, value in (("rows", rows), ("seq_len", seq_len), ("world_size", world_size)):
        if value < 1:
            raise DataError(f"{name} is {value}; it must be at least 1")
    if not 0 <= rank < world_size:
        raise DataError(f"rank is {rank}; it must be between 0 and {world_size - 1}")


def _too_little_text(split: str, tokens: int, rows: int, seq_len: int, world_size: int) -> DataError:
    ranks = f" on {world_size} ranks" if world_size > 1 else ""
    advice = "raise --val-frac or give more text" if split == "val" else "give more text"
    return DataError(
        f"too little text for one batch: the {split} split has {tokens:,} tokens, {rows} rows of {seq_len + 1}{ranks} "
        f"need about {rows * (seq_len + 1) * world_size:,}; lower --seq-len or --rows, or {advice}"
    )
