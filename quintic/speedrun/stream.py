"""The race's text as flat batches: documents end to end, each from its beginning, cut at the stage's length.

Order. Documents come in the order of the shards, and the shards again from the first when they end. A batch consists of
`chunks` chunks of equally many tokens. A chunk begins with a document and takes documents, each cut, until it is full;
the last one is shortened, and its rest is dropped, so that the next chunk begins with a document too. What does not
fill a chunk at the end of a shard is dropped.

Ranks. All ranks walk through the same chunks, and each reads the tokens of its own: of every `size` chunks, rank r has
the r-th. So a step's text does not depend on the number of ranks, which must divide the number of chunks. Chunks
of a rank may be joined in a batch: as each begins with a document, none sees another.

Validation text is not aligned: it is cut into chunks wherever they end.

Source: the order of documents is that of the modded-nanogpt speedrun's loader.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quintic.data.loader import Batch as FlatBatch
from quintic.data.loader import numbered
from quintic.data.prefetch import Prefetcher
from quintic.errors import DataError
from quintic.speedrun.shards import RaceData, Tokens, read_shard
from quintic.speedrun.stages import StepSettings
from quintic.train.distributed import ALONE, Ranks

__all__ = ["ChunkStream", "FlatBatch", "validation_batches"]

_BATCHES_AHEAD = 4
_TOKENS_PER_DOCUMENT, _FEWEST_STARTS = 256, 16


class _Shard:
    """Tokens, and where their documents begin and how long they are."""

    def __init__(self, path: Path, vocab_size: int, bos_id: int) -> None:
        self.tokens: Tokens = read_shard(path, vocab_size=vocab_size)
        self.starts: npt.NDArray[np.int64] = np.flatnonzero(self.tokens == bos_id)
        self.lengths = np.diff(self.starts, append=len(self.tokens))

    def chunk(self, document: int, tokens: int, cut: int) -> npt.NDArray[np.int64] | None:
        """Return the tokens that each document gives to a chunk, targets included; None where the shard ends first.

        Args:
            document: the first one.
            tokens: inputs of the chunk.
            cut: most tokens of a document.
        """
        lengths: npt.NDArray[np.int64] = np.minimum(self.lengths[document : document + tokens + 1], cut)
        totals = np.cumsum(lengths)
        last = int(np.searchsorted(totals, tokens + 1))
        if last == len(totals):
            return None
        lengths = lengths[: last + 1]
        lengths[-1] -= totals[last] - (tokens + 1)
        return lengths


class ChunkStream(Iterator[FlatBatch]):
    """Endless batches of one rank's chunks, made ahead in a background thread, from shards loaded ahead in another.

    Use it in a `with` block, or `close` it.

    Args:
        data: the text.
        settings: step from 0 -> its settings; the tokens of batches and documents count here.
        chunks: of a step.
        passes: settings of a step -> number of batches that a rank's chunks of it make, a divisor of their number.
        ranks: the processes that share the text; their number must divide `chunks`.
        device: where batches go; without waiting when it is a CUDA device.

    Raises:
        DataError: the ranks cannot share the chunks.
    """

    def __init__(
        self,
        data: RaceData,
        settings: Callable[[int], StepSettings],
        *,
        chunks: int,
        passes: Callable[[StepSettings], int],
        ranks: Ranks = ALONE,
        device: torch.device | str = "cpu",
    ) -> None:
        if chunks % ranks.size:
            raise DataError(
                f"{ranks.size} ranks cannot share the {chunks} chunks of a batch; start as many as divide them"
            )
        self._data, self._settings, self._device = data, settings, numbered(device)
        self._num_chunks, self._passes, self._ranks = chunks, passes, ranks
        self._threads: list[Prefetcher[Any]] = []

    def __next__(self) -> FlatBatch:
        """Return the next batch.

        Raises:
            DataError: a shard cannot be used, or the shards do not fill a chunk.
        """
        if not self._threads:
            load = functools.partial(_Shard, vocab_size=self._data.vocab_size, bos_id=self._data.bos_id)
            shards = Prefetcher(map(load, itertools.cycle(self._data.train)).__next__, depth=1)
            chunks = _chunks(shards, self._data, self._settings, self._num_chunks, self._ranks)
            batches = _batches(chunks, self._num_chunks // self._ranks.size, self._passes, self._device)
            self._threads = [Prefetcher(batches.__next__, _BATCHES_AHEAD), shards]
        batch: FlatBatch = self._threads[0].get()
        return batch.to(self._device, starts=True)

    def close(self) -> None:
        """Stop the threads."""
        for thread in self._threads:
            thread.close()

    def __enter__(self) -> "ChunkStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# The functions in the threads hold no stream, so that one that was not closed ends with its last reference.


def _batches(
    chunks: Iterator[tuple[FlatBatch, StepSettings]],
    chunks_per_step: int,
    passes: Callable[[StepSettings], int],
    device: torch.device,
) -> Iterator[FlatBatch]:
    """Yield a rank's batches, of its chunks of each step."""
    waiting: list[FlatBatch] = []
    for chunk, step in chunks:
        waiting.append(chunk)
        if len(waiting) == chunks_per_step // passes(step):
            yield _joined(waiting).pinned(device, starts=True)
            waiting = []


