"""Preparing datasets: what is in them, and that no stop, crowd or full disk leaves a wrong one behind."""

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from durability import Synced, as_it_is, disk_events, durable_names
from text_samples import act_after, data_error_of, make_text, write_folder

import quintic.errors
from quintic.data import open_source, preparation
from quintic.data.dataset import Dataset
from quintic.data.files.documents import sections_of
from quintic.data.preparation import prepare
from quintic.data.source import Source
from quintic.data.tokenizer import BOS, Tokenizer
from quintic.errors import DataError

ROOT = Path(quintic.errors.__file__).parents[1]


def texts_of(dataset: Dataset, name: str) -> list[str]:
    split = dataset.split(name)
    found = []
    for index in range(split.num_documents):
        ids = split.document(index)
        assert ids[0] == dataset.bos_id
        assert (ids[1:] != dataset.bos_id).all()
        found.append(dataset.tokenizer.decode(ids.tolist()))
    return found


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def folder_of(path: Path, texts: list[str]) -> Path:
    path.mkdir(parents=True)
    for index, text in enumerate(texts):
        (path / f"{index:03d}.txt").write_text(text, encoding="utf-8")
    return path


def test_every_document_is_on_one_side_and_comes_back(tmp_path: Path) -> None:
    texts = [make_text(seed, 50 + seed) for seed in range(60)] + [f"{BOS} a <|endoftext|> b {BOS}"]
    texts += texts[:20]  # duplicates never straddle
    dataset = prepare(
        str(folder_of(tmp_path / "text", texts)),
        data_dir=tmp_path / "data",
        vocab_size=300,
        val_frac=0.3,
        shard_tokens=2000,
    )
    train, val = texts_of(dataset, "train"), texts_of(dataset, "val")
    assert sorted(train + val) == sorted(texts)
    assert not set(train) & set(val)
    assert 5 <= len(val) <= 40
    for name, found in (("train", train), ("val", val)):
        split = dataset.split(name)
        assert split.num_documents == len(found)
        assert split.num_bytes == sum(len(text.encode()) for text in found)
        assert split.num_tokens == sum(len(split.document(index)) for index in range(len(found)))
        if name == "train":
            expected = split.num_bytes / (split.num_tokens - len(found))
            assert dataset.summary()["bytes_per_token"] == round(expected, 4)
        table = dataset.tokenizer.token_bytes()
        assert split.num_bytes == sum(table[split.document(index)].sum() for index in range(len(found)))
    assert len(dataset.split("train").shards) > 3
    dataset.verify()


def test_the_summary_and_the_manifest_say_what_there_is(dataset: Dataset) -> None:
    summary = dataset.summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["train_documents"] + summary["val_documents"] == 120
    assert summary["vocab_size"] == dataset.vocab_size == dataset.tokenizer.vocab_size
    manifest = json.loads((dataset.path / "manifest.json").read_text())
    assert dataset.path.name == f"text-{dataset.key}"
    assert manifest["settings"]["vocab_size"] == 400
    names = {path.name for path in dataset.path.iterdir()}
    listed = {shard["file"] for split in manifest["splits"].values() for shard in split["shards"]}
    indices = {name.replace(".bin", ".idx") for name in listed}
    assert names == listed | indices | {"manifest.json", "tokenizer.json"}


def test_a_finished_dataset_is_opened_without_work(tmp_path: Path) -> None:
    source = str(write_folder(tmp_path / "text", 20))
    said: list[str] = []
    options = {"data_dir": tmp_path / "data", "vocab_size": 300, "val_frac": 0.3}
    first = prepare(source, **options, say=said.append)
    assert said == ["reading the text ...", "making a tokenizer from it ...", "turning it into tokens ..."]
    before = digest(first.path)
    said.clear()
    again = prepare(source, **options, say=said.append)
    assert said == []
    assert (again.path, digest(again.path)) == (first.path, before)


