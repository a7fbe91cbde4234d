"""A text source: documents in a fixed order, read part by part."""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quintic.data.files.blocks import Utf8

__all__ = ["NAME_ERRORS", "Source", "SourceFile", "slug"]

# Names of files may be bytes that are no UTF-8, which Python reads as lone surrogates.
NAME_ERRORS = "backslashreplace"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of a source.

    Attributes:
        name: path inside the source, with `/`.
        size_bytes: size as stored, compressed or not; 0 when unknown.
        identity: returns a string that changes when the content does; may read the file.
        read: yields the part's documents in order, as UTF-8; may download the file first.
    """

    name: str
    size_bytes: int
    identity: Callable[[], str]
    read: Callable[[], Iterator[Utf8]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Documents in a fixed order, read part by part, so that reading can go on from any place.

    Attributes:
        name: lower-case letters, digits and `-`; usable in a folder name.
        spec: the string that names the source.
        parts: the files in reading order.
        identity: of the whole source besides its parts, for example a version.
        text_bytes: UTF-8 bytes of all documents where the file sizes tell, else None.
        is_remote: whether reading downloads.
        notes: lines for people about what was left out.
    """

    name: str
    spec: str
    parts: tuple[SourceFile, ...]
    identity: str = ""
    text_bytes: int | None = None
    is_remote: bool = False
    notes: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts as stored."""
        return sum(part.size_bytes for part in self.parts)

    def fingerprint(self) -> str:
        """Return 32 hex digits that change when a file is added, removed, renamed or changed.

        Raises:
            DataError: a file cannot be read.
        """
        digest = hashlib.blake2b(self.identity.encode(), digest_size=16)
        for part in self.parts:
            digest.update(f"\0{part.name}\0{part.size_bytes}\0{part.identity()}".encode(errors=NAME_ERRORS))
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        """Yield every document, always in the same order.

        Raises:
            DataError: a file cannot be read, decoded or downloaded.
        """
        for _, text in self.documents_from((0, 0)):
            yield str(text, "utf-8")

    def documents_from(self, cursor: tuple[int, int]) -> Iterator[tuple[tuple[int, int], Utf8]]:
        """Yield `(cursor, UTF-8 of a document)` from a place on; the cursor names the place after the document.

        Args:
            cursor: (part, document in it) to begin at. Parts before it are not opened; the documents before it in
                its part are read and thrown away.

        Raises:
            DataError: a file cannot be read, decoded or downloaded.
        """
        first_part, skipped = cursor
        for index in range(first_part, len(self.parts)):
            for count, text in enumerate(self.parts[index].read()):
                if index > first_part or count >= skipped:
                    yield (index, count + 1), text


def slug(name: str) -> str:
    """Return a name reduced to lower-case letters, digits and single `-`, at most 40 characters.

    >>> slug("My Corpus_v2")
    'my-corpus-v2'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "text"
