"""The split into training and validation text, and a first look at a source: threshold, and text for the tokenizer.

The rules are stated in `quintic.data.shards`, which uses them.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from quintic.data.documents import MAX_DOCUMENT_BYTES, split_document
from quintic.data.source import NAME_ERRORS, Source
from quintic.errors import DataError

__all__ = ["Survey", "pieces_within", "survey", "text_hash"]

_HASH_RANGE = 1 << 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The result of a first look at a source.

    Attributes:
        texts: training text for the tokenizer.
        text_bytes: UTF-8 bytes read for it.
        threshold: a document whose `text_hash` is below it is validation text.
    """

    texts: list[str]
    text_bytes: int
    threshold: int


def text_hash(data: bytes) -> int:
    """Return the hash of a document's UTF-8 text, evenly spread from 0 to 2**64 - 1."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def pieces_within(text: str, max_bytes: int | None, before: int) -> Iterator[tuple[str, bytes]]:
    """Yield the pieces of a document with their UTF-8 text, up to the one that reaches the end of the text used.

    Args:
        text: the document.
        max_bytes: the text used ends after so many bytes; all is used when None.
        before: bytes of the documents before this one.
    """
    for piece in split_document(text):
        if max_bytes is not None and before >= max_bytes:
            return
        data = piece.encode()
        before += len(data)
        yield piece, data


def survey(source: Source, *, val_frac: float, max_bytes: int | None, sample_bytes: int) -> Survey:
    """Read a sample of a source; where it is the whole source, see that both sides get a document.

    Args:
        source: the text.
        val_frac: wanted fraction of validation documents.
        max_bytes: the text used ends after so many bytes; all is used when None.
        sample_bytes: read about so much, at least 1.

    Raises:
        DataError: there is no text, or all of it is one document.
    """
    threshold = int(val_frac * _HASH_RANGE)
    in_order = source.is_remote or max_bytes is not None
    budget = sample_bytes if max_bytes is None else min(sample_bytes, max_bytes)
    seen = sampled = 0
    complete = True
    hashes: list[int] = []
    pieces: list[tuple[int, int, str]] = []
    for text in _sample_documents(source, in_order=in_order):
        if seen >= budget:
            complete = max_bytes is not None and max_bytes <= sample_bytes
            break
        cut = [(text_hash(data), len(data), piece) for piece, data in pieces_within(text, max_bytes, seen)]
        size = sum(length for _, length, _ in cut)
        # Pieces at even distances, if the document is too much for the sample.
        chosen = cut[:: -(-size // (sample_bytes - sampled))]
        hashes += [value for value, _, _ in cut]
        pieces += chosen
        seen += size
        sampled = min(sampled + sum(length for _, length, _ in chosen), sample_bytes - 1)
    if not hashes:
        raise DataError(f"{source.spec}: there is no text in it; give a source with text")
    if complete:
        smallest, largest = min(hashes), max(hashes)
        if smallest == largest:
            advice = f"give two different documents or one of more than {MAX_DOCUMENT_BYTES:,} bytes"
            raise DataError(
                f"{source.spec}: one document of {pieces[0][1]:,} bytes, or copies of it, cannot be split into "
                f"training and validation text; {advice if max_bytes is None else f'raise --max-bytes ({max_bytes:,})'}"
            )
        threshold = min(max(threshold, smallest + 1), largest)
    texts = [text for value, _, text in pieces if value >= threshold]
    return Survey(texts=texts, text_bytes=sampled, threshold=threshold)


def _sample_documents(source: Source, *, in_order: bool) -> Iterator[str]:
    if in_order:
        yield from source.documents()
    else:
        for part in sorted(source.parts, key=lambda part: text_hash(part.name.encode(errors=NAME_ERRORS))):
            yield from part.read()
