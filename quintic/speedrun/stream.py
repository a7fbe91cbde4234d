"""The race's text as flat batches: documents one after the other, each truncated to the stage's length.

Order: documents in the order of the shards, starting over after the last shard. A batch consists of `chunks` chunks of
equal length. A chunk is filled with truncated documents; the last one is shortened to fit and its rest is dropped, so
that every chunk begins with a document. The rest of a shard that does not fill a chunk is dropped.

Ranks: all ranks walk through the same chunks, and rank r keeps chunk r, r + size, r + 2 size, ... of each batch. So the
text of a step does not depend on the number of ranks, which must divide the number of chunks. Several chunks of a rank
may be concatenated for a pass: each begins with a document, so attention never crosses chunks.

Validation text is split into chunks of equal length regardless of documents.

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

from quintic.data.loader import Batch, Prefetcher, batch_of, numbered
from quintic.errors import DataError
from quintic.speedrun.shards import RaceData, Tokens, read_shard
from quintic.speedrun.stages import Track
from quintic.train.distributed import SINGLE_PROCESS, Ranks

__all__ = ["chunk_stream", "validation_batches"]

_BATCHES_AHEAD = 4


class _Shard:
    """The tokens of a shard, with starts and lengths of its documents."""

    def __init__(self, data: RaceData, path: Path) -> None:
        self.tokens: Tokens = read_shard(path, vocab_size=data.vocab_size)
        self.starts: npt.NDArray[np.int64] = np.flatnonzero(self.tokens == data.bos_id)
        if len(self.tokens) and not len(self.starts):
            raise DataError(
                f"{path}: has no token {data.bos_id}, which starts documents; it was made with another tokenizer: give "
                "shards of this preset's vocabulary"
            )
        self.lengths = np.diff(self.starts, append=len(self.tokens))

    def documents(self, first: int, tokens: int, longest: int) -> list[Tokens] | None:
        """Return documents from `first` on, truncated to `longest`, with at least `tokens` tokens; None at the end."""
        lengths: npt.NDArray[np.int64] = np.minimum(self.lengths[first : first + tokens], longest)
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
) -> Generator[Batch, None, None]:
    """Yield the batches of one rank, one for each pass. One thread loads shards ahead, another makes batches ahead.

    The threads start with the first batch, and end when the stream is closed or garbage-collected. The batches follow
    the settings of `steps`, an infinite iterator of step numbers. Copies to a CUDA device are asynchronous.

    Raises:
        DataError: a shard cannot be used, or the shards do not fill a chunk.
    """
    device = numbered(device)
    # The threads hold no reference to this generator, so that dropping an unclosed one ends them.
    load = map(functools.partial(_Shard, data), itertools.cycle(data.train)).__next__
    with closing(Prefetcher(load, depth=1)) as shards:
        make = _batches(data, track, steps, ranks, device, shards).__next__
        with closing(Prefetcher(make, _BATCHES_AHEAD)) as batches:
            while True:
                yield batches.get().to(device, starts=True)


def _batches(
    data: RaceData, track: Track, steps: Iterator[int], ranks: Ranks, device: torch.device, shards: Prefetcher[_Shard]
) -> Iterator[Batch]:
    """Yield the batches of one rank, walking through the chunks of all ranks."""
    num_shards, waiting = len(data.train), list[Tokens]()
    shard, document, num_ended, num_unused = shards.get(), 0, 0, 0
    for settings in map(track.at, steps):
        tokens, longest = settings.batch_tokens // track.chunks, settings.document_tokens
        together = track.chunks // ranks.size // track.passes(settings, ranks.size)
        for number in range(track.chunks):
            # One token more than inputs: the last one is only a target.
            while (documents := shard.documents(document, tokens + 1, longest)) is None:
                if num_unused == num_shards:
                    raise DataError(
                        f"{data.train[0].parent}: no training shard fills a chunk of {tokens:,} tokens with documents "
                        f"of at most {longest} tokens; give more text (--data)"
                    )
                shard, document, num_ended, num_unused = shards.get(), 0, num_ended + 1, num_unused + 1
            document, num_unused = document + len(documents), 0
            if number % ranks.size == ranks.rank:
                waiting.append(np.concatenate(documents)[: tokens + 1])
                if len(waiting) == together:
                    yield _flat(waiting, data.bos_id, epoch=num_ended // num_shards).pinned(device, starts=True)
                    waiting.clear()


def validation_batches(data: RaceData, tokens: int, chunk: int, *, ranks: Ranks = SINGLE_PROCESS) -> list[Batch]:
    """Return a rank's chunks of the first `tokens` of the validation text: rank r has chunk r, r + size, ...

    Raises:
        DataError: the shard cannot be used or is too short, or `tokens` is not a multiple of `chunk` x ranks.
    """
    if tokens % (chunk * ranks.size):
        raise DataError(
            f"--val-tokens {tokens}: must be a multiple of {chunk:,} tokens x {ranks.size} ranks, such as "
            f"{tokens // (chunk * ranks.size) * chunk * ranks.size}"
        )
    text = read_shard(data.validation, vocab_size=data.vocab_size)
    if len(text) <= tokens:
        raise DataError(
            f"{data.validation}: has only {len(text):,} tokens, but scoring needs {tokens + 1:,}; lower --val-tokens"
        )
    begins = range(ranks.rank * chunk, tokens, ranks.size * chunk)
    return [_flat([text[begin : begin + chunk + 1]], data.bos_id) for begin in begins]


def _flat(chunks: Sequence[Tokens], bos_id: int, epoch: int = 0) -> Batch:
    """Concatenate chunks of n + 1 tokens to a batch with (chunks x n,) inputs and targets, and padded starts."""
    batch = batch_of(np.stack(chunks).astype(np.int64), bos_id, epoch=epoch)
    starts = np.union1d([0], batch.document_starts.numpy()).astype(np.int32)
    return replace(
        batch,
        inputs=batch.inputs.flatten(),
        targets=batch.targets.flatten(),
        document_starts=torch.from_numpy(starts),
    ).padded()
