"""Content of prepared data against its checksums: what is found, what is read again, and what is remembered."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from text_samples import write_folder

import quintic.errors
from quintic.data.dataset import Dataset
from quintic.data.preparation import prepare
from quintic.data.tokenizer import Tokenizer
from quintic.errors import DataError

ROOT = Path(quintic.errors.__file__).parents[1]
OPTIONS = {"vocab_size": 300, "val_frac": 0.3, "shard_tokens": 3000}


@pytest.fixture
def made(tmp_path: Path) -> Dataset:
    """A dataset of several shards, not verified yet."""
    return prepare(str(write_folder(tmp_path / "text", 30)), data_dir=tmp_path / "data", **OPTIONS)


def flip(path: Path, place: int = 100, *, same_time: bool = False) -> None:
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + (0 if same_time else 1)))


def damage_found(dataset: Dataset, *, once: bool) -> str:
    with pytest.raises(DataError) as error:
        dataset.verify(once=once)
    return str(error.value)


def bytes_read(dataset: Dataset, *, once: bool) -> int:
    announced = [0]
    dataset.verify(once=once, begin=announced.append)
    return announced[-1]


def test_every_shard_is_read_once_on_a_machine(made: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    total = sum(path.stat().st_size for path in made.path.glob("*.bin"))
    assert bytes_read(made, once=True) == total
    assert bytes_read(made, once=True) == 0
    assert bytes_read(Dataset.open(made.path), once=True) == 0
    assert bytes_read(made, once=False) == total
    monkeypatch.setattr("platform.node", lambda: "another/machine")
    assert bytes_read(made, once=True) == total


@pytest.mark.parametrize("name", ["train_00000.bin", "train_00001.bin", "val_00000.bin"])
def test_a_flipped_bit_is_found_and_named(made: Dataset, name: str) -> None:
    made.verify()
    path = made.path / name
    flip(path)
    for _ in range(2):  # what was found wrong is not remembered as whole
        text = damage_found(Dataset.open(made.path), once=True)
        assert text.startswith(f"{path}: damaged, wrong checksum; delete it and run again: quintic prepare --data ")
    path.unlink()
    prepare(str(made.manifest["source"]["spec"]), data_dir=made.path.parent, **OPTIONS).verify()


def test_a_change_that_keeps_the_time_is_found_by_a_full_check(made: Dataset) -> None:
    made.verify()
    path = made.path / "train_00001.bin"
    flip(path, same_time=True)
    assert bytes_read(made, once=True) == 0
    assert str(path) in damage_found(made, once=False)
    assert str(path) in damage_found(made, once=True)  # and from then on by the quick one


def test_only_what_changed_is_read_again(made: Dataset) -> None:
    made.verify()
    for path in (made.path / "train_00001.bin", made.path / "val_00000.idx"):
        os.utime(path, ns=(0, 0))
    changed = [made.path / "train_00001.bin", made.path / "val_00000.bin"]
    assert bytes_read(made, once=True) == sum(path.stat().st_size for path in changed)


def test_the_command_that_mends_prepared_text_names_the_folder_it_was_moved_to(made: Dataset) -> None:
    folder = made.path.parent
    moved = folder.rename(folder.with_name("moved here"))
    path = moved / made.path.name / "train_00000.bin"
    flip(path)
    found = [damage_found(Dataset.open(path.parent), once=True)]
    path.unlink()
    with pytest.raises(DataError) as missing:
        Dataset.open(path.parent)
    for text in (*found, str(missing.value)):
        words = shlex.split(text.split("run again: ")[1])
        assert words[words.index("--data-dir") + 1] == str(moved)


@pytest.mark.parametrize("name", ["train_00001.bin", "val_00000.idx"])
def test_a_shard_that_vanished_after_opening_is_named(made: Dataset, name: str) -> None:
    (made.path / name).unlink()
    text = damage_found(made, once=True)
    assert text.startswith(f"{made.path / name}: missing; run again: quintic prepare --data ")


def test_an_index_that_points_elsewhere(made: Dataset) -> None:
    path = made.path / "train_00001.idx"
    offsets = np.fromfile(path, dtype="<i8")
    offsets[1] += 1  # still ascending, which is all that opening checks
    offsets.tofile(path)
    text = damage_found(Dataset.open(made.path), once=True)
    assert text.startswith(f"{path}: damaged, not the starts of documents; delete it and run again: quintic prepare")


def test_a_vocabulary_that_is_not_the_tokenizers(made: Dataset) -> None:
    manifest = json.loads((made.path / "manifest.json").read_text())
    for field in ("vocab_size", "bos_id"):
        changed = {**manifest, field: manifest[field] + 1}
        (made.path / "manifest.json").write_text(json.dumps(changed))
        assert "manifest.json: does not go with tokenizer.json, which has 300 ids" in damage_found(
            Dataset.open(made.path), once=True
        )
    (made.path / "manifest.json").write_text(json.dumps(manifest))
    Tokenizer.train(["other"], 257).save(made.path / "tokenizer.json")
    assert "tokenizer.json: changed since the text was prepared" in damage_found(Dataset.open(made.path), once=True)


def test_marks_that_cannot_be_kept_or_read(made: Dataset) -> None:
    total = bytes_read(made, once=False)
    (marks,) = (made.path.parent / "cache" / "verified").iterdir()
    for content in ("[", "[]", '{"train_00000.bin": 3}', "[" * 100_000):
        marks.write_text(content)
        assert bytes_read(made, once=True) == total
    marks.unlink()
    marks.parent.rmdir()
    marks.parent.write_text("in the way")
    assert bytes_read(made, once=True) == bytes_read(made, once=True) == total


def quintic_command(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "quintic", *arguments], cwd=folder, capture_output=True, text=True, timeout=100
    )


@pytest.mark.slow
def test_prepare_verify_says_which_file_is_wrong(made: Dataset) -> None:
    source = str(made.manifest["source"]["spec"])
    options = ["prepare", "--data", source, "--data-dir", str(made.path.parent), "--vocab-size", "300"]
    options += ["--val-frac", "0.3"]
    folder = made.path.parents[1]
    ready = quintic_command(*options, folder=folder)
    assert ready.returncode == 0, ready.stderr
    path = next(Path(line.removeprefix("ready: ")) for line in ready.stdout.splitlines() if line.startswith("ready: "))
    shard = path / "val_00000.bin"
    flip(shard, same_time=True)
    assert quintic_command(*options, folder=folder).returncode == 0  # checked before, and looks the same
    checked = quintic_command(*options, "--verify", folder=folder)
    assert checked.returncode == 2
    assert checked.stderr.startswith(f"quintic: error: {shard}: damaged, wrong checksum; delete it and run again: ")
    assert f" -m quintic prepare --data {source} " in checked.stderr  # as it was started
    with shard.open("ab") as file:
        file.write(b"\0")
    checked = quintic_command(*options, "--verify", folder=folder)
    assert checked.stderr.startswith(f"quintic: error: {shard}: damaged, {shard.stat().st_size} bytes instead of")
    assert quintic_command(*options, folder=folder).returncode == 0  # mended
    assert quintic_command(*options, "--verify", folder=folder).returncode == 0
