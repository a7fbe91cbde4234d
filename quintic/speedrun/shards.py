"""The race's token files: `.bin` shards, read, written, found and downloaded.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros) and the tokens as
uint16. Files whose names have `val` in them are for validation, those with `train` for training; there is no text.

Source: the format is that of llm.c and the modded-nanogpt speedrun.
"""

import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quintic.data.hub import download
from quintic.data.sources import open_source
from quintic.data.tokenizer import byte_alphabet, read_definition
from quintic.durable import write_atomically
from quintic.errors import DataError
from quintic.speedrun.presets import BYTES_BOS

__all__ = ["RaceData", "Tokens", "open_data", "prefixes", "read_shard", "vocabulary_of", "write_shard"]

Tokens = npt.NDArray[np.uint16]

_MAGIC, _VERSION = 20240520, 1
_HEADER = np.dtype("<i4")
_HEADER_BYTES = 256 * _HEADER.itemsize
_TOKEN = np.dtype("<u2")
_HUB_NAMES = {"val": "fineweb_val_{:06d}.bin", "train": "fineweb_train_{:06d}.bin"}

# Bytes of the text that comes with Python, on which the smallest preset trains, and its part for validation.
_BYTES_OF_TEXT = 2_000_000
_VALIDATION_SHARE = 20


@dataclass(frozen=True, kw_only=True)
class RaceData:
    """The shards of a run.

    Attributes:
        source: the name that the run was given.
        train: at least one file, in order.
        validation: the file to score.
        vocab_size: tokens must be smaller.
        bos_id: the token that begins a document.
        vocabulary: the bytes of each token, none for special ones; None where the vocabulary is not at hand.
    """

    source: str
    train: tuple[Path, ...]
    validation: Path
    vocab_size: int
    bos_id: int
    vocabulary: tuple[bytes, ...] | None


def prefixes(vocabulary: Sequence[bytes]) -> list[int]:
    """Return for each token the longest other one that its bytes begin with, -1 for none."""
    ids = {token: number for number, token in enumerate(vocabulary) if token}
    return [
        next((ids[token[:length]] for length in range(len(token) - 1, 0, -1) if token[:length] in ids), -1)
        for token in vocabulary
    ]