def _chunks(
    shards: Prefetcher[_Shard],
    data: RaceData,
    settings: Callable[[int], StepSettings],
    num_chunks: int,
    ranks: Ranks,
) -> Iterator[tuple[FlatBatch, StepSettings]]:
    """Yield a rank's chunks and the settings of their steps, while walking through those of all ranks."""
    num_shards = len(data.train)
    shard, document, num_ended, num_unused = shards.get(), 0, 0, 0
    for number in itertools.count():
        step = settings(number // num_chunks)
        tokens, cut = step.batch_tokens // num_chunks, step.document_tokens
        while (lengths := shard.chunk(document, tokens, cut)) is None:
            if num_unused == num_shards:
                raise DataError(
                    f"{data.train[0].parent}: no training shard fills a chunk of {tokens:,} tokens with documents cut "
                    f"at {cut}; give more text (--data)"
                )
            shard, document, num_ended, num_unused = shards.get(), 0, num_ended + 1, num_unused + 1
        if number % ranks.size == ranks.rank:
            yield _flat(shard, document, lengths, num_ended // num_shards), step
        document, num_unused = document + len(lengths), 0


def validation_batches(data: RaceData, *, tokens: int, chunk_tokens: int, ranks: Ranks = ALONE) -> list[FlatBatch]:
    """Return a rank's chunks of the validation text, on the CPU: of each `ranks.size` chunks, rank r has the r-th.

    Raises:
        DataError: the shard cannot be used or is too short, or the numbers do not fit each other.
    """
    if tokens % (chunk_tokens * ranks.size):
        raise DataError(
            f"{tokens:,} validation tokens are no whole number of chunks of {chunk_tokens:,} for each of {ranks.size} "
            "ranks; give another --val-tokens"
        )
    text = read_shard(data.validation, vocab_size=data.vocab_size)
    if len(text) <= tokens:
        raise DataError(
            f"{data.validation}: has {len(text):,} tokens, {tokens + 1:,} are to be scored; give fewer --val-tokens"
        )
    batches = []
    for begin in range(ranks.rank * chunk_tokens, tokens, ranks.size * chunk_tokens):
        piece = torch.from_numpy(text[begin : begin + chunk_tokens + 1].astype(np.int64))
        starts = np.flatnonzero(text[begin + 1 : begin + chunk_tokens] == data.bos_id) + 1
        batches.append(FlatBatch(piece[:-1], piece[1:], _starts([0, *starts.tolist(), chunk_tokens])))
    return batches


def _flat(shard: _Shard, first: int, lengths: npt.NDArray[np.int64], epoch: int) -> FlatBatch:
    begins = shard.starts[first : first + len(lengths)]
    pieces = [shard.tokens[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]
    tokens = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
    ends = np.cumsum(lengths)
    ends[-1] -= 1  # the last token is a target only; its document may have been nothing else
    return FlatBatch(tokens[:-1], tokens[1:], _starts(np.unique([0, *ends])), epoch)


def _joined(chunks: list[FlatBatch]) -> FlatBatch:
    """Return chunks of equally many tokens as one batch."""
    size = len(chunks[0].inputs)
    starts = [number * size + start for number, chunk in enumerate(chunks) for start in chunk.document_starts.tolist()]
    inputs, targets = torch.cat([chunk.inputs for chunk in chunks]), torch.cat([chunk.targets for chunk in chunks])
    return FlatBatch(inputs, targets, _starts(np.unique(starts)), chunks[-1].epoch)


def _starts(values: Sequence[int] | npt.NDArray[np.int64]) -> Tensor:
    """Return starts of documents, with the number of tokens at the end, padded to a number that hardly changes."""
    tokens = int(values[-1])
    room = max(_FEWEST_STARTS, tokens // _TOKENS_PER_DOCUMENT)
    while room < len(values):
        room *= 2
    padded = torch.full((room,), tokens, dtype=torch.int32)
    padded[: len(values)] = torch.as_tensor(values, dtype=torch.int32)
    return padded
