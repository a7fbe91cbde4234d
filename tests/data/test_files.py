"""Files of JSON, CSV and Parquet, the files that a folder leaves out, and the memory that long documents take."""

import csv
import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from text_samples import data_error_of, make_text, write_folder

import quintic.errors
from quintic.data import preparation, survey
from quintic.data.dataset import Dataset
from quintic.data.files import blocks
from quintic.data.files.documents import read_documents
from quintic.data.open_source import open_source
from quintic.data.preparation import prepare
from quintic.data.source import Source
from quintic.data.survey import limited_sample
from quintic.data.tokenizer import Tokenizer

ROOT = Path(quintic.errors.__file__).parents[1]
# With what JSON spells in several ways, quotes and commas of CSV, and signs of one to four bytes.
Text = st.text(st.sampled_from('ab \n\r\t"\\/,{}[]:é漢🙂\x00\x7f\u2028') | st.characters(exclude_categories=["Cs"]))
Texts = st.lists(Text.filter(bool), min_size=1, max_size=6)


def texts_in(path: Path, field: str = "text") -> list[str]:
    return [str(text, "utf-8") for text in read_documents(path, field)]


def documents_of(source: Source) -> list[str]:
    return [text.decode() for text in source.documents()]


# --------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("pack", ["", ".gz", ".zst"])
@pytest.mark.parametrize("layout", ["lines", "array", "pretty array", "pretty objects", "one line", "two arrays"])
def test_json_in_every_layout(tmp_path: Path, layout: str, pack: str) -> None:
    records = [{"id": n, "text": f'"{n}" [é]}}\\\n', "more": [{"text": "inner"}, None]} for n in range(50)]
    plain = {
        "lines": "\n".join(json.dumps(record) for record in records),
        "array": "\ufeff" + json.dumps(records),
        "pretty array": json.dumps(records, indent=2, ensure_ascii=False) + "\n",
        "pretty objects": "\n\n".join(json.dumps(record, indent=1) for record in records),
        "one line": "".join(json.dumps(record) for record in records),
        "two arrays": f"{json.dumps(records[:20])}[]\n{json.dumps(records[20:])}",
    }[layout].encode()
    data = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[pack](plain)
    path = tmp_path / f"a.json{pack}"
    path.write_bytes(data)
    assert texts_in(path) == [record["text"] for record in records]