def test_each_setting_and_the_text_make_another_dataset(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "text", 20)
    base = {"vocab_size": 300, "val_frac": 0.3}
    changes = [{}, {"vocab_size": 310}, {"val_frac": 0.4}, {"max_bytes": 20_000}, {"shard_tokens": 999}]
    paths = {prepare(str(source), data_dir=tmp_path, **(base | change)).path for change in changes}
    (source / "more.txt").write_text("more")
    paths.add(prepare(str(source), data_dir=tmp_path, **base).path)
    assert len(paths) == len(changes) + 1


def test_two_processes_make_the_same_files(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "text", 20)
    options = {"vocab_size": 300, "val_frac": 0.3}
    here = digest(prepare(str(source), data_dir=tmp_path / "here", **options).path)
    run_python(f"prepare({str(source)!r}, data_dir=Path({str(tmp_path / 'there')!r}), **{options})")
    there = digest(next((tmp_path / "there").glob("text-*")))
    # The manifest names the command, and that the data folder.
    here.pop("manifest.json"), there.pop("manifest.json")
    assert here == there


def test_max_bytes_stops_after_the_document_that_reaches_it(tmp_path: Path) -> None:
    texts = [make_text(seed, 200) for seed in range(30)]
    source = folder_of(tmp_path / "text", texts)
    limit = sum(len(text.encode()) for text in texts[:10]) - 5
    dataset = prepare(str(source), data_dir=tmp_path, vocab_size=300, val_frac=0.3, max_bytes=limit)
    assert sorted(texts_of(dataset, "train") + texts_of(dataset, "val")) == sorted(texts[:10])


@pytest.mark.parametrize("sample_bytes", [1 << 20, 90_000])
def test_max_bytes_stops_within_a_big_file(sample_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "_SAMPLE_BYTES", sample_bytes)
    path = tmp_path / "book.txt"
    path.write_text(make_text(3, 60_000), encoding="utf-8")
    pieces = [piece.decode() for piece in sections_of(path.read_bytes())]
    assert len(pieces) > 4
    limit = sum(len(piece.encode()) for piece in pieces[:3]) - 5
    dataset = prepare(str(path), data_dir=tmp_path, vocab_size=300, val_frac=0.3, max_bytes=limit)
    assert sorted(texts_of(dataset, "train") + texts_of(dataset, "val")) == sorted(pieces[:3])


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are any bytes on Linux only")
def test_names_of_files_need_not_be_utf8(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "text", texts := ["a first one", "a second one", "a third one"])
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("a last one")
    dataset = prepare(str(folder), data_dir=tmp_path, vocab_size=300, val_frac=0.3)
    assert sorted(texts_of(dataset, "train") + texts_of(dataset, "val")) == sorted([*texts, "a last one"])


def test_one_big_file_makes_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(make_text(3, 60_000), encoding="utf-8")
    dataset = prepare(str(path), data_dir=tmp_path, vocab_size=300)
    pieces = [piece.decode() for piece in sections_of(path.read_bytes())]
    assert sorted(texts_of(dataset, "train") + texts_of(dataset, "val")) == sorted(pieces)
    assert dataset.split("val").num_documents == 1  # none is below the bound: the smallest hash goes


@pytest.mark.parametrize("val_frac", [1e-9, 1 - 1e-9])
def test_no_side_of_a_small_source_stays_empty(tmp_path: Path, val_frac: float) -> None:
    source = folder_of(tmp_path / "text", ["first text", "second text", "third text"])
    dataset = prepare(str(source), data_dir=tmp_path, vocab_size=300, val_frac=val_frac)
    fewer = min((dataset.split(name).num_documents, name) for name in ("train", "val"))
    assert fewer == (1, "val" if val_frac < 0.5 else "train")


