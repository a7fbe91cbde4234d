"""Atomic writes of files and folders: readers, also after a crash, find the complete old or the complete new content.

Phases of a write: write the content under a temporary name in the same folder; flush it to disk; rename it; flush the
folder. Without the first flush, a crash may leave the new name without content; without the second, the old name.
"""

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "DISK_FULL",
    "discard",
    "flush",
    "json_object",
    "lock",
    "new_folder",
    "remove_unfinished",
    "replace",
    "save_tensors",
    "unused",
    "write_atomically",
]

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors of a disk or a quota that is full."""

# Errors of systems that cannot flush a folder: some network file systems, and Windows, which cannot open it.
_NO_FOLDER_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the content of a file, text in UTF-8. If several processes write at once, the last one wins.

    Raises:
        OSError: the file cannot be written. Its old content stays, and no temporary file remains.
    """
    if not path.name:  # "." and "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        unfinished.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def save_tensors(tensors: dict[str, Any], path: Path) -> None:
    """Write PyTorch tensors by name to a file in the safetensors format.

    Raises:
        OSError: the file cannot be written. It is recovered from the text of safetensors' own exception.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:
        match = re.search(r"I/O error: (.*) \(os error (\d+)\)", str(error))
        if match is None:
            raise
        # Windows derives errno from the last argument, other systems ignore it.
        raise OSError(int(match[2]), match[1], str(path), int(match[2])) from None


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def unused(path: Path) -> Path:
    """Return a path, with -2, -3 and so on at its end if something of that name exists."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([path], numbered) if not one.exists())


@contextlib.contextmanager
def new_folder(path: Path, *, discard_old: bool = False) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `path` when the block ends, or deleted after an exception.

    Args:
        path: as for `replace`; its parent folders are created.
        discard_old: as for `replace`.

    Raises:
        OSError: the folder cannot be made, flushed or renamed.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        replace(unfinished, path, discard_old=discard_old)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def replace(finished: Path, path: Path, *, discard_old: bool = False) -> None:
    """Flush a finished file, or a folder with its files, and rename it to `path` in the same parent folder.

    Files in a folder get the folder's permissions to read and write.

    Args:
        finished: the file or folder.
        path: the new name. An existing file is replaced; an existing folder must be empty, or is deleted if
            `discard_old`.
        discard_old: see `path`.

    Raises:
        OSError: it cannot be flushed or renamed. If only flushing the parent folder failed, `path` is already replaced.
    """
    if finished.is_dir():
        readers = finished.stat().st_mode & 0o666
        for inner in sorted(finished.iterdir()):
            with contextlib.suppress(OSError):  # some libraries create files that only their owner can read
                inner.chmod(inner.stat().st_mode | readers)
            flush(inner)
    flush(finished)
    if discard_old and path.is_dir():
        discard(path)
    os.replace(finished, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Force a file to disk, or the names in a folder, where the file system can do that for folders.

    Raises:
        OSError: the disk is full or broken.
    """
    is_folder = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not (is_folder and error.errno in _NO_FOLDER_FLUSH):
            raise


def discard(folder: Path) -> None:
    """Delete a folder in one step for readers: rename it first, to a name that `remove_unfinished` deletes.

    Raises:
        OSError: the folder cannot be renamed.
    """
    hidden = folder.with_name(f".{folder.name}.{os.getpid()}.old.tmp")
    os.replace(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def lock(descriptor: int, *, wait: bool) -> None:
    """Lock an open file against other processes until it is closed or this process ends.

    Args:
        descriptor: of the file, open for writing. The file must never be deleted, or two processes could lock two
            files of the same name.
        wait: wait for a process that holds the lock.

    Raises:
        BlockingIOError, PermissionError: another process holds the lock, and `wait` is false.
        OSError: the file system has no locks.
    """
    if sys.platform == "win32":
        import msvcrt

        # Lock one byte far beyond the content, because locked bytes cannot be read, and others read the holder's name.
        os.lseek(descriptor, 2**30, os.SEEK_SET)
        while True:
            try:
                return msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
            except OSError:  # LK_LOCK gives up after ten seconds
                if not wait:
                    raise
            time.sleep(0.1)
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_unfinished(folder: Path) -> None:
    """Delete temporary files and folders of killed processes; no other process may be writing to `folder`."""
    for path in folder.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
