"""Reproducible text to prepare datasets from, and the messages of text that cannot be used."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from quintic.data.tokenizer import Tokenizer
from quintic.errors import DataError

_TEXT = (
    "the optimizer keeps a matrix of momentum and turns it into an orthogonal update before each step of training "
    "while rows columns tokens shards batches résumé naïve 漢字 and 12345 numbers are read from documents on disk"
)


def make_text(seed: int, words: int) -> str:
    """Return reproducible text of so many words, in lines of up to twelve."""
    rng = random.Random(seed)
    known = _TEXT.split()
    chosen = [rng.choice(known) for _ in range(words)]
    return "\n".join(" ".join(chosen[start : start + 12]) for start in range(0, words, 12)) + "\n"


def write_folder(folder: Path, documents: int, *, seed: int = 0) -> Path:
    """Write text files of 10 to 1,000 words; returns the folder."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    for index in range(documents):
        text = make_text(seed * 1000 + index, rng.randint(10, 1000))
        (folder / f"{index:03d}.txt").write_text(text, encoding="utf-8")
    return folder


def data_error_of(act: Callable[[], object]) -> str:
    """Return the one line of the `DataError` that a call raises."""
    with pytest.raises(DataError) as error:
        act()
    assert "\n" not in str(error.value)
    return str(error.value)


def act_after(patch: pytest.MonkeyPatch, limit: int, act: Callable[[], object]) -> list[int]:
    """Call `act` before texts beyond so many bytes are encoded; return a list of the bytes of each batch of texts."""
    encode_batch = Tokenizer.encode_batch
    sizes: list[int] = []

    def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        sizes.append(sum(len(text.encode()) for text in texts))
        if sum(sizes) > limit:
            act()
        return encode_batch(tokenizer, texts)

    patch.setattr(Tokenizer, "encode_batch", encode)
    return sizes