def test_a_given_tokenizer_is_used(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train([make_text(5, 500)], 333)
    tokenizer.save(tmp_path / "mine.json")
    source = str(write_folder(tmp_path / "text", 20))
    dataset = prepare(source, data_dir=tmp_path, tokenizer=str(tmp_path / "mine.json"), val_frac=0.3)
    assert dataset.tokenizer.fingerprint() == tokenizer.fingerprint()
    assert dataset.vocab_size == tokenizer.vocab_size


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    fields = json.loads(Tokenizer.train([make_text(5, 500)], 300).definition)
    vocab = fields["model"]["vocab"]
    vocab |= {f"unused{index}": index for index in range(len(vocab), 70_000)}
    (tmp_path / "wide.json").write_text(json.dumps(fields), encoding="utf-8")
    source = folder_of(tmp_path / "text", ["one text", "two texts"])
    dataset = prepare(str(source), data_dir=tmp_path, tokenizer=str(tmp_path / "wide.json"), val_frac=0.5)
    assert dataset.split("train").document(0).dtype == np.uint32
    assert sorted(texts_of(dataset, "train") + texts_of(dataset, "val")) == ["one text", "two texts"]


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    source = str(folder_of(tmp_path / "text", ["one", "two"]))
    options = {"data_dir": tmp_path / "data", "tokenizer": "no/such.json"}
    assert "no/such.json: no such tokenizer" in data_error_of(lambda: prepare(source, **options))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (
            ["only one"],
            "one document of 8 bytes, or copies of it, cannot be split.*two different documents or one of more",
        ),
        (["twice", "twice"], "one document of 5 bytes, or copies of it, cannot be split"),
        ([""], "there is no text in it"),
    ],
)
def test_too_little_text_says_how_much_is_needed(tmp_path: Path, texts: list[str], expected: str) -> None:
    source = str(folder_of(tmp_path / "text", texts))
    with pytest.raises(DataError, match=expected):
        prepare(source, data_dir=tmp_path / "data", vocab_size=300)
    assert list((tmp_path / "data").glob("text-*")) == []


def test_a_limit_that_ends_within_the_first_document_is_named(tmp_path: Path) -> None:
    source = str(folder_of(tmp_path / "text", ["a first one", "a second one"]))
    text = data_error_of(lambda: prepare(source, data_dir=tmp_path / "data", vocab_size=300, max_bytes=5))
    assert text.endswith("cannot be split into training and validation text; raise --max-bytes (5)")


def test_a_large_source_with_an_empty_side_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "_SAMPLE_BYTES", 50)
    source = str(folder_of(tmp_path / "text", [f"document number {index}" for index in range(50)]))
    text = data_error_of(lambda: prepare(source, data_dir=tmp_path / "data", vocab_size=300, val_frac=1e-9))
    assert "no document fell on the val side" in text
    assert "raise --val-frac (1e-09) or give more text" in text
    assert list((tmp_path / "data").glob("text-*")) == []


def test_the_tokenizer_sample_holds_no_validation_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    train = Tokenizer.train
    monkeypatch.setattr(Tokenizer, "train", lambda texts, size: train(seen.extend(texts) or seen, size))
    monkeypatch.setattr(preparation, "_SAMPLE_BYTES", 30_000)
    source = str(write_folder(tmp_path / "text", 60))
    dataset = prepare(source, data_dir=tmp_path, vocab_size=300, val_frac=0.3)
    assert 15_000 < sum(len(text.encode()) for text in seen) < 40_000
    assert set(seen) <= set(texts_of(dataset, "train"))
    # A sample of the whole, not its beginning.
    assert {text.split()[0] for text in seen} != {text.split()[0] for text in texts_of(dataset, "train")[: len(seen)]}


def test_the_sample_of_one_big_document_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    train = Tokenizer.train
    monkeypatch.setattr(Tokenizer, "train", lambda texts, size: train(seen.extend(texts) or seen, size))
    monkeypatch.setattr(preparation, "_SAMPLE_BYTES", 200_000)
    path = tmp_path / "book.txt"
    path.write_text(make_text(3, 150_000), encoding="utf-8")
    dataset = prepare(str(path), data_dir=tmp_path, vocab_size=300, val_frac=0.2)
    assert 60_000 < sum(len(text.encode()) for text in seen) < 300_000
    assert set(seen) <= set(texts_of(dataset, "train"))


