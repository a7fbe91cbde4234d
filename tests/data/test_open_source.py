"""Text sources: what each kind yields, in which order, and what is said about unusable text."""

import errno
import gzip
import itertools
import json
import os
import random
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from text_samples import data_error_of, make_text, write_folder

import quintic.errors
from quintic.data.files import blocks, documents
from quintic.data.files.documents import MAX_DOCUMENT_BYTES, read_documents, sections_of
from quintic.data.open_source import open_source
from quintic.data.source import Source, slug

ROOT = Path(quintic.errors.__file__).parents[1]


def texts_in(path: Path, field: str = "text") -> list[str]:
    return [text.decode() for text in read_documents(path, field)]


def documents_of(source: Source) -> list[str]:
    return [text.decode() for text in source.documents()]


def opened(path: Path) -> Source:
    return open_source(str(path), cache_dir=path / "cache")


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def test_python_yields_the_standard_library() -> None:
    source = open_source("python", cache_dir=Path("unused"))
    names = [part.name for part in source.files]
    assert source.name == "python"
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "pydoc_data/topics.py"} <= set(names)
    assert not {"site-packages", "test", "tests", "idle_test"} & {piece for name in names for piece in name.split("/")}
    texts = documents_of(source)
    assert texts[:99] == [text.decode() for text in itertools.islice(source.documents(), 99)]
    assert all(len(text.encode()) >= 200 for text in texts)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    kept = set(texts)
    assert (stdlib / "os.py").read_text(encoding="utf-8") in kept
    assert (stdlib / "keyword.py").read_text(encoding="utf-8") in kept
    assert (stdlib / "encodings" / "cp437.py").read_text(encoding="utf-8") not in kept  # a table
    assert any(text.startswith('The "assert" statement') for text in texts)  # a topic of pydoc
    assert sum(len(text.encode()) for text in texts) > 5_000_000


def test_python_without_sources_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_sysconfigdata.py").write_text("")
    for stdlib in (tmp_path, tmp_path / "python311.zip"):
        monkeypatch.setattr(sysconfig, "get_paths", lambda stdlib=stdlib: {"stdlib": str(stdlib)})
        text = data_error_of(lambda: open_source("python", cache_dir=tmp_path))
        assert text.startswith(f"python: the standard library's sources are not in {stdlib}")


def test_a_folder_is_walked_in_sorted_order(tmp_path: Path) -> None:
    root = tmp_path / "My Corpus"
    files = {
        "b.md": b"b",
        "a.txt": "é".encode(),
        "sub/c.rst": b"c",
        "sub/d.jsonl": b'{"text": "d1"}\n\n{"text": "d2", "other": 1}',
        "sub/e.txt.gz": gzip.compress(b"e"),
        "sub/f.md.zst": zst(b"f"),
        "sub/g.jsonl.gz": gzip.compress(b'{"text": "g"}\n'),
        "sub/h.JSONL.ZST": zst(b'{"text": "h"}\n'),
        ".hidden.txt": b"no",
        ".git/x.txt": b"no",
        "sub/picture.png": b"no",
        "sub/empty.txt": b"",
    }
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    source = opened(root)
    assert source.name == "my-corpus"
    assert documents_of(source) == ["é", "b", "c", "d1", "d2", "e", "f", "g", "h"]


def test_a_file_is_one_source(tmp_path: Path) -> None:
    path = tmp_path / "Big Book.txt.gz"
    path.write_bytes(gzip.compress("one\r\ntwo\n".encode("utf-8-sig")))
    assert opened(path).name == "big-book"
    assert documents_of(opened(path)) == ["one\r\ntwo\n"]  # without the byte order mark, else as it is


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_long_lines_cross_blocks(tmp_path: Path, ending: str) -> None:
    rng = random.Random(1)
    texts = [("x\r\u2028é" * rng.randint(1, 400_000)) + str(index) for index in range(5)] + ["short"] * 1000
    data = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
    path = tmp_path / f"a{ending}"
    path.write_bytes({".gz": gzip.compress, ".zst": zst}.get(path.suffix, lambda plain: plain)(data))
    assert texts_in(path) == texts


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".zst", zst)])
def test_files_of_several_frames(tmp_path: Path, ending: str, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(pack(b"one ") + pack(b"") + pack(b"two"))
    assert texts_in(path) == ["one two"]


def test_a_large_text_file_is_read_in_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_MAX_TEXT_BYTES", 100_000)
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 30_000)
    text = make_text(0, 60_000) + "漢" * 100_000
    (tmp_path / "a.txt").write_text("\ufeff" + text, encoding="utf-8")
    found = documents_of(opened(tmp_path))
    assert "".join(found) == text
    assert 6 <= len(found) == sum(len(piece.encode()) <= 100_000 for piece in found)
    (tmp_path / "a.txt").write_bytes(text.encode() + b"\xff")
    assert f"not UTF-8 at byte offset {len(text.encode())} " in data_error_of(
        lambda: list(opened(tmp_path).documents())
    )


