"""`survey_sources` reads samples: for the bound between validation and training text, and for the tokenizer.

`quintic.data.preparation`, which uses it, states the rules.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from quintic.data.files.documents import MAX_DOCUMENT_BYTES, sections_of
from quintic.data.source import NAME_ERRORS, Source
from quintic.errors import DataError

__all__ = ["limited_sample", "sections_within", "survey_sources", "text_hash"]

_HASH_RANGE = 1 << 64
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


def text_hash(data: bytes) -> int:
    """Return the hash of a document's UTF-8 text, uniformly distributed from 0 to 2**64 - 1."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def sections_within(documents: Iterable[bytes], max_bytes: int | None) -> Iterator[bytes]:
    """Yield the sections of documents, up to the section that reaches the limit of the text; None for no limit."""
    num_bytes = 0
    for document in documents:
        for piece in sections_of(document):
            num_bytes += len(piece)
            yield piece
            if max_bytes is not None and num_bytes >= max_bytes:
                return


def survey_sources(
    sources: Sequence[Source], *, val_frac: float, max_bytes: int | None, sample_bytes: int
) -> tuple[list[bytes], list[int]]:
    """Read a sample of each source: in all about `sample_bytes`, divided among the sources by their weights.

    Returns:
        The training text for the tokenizer, and for each source the threshold of `text_hash` below which its documents
        are validation text.

    Raises:
        DataError: a source has no text, or one document that would have to be divided.
    """
    texts: list[bytes] = []
    thresholds: list[int] = []
    for source in sources:
        if source.side == "val":
            if next(source.documents(), None) is None:
                raise DataError(f"--val-data {source.spec}: there is no text in it; give a source with text")
            # Every hash is below it: all documents are validation text, and none is for the tokenizer.
            thresholds.append(_HASH_RANGE)
            continue
        sample, threshold = _survey(
            source,
            val_frac=val_frac if source.side is None else 0.0,
            max_bytes=max_bytes,
            sample_bytes=max(1, int(sample_bytes * source.weight)),
        )
        texts += sample
        thresholds.append(threshold)
    # Each sample is within the tokenizer's limits, but all samples together may exceed them.
    return limited_sample(texts) if len(sources) > 1 else texts, thresholds


def _survey(source: Source, *, val_frac: float, max_bytes: int | None, sample_bytes: int) -> tuple[list[bytes], int]:
    """Survey one source; if the sample is all of it, move the threshold so that both sides get a document.

    With `val_frac` 0 there is no validation text, even in a small source.
    """
    budget = sample_bytes if max_bytes is None else min(sample_bytes, max_bytes)
    seen = sampled = 0
    complete = True
    hashes: list[int] = []
    first_bytes = 0
    pieces: list[bytes] = []
    files = source.files
    if not source.is_remote and max_bytes is None:
        files = tuple(sorted(files, key=lambda file: text_hash(file.name.encode(errors=NAME_ERRORS))))
    for document in chain.from_iterable(file.read() for file in files):
        if seen >= budget:
            complete = max_bytes is not None and max_bytes <= sample_bytes
            break
        rest = None if max_bytes is None else max_bytes - seen
        sections = list(sections_within([document], rest))
        size = sum(map(len, sections))
        first_bytes = first_bytes or len(sections[0])
        # Of a document that is too large for the rest of the sample, every `stride`-th section is used.
        stride = -(-size // (sample_bytes - sampled))
        hashes += map(text_hash, sections)
        pieces += sections[::stride]
        seen += size
        sampled = min(sampled + sum(map(len, sections[::stride])), sample_bytes - 1)
    if not hashes:
        raise DataError(f"{source.spec}: there is no text in it; give a source with text")
    threshold = int(val_frac * _HASH_RANGE)
    if complete and val_frac > 0:
        smallest, largest = min(hashes), max(hashes)
        if smallest == largest:
            advice = f"give two different documents or one of more than {MAX_DOCUMENT_BYTES:,} bytes"
            raise DataError(
                f"{source.spec}: one document of {first_bytes:,} bytes, or copies of it, cannot be split into "
                f"training and validation text; {advice if max_bytes is None else f'raise --max-bytes ({max_bytes:,})'}"
            )
        threshold = min(max(threshold, smallest + 1), largest)
    return limited_sample([piece for piece in pieces if text_hash(piece) >= threshold]), threshold


def limited_sample(pieces: Sequence[bytes]) -> list[bytes]:
    """Return the sections that a tokenizer can be trained on in limited memory and time: all sections of ordinary text.

    Text without spaces (DNA), whose words are as long as its sections, and text whose words are all different (Chinese,
    hexadecimal numbers) exceed the limits; then sections are drawn by hash, at least one.
    """
    # A fast first check: strings between spaces contain the words, so if these strings are within the limits, so are
    # the words.
    if len(_choose_within_limits(enumerate(pieces), bytes.split)) == len(pieces):
        return list(pieces)
    by_hash = sorted(enumerate(pieces), key=lambda item: text_hash(item[1]))
    chosen = _choose_within_limits(by_hash, lambda piece: [word.encode() for word in _RUNS.findall(piece.decode())])
    return [pieces[number] for number in sorted(chosen)]


def _choose_within_limits(
    pieces: Iterable[tuple[int, bytes]], words_of: Callable[[bytes], Iterable[bytes]]
) -> list[int]:
    """Return the numbers of the first section, and of each later one whose new words are within the limits."""
    words = set[bytes]()
    num_bytes = work = 0
    chosen: list[int] = []
    for number, piece in pieces:
        new_words = set(words_of(piece)) - words
        bytes_with = num_bytes + sum(map(len, new_words))
        work_with = work + sum(len(word) * min(len(word), _MERGES) for word in new_words)
        if not chosen or (bytes_with <= _WORD_BYTES and work_with <= _WORD_WORK):
            words |= new_words
            num_bytes, work = bytes_with, work_with
            chosen.append(number)
    return chosen