def test_a_download_of_terabytes_needs_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = open_source.open_source(str(folder_of(tmp_path / "text", ["a"])), cache_dir=tmp_path).files[0]
    huge = type(part)(name=part.name, size_bytes=10**13, identity=str, read=part.read)
    source = Source(name="huge", spec="hf:me/huge", files=(huge,), is_remote=True)
    monkeypatch.setattr(open_source, "open_source", lambda spec, **options: source)
    text = data_error_of(lambda: prepare("hf:me/huge", data_dir=tmp_path / "data"))
    assert text == "hf:me/huge: a download of 10000 GB; limit the text with --max-bytes"


@pytest.mark.parametrize("name", ["train_00000.bin", "train_00001.idx", "val_00000.bin"])
def test_damaged_files_are_named_with_the_command(tmp_path: Path, name: str) -> None:
    source = str(write_folder(tmp_path / "my text", 30))
    options = {"data_dir": tmp_path / "data", "vocab_size": 300, "val_frac": 0.3, "shard_tokens": 3000}
    dataset = prepare(source, **options)
    good = digest(dataset.path)
    path = dataset.path / name
    size = path.stat().st_size
    with path.open("ab") as file:
        file.truncate(size - 8)
    text = data_error_of(lambda: Dataset.open(dataset.path))
    assert text.startswith(
        f"{path}: damaged, {size - 8} bytes instead of {size}; run again: quintic prepare --data '{source}'"
    )
    assert "--vocab-size 300 --val-frac 0.3" in text
    path.unlink()
    assert data_error_of(lambda: Dataset.open(dataset.path)).startswith(f"{path}: missing; run again: quintic prepare")
    assert digest(prepare(source, **options).path) == good  # running it again mends it


@pytest.mark.parametrize(("owner", "reader"), [(np, "fromfile"), (np, "memmap"), (json, "loads")])
def test_a_dataset_that_cannot_be_opened_now_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, reader: str
) -> None:
    source = str(write_folder(tmp_path / "text", 30))
    options = {"data_dir": tmp_path / "data", "vocab_size": 300, "val_frac": 0.3}
    dataset = prepare(source, **options)
    good = digest(dataset.path)

    def read(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(owner, reader, read)
        text = data_error_of(lambda: prepare(source, **options))
    assert text.endswith(": cannot be read (Too many open files); mend this, or use another --data-dir")
    assert digest(dataset.path) == good


def test_an_index_that_does_not_ascend_is_found_when_opened(tmp_path: Path) -> None:
    source = str(write_folder(tmp_path / "text", 30))
    dataset = prepare(source, data_dir=tmp_path, vocab_size=300, val_frac=0.3)
    index = dataset.path / "train_00000.idx"
    offsets = np.fromfile(index, dtype="<i8")
    offsets[1] = 10**9
    offsets.tofile(index)
    assert "train_00000.idx: damaged, its offsets do not ascend" in data_error_of(lambda: Dataset.open(dataset.path))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "is not a finished dataset (no manifest.json); run `quintic prepare` first"),
        ("{", "manifest.json: damaged"),
        ("[]", "format version None, this program reads 1"),
        ('{"version": 99}', "format version 99, this program reads 1; prepare again"),
        ('{"version": 1}', "manifest.json: damaged ('splits'); delete the folder and prepare again"),
    ],
)
def test_what_is_no_dataset_is_named(tmp_path: Path, content: str | None, expected: str) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    assert expected in data_error_of(lambda: Dataset.open(tmp_path))
    assert "does not exist" in data_error_of(lambda: Dataset.open(tmp_path / "none"))


