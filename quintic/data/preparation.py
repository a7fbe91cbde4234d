"""`prepare` turns text into a tokenizer and token shards; later calls with the same settings open the result.

Three phases, each of which depends only on the source and the settings:

1. Survey. A sample of the source gives the bound between validation and training text. A document is validation text
   if the hash of its text is below `val_frac` of the hash's range: equal texts are always on the same side, and added
   text moves no other text. If the sample is the whole source and a side would stay empty, the bound moves just far
   enough for the document with the smallest (largest) hash to become validation (training) text.
2. Tokenizer. It is trained on at most 32 MiB of training text. Files of a local source are sampled in an order drawn by
   hash; of a download, or under `max_bytes`, the sample is the beginning.
3. Tokens. Documents longer than 64 KiB are divided into sections at line ends, so that a single big file can be split,
   too; each section counts as a document in all phases. Documents are tokenized and appended to the shards of their
   side.

Everything is written to the dataset's folder, under a lock. The manifest, written last, makes the folder a dataset. A
preparation that was stopped reads the sources again, but tokenizes only documents that are in no shard yet.
`quintic.data.dataset` reads datasets.
"""

import hashlib
import json
import shlex
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quintic.data.dataset import FORMAT_VERSION, MANIFEST_NAME, TOKENIZER_NAME, Dataset, DocumentSplit
from quintic.data.files.documents import MAX_DOCUMENT_BYTES, TEXT_FIELD
from quintic.data.open_source import joined, open_sources
from quintic.data.source import SPLITS, Source, SplitName
from quintic.data.survey import sections_within, survey_sources, text_hash
from quintic.data.tokenizer import Tokenizer, lost_text
from quintic.durable import DISK_FULL, flush, json_object, lock, remove_unfinished, write_atomically
from quintic.errors import DataError

__all__ = ["prepare", "prepare_command"]

_PROGRESS_NAME = "progress.json"
_SAMPLE_BYTES = 32 << 20
# Bytes of text that are tokenized at a time.
_BATCH_BYTES = 1 << 20
# Larger downloads need a limit from the user.
_MAX_REMOTE_BYTES = 50 << 30


