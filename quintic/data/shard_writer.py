"""`ShardWriter` writes the token shards of one split; the layout of a dataset is drawn in `quintic.data.dataset`."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quintic.durable import write_atomically

__all__ = ["ShardWriter"]


class ShardWriter:
    """Collects the documents of one split, and writes a shard whenever there are enough; a shard has whole documents.

    Methods raise OSError if a file cannot be written.

    Attributes:
        shards: the manifest's entries of the shards that are written.
    """

    def __init__(
        self, folder: Path, split: str, dtype: str, shard_tokens: int, shards: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Continue after `shards`, those already written; `shard_tokens` is the number at which one is written."""
        self.shards = list(shards)
        self._folder = folder
        self._split = split
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._begin_shard()

    def add(self, ids: Sequence[int], num_bytes: int) -> None:
        """Append one document: its tokens, bos first, and the number of UTF-8 bytes of its text."""
        self._tokens += np.asarray(ids, dtype=self._dtype).tobytes()
        self._offsets.append(self._offsets[-1] + len(ids))
        self._num_bytes += num_bytes
        if self._offsets[-1] >= self._shard_tokens:
            self.finish()

    def finish(self) -> None:
        """Write the documents that are in no shard yet."""
        if not self._tokens:
            return
        path = self._folder / f"{self._split}_{len(self.shards):05d}.bin"
        write_atomically(path, bytes(self._tokens))
        write_atomically(path.with_suffix(".idx"), np.array(self._offsets, dtype="<i8").tobytes())
        entry = {"file": path.name, "tokens": self._offsets[-1], "documents": len(self._offsets) - 1}
        self.shards.append({**entry, "bytes": self._num_bytes, "crc32": f"{zlib.crc32(self._tokens):08x}"})
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._tokens = bytearray()
        self._offsets = [0]
        self._num_bytes = 0