@pytest.mark.parametrize("allowed", [0, 5000, 30_000])
def test_a_full_disk_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    written = 0

    def count(block: bytes) -> None:
        nonlocal written
        written += len(block)
        if written > allowed:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write_bytes(path: Path, content: bytes) -> None:
        count(content)
        with path.open("wb") as file:
            file.write(content)

    monkeypatch.setattr(preparation, "_BATCH_BYTES", 5000)
    source = str(write_folder(tmp_path / "text", 40))
    options = {"data_dir": tmp_path / "data", "vocab_size": 300, "val_frac": 0.3, "shard_tokens": 3000}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_bytes)
        text = data_error_of(lambda: prepare(source, **options))
    assert text.startswith(f"{tmp_path / 'data'}/text-")
    assert text.endswith(
        ": cannot be written (No space left on device); unfinished data is removed, free some space or use another "
        "--data-dir"
    )
    assert [path.name for path in (tmp_path / "data").iterdir() if not path.name.startswith(".")] == []
    prepare(source, **options).verify()


@pytest.mark.parametrize("act", ["write", "read"])
def test_other_errors_of_the_disk_remove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    source = str(write_folder(tmp_path / "text", 60))
    options = {"data_dir": tmp_path / "data", "vocab_size": 300, "val_frac": 0.3, "shard_tokens": 5000}

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(preparation, "_BATCH_BYTES", 8192)
    expected = r"text-\w+: cannot be written \(Input/output error\); use another --data-dir$"
    with monkeypatch.context() as patch:
        act_after(patch, 100_000, fail)
        with pytest.raises(DataError, match=expected):
            prepare(source, **options)
    (folder,) = (tmp_path / "data").glob("text-*")
    written = digest(folder)
    assert "train_00000.bin" in written
    with monkeypatch.context() as patch:
        if act == "write":
            patch.setattr(preparation.ShardWriter, "finish", fail)
        else:
            patch.setattr(np, "fromfile", fail)
        with pytest.raises(DataError, match=expected):
            prepare(source, **options)
    assert digest(folder) == written
    said: list[str] = []
    prepare(source, **options, say=said.append).verify()
    assert said == ["turning it into tokens ..."]  # no survey, no tokenizer


def test_every_file_of_a_dataset_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "_BATCH_BYTES", 8192)
    source = str(write_folder(tmp_path / "text", 40))
    events = disk_events(monkeypatch)
    dataset = prepare(source, data_dir=tmp_path / "data", vocab_size=300, val_frac=0.3, shard_tokens=10_000)
    names = durable_names(events)
    files = {path.name for path in dataset.path.iterdir()}
    assert files <= set(names)
    assert "progress.json" in names
    assert names[-1] == "manifest.json"
    # The dataset's folder has a name, too.
    assert as_it_is(tmp_path / "data").identity in [event.identity for event in events if isinstance(event, Synced)]


def run_python(code: str) -> "subprocess.CompletedProcess[str]":
    prelude = "import os, signal, sys, hashlib\nfrom pathlib import Path\nfrom quintic.data import preparation\n"
    prelude += "from quintic.data.preparation import prepare\npreparation._BATCH_BYTES = 8192\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=100
    )


