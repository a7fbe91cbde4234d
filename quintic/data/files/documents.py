"""`read_documents` reads the documents of one file: plain text, JSON and CSV, also compressed, and Parquet.

A text file (`.txt`, `.md`, `.rst`) is one document, or one per 64 MiB if it is larger, so that files of any size can be
read; JSON gives one document per object, CSV and Parquet one per row. Documents are bytes of UTF-8. `sections_of`
divides long documents into sections. `quintic.data.open_source` decides which files make up a source, and their order.
"""

import codecs
import csv
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from quintic.data.files.blocks import COMPRESSIONS, lines_of, text_blocks, uncompressed_name
from quintic.errors import DataError

__all__ = [
    "ENDINGS_ADVICE",
    "MAX_DOCUMENT_BYTES",
    "RECORD_ENDINGS",
    "TEXT_FIELD",
    "MissingField",
    "format_of",
    "read_documents",
    "sections_of",
]

TEXT_FIELD = "text"
"""Default name of the field of JSON, CSV and Parquet that holds the text."""

_TEXT_ENDINGS = (".txt", ".md", ".rst")
RECORD_ENDINGS = (".parquet", ".jsonl", ".ndjson", ".json", ".csv")
ENDINGS_ADVICE = (
    f"supported are {', '.join((*_TEXT_ENDINGS, *RECORD_ENDINGS[1:]))}, these also with {' or '.join(COMPRESSIONS)} "
    "behind, and .parquet; copy other plain text, source code for example, to names in .txt"
)
MAX_DOCUMENT_BYTES = 64 * 1024
_MAX_TEXT_BYTES = 64 << 20
_MAX_RECORD_BYTES = 256 << 20
_MAX_CELL_BYTES = 32 << 20
# Between the objects of a `.json` file: spaces, commas, and a byte order mark. Brackets are compared one by one.
_BETWEEN_RECORDS = re.compile(r"[\s,\ufeff]*")
# Number of fields that a message names.
_NAMED_FIELDS = 20


class MissingField(DataError):
    """A record or a table lacks the field that should hold the text; `fields` are the names of its fields."""

    def __init__(self, place: str, field: str, fields: Iterable[str]) -> None:
        """Make a message with the names of the fields, and the option that chooses one of them."""
        self.fields = tuple(fields)
        more = f" and {len(self.fields) - _NAMED_FIELDS} more" if len(self.fields) > _NAMED_FIELDS else ""
        given = f"its fields are {', '.join(self.fields[:_NAMED_FIELDS]) or 'none'}{more}"
        super().__init__(f"{place}: no field {field!r} ({given}); choose the one that holds the text with --text-field")


def format_of(name: str) -> str | None:
    """Return the ending that says how a file is read, without that of a compression; None if it cannot be read.

    >>> format_of("a.JSON.gz"), format_of("a.parquet.gz")
    ('.json', None)
    """
    plain = uncompressed_name(name)
    if plain.endswith(".parquet") and plain != name.lower():
        return None
    return next((ending for ending in (*_TEXT_ENDINGS, *RECORD_ENDINGS) if plain.endswith(ending)), None)


def read_documents(path: Path, field: str = TEXT_FIELD) -> Iterator[bytes]:
    """Yield the documents of one file as UTF-8 in stored order, except empty ones.

    A leading byte order mark is dropped; line ends are preserved. Lone halves of surrogate pairs, which JSON can
    contain but UTF-8 cannot, become U+FFFD. `field` is the key or column that holds the text.

    Raises:
        MissingField: a record or the table has no such field.
        DataError: the file cannot be opened, is damaged, is not UTF-8, or has a record without text or of more than
            256 MiB (CSV: 32 MiB).
    """
    ending = format_of(path.name)
    if ending is None:
        raise DataError(f"{path}: unknown ending; {ENDINGS_ADVICE}")
    records = {".csv": _read_csv, ".json": _read_json, ".parquet": _read_parquet}
    try:
        if ending in _TEXT_ENDINGS:
            yield from filter(None, _read_text(path))
        else:
            yield from filter(None, records.get(ending, _read_json_lines)(path, field))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _read_text(path: Path) -> Iterator[bytes]:
    mark = codecs.BOM_UTF8
    held = bytearray()
    for block in text_blocks(path):
        held += block.encode()
        while len(held) > _MAX_TEXT_BYTES:
            end = _section_end(held, 0, _MAX_TEXT_BYTES)
            yield bytes(held[:end]).removeprefix(mark)
            del held[:end]
            mark = b""
    yield bytes(held).removeprefix(mark)


def _read_json_lines(path: Path, field: str) -> Iterator[bytes]:
    for number, line in enumerate(lines_of(path, _MAX_RECORD_BYTES), start=1):
        if line.isspace():
            continue
        place = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: not a JSON object ({error}); expected one object per line") from error
        yield _text_of(record, place, field)


