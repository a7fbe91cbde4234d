"""`Tokenizer`: a byte-level BPE, trained here or loaded, that preserves every byte of a text.

It wraps the `tokenizers` library and adds three things that training needs: a token that starts a document, the number
of bytes of each token (for bits per byte), and encoding that never mistakes text for a special token.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt

from quintic.durable import write_atomically
from quintic.errors import DataError

__all__ = ["BOS", "Tokenizer", "byte_alphabet", "lost_text"]

BOS = "<|bos|>"
_END_OF_TEXT = "<|endoftext|>"
_GPT2_REPO = "openai-community/gpt2"
_GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
_PROBE = "Text  with\ttabs, 12345 numbers;\r\n\n  e\u0301\u00e9 \u6f22\U0001f642\x00 <|bos|>end "
# Properties of added tokens that remove the spaces before or after them.
_STRIPPING = ("lstrip", "rstrip")
# Pre-tokenizers that remove or replace the characters at which they split.
_LOSSY_STAGES = frozenset(
    {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit", "Metaspace", "Delimiter"}
)

# Number of characters at which `encode_parts` divides text without a place between two words.
_MOST_AT_ONCE = 1 << 20
# A text up to its last place between two words: behind a letter or digit, before a space and the next letter or digit.
_UP_TO_LAST_WORD = re.compile(r".*[^\W_](?=\s[^\W_])", re.DOTALL)

# The words within which BPE merges: contractions; letters with one leading sign or space; one or two digits, so that
# the tokens of a number do not depend on the text around it; sequences of other signs; line ends; and spaces, the last
# one belonging to the following word. Combining marks count as letters, so that scripts with them keep words whole.
_WORDS = (
    r"(?i:'(?:[sdmt]|ll|ve|re))"
    r"|[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


class Tokenizer:
    """A byte-level BPE tokenizer with a token that starts a document.

    Every text without lone surrogates is preserved: `decode(encode(text)) == text`.
    """

    def __init__(self, definition: str) -> None:
        """Make a tokenizer from the content of a `tokenizer.json`; usually `train` or `load` is called instead.

        Normalizer, truncation, padding, post-processor, dropout and prefix space of the definition are ignored, and
        added tokens do not strip spaces: with any of these, tokens would not represent the bytes of the text.

        Raises:
            DataError: it is not a byte-level BPE, its vocabulary lacks bytes, or it loses text.
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
        stages = [*_stages(fields.get("pre_tokenizer")), *_stages(fields.get("decoder"))]
        if kind != "BPE" or not any(stage.get("type") == "ByteLevel" for stage in stages):
            raise DataError(f"a {kind} tokenizer that is not byte-level BPE; use one of GPT-2's kind")
        missing = [symbol for symbol in byte_alphabet() if symbol not in vocab]
        if missing:
            raise DataError(f"the vocabulary lacks {len(missing)} of the 256 bytes; use a complete byte-level BPE")
        for stage in _stages(fields.get("pre_tokenizer")):
            if str(stage.get("behavior", "")).lower() == "removed" or stage.get("type") in _LOSSY_STAGES:
                raise DataError(
                    f"its pre-tokenizer {stage.get('type')} removes what it splits at; use a byte-level BPE that keeps "
                    "every byte"
                )
        added = [token | dict.fromkeys(_STRIPPING, False) for token in added]
        names = {token["content"] for token in added}
        bos = next((name for name in (BOS, _END_OF_TEXT) if name in names or name in vocab), BOS)
        added = [token | {"special": True} if token["content"] == bos else token for token in added]
        if bos not in names:
            bos_id = vocab.get(bos, 1 + max([*vocab.values(), *(token["id"] for token in added)]))
            flags = dict.fromkeys(("single_word", "normalized", *_STRIPPING), False)
            added.append({"id": bos_id, "content": bos, **flags, "special": True})
        model["dropout"] = None
        for stage in stages:
            if stage.get("type") == "ByteLevel":
                stage["add_prefix_space"] = False
        fields |= {"normalizer": None, "truncation": None, "padding": None, "post_processor": None}
        fields["added_tokens"] = sorted(added, key=lambda token: int(token["id"]))
        try:
            self._backend = Backend.from_str(json.dumps(fields, ensure_ascii=False))
        # The library raises bare `Exception` for every kind of bad definition.
        except Exception as error:
            raise DataError(f"not a usable tokenizer.json ({str(error).splitlines()[0]})") from error
        # A document that spells out a special token must not be encoded as its id.
        self._backend.encode_special_tokens = True
        # From the library and not from the definition, because the library renumbers added tokens without gaps.
        self._is_special = {
            int(index): bool(token.special) for index, token in self._backend.get_added_tokens_decoder().items()
        }
        self.bos_id = next(index for index in self._is_special if self._backend.id_to_token(index) == bos)
        """Id of the token that starts a document."""
        # Encode and decode samples; users may also write the names of added tokens in their text.
        for probe in (_PROBE, *(f"a  {token['content']}  b{token['content']}" for token in added)):
            if (back := self.decode_bytes(self.encode(probe))) != probe.encode():
                raise DataError(lost_text(probe.encode(), back))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Return a tokenizer trained on texts; equal texts give equal tokenizers in every process.

        Args:
            texts: the documents; they are read once, and only word counts are kept in memory.
            vocab_size: requested number of ids, 257 or more: `<|bos|>` and the 256 bytes are among them. Texts with too
                few different words give fewer; the attribute `vocab_size` has the actual number.
        """
        from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Backend

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
        _interruptibly(lambda: backend.train_from_iterator(texts, trainer))
        return cls(backend.to_str())

    @classmethod
    def load(cls, path: str | Path, *, cache_dir: Path | None = None) -> "Tokenizer":
        """Return the tokenizer of a file or a folder, or the one named `gpt2`.

        Args:
            path: a `tokenizer.json`; a folder with one, or with GPT-2's `encoder.json` and `vocab.bpe` (also named
                `vocab.json` and `merges.txt`); or `gpt2`, which is downloaded unless a file has that name.
                Documents start with `<|bos|>`, or with `<|endoftext|>` if there is no `<|bos|>`; if there is neither,
                `<|bos|>` is added.
            cache_dir: folder for the download; None for the Hub client's own cache.

        Raises:
            DataError: the tokenizer is missing, is not a byte-level BPE, or cannot be downloaded; the message names the
                path.
        """
        definition = _read_definition(str(path), cache_dir)
        try:
            return cls(definition)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json`, which `transformers.PreTrainedTokenizerFast` can load, too.

        Raises:
            DataError: the file cannot be written.
        """
        try:
            write_atomically(Path(path), self.definition)
        except OSError as error:
            raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids including special tokens: one more than the largest id."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without a document start; names of special tokens in it are plain text."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, encoded in parallel."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_parts(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yield the ids of one text that arrives as several strings; together they are the ids of the whole text.

        Memory is needed for a few strings, not for the text. The text is divided between two words, where the tokens of
        usual tokenizers end: few tokenizers have words that go on behind a space. Text without such a place in a
        million characters, DNA for example, is divided there.
        """
        rest = ""
        for text in texts:
            rest += text
            match = _UP_TO_LAST_WORD.match(rest)
            end = match.end() if match else len(rest) if len(rest) >= _MOST_AT_ONCE else 0
            if end:
                yield self.encode(rest[:end])
                rest = rest[end:]
        yield self.encode(rest)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens are skipped, incomplete characters become U+FFFD.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the exact bytes of ids; special tokens have none.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        ids, table = list(ids), self._bytes
        wrong = [index for index in ids if not 0 <= index < len(table)]
        if wrong:
            raise DataError(f"token id {wrong[0]} is outside the vocabulary of {len(table)}")
        return b"".join([table[index] for index in ids])

    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Return the number of bytes of each token: (vocab_size,) int32, 0 for special tokens."""
        return np.array([len(token) for token in self._bytes], dtype=np.int32)

    def fingerprint(self) -> str:
        """Return 32 hex digits that change if a token or a merge changes."""
        canonical = json.dumps(json.loads(self.definition), sort_keys=True)
        return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()

    @cached_property
    def definition(self) -> str:
        """The content of a `tokenizer.json`, which `save` writes and the constructor accepts."""
        return str(self._backend.to_str())

    @cached_property
    def _bytes(self) -> tuple[bytes, ...]:
        """The bytes of each id; empty for special tokens and for unused ids."""
        from_symbol = {symbol: byte for byte, symbol in enumerate(byte_alphabet())}
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocab.values()) + 1)
        for token, index in vocab.items():
            if index in self._is_special:
                table[index] = b"" if self._is_special[index] else token.encode()
            elif all(symbol in from_symbol for symbol in token):
                table[index] = bytes(from_symbol[symbol] for symbol in token)
        return tuple(table)


