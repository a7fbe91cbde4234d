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
   side, with checkpoints.

Everything is written to the dataset's folder, under a lock. The manifest, written last, makes the folder a dataset. A
preparation that was stopped resumes at its last checkpoint. `quintic.data.dataset` reads datasets,
`quintic.data.shard_writer` writes the shards.
"""

import errno
import hashlib
import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintic.data.dataset import FORMAT_VERSION, MANIFEST_NAME, TOKENIZER_NAME, Dataset, DocumentSplit, SplitName
from quintic.data.files.documents import MAX_DOCUMENT_BYTES, TEXT_FIELD
from quintic.data.mixture import MixedSource, joined, open_sources, survey_all
from quintic.data.shard_writer import ShardWriter, exclusive
from quintic.data.source import Source
from quintic.data.survey import sections_within, text_hash
from quintic.data.tokenizer import Tokenizer, lost_text
from quintic.durable import flush, json_object, remove_unfinished, write_atomically
from quintic.errors import DataError

__all__ = ["Dataset", "DocumentSplit", "Progress", "SplitName", "prepare", "prepare_command"]

Progress = Callable[[str, int, int | None], None]
"""Called with the stage, the bytes of text done, and the total bytes of text (None if unknown)."""

_PROGRESS_NAME = "progress.json"
_SAMPLE_BYTES = 32 << 20
# Bytes of text that are tokenized at a time.
_BATCH_BYTES = 1 << 20
# Larger downloads need a limit from the user.
_MAX_REMOTE_BYTES = 50 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The arguments of one preparation, and values derived from them."""

    sources: tuple[MixedSource, ...]
    source: Source
    """The documents of all sources, one after the other."""
    asked: dict[str, str | None]
    """The options that name the text, for the manifest."""
    fingerprint: str
    tokenizer: Tokenizer | None
    tokenizer_name: str | None
    settings: dict[str, Any]
    key: str
    folder: Path
    command: str
    progress: Progress


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
    progress: Progress | None = None,
    text_field: str = TEXT_FIELD,
    val_data: str | None = None,
    note: Callable[[str], None] | None = None,
) -> Dataset:
    """Tokenize a text source into the folder `data_dir/<name>-<key>` and open it; a finished folder is only opened.

    Several processes may call this function at once: one prepares, the others wait and open the result. Opening checks
    the sizes of the files; `Dataset.verify` checks their content.

    Args:
        spec: the text source, see `open_source`; or several with weights, see `quintic.data.mixture`.
        data_dir: folder of datasets, created if missing. Downloads go to its folder `cache`.
        vocab_size: number of ids of the tokenizer to train, at least 257; ignored if `tokenizer` is given.
        tokenizer: a tokenizer to use instead of training one, see `Tokenizer.load`.
        val_frac: fraction of the documents for validation, between 0 and 1.
        max_bytes: limit of the UTF-8 bytes of text, per source; the document (or section) that reaches the limit is
            the last one. None for no limit.
        shard_tokens: number of tokens at which a shard is closed.
        repair: whether to prepare a finished folder again if a file is missing or has the wrong size; False raises an
            error instead.
        progress: called from time to time, from this thread.
        text_field: the field of JSON, CSV and Parquet that holds the text.
        val_data: source of the validation text; None to hold back documents of `spec`.
        note: called with a message for users about each kind of files that is left out.

    Raises:
        DataError: the source, the tokenizer or a setting cannot be used; one side would have no text; the disk is full
            (everything written is removed) or cannot be written.
    """
    if not 0 < val_frac < 1:
        raise DataError(f"--val-frac {val_frac}: must lie strictly between 0 and 1")
    if tokenizer is None and vocab_size < 257:
        raise DataError(f"--vocab-size {vocab_size} is too small; 256 bytes and <|bos|> need 257 or more")
    for name, value in (("max_bytes", max_bytes), ("shard_tokens", shard_tokens)):
        if value is not None and value < 1:
            raise DataError(f"{name} is {value}; it must be at least 1")
    data_dir = Path(data_dir)
    sources = open_sources(spec, val_data, cache_dir=data_dir / "cache", text_field=text_field)
    source = joined(sources, spec)
    if note is not None:
        for line in source.notes:
            note(line)
    if source.is_remote and max_bytes is None and source.size_bytes > _MAX_REMOTE_BYTES:
        raise DataError(f"{spec}: a download of {source.size_bytes / 1e9:.0f} GB; limit the text with --max-bytes")
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
    plan = _Plan(
        sources=sources,
        source=source,
        asked={"spec": source.spec, "text_field": text_field, "val_data": val_data},
        fingerprint=fingerprint,
        tokenizer=given,
        tokenizer_name=tokenizer,
        settings=settings,
        key=key,
        folder=data_dir / f"{source.name}-{key}",
        command=prepare_command(spec, data_dir, vocab_size, tokenizer, val_frac, max_bytes, text_field, val_data),
        progress=progress or (lambda stage, done, total: None),
    )
    finished = _open_finished(plan.folder, repair=repair)
    return finished if finished is not None else _prepare_locked(plan)


