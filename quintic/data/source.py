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
    """One file of a source."""

    name: str  # path within the source, with `/`
    size_bytes: int  # of the stored file, compressed or not; 0 if unknown
    identity: Callable[[], str]  # returns a string that changes when the content changes; may read the file
    read: Callable[[], Iterator[bytes]]  # yields the documents in order, as UTF-8; may download the file first


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Documents in a fixed order, read file by file."""

    name: str  # lower-case letters, digits and `-`; usable in a folder name
    spec: str  # the string that names the source
    files: tuple[SourceFile, ...]  # in reading order
    identity: str = ""  # of the source in addition to its files, for example a version
    is_remote: bool = False  # whether reading downloads files
    notes: tuple[str, ...] = ()  # messages for users about files that were left out
    weight: float = 1.0  # fraction of the training tokens, if there are several sources; 0 for validation text
    side: SplitName | None = None  # the split of all of its documents; None to divide them by hash

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