# Children of one process, so that its imports are paid once: each is killed at the n-th moment when something is
# made durable, a second child then prepares again.
KILL_EVERYWHERE = """
source, root = {source!r}, Path({root!r})

def child(act):
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def make(data_dir):
    prepare(source, data_dir=data_dir, vocab_size=300, val_frac=0.3, shard_tokens=30_000)

def killed(data_dir, moment, late):
    calls = 0
    fsync = os.fsync
    def dying(number):
        nonlocal calls
        calls += 1
        if calls == moment and not late:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(number)
        if calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)
    os.fsync = dying
    make(data_dir)

def digest(data_dir):
    (folder,) = [path for path in data_dir.iterdir() if not path.name.startswith(".")]
    # A kill right after the manifest was written leaves the last checkpoint beside it.
    names = sorted(path.name for path in folder.iterdir() if path.name not in ("manifest.json", "progress.json"))
    return [(name, hashlib.sha256((folder / name).read_bytes()).hexdigest()) for name in names]

assert child(lambda: make(root / "good")) == 0
good = digest(root / "good")
assert not list((root / "good").glob("*/progress.json"))
moment, resumed = 1, 0
while True:
    data_dir = root / str(moment)
    status = child(lambda: killed(data_dir, moment, late=moment % 2))
    if status == 0:
        break
    assert status == signal.SIGKILL, status
    (folder,) = [path for path in data_dir.iterdir() if not path.name.startswith(".")]
    if not (folder / "manifest.json").exists():
        resumed += (folder / "progress.json").exists()
    assert child(lambda: make(data_dir)) == 0
    assert digest(data_dir) == good, moment
    moment += 1
print(moment, resumed)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="forks and kills")
def test_a_kill_at_any_write_leaves_what_can_be_finished(tmp_path: Path) -> None:
    source = str(write_folder(tmp_path / "text", 40))
    run = run_python(KILL_EVERYWHERE.format(source=source, root=str(tmp_path / "data")))
    moments, resumed = map(int, run.stdout.split())
    assert moments > 15
    assert resumed > 10


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_what_was_stopped_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(write_folder(tmp_path / "text", 60))
    options = {"vocab_size": 300, "val_frac": 0.3, "shard_tokens": 5000}
    total = sum(path.stat().st_size for path in Path(source).iterdir())
    code = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
import pytest
from text_samples import act_after
act_after(pytest.MonkeyPatch(), {total // 2}, lambda: os.kill(os.getpid(), signal.SIGKILL))
prepare({source!r}, data_dir=Path({str(tmp_path / "data")!r}), **{options})
"""
    with pytest.raises(subprocess.CalledProcessError) as killed:
        run_python(code)
    assert killed.value.returncode == -9
    (folder,) = (tmp_path / "data").glob("text-*")
    with pytest.raises(DataError, match="is not a finished dataset"):
        Dataset.open(folder)
    monkeypatch.setattr(preparation, "_BATCH_BYTES", 8192)
    encoded = act_after(monkeypatch, total, lambda: None)
    said: list[str] = []
    dataset = prepare(source, data_dir=tmp_path / "data", **options, say=said.append)
    assert said == ["turning it into tokens ..."]  # no survey, no tokenizer
    assert sum(encoded) < total - total // 3
    dataset.verify()
    assert dataset.split("train").num_bytes + dataset.split("val").num_bytes == total


def test_a_checkpoint_that_does_not_fit_its_files_is_not_used(tmp_path: Path) -> None:
    source = str(write_folder(tmp_path / "text", 20))
    options = {"data_dir": tmp_path, "vocab_size": 300, "val_frac": 0.3, "shard_tokens": 3000}
    dataset = prepare(source, **options)
    good = digest(dataset.path)
    manifest = json.loads((dataset.path / "manifest.json").read_text())
    closed = {name: {"closed": split["shards"], "open": None} for name, split in manifest["splits"].items()}
    fingerprint = manifest["tokenizer"]["fingerprint"]
    state = {"tokenizer": fingerprint, "cursor": [20, 0], "threshold": 1, "text_bytes": 1, "splits": closed}
    (dataset.path / "manifest.json").unlink()
    for damaged in ("{", json.dumps({"cursor": 1}), json.dumps({**state, "tokenizer": "x"}), json.dumps(state)):
        (dataset.path / "progress.json").write_text(damaged)
        (dataset.path / "train_00000.bin").write_bytes(b"short")
        assert digest(prepare(source, **options).path) == good
        (dataset.path / "manifest.json").unlink()


@pytest.mark.slow
def test_several_processes_at_once_make_one_dataset(tmp_path: Path) -> None:
    source = str(write_folder(tmp_path / "text", 40))
    code = (
        "from pathlib import Path\nfrom quintic.data.preparation import prepare\n"
        f"made = prepare({source!r}, data_dir=Path({str(tmp_path / 'data')!r}), vocab_size=300, val_frac=0.3)\n"
        "made.verify()\nprint(made.summary())"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    answers = [run.communicate(timeout=100) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], answers
    assert len({out for out, _ in answers}) == 1
    assert len(list((tmp_path / "data").glob("text-*"))) == 1
