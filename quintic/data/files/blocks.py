"""Reads the bytes of a file in blocks or in lines, decompressed by its ending, and decodes UTF-8."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quintic.errors import DataError

__all__ = ["COMPRESSIONS", "blocks_of", "decode_utf8", "lines_of", "not_utf8", "uncompressed_name"]

COMPRESSIONS = (".gz", ".zst")

_BLOCK_BYTES = 1 << 20
# Compressed bytes that are decompressed at a time: four bytes of Zstandard can become 128 KiB, so these at most 64 MiB.
_ZSTD_PIECE_BYTES = 2 << 10


def uncompressed_name(name: str) -> str:
    """Return a file's name in lower case, without the ending of a compression.

    >>> uncompressed_name("C4-00001.JSON.gz")
    'c4-00001.json'
    """
    name = name.lower()
    return next((name.removesuffix(ending) for ending in COMPRESSIONS if name.endswith(ending)), name)


def decode_utf8(data: bytes | bytearray, path: Path, offset: int) -> str:
    """Return the text of some bytes of a file, without the byte order mark at the file's beginning.

    Args:
        data: the bytes, whole characters.
        path: the file, for the message.
        offset: offset of the bytes in the file.

    Raises:
        DataError: the bytes are not UTF-8; the message has the offset of the first wrong byte.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(path, offset, error) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


def not_utf8(path: Path, offset: int, error: UnicodeDecodeError) -> DataError:
    """Return the error of a file whose bytes from `offset` on could not be decoded."""
    wrong = error.object[error.start]
    return DataError(
        f"{path}: not UTF-8 at byte offset {offset + error.start} (byte 0x{wrong:02x}); convert the file to UTF-8"
    )


def lines_of(path: Path, max_bytes: int) -> Iterator[str]:
    """Yield the lines of a file with their line ends; at most one line and one block are in memory.

    Raises:
        DataError: a line has more than `max_bytes` bytes or is not UTF-8, or the file is damaged.
        OSError: it cannot be read.
    """
    offset = 0
    line = bytearray()
    for block in blocks_of(path):
        for part in block.splitlines(keepends=True):
            line += part
            # A carriage return alone ends no line.
            if part.endswith(b"\n"):
                yield decode_utf8(line, path, offset)
                offset += len(line)
                line.clear()
        if len(line) > max_bytes:
            raise DataError(
                f"{path}: a line of more than {max_bytes >> 20} MiB; write one record per line, each with a document "
                "of a sensible size"
            )
    if line:
        yield decode_utf8(line, path, offset)


def blocks_of(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks that are not empty, decompressed by the file's ending.

    Raises:
        DataError: the compressed data is damaged or stops early.
        OSError: the file cannot be read.
    """
    name = path.name.lower()
    truncated = f"{path}: truncated, the compressed data stops early; copy or download it again"
    if name.endswith(COMPRESSIONS) and path.stat().st_size == 0:
        raise DataError(truncated)
    if name.endswith(".zst"):
        yield from _zstandard_blocks(path, truncated)
        return
    try:
        with gzip.open(path) if name.endswith(".gz") else path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block
    except EOFError as error:
        raise DataError(truncated) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged or not compressed as its ending says ({error})") from error


def _zstandard_blocks(path: Path, truncated: str) -> Iterator[bytes]:
    """Yield the bytes of a file of one or more Zstandard frames; one that ends within a frame is an error.

    The library's own stream reader takes such a file for complete.
    """
    import zstandard

    # Frames of `zstd --long=31` need a larger window than the library's default.
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame: Any = None
    with path.open("rb", buffering=_BLOCK_BYTES) as file:
        while piece := file.read(_ZSTD_PIECE_BYTES):
            while piece:
                frame = frame or decompressor.decompressobj()
                try:
                    block = frame.decompress(piece)
                except zstandard.ZstdError as error:
                    raise DataError(f"{path}: damaged or not compressed as its ending says ({error})") from error
                if block:
                    yield block
                piece = b""
                if frame.eof:
                    piece, frame = frame.unused_data, None
    if frame is not None:
        raise DataError(truncated)