def _read_json(path: Path, field: str) -> Iterator[bytes]:
    """Yield the texts of objects in an array, or one after the other, with or without line ends."""
    decoder = json.JSONDecoder()
    number = 1
    is_open = False  # whether an array has begun and not ended
    held = ""  # the text from the next record on
    tried = 0  # length of an incomplete record; it is parsed again when there is twice as much
    for block in chain(text_blocks(path), [""]):
        held += block
        is_last = not block
        if len(held) < 2 * tried and not is_last:
            continue
        start = 0
        while (start := _skip_to_record(held, start)) < len(held):
            place = f"{path}: record {number}"
            if held[start] == ("]" if is_open else "["):
                is_open, start = not is_open, start + 1
                continue
            if held[start] != "{":
                raise DataError(
                    f"{place}: not a JSON object ({held[start : start + 20]!r}); expected an array of objects, or one "
                    "object per line"
                )
            try:
                record, end = decoder.raw_decode(held, start)
            except (ValueError, RecursionError) as error:
                if is_last:
                    raise DataError(
                        f"{place}: not a JSON object, or the file ends inside it ({error}); copy or write it again"
                    ) from error
                break
            yield _text_of(record, place, field)
            number, start = number + 1, end
        held = held[start:]
        tried = len(held)
        if tried > _MAX_RECORD_BYTES:
            raise DataError(
                f"{path}: record {number}: more than {_MAX_RECORD_BYTES >> 20} MiB, or not a JSON object; write one "
                "object per line, each with a document of a sensible size"
            )
    if is_open:
        raise DataError(f"{path}: the file ends inside an array, after record {number - 1}; copy or write it again")


def _skip_to_record(text: str, start: int) -> int:
    match = _BETWEEN_RECORDS.match(text, start)
    return start if match is None else match.end()


def _text_of(record: Any, place: str, field: str) -> bytes:
    """Return the text of a JSON record."""
    if not isinstance(record, dict):
        raise DataError(f"{place}: no field {field!r} (the record is not an object); leave such lines out")
    if field not in record:
        raise MissingField(place, field, record)
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{place}: {field!r} is {json.dumps(text)[:40]}, not a string; leave such lines out")
    try:
        return text.encode()
    except UnicodeEncodeError:  # lone halves of surrogate pairs
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _read_csv(path: Path, field: str) -> Iterator[bytes]:
    # Python's default limit is 128 KiB.
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_CELL_BYTES))
    rows = csv.reader(lines_of(path, _MAX_CELL_BYTES), strict=True)
    try:
        names = next(rows, None)
        if names is None:
            return
        column = _column(path, field, names)
        for row in rows:
            if not row:  # an empty line
                continue
            # Empty cells at the end come from a table that was wider; others from a text with commas that lacks quotes.
            if len(row) <= column or any(row[len(names) :]):
                raise DataError(
                    f"{path}:{rows.line_num}: {len(row)} cells, but {field!r} is column {column + 1} of {len(names)}; "
                    "put quotes around cells with commas or line ends, or leave such rows out"
                )
            yield row[column].encode()
    except csv.Error as error:
        raise DataError(
            f"{path}:{rows.line_num}: not a row of CSV with cells of at most {_MAX_CELL_BYTES >> 20} MiB ({error}); "
            "write the file again"
        ) from error


def _column(path: Path, field: str, names: list[str]) -> int:
    """Return the index of a table's column that holds the text."""
    if field not in names:
        raise MissingField(str(path), field, names)
    if names.count(field) > 1:
        raise DataError(
            f"{path}: {names.count(field)} columns named {field!r}; rename all but the one that holds the text, or "
            "choose another column with --text-field"
        )
    return names.index(field)


def _read_parquet(path: Path, field: str) -> Iterator[bytes]:
    """Yield the texts of a column; rows with a missing text are left out."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        # With a buffer, because otherwise the whole column of a row group is read at once.
        with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
            schema = table.schema_arrow
            kind = schema.field(_column(path, field, list(schema.names))).type
            if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                raise DataError(
                    f"{path}: column {field!r} holds {kind}, not strings; write it as strings, or choose another "
                    "column with --text-field"
                )
            # Few rows at a time, since a row may be long.
            for batch in table.iter_batches(batch_size=64, columns=[field]):
                for text in batch.column(0).to_pylist():
                    yield b"" if text is None else text.encode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: column {field!r} is not UTF-8 ({error.reason}); write the file again") from error
    except arrow.ArrowException as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: not a readable Parquet file ({reason}); write or download it again") from error


def sections_of(document: bytes, max_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[bytes]:
    r"""Yield the sections of a document, divided at line ends, or between characters within a line that is too long.

    The sections join to the document. Division begins at the front, so that text appended to a file does not change the
    sections before it. `max_bytes` is at least 4.

    >>> list(sections_of(b"one\ntwo\nthree\n", max_bytes=9))
    [b'one\ntwo\n', b'three\n']
    """
    start = 0
    while len(document) - start > max_bytes:
        end = _section_end(document, start, max_bytes)
        yield document[start:end]
        start = end
    yield document[start:]


def _section_end(data: bytes | bytearray, start: int, max_bytes: int) -> int:
    """Return the end of a section that begins at `start`: after its last line end, else between characters."""
    end = data.rfind(b"\n", start, start + max_bytes) + 1
    if end > 0:
        return end
    end = start + max_bytes
    # Within a character (its later bytes begin with the bits 10): go back to its first byte.
    while end > start + 1 and data[end] & 0xC0 == 0x80:
        end -= 1
    return end
