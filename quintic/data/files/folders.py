"""`list_folder` finds the files of a folder that are text to train on, and reports the others.

It leaves out hidden files and folders; folders of installed packages and caches; folders written by Quintic (runs,
prepared text, downloads), recognised by their content and not by their names; files with other endings; and `.json` and
`.csv` files without the field of the text, which are usually settings.
"""

import codecs
import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from quintic.data.files.blocks import COMPRESSIONS, blocks_of, lines_of
from quintic.data.files.documents import ENDINGS_ADVICE, MissingField, format_of, read_documents
from quintic.durable import json_object
from quintic.errors import DataError

__all__ = ["list_folder", "walk"]

# Number of files or endings that a note names.
_NAMED = 6
# Behind a dot, longer names are hashes or words: as many endings as files.
_LONGEST_ENDING = len(".safetensors")
# Longest first line of a log.
_FIRST_RECORD_CHARS = 1 << 20
_COMPRESSED = (*COMPRESSIONS, ".bz2", ".xz", ".lz4", ".zip")
_INSTALLED = frozenset({"node_modules", "site-packages", "dist-packages", "__pycache__"})


def list_folder(root: Path, spec: str, *, cache_dir: Path, text_field: str) -> tuple[list[Path], tuple[str, ...]]:
    """Return the files of a folder that hold text, sorted by path, and messages for users about the other files.

    Messages name the folder by `spec`; `cache_dir`, the folder of downloads, is left out.

    Raises:
        DataError: no file is left, a folder cannot be read, or the folder itself was written by Quintic.
    """
    cache = os.path.realpath(cache_dir)
    found: dict[str, Path] = {}
    own, installed, hidden = "written by Quintic", "of installed packages or caches", "hidden"
    left_out: dict[str, list[str]] = {own: [], installed: [], hidden: []}
    for folder, folders, names in walk(root):
        place = folder.relative_to(root).as_posix()
        kind = "downloads" if os.path.realpath(folder) == cache else _own_kind(folder, {*folders, *names})
        if kind is not None and folder == root:
            raise DataError(f"{spec}: is {kind}, not a folder of text; name the text that it was made from")
        if kind is not None or "pyvenv.cfg" in names or "CACHEDIR.TAG" in names:
            left_out[own if kind else installed].append(f"{place}/ ({kind})" if kind else f"{place}/")
            folders.clear()
            continue
        prefix = "" if place == "." else f"{place}/"
        left_out[hidden] += [f"{prefix}{name}/" for name in folders if name.startswith(".")]
        left_out[hidden] += [f"{prefix}{name}" for name in names if name.startswith(".") and format_of(name)]
        left_out[installed] += [f"{prefix}{name}/" for name in folders if name in _INSTALLED]
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _INSTALLED]
        found |= {f"{prefix}{name}": folder / name for name in names if not name.startswith(".")}

    files: list[Path] = []
    endings: Counter[str] = Counter()
    without_field: dict[str, tuple[str, ...]] = {}
    for name, path in sorted(found.items()):
        if not path.is_file():  # a pipe, or a link to nothing
            continue
        ending = format_of(name)
        if ending is None:
            endings[_ending(path.name)] += 1
        elif ending in (".json", ".csv") and (fields := _fields_without(path, text_field)) is not None:
            without_field[name] = fields
        else:
            files.append(path)

    kinds = [f"{number:,} {ending}" for ending, number in endings.most_common()]
    notes = []
    if endings:
        notes.append(f"{_count(endings.total())} left out for other endings ({_first(kinds)})")
    if without_field:
        names = list(without_field)
        notes.append(f"{_count(len(names))} left out without a field {text_field!r} ({_first(names)})")
    notes += [f"left out as {what}: {_first(paths)}" for what, paths in left_out.items() if paths]
    if not files:
        for name, fields in without_field.items():
            if fields:
                raise MissingField(f"{spec}: {name}", text_field, fields)
        if without_field:
            return [found[next(iter(without_field))]], ()  # the error of reading it explains it
        about = f" ({'; '.join(notes)})" if notes else ""
        raise DataError(f"{spec}: no file with a supported ending{about}; {ENDINGS_ADVICE}")
    return files, tuple(f"{spec}: {note}" for note in notes)


def walk(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield each folder under `root` with the sorted names of its folders and files, as `os.walk` does.

    Links to folders are followed, but each folder is read once. Names removed from the list of folders are skipped.

    Raises:
        DataError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror or error})") from error

    read = set[str]()
    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in read:
            folders.clear()
            continue
        read.add(real)
        folders.sort()
        yield Path(folder), folders, sorted(files)


def _first(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _count(number: int) -> str:
    return f"{number:,} file{'s' * (number > 1)}"


def _own_kind(folder: Path, names: set[str]) -> str | None:
    """Return what kind of folder it is if Quintic has written it, judged by its files; else None."""
    for name, fields, kind in (
        ("manifest.json", {"splits", "tokenizer", "dtype"}, "prepared text"),
        ("progress.json", {"thresholds", "splits"}, "text that is being prepared"),
        ("config.json", {"data", "model", "optim", "schedule", "run"}, "a run"),
    ):
        if name in names and fields <= set(json_object(folder / name)):
            return kind
    if "metrics.jsonl" in names:
        with contextlib.suppress(OSError, ValueError, RecursionError):  # no log, but a file that is read or refused
            record = json.loads(next(lines_of(folder / "metrics.jsonl", _FIRST_RECORD_CHARS), ""))
            if isinstance(record, dict) and "kind" in record and "text" not in record:
                return "a run"
    return None


def _ending(name: str) -> str:
    """Return the ending of an unsupported file for a note, including the ending before that of a compression.

    >>> _ending("part-1.json.xz"), _ending("Dr. Smith's letters")
    ('.json.xz', 'without an ending')
    """
    endings = [ending for ending in Path(name.lower()).suffixes if len(ending) <= _LONGEST_ENDING]
    return "".join(endings[-2:] if endings[-1:] and endings[-1] in _COMPRESSED else endings[-1:]) or "without an ending"


def _fields_without(path: Path, text_field: str) -> tuple[str, ...] | None:
    """Return the fields of the first record if it lacks the text's field; None if the file should be read.

    A damaged file counts as a file to read, so that reading it raises an error that explains the damage. A file that
    cannot be read and begins without the field's name is of another kind: a list of numbers, settings with comments.
    """
    try:
        next(read_documents(path, text_field), None)
    except MissingField as error:
        return error.fields
    except DataError:
        with contextlib.suppress(DataError, UnicodeDecodeError):
            # Not `bytes.decode`: the block may end within a character.
            text = codecs.getincrementaldecoder("utf-8")().decode(next(blocks_of(path), b""))
            return None if text_field in text else ()
    return None
