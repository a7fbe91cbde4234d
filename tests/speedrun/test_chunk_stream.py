"""The stream of chunks against a reference in plain Python, that walks token by token."""

import itertools
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quintic.data.loader import Batch
from quintic.errors import DataError
from quintic.speedrun.shards import RaceData, write_shard
from quintic.speedrun.stages import TINY
from quintic.speedrun.stream import chunk_stream, validation_batches
from quintic.train.distributed import SINGLE_PROCESS, Ranks

BOS = 9


@dataclass
class Settings:
    batch_tokens: int
    document_tokens: int


def documents_of(shard: list[int]) -> list[list[int]]:
    documents: list[list[int]] = []
    for token in shard:
        if token == BOS:
            documents.append([])
        if documents:
            documents[-1].append(token)
    return documents


def reference(shards: list[list[int]], shape_of_chunk, count: int) -> list[tuple[list[int], list[int], list[int]]]:
    """The first `count` chunks: (inputs, targets, document starts)."""
    chunks: list[tuple[list[int], list[int], list[int]]] = []
    shard = 0
    while True:
        documents = documents_of(shards[shard % len(shards)])
        shard += 1
        while True:
            tokens, cut = shape_of_chunk(len(chunks))
            row: list[int] = []
            starts: list[int] = []
            used = 0
            for document in documents:
                used += 1
                starts.append(len(row))
                row += document[:cut]
                if len(row) > tokens:
                    break
            if len(row) <= tokens:
                break
            documents = documents[used:]
            starts = [*(start for start in starts if start < tokens), tokens]
            chunks.append((row[:tokens], row[1 : tokens + 1], starts))
            if len(chunks) == count:
                return chunks


def joined(chunks: list[tuple[list[int], list[int], list[int]]]) -> tuple[list[int], list[int], list[int]]:
    inputs: list[int] = []
    targets: list[int] = []
    starts: list[int] = []
    for more_inputs, more_targets, more_starts in chunks:
        starts += [len(inputs) + start for start in more_starts[:-1]]
        inputs += more_inputs
        targets += more_targets
    return inputs, targets, [*starts, len(inputs)]