@pytest.mark.parametrize("ending", [".jsonl", ".ndjson", ".json"])
@pytest.mark.parametrize("ascii_only", [True, False])
@given(texts=Texts, block=st.integers(1, 30))
def test_any_text_in_json(
    tmp_path_factory: pytest.TempPathFactory, ending: str, ascii_only: bool, texts: list[str], block: int
) -> None:
    path = tmp_path_factory.mktemp("json") / f"a{ending}"
    records = [{"a": {"text": "no"}, "text": "former", "t\\u": [1, "]"], "n": -1.5e3} for _ in texts]
    lines = [
        json.dumps(record, ensure_ascii=ascii_only)[:-1] + f', "text": {json.dumps(text, ensure_ascii=ascii_only)} }}'
        for record, text in zip(records, texts, strict=True)
    ]
    path.write_bytes("\n".join(lines).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_BLOCK_BYTES", block)
        assert texts_in(path) == texts


@pytest.mark.parametrize(
    "written", [r"a\ud83d", r"\ud83d\ud83d\ude42", r"\\ud83d", r"\udE42 \uD83D\uDE42", r"\u005cn\\n"]
)
def test_surrogates_and_escapes(tmp_path: Path, written: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "{written}"}}')
    assert texts_in(path) == [json.loads(f'"{written}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace")]


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.jsonl", '{"text": "x"} {"text": "y"}', "a.jsonl:1: not a JSON object"),
        ("a.jsonl", '{"text": "x"', "a.jsonl:1: not a JSON object"),
        ("a.jsonl", '{"text": "x}', "a.jsonl:1: not a JSON object"),
        ("a.jsonl", '{"text": "\\x"}', "a.jsonl:1: not a JSON object"),
        ("a.jsonl", '{"text": tru}', "a.jsonl:1: not a JSON object"),
        ("a.jsonl", '{"text" "x"}', "a.jsonl:1: not a JSON object"),
        ("a.jsonl", '{"text": 12}', "a.jsonl:1: 'text' is 12, not a string"),
        ("a.jsonl", '{"body": "x", "id": {}}', "a.jsonl:1: no field 'text' (its fields are body, id); choose the one"),
        ("a.jsonl", '["x"]', "a.jsonl:1: no field 'text' (the record is not an object)"),
        ("a.json", '[{"text": "x"}, 3]', "a.json: record 2: not a JSON object ('3]'); expected an array of objects"),
        ("a.json", '[{"text": "x"}, {"text": "y"', "a.json: record 2: not a JSON object, or the file ends inside it"),
        ("a.json", '[{"text": "x"}, {"text": "y"},', "a.json: the file ends inside an array, after record 2"),
        ("a.json", '[{"text": "x"}', "a.json: the file ends inside an array, after record 1"),
        ("a.json", "[", "a.json: the file ends inside an array, after record 0"),
        ("a.json", '{"text": "x"}]', "a.json: record 2: not a JSON object (']'); expected an array of objects"),
        ("a.json", '[{"text": "x"}]]', "a.json: record 2: not a JSON object (']'); expected an array of objects"),
        ("a.json", '[[{"text": "x"}]]', "a.json: record 1: not a JSON object ('[{"),
        ("a.json", '{"text": tru}', "a.json: record 1: not a JSON object, or the file ends inside it (Expecting value"),
        ("a.json", "plain text", "a.json: record 1: not a JSON object ('plain text')"),
        ("a.json", '{"body": 1}', "a.json: record 1: no field 'text' (its fields are body)"),
    ],
)
def test_unusable_json_is_named(tmp_path: Path, name: str, data: str, expected: str) -> None:
    (tmp_path / name).write_text(data)
    assert data_error_of(lambda: texts_in(tmp_path / name)).startswith(f"{tmp_path}/{expected}")


@given(texts=Texts)
def test_any_text_in_csv(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["id", "body", "text"], *([n, "no", text] for n, text in enumerate(texts))])
    assert texts_in(path) == texts
    assert texts_in(path, "body") == ["no"] * len(texts)


def test_empty_cells_behind_the_last_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text\n1,x,\n2,y,,\n")
    assert texts_in(tmp_path / "a.csv") == ["x", "y"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("id,body\n1,x\n", "a.csv: no field 'text' (its fields are id, body); choose the one that holds the text with"),
        ("text,id,text\nx,1,y\n", "a.csv: 2 columns named 'text'; rename all but the one"),
        ("id,text\n1\n", "a.csv:2: 1 cells, but 'text' is column 2 of 2"),
        ("id,text\n1,x\n2,x, y\n", "a.csv:3: 3 cells, but 'text' is column 2 of 2; put quotes"),
        ('text\n"x" y\n', "a.csv:2: not a row of CSV"),
        ('text\n"x\n', "a.csv:2: not a row of CSV"),
        ("text\n" + "x" * 300_000 + "\n" + "y" * 40_000_000, "a.csv: a line of more than 32 MiB"),
    ],
)
def test_unusable_csv_is_named(tmp_path: Path, data: str, expected: str) -> None:
    (tmp_path / "a.csv").write_text(data)
    assert data_error_of(lambda: texts_in(tmp_path / "a.csv")).startswith(f"{tmp_path}/{expected}")


@pytest.mark.parametrize("kind", [arrow.string(), arrow.large_string()])
def test_parquet_gives_the_column_that_is_asked_for(tmp_path: Path, kind: arrow.DataType) -> None:
    texts = [None if n % 7 == 3 else "" if n % 5 == 2 else f"{n} é🙂" * (n % 40) for n in range(3000)]
    columns = {"text": arrow.array(["no"] * 3000), "body": arrow.array(texts, type=kind)}
    pyarrow.parquet.write_table(arrow.table(columns), tmp_path / "a.parquet", row_group_size=1100)
    assert texts_in(tmp_path / "a.parquet", "body") == [text for text in texts if text]
    assert data_error_of(lambda: texts_in(tmp_path / "a.parquet", "boby")) == (
        f"{tmp_path}/a.parquet: no field 'boby' (its fields are text, body); choose the one that holds the text with "
        "--text-field"
    )
    twice = arrow.Table.from_arrays([columns["text"], columns["body"]], names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "b.parquet")
    assert "b.parquet: 2 columns named 'text'; rename" in data_error_of(lambda: texts_in(tmp_path / "b.parquet"))


