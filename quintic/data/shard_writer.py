"""`ShardWriter` writes token shards so that a stop at any moment loses little work and leaves no half-written dataset.

An open shard is `<split>_<number>.bin.part`; when it is finished it loses the `.part`. `ShardWriter.checkpoint` makes
everything written durable and returns a description of it; `ShardWriter.resume` truncates the files to that
description. The layout of a finished dataset is drawn in `quintic.data.dataset`.
"""

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quintic.data.dataset import checksum
from quintic.durable import flush, lock, replace, write_atomically

__all__ = ["ShardWriter", "exclusive"]


class ShardWriter:
    """Appends the documents of one split to shards of bounded size; every document lies in one shard."""

    def __init__(self, folder: Path, split: str, dtype: str, shard_tokens: int) -> None:
        """Start without shards; existing files of the same names are overwritten.

        Args:
            folder: the dataset's folder, which must exist.
            split: beginning of the file names.
            dtype: `uint16` or `uint32`.
            shard_tokens: number of tokens at which a shard is closed.
        """
        self._folder = folder
        self._split = split
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._closed: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self._offsets = [0]
        self._num_bytes = 0
        self._crc = 0

    @property
    def num_closed(self) -> int:
        """Number of finished shards."""
        return len(self._closed)

    @property
    def num_documents(self) -> int:
        """Number of documents written so far."""
        return sum(int(shard["documents"]) for shard in self._closed) + len(self._offsets) - 1

    def add(self, ids: Sequence[int], num_bytes: int) -> None:
        """Append one document.

        Args:
            ids: the tokens, bos first.
            num_bytes: UTF-8 bytes of the document's text.

        Raises:
            OSError: the file cannot be written.
        """
        if self._file is None:
            # Closed by `close_shard` or `abandon`, since a shard is written by many calls.
            self._file = self._open_path.open("wb")
        block = np.asarray(ids, dtype=self._dtype).tobytes()
        _append(self._file, block)
        self._crc = zlib.crc32(block, self._crc)
        self._offsets.append(self._offsets[-1] + len(ids))
        self._num_bytes += num_bytes
        if self._offsets[-1] >= self._shard_tokens:
            self.close_shard()

    def close_shard(self) -> None:
        """Finish the open shard, if there is one.

        Raises:
            OSError: the file cannot be written.
        """
        if self._file is None:
            return
        self._file.close()
        self._file = None
        part = self._open_path
        path = part.with_suffix("")
        _write_offsets(path.with_suffix(".idx"), self._offsets)
        replace(part, path)
        self._index_part.unlink(missing_ok=True)
        self._closed.append({"file": path.name, **self._counts()})
        self._offsets, self._num_bytes, self._crc = [0], 0, 0

    def abandon(self) -> None:
        """Close the file without finishing its shard; the disk keeps the state of the last checkpoint."""
        if self._file is not None:
            # On a full disk closing the file may fail to flush it; its content is abandoned anyway.
            with suppress(OSError):
                self._file.close()
            self._file = None

    def checkpoint(self) -> dict[str, Any]:
        """Make everything written durable, and return its description as JSON values.

        Raises:
            OSError: the files cannot be written.
        """
        if self._file is not None:
            self._file.flush()
            flush(self._open_path)
            _write_offsets(self._index_part, self._offsets)
        return {"closed": list(self._closed), "open": self._counts() if self._file is not None else None}

    def resume(self, description: dict[str, Any]) -> bool:
        """Resume from a checkpoint: finished shards stay, the open one is truncated to the checkpoint.

        Returns:
            Whether the files match the checkpoint. If not, the writer and its files cannot be used.
        """
        try:
            for shard in description["closed"]:
                size = (self._folder / shard["file"]).stat().st_size
                if size != shard["tokens"] * self._dtype.itemsize:
                    return False
            self._closed = list(description["closed"])
            counts = description["open"]
            if counts is None:
                return True
            # If the open shard was closed and renamed after the checkpoint, undo that.
            closed_later = self._open_path.with_suffix("")
            if not self._open_path.exists() and closed_later.exists():
                replace(closed_later, self._open_path)
            os.truncate(self._open_path, counts["tokens"] * self._dtype.itemsize)
            index = self._index_part if self._index_part.exists() else closed_later.with_suffix(".idx")
            self._offsets = np.fromfile(index, dtype="<i8")[: counts["documents"] + 1].tolist()
            if checksum(self._open_path) != counts["crc32"] or self._offsets[-1] != counts["tokens"]:
                return False
            self._num_bytes = int(counts["bytes"])
            self._crc = int(counts["crc32"], 16)
            self._file = self._open_path.open("ab")
        except (OSError, KeyError, TypeError, ValueError, IndexError):
            return False
        return True

    def finish(self) -> list[dict[str, Any]]:
        """Close the last shard, and return the manifest's entries of all shards.

        Raises:
            OSError: the file cannot be written.
        """
        self.close_shard()
        return self._closed

    @property
    def _open_path(self) -> Path:
        return self._folder / f"{self._split}_{len(self._closed):05d}.bin.part"

    @property
    def _index_part(self) -> Path:
        return self._folder / f"{self._split}_{len(self._closed):05d}.idx.part"

    def _counts(self) -> dict[str, Any]:
        return {
            "tokens": self._offsets[-1],
            "documents": len(self._offsets) - 1,
            "bytes": self._num_bytes,
            "crc32": f"{self._crc:08x}",
        }


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes, waiting for it first; the lock file is not removed.

    Raises:
        OSError: the lock file cannot be made.
    """
    with path.open("ab") as file:
        lock(file.fileno(), wait=True)
        # Closing the file releases the lock.
        yield


def _append(file: BinaryIO, block: bytes) -> None:
    file.write(block)


def _write_offsets(path: Path, offsets: list[int]) -> None:
    write_atomically(path, np.array(offsets, dtype="<i8").tobytes())
