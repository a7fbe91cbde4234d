"""Batches of any text: each token is a target once, behind what came before it in its document."""

import random
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from quintic.data.loader import Batch
from quintic.data.tokenizer import Tokenizer
from quintic.eval import text as module
from quintic.eval.text import encoded, text_batches

BOS = 0


def contexts_of(batches: list[Batch]) -> dict[int, list[tuple[list[int], int]]]:
    """Document -> its (tokens since the last bos, target) in order of the batches."""
    found: dict[int, list[tuple[list[int], int]]] = {}
    for batch in batches:
        assert batch.documents is not None
        for row in range(len(batch.inputs)):
            seen: list[int] = []
            columns = zip(batch.inputs[row], batch.targets[row], batch.documents[row], strict=True)
            for token, target, number in ((int(a), int(b), int(c)) for a, b, c in columns):
                seen = [] if token == BOS else [*seen, token]
                if target != BOS:
                    found.setdefault(number, []).append((list(seen), target))
    return found


@given(
    documents=st.lists(st.lists(st.integers(1, 9), max_size=25), max_size=12),
    rows=st.integers(1, 4),
    seq_len=st.integers(1, 8),
    max_tokens=st.none() | st.integers(1, 60),
)
def test_every_token_is_a_target_once(
    documents: list[list[int]], rows: int, seq_len: int, max_tokens: int | None
) -> None:
    batches = list(text_batches(documents, bos_id=BOS, rows=rows, seq_len=seq_len, max_tokens=max_tokens))
    left = 10**9 if max_tokens is None else max_tokens
    expected: dict[int, list[tuple[list[int], int]]] = {}
    for number, document in enumerate(documents):
        taken = document[:left]
        left -= len(taken)
        for index, token in enumerate(taken):
            start = index // seq_len * seq_len
            expected.setdefault(number, []).append((taken[start:index], token))
    found = contexts_of(batches)
    assert {number: sorted(pairs) for number, pairs in found.items()} == {
        number: sorted(pairs) for number, pairs in expected.items()
    }
    for batch in batches:
        assert batch.inputs.shape == batch.targets.shape == (len(batch.inputs), seq_len)
        assert 1 <= len(batch.inputs) <= rows
        flat = batch.inputs.flatten()
        assert batch.document_starts.dtype == torch.int32
        assert batch.document_starts.tolist() == [*(flat == BOS).nonzero().flatten().tolist(), flat.numel()]
        assert (flat[::seq_len] == BOS).all()  # each row begins a document


def test_rows_are_filled_tightly() -> None:
    documents = [[1] * (3 + number % 11) for number in range(600)]
    batches = list(text_batches(documents, bos_id=BOS, rows=16, seq_len=32))
    needed = sum(len(document) + 1 for document in documents)
    assert sum(batch.inputs.numel() for batch in batches) < 1.05 * needed


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_no_text_makes_no_batch(documents: list[list[int]]) -> None:
    assert list(text_batches(documents, bos_id=BOS, rows=2, seq_len=4)) == []


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a few words of text,\n and 12 more of them. " * 20], 300)


def test_long_and_short_documents_have_the_tokens_of_the_whole(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SECTION_BYTES", 200)
    rng = random.Random(0)
    texts = ["".join(rng.choices("a few\n é漢🙂,.12", k=rng.choice([1, 30, 70, 500, 3000]))) for _ in range(60)]
    documents = [text.encode() for text in texts]
    assert [list(ids) for ids in encoded(tokenizer, documents)] == [tokenizer.encode(text) for text in texts]


def test_no_more_is_read_than_is_scored(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECTION_BYTES", 1000)
    begun = []

    def documents() -> Iterator[bytes]:
        for number in range(1000):
            begun.append(number)
            yield b"some words of text, " * 20

    batches = text_batches(encoded(tokenizer, documents()), bos_id=tokenizer.bos_id, rows=2, seq_len=16, max_tokens=64)
    assert sum(int((batch.targets != tokenizer.bos_id).sum()) for batch in batches) == 64
    assert len(begun) <= 4

    pieces = []
    sections_of = module.sections_of

    def counted(document: bytes, max_bytes: int) -> Iterator[bytes]:
        for piece in sections_of(document, max_bytes):
            pieces.append(piece)
            yield piece

    monkeypatch.setattr(module, "sections_of", counted)
    one = encoded(tokenizer, [b"some words of text, " * 50_000])
    batches = text_batches(one, bos_id=tokenizer.bos_id, rows=2, seq_len=16, max_tokens=64)
    assert len(next(batches).inputs) == 2  # the first batch is there before the text has been read
    assert len(pieces) == 1
