"""The tokenizer: byte-level BPE, trained here or taken from elsewhere, exact to the byte in both directions.

`Tokenizer` wraps the `tokenizers` library and adds what training needs: the token that starts a document, the bytes
each token stands for (for bits per byte), and encoding that never takes text for a special token. Files of other
makers (a `tokenizer.json`, GPT-2's two files, GPT-2 by name from the Hub) become one of these in `read_definition`.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quintic.durable import write_atomically
from quintic.errors import DataError

__all__ = ["BOS", "Tokenizer", "byte_alphabet", "read_definition"]

BOS = "<|bos|>"
_OTHER_DOCUMENT_STARTS = ("<|endoftext|>",)
_PROBE = "Text  with\ttabs, 12345 numbers;\r\n\n  e\u0301\u00e9 \u6f22\U0001f642\x00 <|bos|>end "
_MIN_VOCAB = 257  # every byte, and the document start

# Words as BPE sees them: contractions; letters with one leading mark or space; one or two digits, so that numbers
# get the same pieces wherever they stand; runs of other signs; line ends; and spaces, of which the last goes to the
# word that follows. Combining marks count as letters, so that scripts which need them keep their words whole.
_WORDS = (
    r"(?i:'(?:[sdmt]|ll|ve|re))"
    r"|[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

_GPT2_REPO = "openai-community/gpt2"
_GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


class Tokenizer:
    """A byte-level BPE vocabulary with a token that starts a document.

    Text round-trips exactly: `decode(encode(text)) == text` for every text without lone surrogates.
    """

    def __init__(self, definition: str) -> None:
        """Take the content of a `tokenizer.json`; `train` and `load` are the usual ways in.

        The normalizer, truncation, padding, post-processor, dropout and prefix space of the definition are dropped:
        each would make the tokens stand for other bytes than the text's.

        Raises:
            DataError: it is not a byte-level BPE, bytes are missing from its vocabulary, or it loses text.
        """
        from tokenizers import Tokenizer as Backend

        try:
            fields = json.loads(definition)
            model = fields["model"]
            vocab: dict[str, int] = model["vocab"]
            added: list[dict[str, Any]] = fields.get("added_tokens") or []
            kind = model.get("type", "BPE" if "merges" in model else "unknown")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                "not a tokenizer.json of the tokenizers library; expected a 'model' with 'vocab'"
            ) from error
        if kind != "BPE" or not any(stage.get("type") == "ByteLevel" for stage in _stages(fields)):
            raise DataError(f"a {kind} tokenizer that is not byte-level BPE; use one of GPT-2's kind")
        missing = [symbol for symbol in byte_alphabet() if symbol not in vocab]
        if missing:
            raise DataError(f"the vocabulary lacks {len(missing)} of the 256 bytes; use a complete byte-level BPE")
        names = {token["content"] for token in added}
        bos = next((name for name in (BOS, *_OTHER_DOCUMENT_STARTS) if name in names or name in vocab), BOS)
        added = [token | {"special": True} if token["content"] == bos else token for token in added]
        if bos not in names:
            bos_id = vocab.get(bos, 1 + max([*vocab.values(), *(token["id"] for token in added)]))
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": bos_id, "content": bos, **flags, "special": True})
        model["dropout"] = None
        for stage in _stages(fields):
            if stage.get("type") == "ByteLevel":
                stage["add_prefix_space"] = False
        fields |= {"normalizer": None, "truncation": None, "padding": None, "post_processor": None}
        fields["added_tokens"] = sorted(added, key=lambda token: int(token["id"]))
        try:
            self._backend = Backend.from_str(json.dumps(fields, ensure_ascii=False))
        # The library raises bare `Exception` for every kind of bad definition.
        except Exception as error:
            raise DataError(f"not a usable tokenizer.json ({str(error).splitlines()[0]})") from error
        # Text is text: a document that spells out a special token does not get its id.
        self._backend.encode_special_tokens = True
        # Asked rather than read from the definition: the library numbers added tokens without gaps.
        self._is_special = {
            int(index): bool(token.special) for index, token in self._backend.get_added_tokens_decoder().items()
        }
        self.bos_id = next(index for index in self._is_special if self._backend.id_to_token(index) == bos)
        """Id of the token that starts a document."""
        if self.decode(self.encode(_PROBE)) != _PROBE:
            raise DataError("its pre-tokenizer loses text; use a byte-level BPE that keeps every byte")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn a vocabulary from texts; the same texts give the same vocabulary in every process.

        Args:
            texts: the documents; read once, word counts are kept in memory, the texts are not.
            vocab_size: number of ids wanted, `<|bos|>` and the 256 bytes included. A text with too few different
                words gives fewer; `.vocab_size` is what came out.

        Raises:
            DataError: `vocab_size` is below 257.
        """
        from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Backend

        if vocab_size < _MIN_VOCAB:
            raise DataError(f"vocab_size {vocab_size} is too small; 256 bytes and {BOS} need {_MIN_VOCAB} or more")
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BOS],
            initial_alphabet=sorted(byte_alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend.to_str())

    @classmethod
    def load(cls, path: str | Path, *, cache_dir: Path | None = None) -> "Tokenizer":
        """Load a tokenizer from a file, a folder, or by the name `gpt2`.

        Args:
            path: a `tokenizer.json`; a folder with one, or with GPT-2's `encoder.json` and `vocab.bpe` (also named
                `vocab.json` and `merges.txt`); or `gpt2`, which is downloaded unless a file has that name.
                Without a `<|bos|>`, an `<|endoftext|>` starts documents; without either, `<|bos|>` is added.
            cache_dir: where the download is kept; the Hub client's own cache when None.

        Raises:
            DataError: missing, not a byte-level BPE, or not to be downloaded; the message names the path.
        """
        definition = read_definition(str(path), cache_dir=cache_dir)
        try:
            return cls(definition)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json`, which `transformers.PreTrainedTokenizerFast` loads too.

        Raises:
            DataError: the file cannot be written.
        """
        try:
            write_atomically(Path(path), self.definition)
        except OSError as error:
            raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids: one more than the largest, special tokens included."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without the document start; special tokens in it are plain text."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts; they are divided among the processor's cores."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens are skipped, incomplete characters become U+FFFD.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the exact bytes ids stand for; special tokens stand for none.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        table = self._bytes
        size = len(table)
        pieces = []
        for index in ids:
            if not 0 <= index < size:
                raise DataError(f"token id {index} is outside the vocabulary of {size}")
            pieces.append(table[index])
        return b"".join(pieces)

    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Return the number of UTF-8 bytes of each token: (vocab_size,) int32, 0 for special tokens."""
        return np.array([len(token) for token in self._bytes], dtype=np.int32)

    def fingerprint(self) -> str:
        """Return 32 hex digits that change when a token or a merge does."""
        canonical = json.dumps(json.loads(self.definition), sort_keys=True)
        return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()

    @cached_property
    def definition(self) -> str:
        """The content of a `tokenizer.json`, as `save` writes and the constructor takes it."""
        return str(self._backend.to_str())

    @cached_property
    def _bytes(self) -> tuple[bytes, ...]:
        """The bytes of each id; nothing for special tokens and for ids that no token has."""
        from_symbol = {symbol: byte for byte, symbol in enumerate(byte_alphabet())}
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocab.values()) + 1)
        for token, index in vocab.items():
            if index in self._is_special:
                table[index] = b"" if self._is_special[index] else token.encode()
            elif all(symbol in from_symbol for symbol in token):
                table[index] = bytes(from_symbol[symbol] for symbol in token)
        return tuple(table)


def byte_alphabet() -> tuple[str, ...]:
    """Return the character that stands for each byte in byte-level vocabularies, as GPT-2 introduced them.

    Printable Latin-1 characters stand for themselves; the other bytes take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols = []
    others = 0
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(0x100 + others))
            others += 1
    return tuple(symbols)


def _stages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pre-tokenizers and decoders of a definition, also those inside sequences."""
    stages: list[dict[str, Any]] = []
    for stage in (fields.get("pre_tokenizer"), fields.get("decoder")):
        if stage:
            stages += [stage, *(stage.get("pretokenizers") or []), *(stage.get("decoders") or [])]
    return stages


def read_definition(name: str, *, cache_dir: Path | None = None, endpoint: str | None = None) -> str:
    """Return the text of a `tokenizer.json` for a path or the name `gpt2`.

    Args:
        name: a file, a folder (see `Tokenizer.load`), or `gpt2` where no file or folder has that name.
        cache_dir: where a download is kept; the Hub client's cache when None.
        endpoint: address of the Hub; the client's own when None.

    Raises:
        DataError: there is nothing of that name, it cannot be read, or it cannot be downloaded.
    """
    path = Path(name).expanduser()
    if name == "gpt2" and not path.exists():
        from quintic.data.hub import download

        path = download(
            _GPT2_REPO, "tokenizer.json", repo_type="model", revision=None, cache_dir=cache_dir, endpoint=endpoint
        )
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            path = path / "tokenizer.json"
        else:
            return _from_gpt2_files(path)
    if path.name.endswith((".tiktoken", ".model", ".bpe")):
        raise DataError(
            f"{name}: cannot be read alone, it holds no complete byte-level BPE; give a tokenizer.json, or a folder "
            "with encoder.json and vocab.bpe"
        )
    return _read(path, name)


def _from_gpt2_files(folder: Path) -> str:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    for vocab_name, merges_name in _GPT2_FILES:
        vocab_file, merges_file = folder / vocab_name, folder / merges_name
        if vocab_file.is_file() and merges_file.is_file():
            try:
                backend = Backend(models.BPE.from_file(str(vocab_file), str(merges_file)))
            # The library raises bare `Exception` for every kind of bad file.
            except Exception as error:
                reason = str(error).splitlines()[0]
                raise DataError(f"{folder}: {vocab_name} and {merges_name} do not fit together ({reason})") from error
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
            return str(backend.to_str())
    raise DataError(f"{folder}: no tokenizer.json in it, and no encoder.json with vocab.bpe")


def _read(path: Path, name: str) -> str:
    if not path.exists():
        raise DataError(f"{name}: no such tokenizer; give a tokenizer.json, a folder with one, or 'gpt2'")
    if not path.is_file():  # opening a pipe waits for a writer
        raise DataError(f"{name}: a pipe or a device, not a file; give a tokenizer.json")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not a tokenizer.json (not UTF-8 at byte offset {error.start})") from error
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error})") from error
