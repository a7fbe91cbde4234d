"""Documents out of one file: plain text, JSON lines and Parquet, each text format also compressed.

A text file (`.txt`, `.md`, `.rst`) is one document, or one per 64 MiB where it is larger, so that a file of any size
can be read; JSON lines give one document per line (field `text`), Parquet one per row (column `text`).
`split_document` cuts text that is too long for one document. `quintic.data.sources` decides which files make up a
source, and in which order.
"""

import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quintic.errors import DataError

__all__ = [
    "ENDINGS_ADVICE",
    "MAX_DOCUMENT_BYTES",
    "SUPPORTED_ENDINGS",
    "is_supported",
    "read_documents",
    "split_document",
    "stored_as_text",
]

TEXT_ENDINGS = (".txt", ".md", ".rst")
SUPPORTED_ENDINGS = (
    *(ending + packed for ending in (*TEXT_ENDINGS, ".jsonl") for packed in ("", ".gz", ".zst")),
    ".parquet",
)
ENDINGS_ADVICE = (
    f"supported are {', '.join(SUPPORTED_ENDINGS)}; copy other plain text, source code for example, to names in .txt"
)
MAX_DOCUMENT_BYTES = 64 * 1024
_MAX_TEXT_BYTES = 64 << 20
_MAX_LINE_BYTES = 256 << 20
_BLOCK_BYTES = 1 << 20
# Bytes decompressed at once: a small file can hold gigabytes of one character. Four bytes of Zstandard can stand for
# 128 KiB, one of gzip for about 1 KiB, so either way a piece becomes 64 MiB at most.
_ZSTD_PIECE_BYTES = 2 << 10
_GZIP_PIECE_BYTES = 64 << 10


def is_supported(name: str) -> bool:
    """Return whether a file of this name can be read, judged by its ending (upper or lower case)."""
    return name.lower().endswith(SUPPORTED_ENDINGS)


def stored_as_text(name: str) -> bool:
    """Return whether a file's size on disk is the size of its text, as it is for uncompressed plain text."""
    return name.lower().endswith(TEXT_ENDINGS)


