"""`Source`: documents in a fixed order, read file by file."""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["NAME_ERRORS", "SPLITS", "Source", "SourceFile", "SplitName", "slug"]

SplitName = Literal["train", "val"]
SPLITS: tuple[SplitName, ...] = ("train", "val")

# How to encode file names: a name that is not UTF-8 has lone surrogates in Python.
NAME_ERRORS = "backslashreplace"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of a source.

    Attributes:
        name: path within the source, with `/`.
        size_bytes: size of the stored file, compressed or not; 0 if unknown.
        identity: returns a string that changes when the content changes; may read the file.
        read: yields the file's documents in order, as UTF-8; may download the file first.
    """

    name: str
    size_bytes: int
    identity: Callable[[], str]
    read: Callable[[], Iterator[bytes]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Documents in a fixed order, read file by file.

    Attributes:
        name: lower-case letters, digits and `-`; usable in a folder name.
        spec: the string that names the source.
        files: the files in reading order.
        identity: identity of the source in addition to its files, for example a version.
        is_remote: whether reading downloads files.
        notes: messages for users about files that were left out.
        weight: fraction of the training tokens, if there are several sources; 0 for validation text.
        side: the split of all of its documents; None to divide them by hash.
    """

    name: str
    spec: str
    files: tuple[SourceFile, ...]
    identity: str = ""
    is_remote: bool = False
    notes: tuple[str, ...] = ()
    weight: float = 1.0
    side: SplitName | None = None

    def fingerprint(self) -> str:
        """Return 32 hex digits that change if a file is added, removed, renamed or changed.

        Raises:
            DataError: a file cannot be read.
        """
        digest = hashlib.blake2b(self.identity.encode(), digest_size=16)
        for file in self.files:
            digest.update(f"\0{file.name}\0{file.size_bytes}\0{file.identity()}".encode(errors=NAME_ERRORS))
        return digest.hexdigest()

    def documents(self) -> Iterator[bytes]:
        """Yield every document as UTF-8, in a fixed order.

        Raises:
            DataError: a file cannot be read, decoded or downloaded.
        """
        for file in self.files:
            yield from file.read()


def slug(name: str) -> str:
    """Return a name reduced to lower-case letters, digits and single `-`, at most 40 characters.

    >>> slug("My Corpus_v2")
    'my-corpus-v2'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "text"
