"""`list_folder` finds the files of a folder that are text to train on, and reports the others.

It leaves out hidden files and folders; folders of installed packages and caches; folders written by Quintic (runs,
prepared text, downloads), recognised by their content and not by their names; files with other endings; and `.json` and
`.csv` files without the field of the text, which are usually settings.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from quintic.data.files.blocks import COMPRESSIONS
from quintic.data.files.documents import ENDINGS_ADVICE, has_fields, is_supported, read_documents
from quintic.data.files.fields import MissingField
from quintic.durable import json_object
from quintic.errors import DataError

__all__ = ["list_folder", "visible_files"]

# Number of files or endings that a note names.
_NAMED = 6
# Bytes of a log's first line that are read.
_FIRST_RECORD_BYTES = 1 << 16
_COMPRESSED = (*COMPRESSIONS, ".bz2", ".xz", ".lz4", ".zip")
_INSTALLED = frozenset({"node_modules", "site-packages", "dist-packages", "__pycache__"})


class _LeftOut:
    """Files and folders that were left out, by reason."""

    def __init__(self) -> None:
        self.endings: Counter[str] = Counter()
        self.hidden: list[str] = []
        self.installed: list[str] = []
        self.own: list[str] = []
        self.without_field: dict[str, tuple[str, ...]] = {}
        """Path -> names of its fields."""

    def notes(self, spec: str, text_field: str) -> Iterator[str]:
        """Yield a message for users for each reason."""
        if self.endings:
            count = self.endings.total()
            kinds = [f"{number:,} {ending}" for ending, number in self.endings.most_common()]
            yield f"{spec}: {count:,} file{'s' * (count > 1)} left out for other endings ({_some(kinds)})"
        if self.without_field:
            count = len(self.without_field)
            names = _some(self.without_field)
            yield f"{spec}: {count:,} file{'s' * (count > 1)} left out without a field {text_field!r} ({names})"
        for paths, what in (
            (self.own, "written by Quintic"),
            (self.installed, "of installed packages or caches"),
            (self.hidden, "hidden"),
        ):
            if paths:
                yield f"{spec}: left out as {what}: {_some(paths)}"


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def list_folder(root: Path, spec: str, *, cache_dir: Path, text_field: str) -> tuple[list[Path], tuple[str, ...]]:
    """Return the files of a folder that hold text, sorted by path, and messages for users about the other files.

    Args:
        root: the folder.
        spec: the user's name of the folder, for messages.
        cache_dir: folder of downloads, which is left out.
        text_field: the field of JSON and CSV that holds the text.

    Raises:
        DataError: no file is left, a folder cannot be read, or the folder itself was written by Quintic.
    """
    kind = _own_kind(root, set(os.listdir(root)) if os.access(root, os.R_OK) else set())
    if kind is not None:
        raise DataError(f"{spec}: is {kind}, not a folder of text; name the text that it was made from")
    left_out = _LeftOut()
    found = sorted(
        visible_files(root, _INSTALLED, left_out, cache_dir=cache_dir),
        key=lambda path: path.relative_to(root).as_posix(),
    )
    files = []
    for path in found:
        if not is_supported(path.name):
            left_out.endings[_ending(path.name)] += 1
        elif has_fields(path.name) and (fields := _fields_without(path, text_field)) is not None:
            left_out.without_field[path.relative_to(root).as_posix()] = fields
        else:
            files.append(path)
    notes = tuple(left_out.notes(spec, text_field))
    if not files:
        if left_out.without_field:
            name, fields = next(iter(left_out.without_field.items()))
            raise MissingField(f"{spec}: {name}", text_field, fields)
        about = "; ".join(note.removeprefix(f"{spec}: ") for note in notes)
        raise DataError(f"{spec}: no file with a supported ending{f' ({about})' if about else ''}; {ENDINGS_ADVICE}")
    return files, notes


def visible_files(
    root: Path,
    unwanted: frozenset[str] = frozenset(),
    left_out: _LeftOut | None = None,
    *,
    cache_dir: Path | None = None,
) -> Iterator[Path]:
    """Yield the files of a folder, recursively, except hidden ones; links to folders are followed, each folder once.

    Args:
        root: the folder.
        unwanted: names of folders to skip.
        left_out: record of skipped files; folders written by Quintic and environments are skipped only if it is given.
        cache_dir: a folder to skip.

    Raises:
        DataError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror or error})") from error

    cache = None if cache_dir is None else os.path.realpath(cache_dir)
    read = set[str]()
    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        # A link to a folder that was already read, or a cycle of links.
        if (real := os.path.realpath(folder)) in read:
            folders.clear()
            continue
        read.add(real)
        place = Path(folder).relative_to(root).as_posix()
        if left_out is not None:
            own = "downloads" if real == cache else _own_kind(Path(folder), {*folders, *files})
            if own is not None or _is_installed(files):
                names = left_out.installed if own is None else left_out.own
                names.append(f"{place}/" if own is None else f"{place}/ ({own})")
                folders.clear()
                continue
            prefix = "" if place == "." else f"{place}/"
            left_out.hidden += [f"{prefix}{name}/" for name in sorted(folders) if name.startswith(".")]
            left_out.hidden += [
                f"{prefix}{name}" for name in sorted(files) if name.startswith(".") and is_supported(name)
            ]
            left_out.installed += [f"{prefix}{name}/" for name in sorted(folders) if name in unwanted]
        # os.walk descends into the folders that are left in the list, in its order.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in unwanted)
        for name in files:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _own_kind(folder: Path, names: set[str]) -> str | None:
    """Return what kind of folder it is if Quintic has written it, judged by its files; else None."""
    if "manifest.json" in names and {"splits", "tokenizer", "dtype"} <= _fields(folder / "manifest.json"):
        return "prepared text"
    if "progress.json" in names and {"cursor", "splits"} <= _fields(folder / "progress.json"):
        return "text that is being prepared"
    if "metrics.jsonl" in names and _is_log(folder / "metrics.jsonl"):
        return "a run"
    if "config.json" in names and {"data", "model", "optim", "schedule", "run"} <= _fields(folder / "config.json"):
        return "a run"
    return None


def _is_log(path: Path) -> bool:
    """Return whether a file is the log of a run: its records have a field "kind" and no text."""
    try:
        with path.open("rb") as file:
            record = json.loads(file.readline(_FIRST_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and "kind" in record and "text" not in record


def _fields(path: Path) -> set[str]:
    return set(json_object(path))


def _is_installed(files: list[str]) -> bool:
    """Return whether files mark their folder as a Python environment or a cache."""
    return "pyvenv.cfg" in files or "CACHEDIR.TAG" in files


def _ending(name: str) -> str:
    """Return the ending of an unsupported file for a note, including the ending before that of a compression.

    >>> _ending("part-1.json.xz"), _ending("Makefile")
    ('.json.xz', 'without an ending')
    """
    packed = next((ending for ending in _COMPRESSED if name.lower().endswith(ending)), "")
    stem = name[: len(name) - len(packed)]
    _, dot, ending = stem.rpartition(".")
    if dot and 0 < len(ending) <= 10:
        return f".{ending.lower()}{packed}"
    return packed or "without an ending"


def _fields_without(path: Path, text_field: str) -> tuple[str, ...] | None:
    """Return the fields of the first record if it lacks the text's field; None if the file should be read.

    A damaged file counts as a file to read, so that reading it raises an error that explains the damage.
    """
    try:
        next(read_documents(path, text_field), None)
    except MissingField as error:
        return error.fields or ()
    except DataError:
        return None
    return None