def test_the_field_makes_another_dataset_and_is_in_the_command(tmp_path: Path) -> None:
    records = [{"text": make_text(n, 50), "body": make_text(100 + n, 50)} for n in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    options = {"data_dir": tmp_path / "data", "vocab_size": 300, "val_frac": 0.3}
    first = prepare(str(tmp_path / "a.jsonl"), **options)
    second = prepare(str(tmp_path / "a.jsonl"), text_field="body", **options)
    assert first.key != second.key
    for dataset, field in ((first, "text"), (second, "body")):
        found = [
            dataset.tokenizer.decode(split.document(number).tolist())
            for split in map(dataset.split, ("train", "val"))
            for number in range(split.num_documents)
        ]
        assert sorted(found) == sorted(record[field] for record in records)
    assert "--text-field" not in first.manifest["command"]
    assert second.manifest["command"].endswith("--text-field body")


# --------------------------------------------------------------------------------------- folders


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_what_a_folder_leaves_out_is_counted_and_named(tmp_path: Path) -> None:
    record = json.dumps({"text": "from JSON"})
    root = write(
        tmp_path / "text",
        {
            "README.md": "from Markdown",
            "a.json": record,
            "b.ndjson": record,
            "c.csv": "text\nfrom CSV\n",
            "package.json": json.dumps({"name": "x", "version": 1}),
            "sub/numbers.csv": "x,y\n1,2\n",
            **{f"shards/{n}.json.xz": "" for n in range(20)},
            "picture.PNG": "",
            **dict.fromkeys(["Makefile", "Dr. Smith's letters", "blob.e3b0c44298fc1c14", "blob.9afbf4c8996fb924"], ""),
            ".git/notes.txt": "no",
            ".hidden.txt": "no",
            "venv/pyvenv.cfg": "",
            "venv/lib/a.txt": "no",
            "node_modules/a/README.md": "no",
            "tagged/CACHEDIR.TAG": "",
            "tagged/a.txt": "no",
        },
    )
    source = open_source(str(root), cache_dir=tmp_path / "cache")
    assert sorted(documents_of(source)) == ["from CSV", "from JSON", "from JSON", "from Markdown"]
    assert source.notes == (
        f"{root}: 25 files left out for other endings (20 .json.xz, 4 without an ending, 1 .png)",
        f"{root}: 2 files left out without a field 'text' (package.json, sub/numbers.csv)",
        f"{root}: left out as of installed packages or caches: node_modules/, tagged/, venv/",
        f"{root}: left out as hidden: .git/, .hidden.txt",
    )


def test_a_folder_whose_files_lack_the_field_lists_those_there_are(tmp_path: Path) -> None:
    root = write(tmp_path / "text", {"a.json.gz": "", "b.csv": "id,body\n1,x\n"})
    (root / "a.json.gz").write_bytes(gzip.compress(b'{"content": "x", "url": "y"}\n'))
    text = data_error_of(lambda: open_source(str(root), cache_dir=tmp_path))
    assert text.startswith(f"{root}: a.json.gz: no field 'text' (its fields are content, url); choose the one")
    source = open_source(str(root), cache_dir=tmp_path, text_field="content")
    assert documents_of(source) == ["x"]


OTHER_JSON = {
    "numbers.json": "[1, 2]",
    "word.json": '"x"',
    "tsconfig.json": '{\n  // comments, which JSON has not\n  "strict": true,\n}',
    "lines.json": "// nothing else",
    "cut.json": '{"name": "x',
    "wide.json": '["' + "ä" * (1 << 20) + '"]',
}


@pytest.mark.parametrize("name", OTHER_JSON)
def test_json_that_is_no_text_does_not_stop_a_folder(tmp_path: Path, name: str) -> None:
    root = write(tmp_path / "text", {"a.md": "text", name: OTHER_JSON[name]})
    source = open_source(str(root), cache_dir=tmp_path)
    assert documents_of(source) == ["text"]
    assert source.notes == (f"{root}: 1 file left out without a field 'text' ({name})",)
    # Alone, it says itself what is wrong.
    (root / "a.md").unlink()
    alone = data_error_of(lambda: documents_of(open_source(str(root / name), cache_dir=tmp_path)))
    assert data_error_of(lambda: documents_of(open_source(str(root), cache_dir=tmp_path))) == alone


DAMAGED = {
    "cut.json": b'[{"text": "a"},',
    "open.json": b'{"text": "a',
    "word.json": b'"text"',
    "utf16.json": "[1]".encode("utf-16"),
    "latin1.json": '[{"title": "caf\u00e9", "text": "a"}]'.encode("latin-1"),
    "lines.json": '{"title": "caf\u00e9", "text": "a"}\n'.encode("latin-1"),
    "header.csv": "caf\u00e9,text\n1,a\n".encode("latin-1"),
    "rows.csv": "id,text\n1,caf\u00e9\n".encode("latin-1"),
    "rows.csv.gz": gzip.compress("caf\u00e9,text\n1,a\n".encode("latin-1")),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_of_a_folder_that_may_be_text_is_an_error_if_it_is_damaged(tmp_path: Path, name: str) -> None:
    root = write(tmp_path / "text", {"a.md": "text"})
    (root / name).write_bytes(DAMAGED[name])
    assert f"{root / name}: " in data_error_of(lambda: documents_of(open_source(str(root), cache_dir=tmp_path)))


def test_a_damaged_file_of_a_folder_is_left_out_without_the_field(tmp_path: Path) -> None:
    root = write(tmp_path / "text", {"a.md": "text"})
    (root / "cities.csv").write_bytes("id,city\n1,Zürich\n".encode("latin-1"))
    (root / "cut.json.gz").write_bytes(gzip.compress(b"[1, 2]" + b" " * (3 << 19))[:-4])
    source = open_source(str(root), cache_dir=tmp_path)
    assert documents_of(source) == ["text"]
    assert source.notes == (f"{root}: 2 files left out without a field 'text' (cities.csv, cut.json.gz)",)


OPTIONS = json.dumps({section: {} for section in ("data", "model", "optim", "schedule", "run")})


def test_what_quintic_has_written_is_no_text(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "project", 30)
    first = open_source(str(root), cache_dir=root / "elsewhere" / "cache")
    assert first.notes == ()
    prepare(str(root), data_dir=root / "elsewhere", vocab_size=300, val_frac=0.3)
    write(
        root,
        {
            "out/first/config.json": OPTIONS,
            "out/first/metrics.jsonl": json.dumps({"kind": "run", "time": 1}) + "\n",
            "out/first/notes.md": "no",
            "out/unstarted/config.json": OPTIONS,
            "out/race/metrics.jsonl": json.dumps({"kind": "run"}) + "\n",
            "elsewhere/stopped/progress.json": json.dumps({"thresholds": [0], "splits": {}}),
            "elsewhere/cache/hub/README.md": "no",
        },
    )
    again = open_source(str(root), cache_dir=root / "elsewhere" / "cache")
    assert again.fingerprint() == first.fingerprint()
    (note,) = again.notes
    assert note.startswith(f"{root}: left out as written by Quintic: ")
    runs = [f"out/{name}/ (a run)" for name in ("first", "race", "unstarted")]
    for place in ("elsewhere/cache/ (downloads)", "elsewhere/project-", "(prepared text)", *runs):
        assert place in note
    for own, kind in (("out/first", "a run"), ("elsewhere/stopped", "text that is being prepared")):
        text = data_error_of(lambda own=own: open_source(str(root / own), cache_dir=tmp_path))
        assert text == f"{root / own}: is {kind}, not a folder of text; name the text that it was made from"


def test_a_users_folder_is_not_taken_for_a_run(tmp_path: Path) -> None:
    root = write(
        tmp_path / "text",
        {
            "a/config.json": json.dumps({"name": "x"}),
            "a/metrics.jsonl": json.dumps({"text": "one"}),
            "b/manifest.json": json.dumps({"text": "two"}),
            "runs/c.txt": "three",
            "data/d.txt": "four",
        },
    )
    assert sorted(documents_of(open_source(str(root), cache_dir=tmp_path))) == ["four", "one", "three", "two"]


# ---------------------------------------------------------------------- what preparing is safe from


def test_a_tokenizer_that_loses_text_of_the_user_is_refused(tmp_path: Path) -> None:
    Tokenizer.train([make_text(5, 500)], 300).save(tmp_path / "t.json")
    folder = write(tmp_path / "text", {f"{n}.txt": f"document {n} QQ" for n in range(20)})
    encode_batch = Tokenizer.encode_batch

    # No definition that loads is known to lose text; one that does is caught by the text itself.
    def losing(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
        encoded = encode_batch(tokenizer, texts)
        return [ids[:-1] if "7" in text else ids for ids, text in zip(encoded, texts, strict=True)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "encode_batch", losing)
        text = data_error_of(
            lambda: prepare(str(folder), data_dir=tmp_path / "d", tokenizer=str(tmp_path / "t.json"), val_frac=0.3)
        )
    assert text.startswith(
        f"--tokenizer {tmp_path}/t.json: loses text: 'ument 17 QQ' comes back as 'ument 17 Q'; use a byte"
    )
    assert list((tmp_path / "d").glob("text-*")) == []


def test_teachable_keeps_ordinary_text_whole() -> None:
    pieces = [make_text(seed, 3000).encode() for seed in range(50)]
    assert limited_sample(pieces) == pieces


@pytest.mark.parametrize("alphabet", ["ACGT", "漢字語文国日本人大一", "0123456789abcdef"])
def test_teachable_bounds_words_and_their_lengths(alphabet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_WORD_BYTES", 100_000)
    monkeypatch.setattr(survey, "_WORD_WORK", 3 * 10**8)
    rng = random.Random(0)
    pieces = ["".join(rng.choices(alphabet, k=5000)).encode() for _ in range(100)]
    chosen = limited_sample(pieces)
    assert 1 <= len(chosen) < 60
    assert chosen == [piece for piece in pieces if piece in set(chosen)]  # in their order
    assert limited_sample(pieces[::-1]) == chosen[::-1]  # and the same ones, whatever the order
    # A page of prose among them, drawn or not, makes no difference to what fits.
    assert len(limited_sample([*pieces, b"a few words more"])) == len(chosen) + 1


def peak_mib(code: str, *arguments: str) -> int:
    """Run Python code in a process of its own; return how far its memory grew over that of the imports."""
    code = f"import resource, sys\n{code}"
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=200
    )
    return int(run.stdout.split()[-1]) >> 10


PREPARE = """
from pathlib import Path
from quintic.data.preparation import prepare
prepare(sys.argv[2], data_dir=Path(sys.argv[3]), vocab_size=300, tokenizer=sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare(sys.argv[4], data_dir=Path(sys.argv[3]), vocab_size=300, tokenizer=sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory in KiB")
def test_preparing_a_long_document_encodes_it_in_pieces(tmp_path: Path) -> None:
    Tokenizer.train([make_text(1, 2000)], 300).save(tmp_path / "t.json")
    text = make_text(1, 100_000)
    (tmp_path / "small.txt").write_text(text)
    (tmp_path / "large.txt").write_text(text * 12)
    size = (tmp_path / "large.txt").stat().st_size
    arguments = ("t.json", "small.txt", "data", "large.txt")
    grown = peak_mib(PREPARE, *(str(tmp_path / name) for name in arguments))
    assert grown < 4 * size / 2**20 + 30  # it was 26 bytes for each byte


def test_batches_and_checkpoints_within_a_document_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(make_text(1, 60_000))
    (tmp_path / "b.txt").write_text(make_text(2, 60_000))

    def made(folder: str) -> Dataset:
        return prepare(str(tmp_path / "a.txt"), data_dir=tmp_path / folder, vocab_size=300, shard_tokens=20_000)

    whole = made("whole")
    monkeypatch.setattr(preparation, "_BATCH_BYTES", 1)
    pieces = made("pieces")
    for name in ("train", "val"):
        assert [list(shard) for shard in whole.split(name).shards] == [
            list(shard) for shard in pieces.split(name).shards
        ]