def _read_definition(name: str, cache_dir: Path | None) -> str:
    """Return the content of a `tokenizer.json` for what `Tokenizer.load` accepts."""
    path = Path(name).expanduser()
    if name == "gpt2" and not path.exists():
        from quintic.data.hub import download

        path = download(_GPT2_REPO, "tokenizer.json", repo_type="model", cache_dir=cache_dir)
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            return _from_gpt2_files(path)
        path = path / "tokenizer.json"
    if path.name.endswith((".tiktoken", ".model", ".bpe")):
        raise DataError(
            f"{name}: cannot be read alone, it holds no complete byte-level BPE; give a tokenizer.json, or a folder "
            "with encoder.json and vocab.bpe"
        )
    if not path.exists():
        raise DataError(f"{name}: no such tokenizer; give a tokenizer.json, a folder with one, or 'gpt2'")
    # Opening a pipe would wait for a writer.
    if not path.is_file():
        raise DataError(f"{name}: a pipe or a device, not a file; give a tokenizer.json")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not a tokenizer.json (not UTF-8 at byte offset {error.start})") from error
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error})") from error


def _from_gpt2_files(folder: Path) -> str:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    for vocab_name, merges_name in _GPT2_FILES:
        vocab_file, merges_file = folder / vocab_name, folder / merges_name
        if vocab_file.is_file() and merges_file.is_file():
            try:
                backend = Backend(models.BPE.from_file(str(vocab_file), str(merges_file)))
            # The library raises a plain `Exception` for any bad file.
            except Exception as error:
                reason = str(error).splitlines()[0]
                raise DataError(f"{folder}: {vocab_name} and {merges_name} do not fit together ({reason})") from error
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
            return str(backend.to_str())
    raise DataError(f"{folder}: no tokenizer.json in it, and no encoder.json with vocab.bpe")


