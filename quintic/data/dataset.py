"""Reads a prepared dataset: the manifest, the memory-mapped token shards, and the documents in them.

    <data_dir>/<name>-<key>/
      manifest.json                  written last; without it the folder is not a dataset
      tokenizer.json
      train_00000.bin                tokens, little-endian uint16 or uint32; each document begins with bos
      train_00000.idx                int64 little-endian: offset of each document, and the number of tokens
      val_00000.bin ...

    <data_dir>/cache/verified/
      <name>-<key>-<machine>.json    sizes and times of the shards that this machine has verified

`quintic.data.preparation` makes datasets.
"""

import contextlib
import json
import platform
import shlex
import zlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quintic.data.source import SPLITS, SplitName, slug
from quintic.data.tokenizer import Tokenizer
from quintic.durable import json_object, write_atomically
from quintic.errors import DataError

__all__ = ["FORMAT_VERSION", "MANIFEST_NAME", "TOKENIZER_NAME", "Dataset", "DocumentSplit", "SourceRange"]

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"


class DocumentSplit:
    """The documents of one side, training or validation, numbered from 0 across all shards."""

    def __init__(self, folder: Path, fields: dict[str, Any], dtype: str, repair: str) -> None:
        """Map the shards that the split's entry in the manifest lists; `repair` is the command that makes them again.

        Raises:
            DataError: a shard is missing, or its size differs from the manifest's.
        """
        little_endian = np.dtype(dtype).newbyteorder("<")
        self.num_bytes = sum(int(shard["bytes"]) for shard in fields["shards"])  # of the text as UTF-8
        # Tokens of each shard, memory-mapped and read-only; every document lies in one shard.
        self.shards: list[npt.NDArray[np.unsignedinteger[Any]]] = []
        # (num_shards + 1,) int64: number of tokens before each shard, and in total.
        self.shard_offsets = np.cumsum([0, *(int(shard["tokens"]) for shard in fields["shards"])], dtype=np.int64)
        starts = []
        for shard, before in zip(fields["shards"], self.shard_offsets[:-1], strict=True):
            tokens, documents = int(shard["tokens"]), int(shard["documents"])
            path = folder / shard["file"]
            index = path.with_suffix(".idx")
            for file, expected in ((path, tokens * little_endian.itemsize), (index, (documents + 1) * 8)):
                if not file.exists():
                    raise DataError(f"{file}: missing; run again: {repair}")
                if (size := file.stat().st_size) != expected:
                    raise DataError(f"{file}: damaged, {size} bytes instead of {expected}; run again: {repair}")
            offsets = np.fromfile(index, dtype="<i8").astype(np.int64)
            if offsets[0] != 0 or offsets[-1] != tokens or (np.diff(offsets) < 1).any():
                raise DataError(f"{index}: damaged, its offsets do not ascend to {tokens}; run again: {repair}")
            # A plain array over the mapping: slicing an np.memmap takes several times longer.
            self.shards.append(np.asarray(np.memmap(path, dtype=little_endian, mode="r")))
            starts.append(offsets[:-1] + before)
        # (num_documents + 1,) int64: first token of each document, counted across all shards, and the number of tokens.
        self.offsets = np.concatenate([*starts, self.shard_offsets[-1:]])

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including the document starts."""
        return int(self.offsets[-1])

    def document(self, index: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return the tokens of a document, bos first: (length,) uint16 or uint32, a read-only view of the file."""
        return self.tokens(int(self.offsets[index]), int(self.offsets[index + 1]))

    def tokens(self, start: int, end: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return the tokens from `start` to `end`, counted across all shards, which one document has; as `document`."""
        shard = int(np.searchsorted(self.shard_offsets[:-1], start, side="right")) - 1
        base = int(self.shard_offsets[shard])
        return self.shards[shard][start - base : end - base]


class SourceRange(NamedTuple):
    """The range of one source's documents in a split."""

    source: str  # the string that names the source
    weight: float  # of the source's tokens when rows are packed
    first: int  # index of its first document
    last: int  # one past the index of its last document


class Dataset:
    """Prepared text in a folder: a tokenizer and the two splits. `Dataset.open` and `prepare` make one."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self._splits = {
            name: DocumentSplit(path, manifest["splits"][name], manifest["dtype"], self.prepare_command)
            for name in SPLITS
        }
        self.bos_id = int(manifest["bos_id"])  # of the token that starts a document
        self.vocab_size = int(manifest["vocab_size"])  # may be smaller than the requested number

    @property
    def prepare_command(self) -> str:
        """The `quintic prepare` command that makes this folder, where it is now."""
        words = shlex.split(self.manifest["command"])
        if "--data-dir" in words:
            words[words.index("--data-dir") + 1] = str(self.path.parent)
        return shlex.join(words)

    @classmethod
    def open(cls, path: str | Path) -> "Dataset":
        """Open a prepared dataset: map its shards and check their sizes (`verify` also checks their content).

        Raises:
            DataError: the folder is not a finished dataset, has another format version, or one of its files is missing,
                has the wrong size or cannot be read; the message names the file and the command to run again.
        """
        folder = Path(path)
        manifest_path = folder / MANIFEST_NAME
        if not manifest_path.exists():
            state = "is not a finished dataset" if folder.is_dir() else "does not exist"
            raise DataError(f"{folder}: {state} (no {MANIFEST_NAME}); run `quintic prepare` first")
        try:
            manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
            version = manifest.get("version") if isinstance(manifest, dict) else None
            if version != FORMAT_VERSION:
                raise DataError(
                    f"{manifest_path}: format version {version}, this program reads {FORMAT_VERSION}; prepare again"
                )
            return cls(folder, manifest)
        except DataError:  # a ValueError, too
            raise
        except OSError as error:  # the file may be intact, so this is not damage
            place = error.filename or manifest_path
            raise DataError(
                f"{place}: cannot be read ({error.strerror or error}); mend this, or use another --data-dir"
            ) from error
        except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
            raise DataError(f"{manifest_path}: damaged ({error}); delete the folder and prepare again") from error

    @property
    def key(self) -> str:
        """Short hash of the text, the tokenizer and the settings from which the dataset was prepared."""
        return str(self.manifest["key"])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded on first use.

        Raises:
            DataError: its file is missing or was changed.
        """
        path = self.path / TOKENIZER_NAME
        tokenizer = Tokenizer.load(path)
        if tokenizer.fingerprint() != self.manifest["tokenizer"]["fingerprint"]:
            raise DataError(f"{path}: changed since the text was prepared; run again: {self.prepare_command}")
        return tokenizer

    def source_ranges(self, name: SplitName) -> list[SourceRange]:
        """Return the sources with documents in a split, with weights and ranges; a single one without a mixture."""
        split = self.split(name)
        everything = SourceRange(self.manifest["source"]["spec"], 1.0, 0, split.num_documents)
        found = [
            SourceRange(fields["source"], float(fields["weight"]), *map(int, fields[name]))
            for fields in self.manifest.get("sources", [])
        ]
        # A source of validation text has weight 0, and is then the only source of the split.
        return [entry for entry in found if entry.first < entry.last] or [everything]

    def split(self, name: SplitName) -> DocumentSplit:
        """Return the `train` or the `val` split."""
        return self._splits[name]

    def summary(self) -> dict[str, Any]:
        """Return a short description for logs, as JSON values."""
        train, val = self._splits["train"], self._splits["val"]
        sources = self.source_ranges("train")
        return {
            "path": str(self.path),
            "source": self.manifest["source"]["spec"],
            "key": self.key,
            "vocab_size": self.vocab_size,
            "train_documents": train.num_documents,
            "train_tokens": train.num_tokens,
            "train_bytes": train.num_bytes,
            "val_documents": val.num_documents,
            "val_tokens": val.num_tokens,
            "val_bytes": val.num_bytes,
            # Document starts have no bytes and are not counted.
            "bytes_per_token": round(train.num_bytes / max(1, train.num_tokens - train.num_documents), 4),
            **({"shares": {entry.source: entry.weight for entry in sources}} if len(sources) > 1 else {}),
        }

    def verify(self, *, once: bool = False, begin: Callable[[int], None] | None = None) -> None:
        """Check the content of the files: checksums and document starts of all shards, and the tokenizer.

        A shard without errors is recorded, with sizes and modification times of its files, in the folder `cache` next
        to the dataset's folder, for this machine only. If that folder cannot be written, nothing is recorded.

        Args:
            once: skip shards that are recorded and have not changed since.
            begin: called with the number of bytes to read, unless it is zero.

        Raises:
            DataError: the content of a file has changed, or does not belong to the tokenizer; the message names the
                file and tells how to repair it.
        """
        ids, bos = self.tokenizer.vocab_size, self.tokenizer.bos_id
        if (ids, bos) != (self.vocab_size, self.bos_id):
            raise DataError(
                f"{self.path / MANIFEST_NAME}: does not go with {TOKENIZER_NAME}, which has {ids} ids and starts "
                f"documents with {bos}; delete the folder and prepare again"
            )
        folder = self.path.resolve()
        record = folder.parent / "cache" / "verified" / f"{folder.name}-{slug(platform.node())}.json"
        recorded = json_object(record)
        shards = {
            fields["file"]: (split, number, fields)
            for name, split in self._splits.items()
            for number, fields in enumerate(self.manifest["splits"][name]["shards"])
        }
        # States are from before reading: a file that changes during it is read again next time.
        states = {file: self._state(fields) for file, (_, _, fields) in shards.items()}
        due = [file for file in shards if not once or recorded.get(file) != states[file]]
        if due and begin is not None:
            begin(sum(states[file][0] for file in due))
        verified = {file: state for file, state in states.items() if file not in due}
        try:
            for file in due:
                self._verify_shard(*shards[file])
                verified[file] = states[file]
        finally:
            # Also after an error: the shards before the wrong one need not be read again.
            if verified != recorded:
                with contextlib.suppress(OSError):
                    record.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(record, json.dumps(verified))

    def _verify_shard(self, split: DocumentSplit, number: int, fields: dict[str, Any]) -> None:
        path = self.path / fields["file"]
        mend = f"delete it and run again: {self.prepare_command}"
        try:
            crc = zlib.crc32(path.read_bytes())
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error}); {mend}") from error
        if f"{crc:08x}" != fields.get("crc32"):
            raise DataError(f"{path}: damaged, wrong checksum; {mend}")
        # The index has no checksum, but all documents that it names must begin with bos.
        first, last = np.searchsorted(split.offsets, split.shard_offsets[number : number + 2])
        starts = split.offsets[first:last] - split.shard_offsets[number]
        if (split.shards[number][starts] != self.bos_id).any():
            raise DataError(f"{path.with_suffix('.idx')}: damaged, not the starts of documents; {mend}")

    def _state(self, fields: dict[str, Any]) -> list[Any]:
        """Return the state of a shard for the record: sizes and times of its files, checksum, vocabulary and bos."""
        path = self.path / fields["file"]
        try:
            stats = [path.stat(), path.with_suffix(".idx").stat()]
        except FileNotFoundError as error:
            raise DataError(f"{error.filename}: missing; run again: {self.prepare_command}") from error
        files = [value for stat in stats for value in (stat.st_size, stat.st_mtime_ns)]
        return [*files, fields.get("crc32"), self.vocab_size, self.bos_id]