def read_documents(path: Path) -> Iterator[str]:
    """Yield the documents of one file in the order they are stored; empty ones are left out.

    A leading byte order mark is dropped; line endings stay as they are. Halves of surrogate pairs, which JSON can
    spell but UTF-8 cannot, become U+FFFD.

    Args:
        path: a file with one of `SUPPORTED_ENDINGS`.

    Raises:
        DataError: the file cannot be opened, is truncated, is not UTF-8, or has a record without text or of more than
            256 MiB.
    """
    name = path.name.lower()
    if not is_supported(name):
        raise DataError(f"{path}: unknown ending; {ENDINGS_ADVICE}")
    try:
        if name.endswith(".parquet"):
            documents = _parquet_documents(path)
        elif name.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl"):
            documents = _jsonl_documents(path)
        else:
            documents = _text_documents(path)
        for text in documents:
            if text:
                yield text
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def split_document(text: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> list[str]:
    r"""Cut a long document into pieces at line ends, or between characters where a line is too long.

    The pieces join to the text again. Cutting goes from the front, so text appended to a file leaves the pieces
    before it as they were.

    Args:
        text: any text without lone surrogates.
        max_bytes: most UTF-8 bytes of a piece, at least 4.

    Returns:
        `[text]` when it is short enough, else two or more pieces.

    >>> split_document("one\ntwo\nthree\n", max_bytes=9)
    ['one\ntwo\n', 'three\n']
    """
    if len(text) * 4 <= max_bytes:
        return [text]
    data = text.encode()
    pieces = []
    start = 0
    while len(data) - start > max_bytes:
        end = _cut(data, start, max_bytes)
        pieces.append(data[start:end].decode())
        start = end
    pieces.append(data[start:].decode())
    return pieces


def _cut(data: bytes | bytearray, start: int, max_bytes: int) -> int:
    """Return the end of a piece of UTF-8 that begins at `start`; more than `max_bytes` bytes follow there."""
    end = data.rfind(b"\n", start, start + max_bytes) + 1
    if end > start:
        return end
    end = start + max_bytes
    while end > start + 1 and data[end] & 0xC0 == 0x80:  # inside a character: go back to its first byte
        end -= 1
    return end


def _text_documents(path: Path) -> Iterator[str]:
    offset = 0
    rest = bytearray()
    for block in _blocks(path):
        rest += block
        while len(rest) > _MAX_TEXT_BYTES:
            end = _cut(rest, 0, _MAX_TEXT_BYTES)
            yield _decode(bytes(rest[:end]), str(path), offset)
            del rest[:end]
            offset += end
    yield _decode(bytes(rest), str(path), offset)


def _jsonl_documents(path: Path) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(_lines(path), start=1):
        text = _decode(line, str(path), offset)
        offset += len(line)
        if text.strip():
            yield _jsonl_text(text, f"{path}:{number}")


def _jsonl_text(line: str, place: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not a JSON object ({error}); expected one object per line") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        if isinstance(record, dict) and "text" in record:
            raise DataError(f"{place}: 'text' is {json.dumps(text)[:40]}, not a string; leave such lines out")
        given = f"keys {', '.join(map(str, record)) or 'none'}" if isinstance(record, dict) else "no object"
        raise DataError(f"{place}: no string field 'text' ({given}); rename the field that holds the text")
    return _without_surrogates(text)


def _parquet_documents(path: Path) -> Iterator[str]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as table:
            schema = table.schema_arrow
            if "text" not in schema.names:
                raise DataError(f"{path}: no column 'text'; its columns are {', '.join(schema.names)}")
            kind = schema.field("text").type
            if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                raise DataError(f"{path}: column 'text' holds {kind}, not strings; write it as strings")
            for batch in table.iter_batches(batch_size=1024, columns=["text"]):
                yield from (text for text in batch.column(0).to_pylist() if text)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: column 'text' is not UTF-8 ({error.reason}); write it again") from error
    except arrow.ArrowException as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: not a readable Parquet file ({reason}); write or download it again") from error


def _decode(data: bytes, name: str, offset: int) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}: not UTF-8 at byte offset {offset + error.start} (byte 0x{data[error.start]:02x}); "
            "convert the file to UTF-8"
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, line ends included, without holding more than one line and one block."""
    parts: list[bytes] = []  # the line so far; a list, so that a line of many blocks is joined once
    held = 0  # bytes in them
    for block in _blocks(path):
        for part in io.BytesIO(block):  # unlike `splitlines` only at b"\n"
            parts.append(part)
            held += len(part)
            if part.endswith(b"\n"):
                yield b"".join(parts)
                parts, held = [], 0
        if held > _MAX_LINE_BYTES:
            raise DataError(
                f"{path}: a line of more than {_MAX_LINE_BYTES >> 20} MiB; give one JSON object per line, each "
                "with a document of a sensible size"
            )
    if parts:
        yield b"".join(parts)


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes, decompressed by its ending; blocks are never empty."""
    name = path.name.lower()
    if name.endswith(".gz"):
        yield from _decompressed(path, lambda: zlib.decompressobj(wbits=31), zlib.error, _GZIP_PIECE_BYTES)
    elif name.endswith(".zst"):
        import zstandard

        def frame() -> Any:
            # Long-distance frames (`zstd --long=31`) need a window beyond the library's default.
            return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()

        yield from _decompressed(path, frame, zstandard.ZstdError, _ZSTD_PIECE_BYTES)
    else:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block


def _decompressed(
    path: Path, start_frame: Callable[[], Any], broken: type[Exception], piece_bytes: int
) -> Iterator[bytes]:
    """Decompress a file of one or more frames, `piece_bytes` at once, and refuse one that ends inside a frame.

    Decompression objects of `zlib` and `zstandard`, which `start_frame` makes, have the same methods.
    """
    with path.open("rb", buffering=_BLOCK_BYTES) as file:
        frame = start_frame()  # so that an empty file counts as truncated
        while block := file.read(piece_bytes):
            while block:
                if frame is None:
                    block = block.lstrip(b"\0")  # gzip allows zero padding between and after members
                    if not block:
                        break
                    frame = start_frame()
                try:
                    data = frame.decompress(block)
                except broken as error:
                    raise DataError(f"{path}: damaged or not compressed as its ending says ({error})") from error
                if data:
                    yield data
                block = b""
                if frame.eof:
                    block, frame = frame.unused_data, None
        if frame is not None:
            raise DataError(f"{path}: truncated, the compressed data stops early; copy or download it again")
