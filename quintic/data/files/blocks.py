"""Reads the text of a file in blocks or in lines, decompressed by its ending."""

import codecs
import gzip
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import zstandard

from quintic.errors import DataError

__all__ = ["COMPRESSIONS", "blocks_of", "lines_of", "text_blocks", "uncompressed_name"]

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


def lines_of(path: Path, max_chars: int) -> Iterator[str]:
    """Yield the lines of a file with their line ends; at most one line and one block are in memory.

    Raises:
        DataError: as `text_blocks`, or a line has more than `max_chars` characters.
    """
    parts: list[str] = []  # of the line that has begun
    size = 0
    for number, block in enumerate(text_blocks(path)):
        # A carriage return alone ends no line.
        *ends, rest = (block if number else block.removeprefix("\ufeff")).split("\n")
        for end in ends:
            yield "".join([*parts, end, "\n"])
            parts, size = [], 0
        parts.append(rest)
        size += len(rest)
        if size > max_chars:
            raise DataError(
                f"{path}: a line of more than {max_chars >> 20} MiB; write one record per line, each with a document "
                "of a sensible size"
            )
    if size:
        yield "".join(parts)


def text_blocks(path: Path) -> Iterator[str]:
    """Yield the text of a file in blocks that are not empty; a byte order mark stays.

    Raises:
        DataError: the file is not UTF-8, or its compressed data is damaged or stops early.
        OSError: the file cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_bytes = 0
    for block in chain(blocks_of(path), [b""]):
        num_bytes += len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            # First the text before it, since a reader may need no more than the names of columns.
            if before := error.object[: error.start].decode():
                yield before
            # The decoder may have put bytes of an unfinished character before the block.
            offset = num_bytes - len(error.object) + error.start
            raise DataError(
                f"{path}: not UTF-8 at byte offset {offset} (byte 0x{error.object[error.start]:02x}); convert the file "
                "to UTF-8"
            ) from error
        if text:
            yield text


def blocks_of(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks, decompressed by its ending; raises as `text_blocks`, but for UTF-8."""
    name = path.name.lower()
    truncated = f"{path}: truncated, the compressed data stops early; copy or download it again"
    if name.endswith(COMPRESSIONS) and path.stat().st_size == 0:
        raise DataError(truncated)
    try:
        if name.endswith(".zst"):
            yield from _zstandard_blocks(path)
        else:
            with gzip.open(path) if name.endswith(".gz") else path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    yield block
    except EOFError as error:
        raise DataError(truncated) from error
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path}: damaged or not compressed as its ending says ({error})") from error


def _zstandard_blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file of one or more Zstandard frames; EOFError if it ends within a frame.

    The library's own stream reader takes such a file for complete.
    """
    # Frames of `zstd --long=31` need a larger window than the library's default.
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame: Any = None
    with path.open("rb", buffering=_BLOCK_BYTES) as file:
        while piece := file.read(_ZSTD_PIECE_BYTES):
            while piece:
                frame = frame or decompressor.decompressobj()
                if block := frame.decompress(piece):
                    yield block
                piece = b""
                if frame.eof:
                    piece, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError
