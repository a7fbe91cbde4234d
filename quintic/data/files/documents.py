"""`read_documents` reads the documents of one file: plain text, JSON and CSV, also compressed, and Parquet.

A text file (`.txt`, `.md`, `.rst`) is one document, or one per 64 MiB if it is larger, so that files of any size can be
read; JSON gives one document per object, CSV and Parquet one per row. Documents are bytes of UTF-8. `sections_of`
divides long documents into sections. `quintic.data.open_source` decides which files make up a source, and their order.

Memory. Reading a document takes at most twice its bytes; a document has at most 256 MiB.
"""

from collections.abc import Iterator
from pathlib import Path

from quintic.data.files.blocks import COMPRESSIONS, Utf8, blocks_of, check_utf8, cut, uncompressed_name
from quintic.data.files.json_records import read_json, read_json_lines
from quintic.data.files.tables import read_csv, read_parquet
from quintic.errors import DataError

__all__ = [
    "ENDINGS_ADVICE",
    "MAX_DOCUMENT_BYTES",
    "SUPPORTED_ENDINGS",
    "TEXT_FIELD",
    "has_fields",
    "is_supported",
    "read_documents",
    "sections_of",
    "stored_as_text",
]

TEXT_FIELD = "text"
"""Default name of the field of JSON, CSV and Parquet that holds the text."""

TEXT_ENDINGS = (".txt", ".md", ".rst")
_JSON_LINES = (".jsonl", ".ndjson")
_RECORDS = (*_JSON_LINES, ".json", ".csv")
SUPPORTED_ENDINGS = (
    *(ending + packed for ending in (*TEXT_ENDINGS, *_RECORDS) for packed in ("", *COMPRESSIONS)),
    ".parquet",
)
ENDINGS_ADVICE = (
    f"supported are {', '.join((*TEXT_ENDINGS, *_RECORDS))}, these also with {' or '.join(COMPRESSIONS)} behind, and "
    ".parquet; copy other plain text, source code for example, to names in .txt"
)
MAX_DOCUMENT_BYTES = 64 * 1024
_MAX_TEXT_BYTES = 64 << 20


def is_supported(name: str) -> bool:
    """Return whether a file can be read, judged by its ending (in upper or lower case)."""
    return name.lower().endswith(SUPPORTED_ENDINGS)


def stored_as_text(name: str) -> bool:
    """Return whether the size of a file is the size of its text: true for uncompressed plain text."""
    return name.lower().endswith(TEXT_ENDINGS)


def has_fields(name: str) -> bool:
    """Return whether a file is JSON or CSV, which may hold something else than documents, for example settings.

    Files of JSON lines and Parquet always count as documents.
    """
    return uncompressed_name(name).endswith((".json", ".csv"))


def read_documents(path: Path, field: str = TEXT_FIELD) -> Iterator[Utf8]:
    """Yield the documents of one file as UTF-8 in stored order, except empty ones.

    A leading byte order mark is dropped; line ends are preserved. Lone halves of surrogate pairs, which JSON can
    contain but UTF-8 cannot, become U+FFFD.

    Args:
        path: a file with one of `SUPPORTED_ENDINGS`.
        field: the key or column that holds the text; ignored for plain text.

    Raises:
        MissingField: a record or the table has no such field.
        DataError: the file cannot be opened, is damaged, is not UTF-8, or has a record without text or of more than
            256 MiB (CSV: 32 MiB).
    """
    if not is_supported(path.name):
        raise DataError(f"{path}: unknown ending; {ENDINGS_ADVICE}")
    name = uncompressed_name(path.name)
    documents: Iterator[Utf8]
    try:
        if name.endswith(".parquet"):
            documents = read_parquet(path, field)
        elif name.endswith(_JSON_LINES):
            documents = read_json_lines(path, field)
        elif name.endswith(".json"):
            documents = read_json(path, field)
        elif name.endswith(".csv"):
            documents = read_csv(path, field)
        else:
            documents = _read_text(path)
        for text in documents:
            if text:
                yield text
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _read_text(path: Path) -> Iterator[Utf8]:
    offset = 0
    rest = bytearray()
    for block in blocks_of(path):
        rest += block
        while len(rest) > _MAX_TEXT_BYTES:
            end = cut(rest, 0, _MAX_TEXT_BYTES)
            yield _checked(rest[:end], path, offset)
            del rest[:end]
            offset += end
    yield _checked(rest, path, offset)


def _checked(text: bytearray, path: Path, offset: int) -> Utf8:
    check_utf8(text, str(path), offset)
    if offset == 0 and text.startswith(b"\xef\xbb\xbf"):
        del text[:3]
    return text


def sections_of(document: Utf8, max_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[bytes]:
    r"""Yield the sections of a document, divided at line ends, or between characters within a line that is too long.

    The sections join to the document. Division begins at the front, so that text appended to a file does not change the
    sections before it.

    Args:
        document: UTF-8.
        max_bytes: largest number of bytes of a section, at least 4.

    Yields:
        The document if it is short enough, else two or more sections.

    >>> list(sections_of(b"one\ntwo\nthree\n", max_bytes=9))
    [b'one\ntwo\n', b'three\n']
    """
    start = 0
    while len(document) - start > max_bytes:
        end = cut(document, start, max_bytes)
        yield bytes(document[start:end])
        start = end
    yield bytes(document[start:]) if start else bytes(document)