def read_shard(path: Path, *, vocab_size: int = 2**16) -> Tokens:
    """Return the tokens of a shard.

    Args:
        path: the file.
        vocab_size: tokens must be smaller.

    Raises:
        DataError: the file cannot be read, is no such shard, is cut off, or has another vocabulary's tokens.
    """
    try:
        size = path.stat().st_size
        header = np.fromfile(path, dtype=_HEADER, count=256)
        if len(header) < 256 or header[0] != _MAGIC:
            raise DataError(f"{path}: not a token shard (its first number is not {_MAGIC}); {_ADVICE}")
        if header[1] != _VERSION:
            raise DataError(f"{path}: a token shard of version {header[1]}, not {_VERSION}; {_ADVICE}")
        count, present = int(header[2]), (size - _HEADER_BYTES) / _TOKEN.itemsize
        if count != present:
            raise DataError(
                f"{path}: its header says {count:,} tokens, the file has {present:,.1f}: it is cut off or damaged; "
                "delete it and download or write it again"
            )
        tokens = np.fromfile(path, dtype=_TOKEN, offset=_HEADER_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(tokens) and int(tokens.max()) >= vocab_size:
        raise DataError(
            f"{path}: token {int(tokens.max())} is outside the vocabulary of {vocab_size:,}; it was made with another "
            "tokenizer: give shards of this preset's vocabulary"
        )
    return tokens


_ADVICE = (
    "give shards as written by `quintic.speedrun.shards.write_shard` or downloaded for the modded-nanogpt speedrun"
)


def write_shard(path: Path, tokens: Iterable[int] | npt.NDArray[np.integer]) -> None:
    """Write tokens as a shard; the file is the old or the new one, also after a crash.

    Args:
        path: the file; its folder must exist.
        tokens: each from 0 to 65535; documents begin with the token for that.

    Raises:
        DataError: a token does not fit, or the file cannot be written.
    """
    whole = np.fromiter(tokens, dtype=np.int64) if not isinstance(tokens, np.ndarray) else tokens
    if len(whole) and not 0 <= int(whole.min()) <= int(whole.max()) < 2**16:
        raise DataError(f"{path}: tokens from {whole.min()} to {whole.max()}; a shard holds 0 to 65535")
    header = np.zeros(256, dtype=_HEADER)
    header[:3] = _MAGIC, _VERSION, len(whole)
    try:
        write_atomically(path, header.tobytes() + whole.astype(_TOKEN).tobytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error


def open_data(
    source: str, *, data_dir: Path, num_shards: int, vocab_size: int, bos_id: int, tokenizer: str | None
) -> RaceData:
    """Return the shards of a run; those of the Hub are downloaded, unless they are there already.

    Args:
        source: a folder of `.bin` files, `hf:owner/name` with the names of the race's FineWeb shards, or `python`: the
            text that comes with Python, as bytes.
        data_dir: where downloads and made shards are kept.
        num_shards: training shards to take at most.
        vocab_size: the model's.
        bos_id: the token that begins a document.
        tokenizer: vocabulary of the shards (see `Tokenizer.load`), for prefixes and bits per byte; None for neither.

    Raises:
        DataError: there are no such shards, or they cannot be downloaded.
    """
    if source.startswith("hf:"):
        train, validation = _downloaded(source, data_dir, num_shards)
    else:
        train, validation = _in_folder(source, data_dir, num_shards)
    vocabulary = None
    if bos_id == BYTES_BOS:
        vocabulary = tuple(bytes([value]) for value in range(BYTES_BOS))
    elif tokenizer is not None:
        vocabulary = vocabulary_of(tokenizer, bos_id=bos_id, cache_dir=data_dir / "hub")
    return RaceData(
        source=source,
        train=tuple(train),
        validation=validation,
        vocab_size=vocab_size,
        bos_id=bos_id,
        vocabulary=vocabulary,
    )


def _in_folder(source: str, data_dir: Path, num_shards: int) -> tuple[list[Path], Path]:
    folder = _bytes_of_python(data_dir) if source == "python" else Path(source).expanduser()
    files = sorted(folder.glob("*.bin"))
    train, validation = ([file for file in files if split in file.name] for split in ("train", "val"))
    for split, some in (("train", train), ("val", validation)):
        if not some:
            raise DataError(
                f"--data {source}: no *{split}*.bin in this folder; give a folder with training and validation shards, "
                "or hf:kjj0/fineweb10B-gpt2"
            )
    return train[:num_shards], validation[0]


def vocabulary_of(tokenizer: str, *, bos_id: int, cache_dir: Path | None = None) -> tuple[bytes, ...]:
    """Return the bytes of each token of a byte-level BPE, none for special ones; a tokenizer.json needs no package.

    Args:
        tokenizer: see `Tokenizer.load`.
        bos_id: the token that begins a document.
        cache_dir: where a download is kept.

    Raises:
        DataError: there is nothing of that name, or it is of another kind.
    """
    fields = json.loads(read_definition(tokenizer, cache_dir=cache_dir))
    value = {symbol: number for number, symbol in enumerate(byte_alphabet())}
    special = {bos_id, *(token["id"] for token in fields.get("added_tokens") or [])}
    try:
        vocabulary: dict[str, int] = fields["model"]["vocab"]
        by_number = {
            number: b"" if number in special else bytes(value[symbol] for symbol in token)
            for token, number in vocabulary.items()
        }
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{tokenizer}: not a byte-level BPE; give GPT-2's tokenizer.json, or 'gpt2'") from None
    return tuple(by_number.get(number, b"") for number in range(max(*by_number, bos_id) + 1))


def _downloaded(source: str, data_dir: Path, num_shards: int) -> tuple[list[Path], Path]:
    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)/?", source)
    if match is None:
        raise DataError(f"--data {source}: not the name of shards on the Hub; write hf:owner/name")
    get = functools.partial(
        download, match.group(1), repo_type="dataset", revision=None, cache_dir=data_dir / "hub", endpoint=None
    )
    validation = get(_HUB_NAMES["val"].format(0))
    return [get(_HUB_NAMES["train"].format(number)) for number in range(1, num_shards + 1)], validation


def _bytes_of_python(data_dir: Path) -> Path:
    """Write the text that comes with Python as two shards whose tokens are bytes; return their folder."""
    folder = data_dir / "python-bytes"
    if (folder / "val_000000.bin").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    documents, size = [], 0
    for text in filter(None, open_source("python", cache_dir=data_dir).documents()):
        content = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
        documents.append(np.concatenate([[BYTES_BOS], content]))
        size += len(content)
        if size >= _BYTES_OF_TEXT:
            break
    held_back = documents[::_VALIDATION_SHARE]
    rest = [document for number, document in enumerate(documents) if number % _VALIDATION_SHARE]
    write_shard(folder / "train_000000.bin", np.concatenate(rest))
    write_shard(folder / "val_000000.bin", np.concatenate(held_back))
    return folder
