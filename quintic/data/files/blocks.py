"""The bytes of one file: decompressed by its ending, in blocks or in lines, and checked to be UTF-8."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quintic.errors import DataError

__all__ = ["COMPRESSIONS", "Utf8", "blocks_of", "check_utf8", "cut", "lines_of", "uncompressed_name"]

COMPRESSIONS = (".gz", ".zst")

# Text as it is stored: one byte for each of its bytes, where a `str` takes up to four.
Utf8 = bytes | bytearray | memoryview

_BLOCK_BYTES = 1 << 20
# Bytes decompressed at once: a small file can hold gigabytes of one character. Four bytes of Zstandard can stand for
# 128 KiB, one of gzip for about 1 KiB, so either way a piece becomes 64 MiB at most.
_ZSTD_PIECE_BYTES = 2 << 10
_GZIP_PIECE_BYTES = 64 << 10


def uncompressed_name(name: str) -> str:
    """Return a file's name in lower case without the ending of a compression.

    >>> uncompressed_name("C4-00001.JSON.gz")
    'c4-00001.json'
    """
    name = name.lower()
    return next((name.removesuffix(ending) for ending in COMPRESSIONS if name.endswith(ending)), name)


def cut(data: Utf8, start: int, max_bytes: int) -> int:
    """Return where a piece of UTF-8 that begins at `start` ends: behind its last line, else between characters.

    Args:
        data: UTF-8 with more than `max_bytes` bytes behind `start`.
        start: beginning of the piece.
        max_bytes: most bytes of the piece, at least 4.
    """
    if (length := bytes(data[start : start + max_bytes]).rfind(b"\n") + 1) > 0:
        return start + length
    end = start + max_bytes
    while end > start + 1 and data[end] & 0xC0 == 0x80:  # inside a character: go back to its first byte
        end -= 1
    return end


def check_utf8(data: Utf8, name: str, offset: int = 0) -> None:
    """Refuse bytes that are no UTF-8. Needs little memory, where decoding all at once can take four times the bytes.

    Args:
        data: the bytes.
        name: of the file, for the message.
        offset: where the bytes begin in the file, for the message.

    Raises:
        DataError: a byte is wrong; the message says where it is.
    """
    with memoryview(data) as view:
        start = 0
        while start < len(view):
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
    """Yield the lines of a file, line ends included, without holding more than one line and one block.

    Raises:
        DataError: a line has more than `max_bytes` bytes, or the file is damaged.
        OSError: it cannot be read.
    """
    held = [bytearray()]  # the line so far; given away with `pop`, so that nothing here keeps a long line alive
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
    """Yield a file's bytes, decompressed by its ending; blocks are never empty.

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