TEXTS = st.lists(
    st.lists(st.integers(0, BOS), min_size=40, max_size=120).map(lambda tokens: [*tokens, *[BOS, 1, 2] * 14]),
    min_size=1,
    max_size=3,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stream")


def write(folder: Path, shards: list[list[int]]) -> list[Path]:
    paths = [folder / f"train_{number}.bin" for number in range(len(shards))]
    for path, shard in zip(paths, shards, strict=True):
        write_shard(path, shard)
    return paths


def data_of(paths: list[Path]) -> RaceData:
    """Data whose last file is the one for validation, too."""
    kind = {"vocab_size": 2**16, "bos_id": BOS, "tokenizer": None}
    return RaceData(source="", train=tuple(paths), validation=paths[-1], **kind)


@dataclass
class FixedTrack:
    """Stands for a `Track`: two steps with the first settings, all later ones with the last, in so many passes each."""

    settings: list[Settings]
    chunks: int
    num_passes: list[int] | None = None

    def at(self, step: int) -> Settings:
        return self.settings[0 if step < 2 else -1]

    def passes(self, settings: Settings, ranks: int) -> int:
        return self.num_passes[settings is not self.settings[0]] if self.num_passes else self.chunks // ranks


def stream_of(paths: list[Path], *settings: Settings, chunks: int, passes=None, ranks: Ranks = SINGLE_PROCESS):
    track = FixedTrack([*settings], chunks, passes)
    return closing(chunk_stream(data_of(paths), track, itertools.count(), ranks=ranks))


def validation(path: Path, *, tokens: int, chunk: int, ranks: Ranks = SINGLE_PROCESS) -> list[Batch]:
    track = replace(TINY, validation_tokens=tokens, validation_chunk=chunk)
    return validation_batches(data_of([path]), track.validation_tokens, track.validation_chunk, ranks=ranks)


def lists(batch) -> tuple[list[int], list[int], list[int]]:
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.document_starts.dtype == torch.int32
    starts = batch.document_starts.tolist()
    documents = starts[: starts.index(len(batch.inputs)) + 1]
    assert starts == documents + [len(batch.inputs)] * (len(starts) - len(documents))
    assert len(starts) >= 16
    return batch.inputs.tolist(), batch.targets.tolist(), documents


@hypothesis.settings(max_examples=30)
@given(
    shards=TEXTS,
    tokens=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    cuts=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    size=st.sampled_from([1, 2, 4]),
    per_pass=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
)
def test_every_rank_gets_its_chunks_of_the_reference(shards, tokens, cuts, size, per_pass, folder: Path):
    stages = [Settings(4 * count, cut) for count, cut in zip(tokens, cuts, strict=True)]
    expected = reference(
        shards, lambda chunk: (tokens[chunk >= 8], cuts[chunk >= 8]), 20
    )  # five steps of four chunks, the first two of the first stage
    paths = write(folder, shards)
    own = 4 // size
    together = [min(count, own) for count in per_pass]
    passes = [own // count for count in together]

    for rank in range(size):
        ranks = Ranks(rank=rank, size=size)
        with stream_of(paths, *stages, chunks=4, passes=passes, ranks=ranks) as stream:
            found = [lists(next(stream)) for _ in range(2 * passes[0] + 3 * passes[1])]
        chunks = expected[rank::size]
        firsts = [*range(0, 2 * own, together[0]), *range(2 * own, 5 * own, together[1])]
        assert found == [joined(chunks[a:b]) for a, b in itertools.pairwise([*firsts, 5 * own])]


def test_a_last_document_of_one_token_is_a_target_only(tmp_path: Path):
    paths = write(tmp_path, [[BOS, 1, 2, BOS, 3, BOS, 4, 5, BOS, 6, 7]])
    with stream_of(paths, Settings(5, 8), chunks=1) as stream:
        assert lists(next(stream)) == ([BOS, 1, 2, BOS, 3], [1, 2, BOS, 3, BOS], [0, 3, 5])
        batch = next(stream)
        assert batch.epoch == 1  # what was left did not fill a chunk


def test_text_that_fills_no_chunk_is_refused(tmp_path: Path):
    paths = write(tmp_path, [[BOS, 1, 2], [BOS, 1, 2, 3]])
    with (
        stream_of(paths, Settings(8, 8), chunks=2) as stream,
        pytest.raises(
            DataError, match="no training shard fills a chunk of 4 tokens with documents of at most 8 tokens"
        ),
    ):
        next(stream)


def test_text_without_the_token_that_begins_documents_is_refused(tmp_path: Path):
    paths = write(tmp_path, [[1, 2, 3] * 20])
    with (
        stream_of(paths, Settings(8, 8), chunks=1) as stream,
        pytest.raises(DataError, match=r"train_0\.bin: has no token 9, which starts documents; it was made"),
    ):
        next(stream)


@pytest.mark.timeout(10)
def test_a_closed_stream_has_no_more_batches(tmp_path: Path):
    with stream_of(write(tmp_path, [[BOS, 1] * 20]), Settings(8, 4), chunks=1) as stream:
        next(stream)
    stream.close()
    assert list(itertools.islice(stream, 8)) == []  # those that were made ahead do not count


def test_a_damaged_shard_is_reported_where_it_is_read(tmp_path: Path):
    paths = write(tmp_path, [[BOS, 1] * 20, [BOS, 1] * 20])
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    with stream_of(paths, Settings(8, 4), chunks=1) as stream:
        for _ in range(4):
            next(stream)
        with pytest.raises(DataError, match=r"train_1\.bin: has .* tokens, but its header says 40"):
            next(stream)


@pytest.mark.parametrize("size", [1, 2])
def test_validation_is_cut_wherever_a_chunk_ends(size, tmp_path: Path):
    text = np.random.default_rng(0).integers(0, BOS + 1, 33).tolist()
    text[8] = BOS  # a chunk that begins with a document
    write_shard(tmp_path / "val.bin", text)
    for rank in range(size):
        batches = validation(tmp_path / "val.bin", tokens=32, chunk=8, ranks=Ranks(rank=rank, size=size))
        assert len(batches) == 4 // size
        for number, batch in enumerate(batches):
            begin = 8 * (rank + number * size)
            starts = [0, *(at for at in range(1, 8) if text[begin + at] == BOS), 8]
            assert lists(batch) == (text[begin : begin + 8], text[begin + 1 : begin + 9], starts)


def test_validation_that_does_not_fit_is_refused(tmp_path: Path):
    write_shard(tmp_path / "val.bin", [BOS] * 32)
    with pytest.raises(DataError, match="--val-tokens 32: must be a multiple of 24 tokens"):
        validation(tmp_path / "val.bin", tokens=32, chunk=24)
    with pytest.raises(DataError, match=r"val\.bin: has only 32 tokens, but scoring needs 33; lower --val-tokens"):
        validation(tmp_path / "val.bin", tokens=32, chunk=8)


def test_more_documents_than_there_is_room_for_double_it(tmp_path: Path):
    paths = write(tmp_path, [[BOS] * 100])
    with stream_of(paths, Settings(40, 4), chunks=1) as stream:
        assert next(stream).document_starts.tolist() == [*range(40), *[40] * 24]