def bomb(path: Path, gibibytes: int) -> Path:
    """Write a file of some kilobytes that holds gigabytes of spaces."""
    with path.open("wb") as file, zstandard.ZstdCompressor(level=1).stream_writer(file) as writer:
        for _ in range(64 * gibibytes):
            writer.write(b" " * (16 << 20))
    return path


PEAK = """
import itertools, resource, sys
from pathlib import Path
from quintic.data.files.documents import read_documents
from quintic.errors import DataError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    print(len(next(read_documents(Path(sys.argv[1])))))
except DataError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory in KiB")
@pytest.mark.parametrize(
    ("name", "expected", "most_mib"),
    [
        ("a.txt.zst", str(64 << 20), 400),
        ("a.jsonl.zst", "{path}: a line of more than 256 MiB; write one record per line", 500),
    ],
)
def test_a_small_file_that_holds_gigabytes(tmp_path: Path, name: str, expected: str, most_mib: int) -> None:
    path = bomb(tmp_path / name, 1)
    assert path.stat().st_size < 200_000
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(path)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=100
    )
    answer, peak_mib = run.stdout.splitlines()
    assert answer.startswith(expected.format(path=path))
    assert int(peak_mib) < most_mib


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes")
@pytest.mark.parametrize("option", ["data", "tokenizer"])
def test_a_pipe_is_an_error(tmp_path: Path, option: str) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    arguments = {"data": str(write_folder(tmp_path / "text", 3)), option: "pipe.txt"}
    command = [sys.executable, "-m", "quintic", "prepare", *(f"--{name}={value}" for name, value in arguments.items())]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr.startswith(f"quintic: error: {tmp_path}/pipe.txt: a pipe or a device, not a file; ")
    assert run.stderr.count("\n") == 1


def test_fingerprint_follows_names_and_content(tmp_path: Path) -> None:
    path = tmp_path / "text" / "a.txt"
    path.parent.mkdir()
    path.write_text("one")
    first = opened(path.parent).fingerprint()
    os.utime(path, (0, 0))
    assert opened(path.parent).fingerprint() == first  # a copy elsewhere is the same source
    path.write_text("two")
    second = opened(path.parent).fingerprint()
    path.rename(path.with_name("b.txt"))
    third = opened(path.parent).fingerprint()
    (path.parent / "c.md").write_text("more")
    assert len({first, second, third, opened(path.parent).fingerprint()}) == 4


@pytest.mark.parametrize("spec", ["no/such/place", "", "pythn"])
def test_a_source_that_does_not_exist(tmp_path: Path, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = data_error_of(lambda: open_source(spec, cache_dir=tmp_path))
    assert text.startswith(f"{spec!r}: no such file or folder; a text source is a path, 'python' or 'hf:")


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for made in (folder, elsewhere):
        made.mkdir()
    (folder / "a.txt").write_text("own")
    (elsewhere / "b.txt").write_text("linked")
    (folder / "one").symlink_to(elsewhere)
    (folder / "two").symlink_to(elsewhere)
    (elsewhere / "circle").symlink_to(folder)
    assert sorted(documents_of(opened(folder))) == ["linked", "own"]
    assert [part.name for part in opened(folder).files] == ["a.txt", "one/b.txt"]


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    scandir = os.scandir

    def closed(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert data_error_of(lambda: opened(tmp_path)) == f"{tmp_path / 'closed'}: cannot be read (Permission denied)"


def test_a_folder_without_text_lists_the_endings(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    text = data_error_of(lambda: opened(tmp_path))
    assert text.startswith(f"{tmp_path}: no file with a supported ending")
    assert all(ending in text for ending in (".txt", ".jsonl", ".ndjson", ".json", ".csv", ".gz", ".zst", ".parquet"))
    assert "1 file left out for other endings (1 .png)" in text
    assert text.endswith("; copy other plain text, source code for example, to names in .txt")


def test_an_unknown_ending_lists_the_endings(tmp_path: Path) -> None:
    (tmp_path / "a.doc").write_bytes(b"")
    text = data_error_of(lambda: opened(tmp_path / "a.doc"))
    assert "a.doc: unknown ending; supported are .txt, .md, .rst, .jsonl" in text
    assert text.endswith("; copy other plain text, source code for example, to names in .txt")
    assert "a.doc: unknown ending" in data_error_of(lambda: list(read_documents(tmp_path / "a.doc")))


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.txt", b"ok\n\xffno", r"a.txt: not UTF-8 at byte offset 3 (byte 0xff); convert the file to UTF-8"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xe9"}\n', "a.jsonl: not UTF-8 at byte offset 25 (byte 0xe9)"),
        ("a.jsonl", b'{"text": "ok"}\n\nnot json\n', "a.jsonl:3: not a JSON object"),
        ("a.jsonl", b'{"text": "ok"}\n{"body": 1, "id": 2}\n', "a.jsonl:2: no field 'text' (its fields are body, id)"),
        ("a.jsonl", b'{"text": null}\n', "a.jsonl:1: 'text' is null, not a string; leave such lines out"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: no field 'text' (the record is not an object)"),
        # No time in it: the bytes are in the test's name, which must be the same in every process.
        ("a.txt.gz", gzip.compress(b"text" * 999, mtime=0)[:-9], "a.txt.gz: truncated"),
        ("a.txt.gz", b"", "a.txt.gz: truncated"),
        ("a.txt.gz", b"plain text", "a.txt.gz: damaged or not compressed as its ending says"),
        ("a.jsonl.zst", zst(b'{"text": "x"}\n' * 9999)[:-5], "a.jsonl.zst: truncated"),
        ("a.txt.zst", b"plain text", "a.txt.zst: damaged or not compressed as its ending says"),
        ("a.parquet", b"plain text", "a.parquet: not a readable Parquet file"),
        ("a.parquet", b"", "a.parquet: not a readable Parquet file"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, name: str, data: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert f"{tmp_path}/{expected}" in data_error_of(lambda: list(opened(tmp_path).documents()))


def test_parquet_without_text_lists_its_columns(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(arrow.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    text = data_error_of(lambda: list(opened(tmp_path).documents()))
    assert (
        "a.parquet: no field 'text' (its fields are id, body); choose the one that holds the text with --text-field"
        in text
    )
    pyarrow.parquet.write_table(arrow.table({"text": [1]}), tmp_path / "a.parquet")
    text = data_error_of(lambda: list(opened(tmp_path).documents()))
    assert "a.parquet: column 'text' holds int64, not strings" in text


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    source = opened(tmp_path)
    path.unlink()
    assert "a.txt: cannot be read (No such file" in data_error_of(lambda: list(source.documents()))
    assert "a.txt: cannot be read (No such file" in data_error_of(source.fingerprint)


@given(st.text(st.sampled_from("ab\né漢🙂"), max_size=200), st.integers(4, 40))
def test_pieces_join_to_the_text(text: str, max_bytes: int) -> None:
    pieces = [piece.decode() for piece in sections_of(text.encode(), max_bytes)]
    assert "".join(pieces) == text
    assert all(0 < len(piece.encode()) <= max_bytes for piece in pieces) or text == ""
    for piece, following in pairwise(pieces):
        # Cut inside a line only where the line was too long, and then as late as possible.
        assert piece.endswith("\n") or len((piece + following[0]).encode()) > max_bytes


def test_appended_text_moves_no_earlier_cut() -> None:
    text = make_text(0, 30_000)
    before = list(sections_of(text.encode()))
    assert len(before) > 2
    assert max(map(len, before)) <= MAX_DOCUMENT_BYTES
    assert list(sections_of((text + make_text(1, 3000)).encode()))[: len(before) - 1] == before[:-1]


@pytest.mark.parametrize(("name", "expected"), [("FineWeb-Edu", "fineweb-edu"), ("a/b c", "a-b-c"), ("漢", "text")])
def test_a_slug_is_a_plain_name(name: str, expected: str) -> None:
    assert slug(name) == expected
