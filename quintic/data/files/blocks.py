"""Reads the bytes of a file in blocks or in lines, decompressed by its ending, and decodes UTF-8."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quintic.errors import DataError

__all__ = ["COMPRESSIONS", "blocks_of", "decode_utf8", "lines_of", "uncompressed_name"]

COMPRESSIONS = (".gz", ".zst")

_BLOCK_BYTES = 1 << 20
# Compressed bytes that are decompressed at a time: a small file can hold gigabytes of one character. Four bytes of
# Zstandard can become 128 KiB, one byte of gzip about 1 KiB: with these sizes at most 64 MiB result.
_ZSTD_PIECE_BYTES = 2 << 10
_GZIP_PIECE_BYTES = 64 << 10


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
        raise DataError(
            f"{path}: not UTF-8 at byte offset {offset + error.start} (byte 0x{data[error.start]:02x}); convert the "
            "file to UTF-8"
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


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
    if name.endswith(".gz"):
        yield from _decompressed(path, lambda: zlib.decompressobj(wbits=31), zlib.error, _GZIP_PIECE_BYTES)
    elif name.endswith(".zst"):
        import zstandard

        def frame() -> Any:
            # Frames of `zstd --long=31` need a larger window than the library's default.
            return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()

        yield from _decompressed(path, frame, zstandard.ZstdError, _ZSTD_PIECE_BYTES)
    else:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block


def _decompressed(
    path: Path, start_frame: Callable[[], Any], broken: type[Exception], piece_bytes: int
) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file of one or more frames, reading `piece_bytes` at a time.

    `start_frame` returns a decompression object of `zlib` or `zstandard`, which have the same methods; `broken` is the
    exception that it raises for damaged data. A file that ends within a frame is an error.
    """
    with path.open("rb", buffering=_BLOCK_BYTES) as file:
        # Started before anything is read, so that an empty file counts as truncated.
        frame = start_frame()
        while block := file.read(piece_bytes):
            while block:
                if frame is None:
                    # gzip allows padding with zeros between and after its members.
                    block = block.lstrip(b"\0")
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
