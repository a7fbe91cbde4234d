"""The race's text as flat batches: documents end to end, each from its beginning, cut at the stage's length.

Order. Documents come in the order of the shards, and the shards again from the first when they end. A batch consists of
`chunks` chunks of equally many tokens. A chunk begins with a document and takes documents, each cut, until it is full;
the last one is shortened, and its rest is dropped, so that the next chunk begins with a document too. What does not
fill a chunk at the end of a shard is dropped.

Ranks. All ranks walk through the same chunks, and each copies the tokens of its own: of every `size` chunks, rank r has
the r-th. So a step's text does not depend on the number of ranks, which must divide the number of chunks. Chunks
of a rank may be joined in a batch: as each begins with a document, none sees another.

Validation text is not aligned: it is cut into chunks wherever they end.

Source: the order of documents is that of the modded-nanogpt speedrun's loader.
"""

import functools
import itertools
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from quintic.data.loader import Batch as FlatBatch
from quintic.data.loader import batch_of, numbered
from quintic.data.prefetch import Prefetcher
from quintic.errors import DataError
from quintic.speedrun.shards import RaceData, Tokens, read_shard
from quintic.speedrun.stages import Track
from quintic.train.distributed import SINGLE_PROCESS, Ranks

__all__ = ["FlatBatch", "chunk_stream", "validation_batches"]

_BATCHES_AHEAD = 4
_TOKENS_PER_DOCUMENT, _FEWEST_STARTS = 256, 16


class _Shard:
    """Tokens, and where their documents begin and how long they are."""

    def __init__(self, data: RaceData, path: Path) -> None:
        self.tokens: Tokens = read_shard(path, vocab_size=data.vocab_size)
        self.starts: npt.NDArray[np.int64] = np.flatnonzero(self.tokens == data.bos_id)
        if len(self.tokens) and not len(self.starts):
            raise DataError(
                f"{path}: no document in it begins with token {data.bos_id}; it was made with another tokenizer: give "
                "shards of this preset's vocabulary"
            )
        self.lengths = np.diff(self.starts, append=len(self.tokens))

    def documents(self, first: int, tokens: int, cut: int) -> list[Tokens] | None:
        """Return the documents from `first` on, each cut, that have so many tokens; None where the shard ends first."""
        lengths: npt.NDArray[np.int64] = np.minimum(self.lengths[first : first + tokens], cut)
        count = 1 + int(np.searchsorted(np.cumsum(lengths), tokens))
        if count > len(lengths):
            return None
        begins = self.starts[first : first + count]
        return [self.tokens[begin : begin + length] for begin, length in zip(begins, lengths[:count], strict=True)]


def chunk_stream(
    data: RaceData,
    track: Track,
    steps: Iterator[int],
    *,
    ranks: Ranks = SINGLE_PROCESS,
    device: torch.device | str = "cpu",
) -> Generator[FlatBatch, None, None]:
    """Yield one rank's chunks in batches, made ahead in a background thread, from shards loaded ahead in another.

    The threads start with the first batch, and end when the stream is closed or dropped.

    Args:
        data: the text.
        track: the schedule, which sets the tokens of batches, documents and passes.
        steps: numbers of the steps whose batches follow each other, without end.
        ranks: the processes that share the text; their number divides the track's chunks.
        device: where batches go; without waiting when it is a CUDA device.

    Raises:
        DataError: a shard cannot be used, or the shards do not fill a chunk.
    """
    device = numbered(device)
    # The functions in the threads do not hold this generator, so that one that was not closed ends with its last
    # reference.
    load = map(functools.partial(_Shard, data), itertools.cycle(data.train)).__next__
    with closing(Prefetcher(load, depth=1)) as shards:
        make = _batches(data, track, steps, ranks, device, shards).__next__
        with closing(Prefetcher(make, _BATCHES_AHEAD)) as batches:
            while True:
                yield batches.get().to(device, starts=True)


def _batches(
    data: RaceData, track: Track, steps: Iterator[int], ranks: Ranks, device: torch.device, shards: Prefetcher[_Shard]
) -> Iterator[FlatBatch]:
    """Yield a rank's batches, while walking through the chunks of all ranks."""
    num_shards, waiting = len(data.train), list[Tokens]()
    shard, document, num_ended, num_unused = shards.get(), 0, 0, 0
    for settings in map(track.at, steps):
        tokens, cut = settings.batch_tokens // track.chunks, settings.document_tokens
        together = track.chunks // ranks.size // track.passes(settings, ranks.size)
        for number in range(track.chunks):
            # The last token is a target only.
            while (documents := shard.documents(document, tokens + 1, cut)) is None:
                if num_unused == num_shards:
                    raise DataError(
                        f"{data.train[0].parent}: no training shard fills a chunk of {tokens:,} tokens with documents "
                        f"cut at {cut}; give more text (--data)"
                    )
                shard, document, num_ended, num_unused = shards.get(), 0, num_ended + 1, num_unused + 1
            document, num_unused = document + len(documents), 0
            if number % ranks.size == ranks.rank:
                waiting.append(np.concatenate(documents)[: tokens + 1])
                if len(waiting) == together:
                    yield _flat(waiting, data.bos_id, epoch=num_ended // num_shards).pinned(device, starts=True)
                    waiting.clear()


def validation_batches(data: RaceData, tokens: int, chunk: int, *, ranks: Ranks = SINGLE_PROCESS) -> list[FlatBatch]:
    """Return a rank's chunks of the validation text, on the CPU: of each `ranks.size` chunks, rank r has the r-th.

    Args:
        data: the text.
        tokens: to score, from the beginning of the shard.
        chunk: tokens scored at once.
        ranks: the processes that share the text.

    Raises:
        DataError: the shard cannot be used or is too short, or the numbers do not fit each other.
    """
    if tokens % (chunk * ranks.size):
        raise DataError(
            f"{tokens:,} validation tokens are no whole number of chunks of {chunk:,} for each of {ranks.size} ranks; "
            f"give another --val-tokens, such as {tokens // (chunk * ranks.size) * chunk * ranks.size}"
        )
    text = read_shard(data.validation, vocab_size=data.vocab_size)
    if len(text) <= tokens:
        raise DataError(
            f"{data.validation}: has {len(text):,} tokens, {tokens + 1:,} are to be scored; give fewer --val-tokens"
        )
    begins = range(ranks.rank * chunk, tokens, ranks.size * chunk)
    return [_flat([text[begin : begin + chunk + 1]], data.bos_id) for begin in begins]


def _flat(chunks: Sequence[Tokens], bos_id: int, epoch: int = 0) -> FlatBatch:
    """Return chunks, each with one token more than inputs, as one batch.

    The starts of documents are padded with the number of tokens, to a length that hardly changes.
    """
    batch = batch_of(np.stack(chunks).astype(np.int64), bos_id, epoch=epoch)
    inputs, targets = batch.inputs.flatten(), batch.targets.flatten()
    starts = np.union1d([0], batch.document_starts.numpy())
    room = max(_FEWEST_STARTS, len(inputs) // _TOKENS_PER_DOCUMENT)
    while room < len(starts):
        room *= 2
    padded = np.pad(starts, (0, room - len(starts)), constant_values=len(inputs)).astype(np.int32)
    return replace(batch, inputs=inputs, targets=targets, document_starts=torch.from_numpy(padded))
