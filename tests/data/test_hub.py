"""Data sets of the Hub, with the real client against a local server."""

import errno
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet
import pytest
from durability import disk_events, durable_names
from hub_server import Hub, serve, use_endpoint
from text_samples import act_after, data_error_of, make_text

from quintic.data import preparation
from quintic.data.hub import open_hub
from quintic.data.preparation import prepare
from quintic.data.tokenizer import BOS, Tokenizer
from quintic.errors import DataError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve() as server:
        use_endpoint(server.endpoint, monkeypatch)
        yield server


def parquet_bytes(texts: list[str]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(arrow.table({"text": texts}), buffer)
    return buffer.getvalue()


def jsonl_bytes(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def test_files_are_downloaded_as_they_are_reached(hub: Hub, tmp_path: Path) -> None:
    hub.files["me/web"] = {
        "README.md": b"a card",
        "data/train-0.parquet": parquet_bytes(["one", "two"]),
        "data/train-1.jsonl.gz": gzip.compress(jsonl_bytes(["three"])),
        "data/test-0.parquet": parquet_bytes(["held out"]),
    }
    source = open_hub("hf:me/web", cache_dir=tmp_path)
    assert (source.name, source.is_remote) == ("web", True)
    assert all(part.size_bytes == len(hub.files["me/web"][part.name]) for part in source.files)
    documents = source.documents()
    assert [next(documents), next(documents)] == [b"one", b"two"]
    assert hub.downloads == ["data/train-0.parquet"]
    assert list(documents) == [b"three"]
    assert list(source.documents()) == [b"one", b"two", b"three"]
    assert hub.downloads == ["data/train-0.parquet", "data/train-1.jsonl.gz"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("sample", ["sample/10/a.jsonl"]),  # a glob, `*` inside one folder
        ("listed", ["data/en/b.jsonl", "data/en/deep/c.jsonl"]),  # a list with `**`, only its training split
        ("fr", ["other/fr/d.jsonl"]),  # not in the card: a folder
        (None, ["data/en/b.jsonl"]),  # the default
    ],
)
def test_a_configuration_chooses_files(hub: Hub, tmp_path: Path, config: str | None, expected: list[str]) -> None:
    names = ["data/en/b.jsonl", "data/en/deep/c.jsonl", "other/fr/d.jsonl", "sample/10/a.jsonl", "sample/a.jsonl"]
    hub.files["me/web"] = {name: jsonl_bytes([name]) for name in names}
    hub.cards["me/web"] = {
        "configs": [
            {"config_name": "default", "data_files": ["data/en/*.jsonl"]},
            {"config_name": "sample", "data_files": "sample/*/*"},
            {
                "config_name": "listed",
                "data_files": [
                    {"split": "train", "path": ["data/**"]},
                    {"split": "test", "path": "other/**/*.jsonl"},
                ],
            },
        ]
    }
    spec = "hf:me/web" + (f"/{config}" if config else "")
    source = open_hub(spec, cache_dir=tmp_path)
    assert [part.name for part in source.files] == expected
    assert [text.decode() for text in source.documents()] == expected


def test_without_network_a_known_data_set_goes_on(
    hub: Hub, tmp_path: Path, closed_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files["me/web"] = {"a.jsonl": jsonl_bytes(["kept"]), "b.jsonl": jsonl_bytes(["never read"])}
    online = open_hub("hf:me/web", cache_dir=tmp_path)
    assert next(online.documents()) == b"kept"
    use_endpoint(closed_endpoint, monkeypatch)
    offline = open_hub("hf:me/web", cache_dir=tmp_path)
    assert offline.fingerprint() == online.fingerprint()
    documents = offline.documents()
    assert next(documents) == b"kept"
    with pytest.raises(DataError, match=r"hf:me/web: b.jsonl cannot be downloaded .*check the network"):
        next(documents)


def test_what_is_known_of_a_data_set_survives_a_crash(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files["me/web"] = {"a.jsonl": jsonl_bytes(["kept"])}
    events = disk_events(monkeypatch)
    open_hub("hf:me/web", cache_dir=tmp_path)
    (name,) = durable_names(events)
    assert [path.name for path in (tmp_path / "hub-listings").iterdir()] == [name]


def test_without_network_and_unknown_it_says_so(
    tmp_path: Path, closed_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_endpoint(closed_endpoint, monkeypatch)
    with pytest.raises(DataError, match=r"hf:me/web: no answer from the Hub .*check the network"):
        open_hub("hf:me/web", cache_dir=tmp_path)


def test_a_hub_that_is_silent_is_not_waited_for(
    hub: Hub, silent_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall that drops packets, or a server that takes them and never answers."""
    hub.files["me/web"] = {"a.jsonl": jsonl_bytes(["kept"])}
    open_hub("hf:me/web", cache_dir=tmp_path / "known")
    monkeypatch.setattr("quintic.data.hub._PATIENCE", 0.2)
    use_endpoint(silent_endpoint, monkeypatch)
    with pytest.raises(DataError, match=r"hf:me/web: no answer from the Hub \(.*[Tt]ime"):
        open_hub("hf:me/web", cache_dir=tmp_path)
    known = open_hub("hf:me/web", cache_dir=tmp_path / "known")
    with pytest.raises(DataError, match=r"hf:me/web: a.jsonl cannot be downloaded \(.*[Tt]ime.*; check the network"):
        list(known.documents())


def test_a_network_that_comes_back_is_waited_for(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files["me/web"] = {"a.jsonl": jsonl_bytes(["text"])}
    source = open_hub("hf:me/web", cache_dir=tmp_path)
    asked, waits = [OSError("no route"), OSError("no route"), None], []

    class Session:
        def head(self, address: str, *, timeout: float) -> None:
            if (error := asked.pop(0)) is not None:
                raise error

    monkeypatch.setattr("huggingface_hub.utils.get_session", Session)
    monkeypatch.setattr("quintic.data.hub.time.sleep", waits.append)
    assert list(source.documents()) == [b"text"]
    assert waits == [1.0, 2.0]


def test_what_the_hub_refuses_is_named(hub: Hub, tmp_path: Path) -> None:
    def message(spec: str) -> str:
        return data_error_of(lambda: open_hub(spec, cache_dir=tmp_path))

    assert message("hf:me/none").startswith("hf:me/none: RepositoryNotFoundError")
    assert message("hf:me/none").endswith("check the name, or log in with `hf auth login` if it is private")
    hub.gated.add("me/closed")
    assert "accept its terms on the Hub" in message("hf:me/closed")
    hub.files["me/pictures"] = {"a.png": b""}
    assert message("hf:me/pictures").startswith("hf:me/pictures: no file to read there among 1; readable are .parquet")
    hub.files["me/web"] = {"a.jsonl": b""}
    hub.cards["me/web"] = {"configs": [{"config_name": "en", "data_files": "*.jsonl"}]}
    assert "hf:me/web/fr: no file to read there among 1; its configurations are en" in message("hf:me/web/fr")


def test_a_hub_that_fails_is_as_one_that_is_away(hub: Hub, tmp_path: Path) -> None:
    hub.files["me/web"] = {"a.jsonl": jsonl_bytes(["kept"])}
    hub.fails = True
    with pytest.raises(DataError, match=r"hf:me/web: no answer from the Hub .HfHubHTTPError"):
        open_hub("hf:me/web", cache_dir=tmp_path)
    hub.fails = False
    list(open_hub("hf:me/web", cache_dir=tmp_path).documents())
    hub.fails = True
    assert list(open_hub("hf:me/web", cache_dir=tmp_path).documents()) == [b"kept"]


def test_a_full_disk_is_told_from_a_lost_network(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    hub.files["me/web"] = {"a.jsonl": jsonl_bytes(["text"])}
    source = open_hub("hf:me/web", cache_dir=tmp_path)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", full)
    with pytest.raises(DataError, match=r"a.jsonl cannot be downloaded .*No space left.*; free some space"):
        list(source.documents())


def test_a_preparation_goes_on_after_a_lost_network(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files["me/web"] = {f"{index}.jsonl": jsonl_bytes([make_text(index, 500)] * 3) for index in range(8)}
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client's waits between its attempts
    monkeypatch.setattr(preparation, "_SAMPLE_BYTES", 5000)
    monkeypatch.setattr(preparation, "_BATCH_BYTES", 5000)

    def lose() -> None:
        hub.fails = True

    options = {"data_dir": tmp_path, "vocab_size": 300, "val_frac": 0.4, "shard_tokens": 2000}
    with monkeypatch.context() as patch:
        act_after(patch, 20_000, lose)
        with pytest.raises(DataError, match=r"hf:me/web: \d.jsonl cannot be downloaded .*check the network"):
            prepare("hf:me/web", **options)
    hub.fails = False
    encoded = act_after(monkeypatch, 10**9, lose)
    said: list[str] = []
    dataset = prepare("hf:me/web", **options, say=said.append)
    assert said == ["turning it into tokens ..."]  # no survey, no tokenizer
    assert sum(encoded) < dataset.split("train").num_bytes + dataset.split("val").num_bytes - 10_000
    dataset.verify()
    assert dataset.split("train").num_documents + dataset.split("val").num_documents == 24


@pytest.mark.parametrize("spec", ["hf:", "hf:web", "hf:me/", "hf:a b/c", "hf:me/-web", "hf:me/web..x/config"])
def test_a_malformed_name_is_named(tmp_path: Path, spec: str) -> None:
    with pytest.raises(DataError, match=f"{spec}: not a data set name; write hf:owner/name"):
        open_hub(spec, cache_dir=tmp_path)


def test_the_gpt2_tokenizer_comes_from_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no file has that name
    Tokenizer.train(["some text"], 257).save("made.json")
    hub.files["openai-community/gpt2"] = {"tokenizer.json": Path("made.json").read_bytes()}
    tokenizer = Tokenizer.load("gpt2", cache_dir=tmp_path / "cache")
    assert BOS in tokenizer.definition
    assert tokenizer.vocab_size == 257
