"""Reads the bytes of a file in blocks or in lines, decompressed by its ending, and checks that they are UTF-8."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quintic.errors import DataError

__all__ = ["COMPRESSIONS", "Utf8", "blocks_of", "check_utf8", "cut", "lines_of", "uncompressed_name"]

COMPRESSIONS = (".gz", ".zst")

# Text as UTF-8, which takes less memory than a `str` with up to four bytes per character.
Utf8 = bytes | bytearray | memoryview

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


def cut(data: Utf8, start: int, max_bytes: int) -> int:
    """Return the end of a section of UTF-8 that begins at `start`: after its last line end, else between characters.

    Args:
        data: UTF-8 with more than `max_bytes` bytes from `start` on.
        start: beginning of the section.
        max_bytes: largest number of bytes of the section, at least 4.
    """
    if (length := bytes(data[start : start + max_bytes]).rfind(b"\n") + 1) > 0:
        return start + length
    end = start + max_bytes
    # Within a character (its later bytes begin with the bits 10): go back to its first byte.
    while end > start + 1 and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


def check_utf8(data: Utf8, name: str, offset: int = 0) -> None:
    """Raise an error if bytes are not UTF-8; decodes in blocks, to need little memory.

    Args:
        data: the bytes.
        name: name of the file, for the message.
        offset: offset of the bytes in the file, for the message.

    Raises:
        DataError: the bytes are not UTF-8; the message has the offset of the first wrong byte.
    """
    with memoryview(data) as view:
        start = 0
        while start < len(view):
            # Blocks end between characters.
            end = start + _BLOCK_BYTES
            while start < end < len(view) and view[end] & 0xC0 == 0x80:
                end -= 1
            end = end if end > start else start + _BLOCK_BYTES
            try:
                str(view[start:end], "utf-8")
            except UnicodeDecodeError as error:
                place = start + error.start
                raise DataError(
                    f"{name}: not UTF-8 at byte offset {offset + place} (byte 0x{data[place]:02x}); convert the file "
                    "to UTF-8"
                ) from error
            start = end


def lines_of(path: Path, max_bytes: int) -> Iterator[bytearray]:
    """Yield the lines of a file with their line ends; at most one line and one block are in memory.

    Raises:
        DataError: a line has more than `max_bytes` bytes, or the file is damaged.
        OSError: it cannot be read.
    """
    # The line so far, in a list: `pop` yields it without keeping a reference, so that the caller can free a long line.
    held = [bytearray()]
    for block in blocks_of(path):
        start = 0
        while (end := block.find(b"\n", start) + 1) > 0:
            held[0] += memoryview(block)[start:end]
            start = end
            yield held.pop()
            held.append(bytearray())
        held[0] += memoryview(block)[start:]
        if len(held[0]) > max_bytes:
            raise DataError(
                f"{path}: a line of more than {max_bytes >> 20} MiB; write one record per line, each with a document "
                "of a sensible size"
            )
    if held[0]:
        yield held.pop()


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
