"""Reading, writing and downloading the race's token files, `.bin` shards.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros), followed by the
tokens as uint16. Names with `val` mark validation shards, names with `train` training shards. Shards hold no text.

Source: the format of llm.c and the modded-nanogpt speedrun.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quintic.data.hub import download
from quintic.data.open_source import open_source
from quintic.data.tokenizer import Tokenizer, byte_alphabet
from quintic.durable import write_atomically
from quintic.errors import DataError
from quintic.model.speedrun_sizes import IGNORED, SpeedrunConfig
from quintic.speedrun.presets import BYTES_BOS, SpeedrunOptions

__all__ = [
    "RaceData",
    "Tokens",
    "byte_tokenizer",
    "open_data",
    "prefixes",
    "read_shard",
    "vocabulary_of",
    "write_shard",
]

Tokens = npt.NDArray[np.uint16]

_MAGIC, _VERSION = 20240520, 1
_HEADER = np.dtype("<i4")
_HEADER_BYTES = 256 * _HEADER.itemsize
_TOKEN = np.dtype("<u2")
_ADVICE = "give shards of the modded-nanogpt speedrun, or shards written by `quintic.speedrun.shards.write_shard`"

# The text of the smallest preset: this many bytes of Python's own text, every 20th document for validation.
_BYTES_OF_TEXT = 2_000_000
_VALIDATION_EVERY = 20


class RaceData(NamedTuple):
    """The shards of a run."""

    source: str  # value of --data
    train: tuple[Path, ...]  # at least one file, in reading order
    validation: Path
    vocab_size: int  # tokens are below this
    bos_id: int  # the token that starts a document
    tokenizer: Tokenizer | None  # the one that made the shards; None if it was not given


def prefixes(vocabulary: Sequence[bytes]) -> list[int]:
    """Return for each token the longest other token that its bytes begin with, or `IGNORED`."""
    ids = {token: number for number, token in enumerate(vocabulary) if token}
    return [
        next((ids[token[:length]] for length in range(len(token) - 1, 0, -1) if token[:length] in ids), IGNORED)
        for token in vocabulary
    ]


def read_shard(path: Path, *, vocab_size: int = 2**16, count: int = -1) -> Tokens:
    """Return the tokens of a shard, or only the first `count`.

    Raises:
        DataError: the file cannot be read, is not a shard or is truncated, or a token is not below `vocab_size`.
    """
    try:
        size = path.stat().st_size
        header = np.fromfile(path, dtype=_HEADER, count=256)
        if len(header) < 256 or header[0] != _MAGIC:
            raise DataError(f"{path}: not a token shard (its first number is not {_MAGIC}); {_ADVICE}")
        if header[1] != _VERSION:
            raise DataError(f"{path}: a token shard of version {header[1]}, not {_VERSION}; {_ADVICE}")
        announced, present = int(header[2]), (size - _HEADER_BYTES) / _TOKEN.itemsize
        if announced != present:
            raise DataError(
                f"{path}: has {present:,.1f} tokens, but its header says {announced:,}: it is truncated or damaged; "
                "delete it and download or write it again"
            )
        tokens = np.fromfile(path, dtype=_TOKEN, count=count, offset=_HEADER_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(tokens) and int(tokens.max()) >= vocab_size:
        raise DataError(
            f"{path}: token {int(tokens.max())} is outside the vocabulary of {vocab_size:,}; it was made with another "
            "tokenizer: give shards of this preset's vocabulary"
        )
    return tokens


def write_shard(path: Path, tokens: Iterable[int] | npt.NDArray[np.integer]) -> None:
    """Write tokens, each from 0 to 65535, as a shard; after a crash, the old or the new file is there, complete.

    Raises:
        DataError: a token is out of range, or the file cannot be written.
    """
    whole = np.fromiter(tokens, dtype=np.int64) if not isinstance(tokens, np.ndarray) else tokens
    if len(whole) and not 0 <= int(whole.min()) <= int(whole.max()) < 2**16:
        raise DataError(f"{path}: has tokens from {whole.min()} to {whole.max()}; they must be from 0 to 65535")
    header = np.zeros(256, dtype=_HEADER)
    header[:3] = _MAGIC, _VERSION, len(whole)
    try:
        write_atomically(path, header.tobytes() + whole.astype(_TOKEN).tobytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error


def open_data(options: SpeedrunOptions, model: SpeedrunConfig) -> RaceData:
    """Return the shards of a run, downloading them from the Hub if needed.

    Raises:
        DataError: there are no such shards, they are damaged or cannot be downloaded, or the vocabulary is too large.
    """
    source, data_dir, tokenizer = options.data, options.data_dir, options.tokenizer
    if source.startswith("hf:"):
        train, validation = _downloaded(source, data_dir / "hub", options.shards)
    else:
        folder = _bytes_of_python(data_dir) if source == "python" else Path(source).expanduser()
        train, validation = ([*sorted(folder.glob(f"*{split}*.bin"))] for split in ("train", "val"))
        if not (train and validation):
            raise DataError(
                f"--data {source}: no *{'val' if train else 'train'}*.bin in this folder; give a folder with training "
                "and validation shards, or hf:kjj0/fineweb10B-gpt2"
            )
        if both := set(train) & set(validation):
            raise DataError(f"{min(both)}: its name has both `train` and `val`; rename it")
    train = train[: options.shards]
    for path in (*train, validation[0]):
        read_shard(path, count=0)  # check header and size now, not in the middle of the run
    loaded = None
    if model.bos_id == BYTES_BOS:
        loaded = byte_tokenizer()
    elif tokenizer is not None:
        loaded = Tokenizer.load(tokenizer, cache_dir=data_dir / "hub")
        if loaded.vocab_size > model.vocab_size:
            raise DataError(
                f"--tokenizer {tokenizer}: has {loaded.vocab_size:,} tokens, but the model only {model.vocab_size:,}; "
                "give the one that made the shards"
            )
    return RaceData(source, tuple(train), validation[0], model.vocab_size, model.bos_id, loaded)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with the 256 bytes as tokens; `BYTES_BOS` starts each document."""
    stage = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocab = {symbol: byte for byte, symbol in enumerate(byte_alphabet())}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return Tokenizer(json.dumps({"version": "1.0", "model": model, "pre_tokenizer": stage, "decoder": stage}))