def prepare(
    spec: str,
    *,
    data_dir: Path,
    vocab_size: int = 4096,
    tokenizer: str | None = None,
    val_frac: float = 0.02,
    max_bytes: int | None = None,
    shard_tokens: int = 2**24,
    repair: bool = True,
    text_field: str = TEXT_FIELD,
    val_data: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Dataset:
    """Tokenize a text source into the folder `data_dir/<name>-<key>` and open it; a finished folder is only opened.

    Several processes may call this function at once: one prepares, the others wait and open the result. Opening checks
    the sizes of the files; `Dataset.verify` checks their content.

    Args:
        spec: the text source, see `open_source`; or several with weights, see `parse_mixture`.
        data_dir: folder of datasets, created if missing. Downloads go to its folder `cache`.
        vocab_size: number of ids of the tokenizer to train, at least 257; ignored if `tokenizer` is given.
        tokenizer: a tokenizer to use instead of training one, see `Tokenizer.load`.
        val_frac: fraction of the documents for validation, between 0 and 1.
        max_bytes: limit of the UTF-8 bytes of text, per source; the document (or section) that reaches the limit is
            the last one. None for no limit.
        shard_tokens: number of tokens at which a shard is closed.
        repair: whether to prepare a finished folder again if a file is missing or has the wrong size; False raises an
            error instead.
        text_field: the field of JSON, CSV and Parquet that holds the text.
        val_data: source of the validation text; None to hold back documents of `spec`.
        say: called with a line for users about each kind of files that is left out, and when a phase begins.

    Raises:
        DataError: the source or the tokenizer cannot be used; one side would have no text; the disk is full
            (unfinished data is removed) or cannot be written (it is kept).
    """
    sources = open_sources(spec, val_data, cache_dir=data_dir / "cache", text_field=text_field)
    source = joined(sources, spec)
    for line in source.notes:
        say(line)
    size = sum(file.size_bytes for file in source.files)
    if source.is_remote and max_bytes is None and size > _MAX_REMOTE_BYTES:
        raise DataError(f"{spec}: a download of {size / 1e9:.0f} GB; limit the text with --max-bytes")
    given = Tokenizer.load(tokenizer, cache_dir=data_dir / "cache" / "hub") if tokenizer is not None else None
    settings = {
        "vocab_size": vocab_size if given is None else None,
        "tokenizer": None if given is None else given.fingerprint(),
        "val_frac": val_frac,
        "max_bytes": max_bytes,
        "shard_tokens": shard_tokens,
        "document_bytes": MAX_DOCUMENT_BYTES,
        "sample_bytes": _SAMPLE_BYTES,
    }
    # The key in the folder's name: everything that decides the content of the dataset.
    fingerprint = source.fingerprint()
    identity = json.dumps([FORMAT_VERSION, fingerprint, settings], sort_keys=True)
    key = hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()
    text_options = {"text_field": text_field, "val_data": val_data}
    command = prepare_command(
        spec,
        data_dir=data_dir,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        val_frac=val_frac,
        max_bytes=max_bytes,
        **text_options,
    )
    job = _Preparation(
        sources=sources,
        given=given,
        folder=data_dir / f"{source.name}-{key}",
        manifest={
            "version": FORMAT_VERSION,
            "key": key,
            "source": {"spec": source.spec, **text_options, "name": source.name, "fingerprint": fingerprint},
            "settings": settings,
            "command": command,
        },
        lost=f"--tokenizer {tokenizer}",
        say=say,
    )
    if (finished := _open_finished(job.folder, repair=repair)) is not None:
        return finished
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        # The lock file is never deleted; closing it releases the lock.
        with (data_dir / f".{job.folder.name}.lock").open("ab") as file:
            lock(file.fileno(), wait=True)
            # Another process may have prepared it while this one waited for the lock.
            if (finished := _open_finished(job.folder)) is None:
                job.run()
            return finished or Dataset.open(job.folder)
    except OSError as error:
        place = error.filename if error.filename is not None else job.folder
        removed = "unfinished data is removed, free some space or " if error.errno in DISK_FULL else ""
        raise DataError(
            f"{place}: cannot be written ({error.strerror or error}); {removed}use another --data-dir"
        ) from error


def prepare_command(spec: str, **options: object) -> str:
    """Return the `quintic prepare` command that calls `prepare` with some options; an option of None is left out."""
    words = ["quintic", "prepare", "--data", spec]
    for name, value in options.items():
        unused = name == "vocab_size" and options["tokenizer"] is not None
        usual = name == "text_field" and value == TEXT_FIELD
        if value is not None and not unused and not usual:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _open_finished(folder: Path, *, repair: bool = True) -> Dataset | None:
    if not (folder / MANIFEST_NAME).exists():
        return None
    try:
        return Dataset.open(folder)
    except DataError as error:
        # A damaged dataset counts as missing: the caller prepares it again. One that cannot be read may be intact.
        if not repair or isinstance(error.__cause__, OSError):
            raise
        return None


class ShardWriter:
    """Collects the documents of one split, and writes them as a shard."""

    def __init__(self, folder: Path, split: str, dtype: str, shards: list[dict[str, Any]]) -> None:
        """Continue after the written `shards`, a list to which the manifest's entry of each new shard is appended."""
        self._folder = folder
        self._split = split
        self._shards = shards
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._begin_shard()

    def add(self, ids: Sequence[int], num_bytes: int) -> int:
        """Append one document, its tokens with bos first and the bytes of its text; return the number of tokens."""
        self._tokens += np.asarray(ids, dtype=self._dtype).tobytes()
        self._offsets.append(self._offsets[-1] + len(ids))
        self._num_bytes += num_bytes
        return self._offsets[-1]

    def finish(self) -> None:
        """Write the documents that are in no shard yet; OSError if a file cannot be written."""
        if not self._tokens:
            return
        path = self._folder / f"{self._split}_{len(self._shards):05d}.bin"
        write_atomically(path, bytes(self._tokens))
        write_atomically(path.with_suffix(".idx"), np.array(self._offsets, dtype="<i8").tobytes())
        entry = {"file": path.name, "tokens": self._offsets[-1], "documents": len(self._offsets) - 1}
        self._shards.append({**entry, "bytes": self._num_bytes, "crc32": f"{zlib.crc32(self._tokens):08x}"})
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._tokens = bytearray()
        self._offsets = [0]
        self._num_bytes = 0


@dataclass(kw_only=True)
class _Preparation:
    """Makes one dataset: survey, tokenizer, one pass over the sources, and the manifest."""

    sources: tuple[Source, ...]
    given: Tokenizer | None  # None to train one
    folder: Path
    manifest: dict[str, Any]  # the entries that are known from the beginning
    lost: str  # names the option of the tokenizer, for messages
    say: Callable[[str], None]
    _tokenizer: Tokenizer = field(init=False)
    _progress: dict[str, Any] = field(init=False)  # content of the file for resuming

    def run(self) -> None:
        """Prepare the dataset, or finish what a stopped preparation has left.

        Raises:
            DataError: as `prepare`.
            OSError: a file cannot be read or written.
        """
        try:
            if (self.folder / MANIFEST_NAME).exists() or not self._resume():
                # A damaged dataset, or one of which nothing can be used: start from nothing.
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir()
                flush(self.folder.parent)
                self._begin()
            self._publish(self._tokenize())
        except (DataError, OSError) as error:
            # A full disk needs the space, and corrected local text would be another dataset, with another folder. A
            # download, and any other error of the system, may be tried again and resumes.
            is_local = not any(source.is_remote for source in self.sources)
            if error.errno in DISK_FULL if isinstance(error, OSError) else is_local:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _begin(self) -> None:
        """Survey the sources, and train or copy the tokenizer."""
        self.say("reading the text ...")
        settings = self.manifest["settings"]
        texts, thresholds = survey_sources(
            self.sources,
            val_frac=settings["val_frac"],
            max_bytes=settings["max_bytes"],
            sample_bytes=settings["sample_bytes"],
        )
        if self.given is None:
            self.say("making a tokenizer from it ...")
            self._tokenizer = Tokenizer.train((text.decode() for text in texts), settings["vocab_size"])
        else:
            self._tokenizer = self.given
        write_atomically(self.folder / TOKENIZER_NAME, self._tokenizer.definition)
        self._progress = {
            "tokenizer": self._tokenizer.fingerprint(),
            "thresholds": thresholds,
            "splits": {name: [] for name in SPLITS},
        }
        self._checkpoint()

    def _resume(self) -> bool:
        """Take over the tokenizer and the shards of a stopped preparation; return whether there are any."""
        self._progress = json_object(self.folder / _PROGRESS_NAME)
        try:
            self._tokenizer = Tokenizer.load(self.folder / TOKENIZER_NAME)
            for name in SPLITS:
                DocumentSplit(self.folder, {"shards": self._progress["splits"][name]}, self._dtype, "")  # checks files
            self._progress["thresholds"] = [int(threshold) for threshold in self._progress["thresholds"]]
            return bool(self._progress["tokenizer"] == self._tokenizer.fingerprint())
        # Nothing to resume, damaged files, or the progress of an older version.
        except (DataError, KeyError, TypeError, ValueError):
            return False

    def _checkpoint(self) -> None:
        write_atomically(self.folder / _PROGRESS_NAME, json.dumps(self._progress))

    @property
    def _dtype(self) -> str:
        return "uint16" if self._tokenizer.vocab_size <= 1 << 16 else "uint32"

    def _tokenize(self) -> list[dict[SplitName, list[int]]]:
        """Tokenize the documents that are in no shard yet; return each source's range of documents in each split."""
        shards = self._progress["splits"]
        written = {name: sum(shard["documents"] for shard in shards[name]) for name in SPLITS}
        writers = {name: ShardWriter(self.folder, name, self._dtype, shards[name]) for name in SPLITS}
        counts: dict[SplitName, int] = dict.fromkeys(SPLITS, 0)
        ranges = []
        batch: list[tuple[SplitName, bytes]] = []
        batch_bytes = 0
        self.say("turning it into tokens ...")
        for source, threshold in zip(self.sources, self._progress["thresholds"], strict=True):
            first = dict(counts)
            for piece in sections_within(source.documents(), self.manifest["settings"]["max_bytes"]):
                side: SplitName = "val" if text_hash(piece) < threshold else "train"
                counts[side] += 1
                if counts[side] <= written[side]:
                    continue
                batch.append((side, piece))
                batch_bytes += len(piece)
                if batch_bytes >= _BATCH_BYTES:
                    self._write(batch, writers)
                    batch, batch_bytes = [], 0
            ranges.append({name: [first[name], counts[name]] for name in counts})
        self._write(batch, writers)
        for writer in writers.values():
            writer.finish()
        return ranges

    def _write(self, batch: list[tuple[SplitName, bytes]], writers: dict[SplitName, ShardWriter]) -> None:
        """Tokenize documents and append them to the shards of their sides."""
        encoded = self._tokenizer.encode_batch([piece.decode() for _, piece in batch])
        for (side, piece), ids in zip(batch, encoded, strict=True):
            # Tokenizers trained here keep every byte; others may lose text, which is checked document by document.
            if self.given is not None and (back := self._tokenizer.decode_bytes(ids)) != piece:
                raise DataError(f"{self.lost}: {lost_text(piece, back)}")
            num_tokens = writers[side].add([self._tokenizer.bos_id, *ids], len(piece))
            if num_tokens >= self.manifest["settings"]["shard_tokens"]:
                writers[side].finish()
                self._checkpoint()

    def _publish(self, ranges: list[dict[SplitName, list[int]]]) -> None:
        """Write the manifest of a dataset whose shards are written."""
        shards = self._progress["splits"]
        for name in SPLITS:
            if not shards[name]:
                other = "raise" if name == "val" else "lower"
                raise DataError(
                    f"{self.manifest['source']['spec']}: no document fell on the {name} side; {other} --val-frac "
                    f"({self.manifest['settings']['val_frac']}) or give more text"
                )
        sources = [
            {"source": source.spec, "weight": source.weight, **places}
            for source, places in zip(self.sources, ranges, strict=True)
        ]
        manifest = {
            **self.manifest,
            "tokenizer": {"file": TOKENIZER_NAME, "fingerprint": self._progress["tokenizer"]},
            "dtype": self._dtype,
            "bos_id": self._tokenizer.bos_id,
            "vocab_size": self._tokenizer.vocab_size,
            "val_threshold": self._progress["thresholds"][0],
            **({"sources": sources} if len(sources) > 1 else {}),
            "splits": {name: {"shards": shards[name]} for name in SPLITS},
        }
        write_atomically(self.folder / MANIFEST_NAME, json.dumps(manifest, indent=1))
        # The manifest replaces the checkpoint; unfinished files may be left from a stopped preparation.
        (self.folder / _PROGRESS_NAME).unlink(missing_ok=True)
        remove_unfinished(self.folder)
