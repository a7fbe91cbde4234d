"""Token files written, read, and refused where they are damaged."""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintic.data.tokenizer import Tokenizer
from quintic.errors import DataError
from quintic.speedrun.presets import BYTES_BOS, PRESETS, SpeedrunOptions
from quintic.speedrun.shards import RaceData, open_data, prefixes, read_shard, vocabulary_of, write_shard


@given(tokens=st.lists(st.integers(0, 2**16 - 1), max_size=300))
def test_what_is_written_is_read(tokens, tmp_path_factory):
    path = tmp_path_factory.mktemp("shard") / "train.bin"
    write_shard(path, tokens)
    assert read_shard(path).tolist() == tokens


def test_the_bytes_are_those_of_the_format(tmp_path: Path):
    write_shard(tmp_path / "a.bin", [50256, 1, 65535])
    expected = struct.pack("<256i", 20240520, 1, 3, *[0] * 253) + struct.pack("<3H", 50256, 1, 65535)
    assert (tmp_path / "a.bin").read_bytes() == expected


def damaged(path: Path, offset: int, value: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + 4] = struct.pack("<i", value)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: damaged(path, 0, 7), r"a\.bin: not a token shard \(its first number is not 20240520\); give"),
        (lambda path: damaged(path, 4, 2), r"a\.bin: a token shard of version 2, not 1; give"),
        (
            lambda path: damaged(path, 8, 9),
            r"has 4\.0 tokens, but its header says 9: it is truncated or damaged; delete it",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-3]),
            r"has 2\.5 tokens, but its header says 4: it is truncated",
        ),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), r"a\.bin: not a token shard"),
        (lambda path: path.write_bytes(b""), r"a\.bin: not a token shard"),
        (lambda path: path.unlink(), r"a\.bin: cannot be read \(No such file"),
    ],
)
def test_a_damaged_file_is_refused_by_name(harm, message, tmp_path: Path):
    path = tmp_path / "a.bin"
    write_shard(path, [1, 2, 3, 4])
    harm(path)
    with pytest.raises(DataError, match=message):
        read_shard(path)


def test_tokens_of_another_vocabulary_are_refused(tmp_path: Path):
    write_shard(tmp_path / "a.bin", [1, 300])
    assert read_shard(tmp_path / "a.bin", vocab_size=301).tolist() == [1, 300]
    with pytest.raises(DataError, match=r"a\.bin: token 300 is outside the vocabulary of 300"):
        read_shard(tmp_path / "a.bin", vocab_size=300)


def test_tokens_that_do_not_fit_are_not_written(tmp_path: Path):
    with pytest.raises(DataError, match="0 to 65535"):
        write_shard(tmp_path / "a.bin", [65536])
    assert not list(tmp_path.iterdir())


def opened(
    data: str, folder: Path, shards: int = 2, tokenizer: Path | None = None, *, bos_id=BYTES_BOS, vocab_size=320
) -> RaceData:
    model = replace(PRESETS["speedrun-tiny"].model, bos_id=bos_id, vocab_size=vocab_size)
    name = None if tokenizer is None else str(tokenizer)
    return open_data(SpeedrunOptions(data=data, data_dir=folder / "data", shards=shards, tokenizer=name), model)


def test_a_folder_is_divided_by_the_names_of_its_files(tmp_path: Path):
    for name in ("x_train_2", "x_train_1", "x_train_3", "x_val_0"):
        write_shard(tmp_path / f"{name}.bin", [256])
    data = opened(str(tmp_path), tmp_path)
    assert [path.name for path in data.train] == ["x_train_1.bin", "x_train_2.bin"]
    assert data.validation.name == "x_val_0.bin"
    (tmp_path / "x_val_0.bin").unlink()
    with pytest.raises(DataError, match=r"no \*val\*\.bin in this folder; give a folder"):
        opened(str(tmp_path), tmp_path)


def test_a_damaged_shard_is_refused_before_the_run_if_it_is_used(tmp_path: Path):
    for name in ("x_train_1", "x_train_2", "x_val_0"):
        write_shard(tmp_path / f"{name}.bin", [256, 1, 2])
    (tmp_path / "x_train_2.bin").write_bytes((tmp_path / "x_train_2.bin").read_bytes()[:-2])
    with pytest.raises(DataError, match=r"x_train_2\.bin: has 2\.0 tokens, but its header says 3"):
        opened(str(tmp_path), tmp_path)
    assert len(opened(str(tmp_path), tmp_path, shards=1).train) == 1


