"""Files and folders that appear whole: a reader, or a restart after a crash, finds the old content or the new one.

Content is written under another name in the same folder, flushed to disk, and renamed; then the folder is flushed.
Without the first flush a crash may leave the new name with no content, without the second the old name.
"""

import contextlib
import errno
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
    "discard",
    "flush",
    "json_object",
    "lock",
    "new_folder",
    "remove_unfinished",
    "replace",
    "save_tensors",
    "write_atomically",
]

# Errors of file systems that cannot flush a folder (some network file systems; Windows, where it cannot be opened).
_NO_FOLDER_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Give a file new content, a text in UTF-8. Of several processes that write at once, the last one wins.

    Raises:
        OSError: the file cannot be written; it is what it was, and nothing else is left behind.
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
    """Write PyTorch tensors by name to a file, in the format of safetensors.

    Raises:
        OSError: the file cannot be written; safetensors raises an exception of its own, whose text has the system's.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:
        match = re.search(r"I/O error: (.*) \(os error (\d+)\)", str(error))
        if match is None:
            raise
        # Windows makes its errno of the last number, other systems ignore that.
        raise OSError(int(match[2]), match[1], str(path), int(match[2])) from None


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds; an empty one if the file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


@contextlib.contextmanager
def new_folder(path: Path, *, discard_old: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` when the block ends; after an exception nothing of it is left.

    Args:
        path: as for `replace`; folders above it are made.
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
    """Flush a finished file, or a folder and the files in it, and rename it to `path`, in the same folder.

    Whoever can read or write the folder can do so with the files in it.

    Args:
        finished: the file or folder.
        path: its new name. A file of that name is replaced; a folder must be empty, or is deleted if `discard_old`.
        discard_old: see `path`.

    Raises:
        OSError: it cannot be flushed or renamed. Where only the flush of the folder failed, `path` is new already.
    """
    if finished.is_dir():
        readers = finished.stat().st_mode & 0o666
        for inner in sorted(finished.iterdir()):
            with contextlib.suppress(OSError):  # libraries may make files that only their owner can read
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
    """Delete a folder that never shows half deleted: it gets a name that `remove_unfinished` knows first.

    Raises:
        OSError: it cannot be renamed.
    """
    hidden = folder.with_name(f".{folder.name}.{os.getpid()}.old.tmp")
    os.replace(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def lock(descriptor: int, *, wait: bool) -> None:
    """Lock an open file among processes, until it is closed or the process dies.

    Args:
        descriptor: of the file, open for writing. It must stay where it is: after a removal, two processes could hold
            two files of the same name.
        wait: whether to wait for a process that has the lock.

    Raises:
        BlockingIOError, PermissionError: another process has it, and `wait` is false.
        OSError: the file system has no locks.
    """
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, 2**30, os.SEEK_SET)  # others may not read what is locked, but shall read who has it
        while True:
            try:
                return msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
            except OSError:  # after ten seconds it gives up waiting
                if not wait:
                    raise
            time.sleep(0.1)
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_unfinished(folder: Path) -> None:
    """Delete the leftovers of killed writers in a folder that no other process writes to now."""
    for path in folder.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
