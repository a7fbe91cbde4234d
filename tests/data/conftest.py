"""A small prepared dataset, and text to make others from."""

import random
import socket
from pathlib import Path

import pytest

from quintic.data.shards import Dataset, prepare

_WORDS = (
    "the optimizer keeps a matrix of momentum and turns it into an orthogonal update before each step of training "
    "while rows columns tokens shards batches résumé naïve 漢字 and 12345 numbers are read from documents on disk"
).split()


def make_text(seed: int, words: int) -> str:
    """Return reproducible text of so many words, in lines of up to twelve."""
    rng = random.Random(seed)
    chosen = [rng.choice(_WORDS) for _ in range(words)]
    return "\n".join(" ".join(chosen[start : start + 12]) for start in range(0, words, 12)) + "\n"


def write_folder(folder: Path, documents: int, *, seed: int = 0) -> Path:
    """Write text files of 10 to 1,000 words; returns the folder."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    for index in range(documents):
        text = make_text(seed * 1000 + index, rng.randint(10, 1000))
        (folder / f"{index:03d}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """120 documents in several shards; a third of them for validation."""
    root = tmp_path_factory.mktemp("dataset")
    source = write_folder(root / "text", 120)
    return prepare(str(source), data_dir=root / "data", vocab_size=400, val_frac=0.3, shard_tokens=20_000)


@pytest.fixture
def closed_endpoint(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address at which nobody answers; the Hub client's waits between its attempts are left out."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{server.getsockname()[1]}"