def prepare_command(
    spec: str,
    data_dir: Path,
    vocab_size: int,
    tokenizer: str | None,
    val_frac: float,
    max_bytes: int | None,
    text_field: str = TEXT_FIELD,
    val_data: str | None = None,
) -> str:
    """Return the `quintic prepare` command that calls `prepare` with these arguments."""
    words = ["quintic", "prepare", "--data", spec, "--data-dir", str(data_dir)]
    words += ["--tokenizer", tokenizer] if tokenizer is not None else ["--vocab-size", str(vocab_size)]
    words += ["--val-frac", str(val_frac)]
    words += ["--max-bytes", str(max_bytes)] if max_bytes is not None else []
    words += ["--text-field", text_field] if text_field != TEXT_FIELD else []
    words += ["--val-data", val_data] if val_data is not None else []
    return shlex.join(words)


def _open_finished(folder: Path, *, repair: bool = True) -> Dataset | None:
    if not (folder / MANIFEST_NAME).exists():
        return None
    try:
        return Dataset.open(folder)
    except DataError:
        # A damaged dataset counts as missing: the caller prepares it again.
        if not repair:
            raise
        return None


def _prepare_locked(plan: _Plan) -> Dataset:
    folder = plan.folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(folder.parent / f".{folder.name}.lock"):
            # Another process may have prepared it while this one waited for the lock.
            finished = _open_finished(folder)
            if finished is None:
                _prepare(plan)
                finished = Dataset.open(folder)
            return finished
    except OSError as error:
        place = error.filename if error.filename is not None else folder
        raise DataError(f"{place}: cannot be written ({error.strerror or error}); use another --data-dir") from error


def _prepare(plan: _Plan) -> None:
    folder = plan.folder
    job = _Tokenization(plan)
    try:
        state = {} if (folder / MANIFEST_NAME).exists() else json_object(folder / _PROGRESS_NAME)
        # A damaged dataset, or a checkpoint that cannot be used: start from nothing.
        if not (state and job.resume(state)):
            job.abandon()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            flush(folder.parent)
            job = _Tokenization(plan)
            job.begin()
        job.run()
    except DataError:
        job.abandon()
        # Corrected local text would be another dataset, with another folder, so this one is removed. A download may be
        # tried again and resumes.
        if not plan.source.is_remote:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        job.abandon()
        used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        total = plan.source.text_bytes or plan.settings["max_bytes"]
        needed = f"about {_needed_bytes(used, job.text_bytes, total):,} bytes are needed" if total else "more is needed"
        shutil.rmtree(folder, ignore_errors=True)
        raise DataError(
            f"{folder.parent}: no space left on the disk after {used:,} bytes of tokens, {needed}; what was written "
            "is removed, free some space or use another --data-dir"
        ) from error
    finally:
        job.abandon()


