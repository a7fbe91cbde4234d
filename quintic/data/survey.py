"""`survey` reads a sample of a source, for the bound between validation and training text and for the tokenizer.

`quintic.data.preparation`, which uses it, states the rules.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from quintic.data.files.blocks import Utf8
from quintic.data.files.documents import MAX_DOCUMENT_BYTES, sections_of
from quintic.data.source import NAME_ERRORS, Source
from quintic.errors import DataError

__all__ = ["HASH_RANGE", "Survey", "limited_sample", "sections_within", "survey", "text_hash"]

HASH_RANGE = 1 << 64
"""Upper bound of `text_hash`."""

# Limits of memory and time for training a tokenizer. Memory: about 130 bytes for each byte of different words. Time:
# every merge visits all words that contain its pair, and a word takes part in about as many merges as it has bytes, so
# its work is its length times the number of its merges, at about 10 nanoseconds. Ordinary text stays far below both:
# 32 MiB of web text have 1.2 MB of different words.
_WORD_BYTES = 5 << 20
_WORD_WORK = 15 * 10**8
# Upper bound of the merges of one word.
_MERGES = 4096
# Roughly the words that the tokenizer's own pattern finds.
_RUNS = re.compile(r"[^\W\d_]+|\d+|\s+|[^\w\s]+|_+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The result of a survey.

    Attributes:
        texts: training text for the tokenizer, as UTF-8.
        text_bytes: number of UTF-8 bytes in the sample.
        threshold: documents with a `text_hash` below it are validation text.
    """

    texts: list[bytes]
    text_bytes: int
    threshold: int


def text_hash(data: bytes) -> int:
    """Return the hash of a document's UTF-8 text, uniformly distributed from 0 to 2**64 - 1."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def sections_within(document: Utf8, max_bytes: int | None, before: int) -> Iterator[bytes]:
    """Yield the sections of a document, up to the section that reaches the limit of the text.

    Args:
        document: the document as UTF-8.
        max_bytes: limit of the bytes of text of the whole source; None for no limit.
        before: number of bytes of the documents before this one.
    """
    for piece in sections_of(document):
        if max_bytes is not None and before >= max_bytes:
            return
        before += len(piece)
        yield piece


def survey(source: Source, *, val_frac: float, max_bytes: int | None, sample_bytes: int) -> Survey:
    """Read a sample of a source; if it is the whole source, move the threshold so that both sides get a document.

    Args:
        source: the text.
        val_frac: fraction of the documents for validation; with 0 there are none, even in a small source.
        max_bytes: limit of the bytes of text of the whole source; None for no limit.
        sample_bytes: approximate size of the sample, at least 1.

    Raises:
        DataError: there is no text, or all of it is one document.
    """
    threshold = int(val_frac * HASH_RANGE)
    in_order = source.is_remote or max_bytes is not None
    budget = sample_bytes if max_bytes is None else min(sample_bytes, max_bytes)
    seen = sampled = 0
    complete = True
    hashes: list[int] = []
    first_bytes = 0
    pieces: list[tuple[int, bytes]] = []
    for document in _sample_documents(source, in_order=in_order):
        if seen >= budget:
            complete = max_bytes is not None and max_bytes <= sample_bytes
            break
        # Divided twice, for the sizes and for the sections: all sections of a long document at once would be a copy.
        sizes = [len(piece) for piece in sections_within(document, max_bytes, seen)]
        first_bytes = first_bytes or sizes[0]
        # Of a document that is too large for the rest of the sample, every `stride`-th section is used.
        stride = -(-sum(sizes) // (sample_bytes - sampled))
        for number, piece in enumerate(sections_within(document, max_bytes, seen)):
            value = text_hash(piece)
            hashes.append(value)
            if number % stride == 0:
                pieces.append((value, piece))
        seen += sum(sizes)
        sampled = min(sampled + sum(sizes[::stride]), sample_bytes - 1)
    if not hashes:
        raise DataError(f"{source.spec}: there is no text in it; give a source with text")
    if complete and val_frac > 0:
        smallest, largest = min(hashes), max(hashes)
        if smallest == largest:
            advice = f"give two different documents or one of more than {MAX_DOCUMENT_BYTES:,} bytes"
            raise DataError(
                f"{source.spec}: one document of {first_bytes:,} bytes, or copies of it, cannot be split into "
                f"training and validation text; {advice if max_bytes is None else f'raise --max-bytes ({max_bytes:,})'}"
            )
        threshold = min(max(threshold, smallest + 1), largest)
    return Survey(
        texts=limited_sample([(value, piece) for value, piece in pieces if value >= threshold]),
        text_bytes=sampled,
        threshold=threshold,
    )


def limited_sample(pieces: list[tuple[int, bytes]]) -> list[bytes]:
    """Return the sections that a tokenizer can be trained on in limited memory and time: all sections of ordinary text.

    Text without spaces (DNA), whose words are as long as its sections, and text whose words are all different (Chinese,
    hexadecimal numbers) exceed the limits; then sections are drawn by hash, at least one.

    Args:
        pieces: `text_hash` and UTF-8 of each section.
    """
    # A fast first check: strings between spaces contain the words, so if these strings are within the limits, so are
    # the words.
    parts = set[bytes]()
    num_bytes = work = 0
    for _, piece in pieces:
        new_parts = set(piece.split()) - parts
        parts |= new_parts
        num_bytes, work = _with_costs(num_bytes, work, new_parts)
        if not _fits(num_bytes, work):
            break
    else:
        return [piece for _, piece in pieces]
    words = set[str]()
    num_bytes = work = 0
    chosen: list[int] = []
    for number, (_, piece) in sorted(enumerate(pieces), key=lambda numbered: numbered[1][0]):
        new_words = set(_RUNS.findall(piece.decode())) - words
        costs = _with_costs(num_bytes, work, (word.encode() for word in new_words))
        if not chosen or _fits(*costs):
            words |= new_words
            num_bytes, work = costs
            chosen.append(number)
    return [pieces[number][1] for number in sorted(chosen)]


def _with_costs(num_bytes: int, work: int, words: Iterable[bytes]) -> tuple[int, int]:
    """Return the bytes of different words, and the work of training on them, after adding more words."""
    for word in words:
        num_bytes += len(word)
        work += len(word) * min(len(word), _MERGES)
    return num_bytes, work


def _fits(num_bytes: int, work: int) -> bool:
    return num_bytes <= _WORD_BYTES and work <= _WORD_WORK


def _sample_documents(source: Source, *, in_order: bool) -> Iterator[Utf8]:
    if in_order:
        for _, document in source.documents_from((0, 0)):
            yield document
    else:
        for file in sorted(source.files, key=lambda file: text_hash(file.name.encode(errors=NAME_ERRORS))):
            yield from file.read()