def test_a_shard_for_both_training_and_validation_is_refused(tmp_path: Path):
    for name in ("retrieval_train", "train", "val"):
        write_shard(tmp_path / f"{name}.bin", [256, 1])
    with pytest.raises(DataError, match=r"retrieval_train\.bin: its name has both `train` and `val`; rename it"):
        opened(str(tmp_path), tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "data").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match=r"python-bytes: cannot be made \(Not a directory\); use another --data-dir"):
        opened("python", tmp_path)


def test_a_malformed_name_on_the_hub_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="--data hf:one: not a name on the Hugging Face Hub"):
        opened("hf:one", tmp_path)


def test_the_text_that_comes_with_python_becomes_bytes(tmp_path: Path):
    data = opened("python", tmp_path)
    train = read_shard(data.train[0], vocab_size=257)
    validation = read_shard(data.validation, vocab_size=257)
    assert train[0] == validation[0] == BYTES_BOS
    assert 1_000_000 < len(train) < 3_000_000
    document = train[1 : np.flatnonzero(train == BYTES_BOS)[1]]
    assert document.astype(np.uint8).tobytes().decode("utf-8").isprintable() is False  # whole text, with line ends
    assert data.tokenizer is not None
    vocabulary = vocabulary_of(data.tokenizer, data.bos_id)
    assert vocabulary == (*(bytes([value]) for value in range(256)), b"")  # the last starts documents
    assert data.tokenizer.bos_id == BYTES_BOS
    assert data.tokenizer.encode("na\u00efve \n <|bos|>") == list("na\u00efve \n <|bos|>".encode())
    before = data.validation.stat().st_mtime_ns
    assert opened("python", tmp_path).validation.stat().st_mtime_ns == before


@given(st.lists(st.binary(max_size=4), unique=True, max_size=40))
def test_a_prefix_is_the_longest_other_token_that_a_token_begins_with(vocabulary):
    for token, prefix in zip(vocabulary, prefixes(vocabulary), strict=True):
        shorter = [other for other in vocabulary if other and other != token and token.startswith(other)]
        assert (vocabulary[prefix] if prefix >= 0 else None) == max(shorter, key=len, default=None)


def test_the_races_shards_come_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def download(repo: str, name: str, **where) -> Path:
        asked.append((repo, name, where["repo_type"]))
        write_shard(tmp_path / name, [256, 1])
        return tmp_path / name

    monkeypatch.setattr("quintic.speedrun.shards.download", download)
    data = opened("hf:kjj0/fineweb10B-gpt2", tmp_path)
    assert [path.name for path in data.train] == ["fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    assert data.validation.name == "fineweb_val_000000.bin"
    assert {(repo, kind) for repo, _, kind in asked} == {("kjj0/fineweb10B-gpt2", "dataset")}


def test_the_vocabulary_is_that_of_the_tokenizer_without_special_tokens():
    tokenizer = Tokenizer.train(["one two three", "two three four"], 270)
    vocabulary = vocabulary_of(tokenizer, bos_id=100)
    assert [token for token in vocabulary if len(token) > 1]  # merges
    for number, token in enumerate(vocabulary):
        assert token == (b"" if number in (100, tokenizer.bos_id) else tokenizer.decode_bytes([number]))
    assert len(vocabulary) == tokenizer.vocab_size


def test_a_vocabulary_larger_than_the_models_is_refused(tmp_path: Path):
    for name in ("train", "val"):
        write_shard(tmp_path / f"{name}.bin", [0, 1])
    Tokenizer.train(["one two three four"], 270).save(tmp_path / "tokenizer.json")
    size = Tokenizer.load(tmp_path / "tokenizer.json").vocab_size
    given = {"tokenizer": tmp_path / "tokenizer.json", "bos_id": 0}
    assert opened(str(tmp_path), tmp_path, **given, vocab_size=size).tokenizer.vocab_size == size
    with pytest.raises(
        DataError, match=rf"tokenizer\.json: has {size} tokens, but the model only {size - 1}; give the one"
    ):
        opened(str(tmp_path), tmp_path, **given, vocab_size=size - 1)
