"""A small prepared dataset for every test of this folder, and an address without a Hub."""

import socket
from collections.abc import Iterator

import pytest
from text_samples import write_folder

from quintic.data.dataset import Dataset
from quintic.data.preparation import prepare


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """120 documents in several shards; a third of them for validation."""
    root = tmp_path_factory.mktemp("dataset")
    source = write_folder(root / "text", 120)
    return prepare(str(source), data_dir=root / "data", vocab_size=400, val_frac=0.3, shard_tokens=20_000)


@pytest.fixture
def closed_endpoint(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address without a server; the Hub client's waits between its attempts are left out."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def silent_endpoint() -> Iterator[str]:
    """An address where connections are made and nothing is ever answered."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