def lost_text(text: bytes, back: bytes) -> str:
    """Return an error message about a text that comes back as other bytes."""
    at = next((at for at, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
    place = text[max(0, at - 10) : at + 20].decode(errors="replace")
    found = back[max(0, at - 10) : at + 20].decode(errors="replace")
    return f"loses text: {place!r} comes back as {found!r}; use a byte-level BPE that keeps every byte"


def _interruptibly(work: Callable[[], object]) -> None:
    """Run long work of the library in a thread, so that Ctrl-C can interrupt the wait for it.

    After an interruption the thread continues until its work is done or the process ends.
    """
    result = Future[object]()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # a panic of the library is no `Exception`
            result.set_exception(error)

    Thread(target=run, daemon=True).start()
    result.result()


def byte_alphabet() -> tuple[str, ...]:
    """Return the character that represents each byte in byte-level vocabularies, as in GPT-2.

    Printable Latin-1 characters represent themselves; the other bytes are represented by U+0100 and so on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


def _stages(stage: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a pre-tokenizer or decoder of a definition and, if it is a sequence, its members, recursively."""
    if not stage:
        return []
    inner = [*(stage.get("pretokenizers") or []), *(stage.get("decoders") or [])]
    return [stage, *(found for part in inner for found in _stages(part))]