def _downloaded(source: str, cache_dir: Path, num_shards: int) -> tuple[list[Path], list[Path]]:
    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)/?", source)
    if match is None:
        raise DataError(f"--data {source}: not a name on the Hugging Face Hub; write hf:owner/name")

    def get(split: str, number: int) -> Path:
        name = f"fineweb_{split}_{number:06d}.bin"
        return download(match[1], name, repo_type="dataset", cache_dir=cache_dir)

    validation = [get("val", 0)]
    return [get("train", number) for number in range(1, num_shards + 1)], validation


def _bytes_of_python(data_dir: Path) -> Path:
    """Write Python's own text as a training and a validation shard of bytes; return their folder."""
    folder = data_dir / "python-bytes"
    if (folder / "val_000000.bin").is_file():
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be made ({error.strerror}); use another --data-dir") from error
    documents, size = list[Tokens](), 0
    for text in open_source("python", cache_dir=data_dir).documents():
        content = np.frombuffer(text, np.uint8)
        documents.append(np.insert(content.astype(_TOKEN), 0, BYTES_BOS))
        size += len(content)
        if size >= _BYTES_OF_TEXT:
            break
    held_back = documents[::_VALIDATION_EVERY]
    del documents[::_VALIDATION_EVERY]
    write_shard(folder / "train_000000.bin", np.concatenate(documents))
    write_shard(folder / "val_000000.bin", np.concatenate(held_back))
    return folder


def vocabulary_of(tokenizer: Tokenizer, bos_id: int) -> tuple[bytes, ...]:
    """Return the bytes of each token of a tokenizer, b"" for special tokens and `bos_id`."""
    numbers = range(tokenizer.vocab_size)
    return tuple(b"" if number == bos_id else tokenizer.decode_bytes([number]) for number in numbers)
