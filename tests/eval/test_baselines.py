"""The reference figures against a naive model, the xz program and hand-computed cases."""

import lzma
import math
import random
import shutil
import subprocess
from collections import Counter
from itertools import pairwise

import pytest

from quintic.data.dataset import Dataset
from quintic.data.loader import validation_rows
from quintic.eval import baselines
from quintic.eval.baselines import BIGRAM_PRIOR_BYTES, ScoredText, reference_scores


def scored(*pieces: bytes) -> ScoredText:
    text = ScoredText()
    for piece in pieces:
        text.add(piece)
    return text


def naive_bigram_bpb(val: bytes, train: bytes) -> float:
    """The formula of the docstring, one byte at a time."""
    unigrams = Counter(train)
    bigrams = Counter(pairwise(train))
    contexts = Counter(train[:-1])

    def unigram(byte: int) -> float:
        return (unigrams[byte] + 1) / (len(train) + 256)

    bits = -math.log2(unigram(val[0]))
    for before, byte in pairwise(val):
        count = bigrams[before, byte] + BIGRAM_PRIOR_BYTES * unigram(byte)
        bits -= math.log2(count / (contexts[before] + BIGRAM_PRIOR_BYTES))
    return bits / len(val)


def random_text(seed: int, length: int) -> bytes:
    words = [b"the ", b"cat ", b"sat ", b"on ", b"a ", b"mat. ", "é".encode()]
    rng = random.Random(seed)
    return b"".join(rng.choice(words) for _ in range(length))


@pytest.mark.parametrize("length", [1, 2, 300])
def test_bigram_equals_the_naive_model(length: int) -> None:
    train, val = random_text(0, 400), random_text(1, 400)[:length] + bytes([0, 255])
    assert scored(val).bigram_bpb(scored(train)) == pytest.approx(naive_bigram_bpb(val, train), rel=1e-12)


def test_where_the_training_text_is_cut_does_not_matter() -> None:
    train, val = random_text(2, 500), random_text(3, 50)
    pieces = scored(train[:1], b"", train[1:700], train[700:])
    assert scored(val).bigram_bpb(pieces) == scored(val).bigram_bpb(scored(train))


def test_where_the_scored_text_is_cut_does_not_matter() -> None:
    train, val = random_text(4, 500), random_text(5, 50)
    whole, pieces = scored(val), scored(val[:1], b"", val[1:33], val[33:])
    assert pieces.bigram_bpb(scored(train)) == whole.bigram_bpb(scored(train))
    assert (pieces.xz_bpb(), pieces.num_bytes) == (whole.xz_bpb(), whole.num_bytes)


def test_xz_sees_the_beginning_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "MAX_XZ_BYTES", 500)
    val = random_text(8, 400)
    text = scored(val[:300], val[300:600], val[600:])
    assert text.xz_bpb() == 8 * len(lzma.compress(val[:500], preset=9)) / 500
    assert text.num_bytes == len(val) > 600
    assert text.bigram_bpb(scored(val)) == pytest.approx(naive_bigram_bpb(val, val), rel=1e-12)


def test_probabilities_of_a_context_sum_to_one() -> None:
    train = scored(b"abracadabra")
    for context in b"az":
        first = scored(bytes([context])).bigram_bpb(train)
        pairs = [2 * scored(bytes([context, byte])).bigram_bpb(train) for byte in range(256)]
        assert sum(2.0 ** -(bits - first) for bits in pairs) == pytest.approx(1.0, abs=1e-9)


def test_first_byte_and_unseen_bytes_by_hand() -> None:
    # train "aab": c(a) = 2, c(b) = 1, c = 3; p(a) = 3/259. The unseen "z" has p(z) = 1/259.
    assert scored(b"a").bigram_bpb(scored(b"aab")) == pytest.approx(-math.log2(3 / 259))
    assert scored(b"z").bigram_bpb(scored(b"aab")) == pytest.approx(math.log2(259))


@pytest.mark.skipif(shutil.which("xz") is None, reason="the xz program is not installed")
def test_xz_is_what_the_program_writes() -> None:
    val = random_text(7, 2000)
    packed = subprocess.run(["xz", "-9", "-T1", "-c"], input=val, capture_output=True, check=True).stdout
    # The container's padding may differ by a few bytes between versions of the program.
    assert scored(val).xz_bpb() == pytest.approx(8 * len(packed) / len(val), abs=8 * 16 / len(val))


def test_the_text_is_that_of_the_targets(tiny_dataset: Dataset) -> None:
    batches = list(validation_rows(tiny_dataset, rows=3, seq_len=40, max_tokens=600))
    scores = reference_scores(tiny_dataset, batches)
    tokenizer, split = tiny_dataset.tokenizer, tiny_dataset.split("train")
    targets = [token for batch in batches for row in batch.targets.tolist() for token in row]
    val_text = scored(tokenizer.decode_bytes(targets))
    assert scores["bytes"] == val_text.num_bytes == sum(tokenizer.token_bytes()[targets])
    documents = [tokenizer.decode_bytes(split.document(index).tolist()) for index in range(split.num_documents)]
    assert sum(map(len, documents)) == split.num_bytes
    assert scores["xz_bpb"] == val_text.xz_bpb()
    assert scores["bigram_bpb"] == val_text.bigram_bpb(scored(*documents))
    # The text repeats a dozen words: both methods must see that.
    assert 0 < scores["xz_bpb"] < 4
    assert 0 < scores["bigram_bpb"] < 4


def test_only_so_much_training_text_is_read(tiny_dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "_MAX_TRAIN_BYTES", 1)
    text = baselines.training_text(tiny_dataset)
    first = tiny_dataset.split("train").document(0).tolist()
    assert text._beginning == tiny_dataset.tokenizer.decode_bytes(first)