def _needed_bytes(used: int, text_done: int, text_total: int) -> int:
    """Return an estimate of the dataset's size from the text done so far; before any, the size of the text."""
    return max(used, used * text_total // text_done) if text_done else text_total


class _Tokenization:
    """One preparation: survey, tokenizer, and one pass over the sources, with checkpoints."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        # The source that is being read, the cursor in it, and the bytes of text read from it.
        self._number = 0
        self._cursor = (0, 0)
        self._source_bytes = 0
        # Per source: bound of the hashes of validation text, and number of documents on each side up to its end.
        self._thresholds: list[int] = []
        self._ends: list[dict[str, int]] = []
        self._writers: dict[str, ShardWriter] = {}
        self.text_bytes = 0

    def begin(self) -> None:
        """Survey the sources, train or copy the tokenizer, and write the first checkpoint."""
        plan = self._plan
        plan.progress("survey", 0, plan.source.text_bytes)
        settings = plan.settings
        sample, self._thresholds = survey_all(
            plan.sources,
            val_frac=settings["val_frac"],
            max_bytes=settings["max_bytes"],
            sample_bytes=settings["sample_bytes"],
        )
        tokenizer = plan.tokenizer
        if tokenizer is None:
            plan.progress("tokenizer", sample.text_bytes, sample.text_bytes)
            tokenizer = Tokenizer.train((text.decode() for text in sample.texts), settings["vocab_size"])
        self._set_tokenizer(tokenizer)
        write_atomically(plan.folder / TOKENIZER_NAME, tokenizer.definition)
        self._checkpoint()

    def resume(self, state: dict[str, Any]) -> bool:
        """Resume a stopped preparation from its checkpoint; return whether the files on disk allow it."""
        try:
            tokenizer = Tokenizer.load(self._plan.folder / TOKENIZER_NAME)
            if tokenizer.fingerprint() != state["tokenizer"]:
                return False
            self._set_tokenizer(tokenizer)
            self._cursor = (int(state["cursor"][0]), int(state["cursor"][1]))
            self._number, self._source_bytes = int(state["source"]), int(state["source_bytes"])
            self._thresholds, self._ends = list(state["thresholds"]), list(state["ends"])
            self.text_bytes = int(state["text_bytes"])
            return all(writer.resume(state["splits"][name]) for name, writer in self._writers.items())
        except (DataError, KeyError, TypeError, ValueError, IndexError):
            return False

    def run(self) -> None:
        """Tokenize from the cursor to the end and write the manifest."""
        while self._number < len(self._plan.sources):
            self._run_source(self._plan.sources[self._number].source)
            self._ends.append({name: writer.num_documents for name, writer in self._writers.items()})
            self._number, self._cursor, self._source_bytes = self._number + 1, (0, 0), 0
        self._publish()
        self._plan.progress("done", self.text_bytes, self.text_bytes)

    def _run_source(self, source: Source) -> None:
        limit = self._plan.settings["max_bytes"]
        total = self._plan.source.text_bytes if limit is None else limit * len(self._plan.sources)
        pending: list[bytes] = []
        pending_bytes = 0
        checkpointed = self._num_closed()
        self._plan.progress("tokens", self.text_bytes, total)
        if limit is None or self._source_bytes < limit:
            for cursor, document in source.documents_from(self._cursor):
                for piece in sections_within(document, limit, self._source_bytes + pending_bytes):
                    pending.append(piece)
                    pending_bytes += len(piece)
                    # Within the loop, because a document may have hundreds of sections.
                    if pending_bytes >= _BATCH_BYTES:
                        self._write(pending)
                        pending, pending_bytes = [], 0
                        self._plan.progress("tokens", self.text_bytes, total)
                full = limit is not None and self._source_bytes + pending_bytes >= limit
                if self._num_closed() > checkpointed:
                    # A cursor points after a whole document, so everything up to there is written before a checkpoint.
                    self._write(pending)
                    pending, pending_bytes = [], 0
                    self._cursor = cursor
                    self._checkpoint()
                    checkpointed = self._num_closed()
                if full:
                    break
        self._write(pending)

    def abandon(self) -> None:
        """Close files that are still open."""
        for writer in self._writers.values():
            writer.abandon()

    def _set_tokenizer(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        shard_tokens = self._plan.settings["shard_tokens"]
        names: tuple[SplitName, ...] = ("train", "val")
        self._writers = {name: ShardWriter(self._plan.folder, name, self._dtype, shard_tokens) for name in names}

    def _num_closed(self) -> int:
        return sum(writer.num_closed for writer in self._writers.values())

    def _write(self, pieces: list[bytes]) -> None:
        """Tokenize documents and append them to the shards of their sides."""
        bos = self._tokenizer.bos_id
        encoded = self._tokenizer.encode_batch([piece.decode() for piece in pieces])
        for piece, ids in zip(pieces, encoded, strict=True):
            # Tokenizers trained here keep every byte; others may lose text, which is checked document by document.
            if self._plan.tokenizer is not None and (back := self._tokenizer.decode_bytes(ids)) != piece:
                raise DataError(f"--tokenizer {self._plan.tokenizer_name}: {lost_text(piece, back)}")
            side = "val" if text_hash(piece) < self._thresholds[self._number] else "train"
            self._writers[side].add([bos, *ids], len(piece))
            self.text_bytes += len(piece)
            self._source_bytes += len(piece)

    def _checkpoint(self) -> None:
        state = {
            "tokenizer": self._tokenizer.fingerprint(),
            "cursor": self._cursor,
            "source": self._number,
            "source_bytes": self._source_bytes,
            "thresholds": self._thresholds,
            "ends": self._ends,
            "text_bytes": self.text_bytes,
            "splits": {name: writer.checkpoint() for name, writer in self._writers.items()},
        }
        write_atomically(self._plan.folder / _PROGRESS_NAME, json.dumps(state))

    def _source_entries(self) -> list[dict[str, Any]]:
        """Return the manifest's entries of the sources, with the range of each source's documents on both sides."""
        begins = [dict.fromkeys(self._writers, 0), *self._ends[:-1]]
        places = [
            {name: [begin[name], end[name]] for name in end} for begin, end in zip(begins, self._ends, strict=True)
        ]
        named = [{"source": mixed.source.spec, "weight": mixed.weight} for mixed in self._plan.sources]
        return [fields | place for fields, place in zip(named, places, strict=True)]

    def _publish(self) -> None:
        plan = self._plan
        for name, writer in self._writers.items():
            if writer.num_documents == 0:
                other = "raise" if name == "val" else "lower"
                raise DataError(
                    f"{plan.source.spec}: no document fell on the {name} side ({self.text_bytes:,} bytes of text); "
                    f"{other} --val-frac ({plan.settings['val_frac']}) or give more text"
                )
        manifest = {
            "version": FORMAT_VERSION,
            "key": plan.key,
            "source": {**plan.asked, "name": plan.source.name, "fingerprint": plan.fingerprint},
            "settings": plan.settings,
            "command": plan.command,
            "tokenizer": {"file": TOKENIZER_NAME, "fingerprint": self._tokenizer.fingerprint()},
            "dtype": self._dtype,
            "bos_id": self._tokenizer.bos_id,
            "vocab_size": self._tokenizer.vocab_size,
            "val_threshold": self._thresholds[0],
            **({"sources": self._source_entries()} if len(plan.sources) > 1 else {}),
            "splits": {name: {"shards": writer.finish()} for name, writer in self._writers.items()},
        }
        write_atomically(plan.folder / MANIFEST_NAME, json.dumps(manifest, indent=1))
        # The manifest replaces the checkpoint; unfinished shards may be left from a stopped preparation.
        for path in (plan.folder / _PROGRESS_NAME, *plan.folder.glob("*.part")):
            path.unlink(missing_ok=True)
        remove_unfinished(plan.folder)
