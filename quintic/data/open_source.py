"""`open_source` turns the string that names a text source into a `Source`.

There are three kinds: the standard library of the running Python (`python`), files and folders (a path), and data sets
of the Hugging Face Hub (`hf:owner/name`, in `quintic.data.hub`). `quintic.data.files` decides which files of a folder
are read, and turns files into documents.

`open_sources` opens several sources as one dataset: sources with weights for training, and one for validation only.

    quintic train --data "notes/=0.7 web.jsonl=0.3" --val-data held_out/

A weight is the fraction of the training tokens that comes from a source, regardless of its size:
`quintic.data.rows.MixedRows` takes rows from the sources in proportion, and reads a small source more often. Preparing
writes the sources one after the other into one dataset with one tokenizer, which is trained on samples of all sources
in proportion to their weights.
"""

import hashlib
import json
import math
import platform
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from quintic.data.files.blocks import uncompressed_name
from quintic.data.files.documents import ENDINGS_ADVICE, TEXT_FIELD, format_of, read_documents
from quintic.data.files.folders import list_folder, walk
from quintic.data.source import Source, SourceFile, SplitName, slug
from quintic.errors import DataError

__all__ = ["joined", "open_source", "open_sources", "parse_mixture"]

# Files up to this size are identified by their content, so that a copy on another machine is the same source. Larger
# ones are identified by size and modification time, because hashing terabytes at every start would take too long.
_HASHED_BYTES = 256 << 20
_SMALLEST_SOURCE_BYTES = 200
_TABLE_FRACTION = 0.85
_LEFT_OUT_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_LITERAL_LINE = re.compile(r"""\s*[\[{(]?\s*(?:[urbURB]{0,2}['"\\]|0[xX]|-?\d)""")


def open_source(spec: str, *, cache_dir: Path, text_field: str = TEXT_FIELD) -> Source:
    """Return the text source that a string names; lists its files, but reads no text.

    Args:
        spec: `python` (the running installation's standard library), `hf:owner/name` or `hf:owner/name/config` (a
            data set of the Hub), else the path of a file or folder. Folders are read recursively in sorted order,
            except for files that `list_folder` leaves out. For a folder called `python` write `./python`.
        cache_dir: folder of downloads; it is left out if it lies within the source.
        text_field: the field of JSON, CSV and Parquet that holds the text.

    Raises:
        DataError: the source does not exist, a folder holds no readable file, a file has an unknown ending, or the Hub
            has no such data set or cannot be reached.
    """
    if spec == "python":
        return _python_source(Path(sysconfig.get_paths()["stdlib"]))
    if spec.startswith("hf:"):
        from quintic.data.hub import open_hub

        return open_hub(spec, cache_dir=cache_dir, text_field=text_field)
    return _path_source(spec, cache_dir, text_field)


def open_sources(spec: str, val_data: str | None, *, cache_dir: Path, text_field: str) -> tuple[Source, ...]:
    """Open the sources of a dataset: the sources in `spec`, and then `val_data` if validation has its own source.

    Raises:
        DataError: as `parse_mixture` and `open_source`; or ``val_data`` is a mixture, or one of the training sources.
    """
    open_one = partial(open_source, cache_dir=cache_dir, text_field=text_field)
    words = parse_mixture(spec) or [(spec, 1.0)]
    total = sum(weight for _, weight in words)
    if val_data is not None:
        if parse_mixture(val_data) is not None:
            raise DataError(f"--val-data {val_data!r}: takes one source; put several into one folder")
        if val_data in dict(words):
            raise DataError(
                f"--val-data {val_data}: is also trained on (--data), so its loss would not show how the model does on "
                "new text; give other text, or leave out --val-data to hold back some documents"
            )
    side: SplitName | None = None if val_data is None else "train"
    sources = [replace(open_one(name), weight=weight / total, side=side) for name, weight in words]
    if val_data is not None:
        sources.append(replace(open_one(val_data), weight=0.0, side="val"))
    return tuple(sources)


def joined(sources: Sequence[Source], spec: str) -> Source:
    """Return one source with the documents of all sources, one after the other."""
    if len(sources) == 1:
        return sources[0]
    return Source(
        name=slug("-".join(source.name for source in sources)),
        spec=spec,
        files=tuple(file for source in sources for file in source.files),
        identity=json.dumps([[source.weight, source.side, source.identity, len(source.files)] for source in sources]),
        is_remote=any(source.is_remote for source in sources),
        notes=tuple(note for source in sources for note in source.notes),
    )


def parse_mixture(spec: str) -> list[tuple[str, float]] | None:
    """Return the sources and weights of a mixture, two or more words `SOURCE=WEIGHT`; None for a single source.

    Raises:
        DataError: only some words have a weight, a weight is not a positive number, or a source is given twice.

    >>> parse_mixture("a.txt=0.7 b/=0.3")
    [('a.txt', 0.7), ('b/', 0.3)]
    """
    words = [word.rpartition("=") for word in spec.split()]
    # The path of a single source may have spaces and equals signs, too.
    if len(words) < 2 or not any(sign for _, sign, _ in words) or Path(spec).expanduser().exists():
        return None
    found: list[tuple[str, float]] = []
    for source, _, number in words:
        try:
            weight = float(number) if source else math.nan
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise DataError(
                f"--data {spec!r}: {source or number!r} has no weight; write SOURCE=WEIGHT for each source of a "
                "mixture, with weights above 0 and no spaces in a path"
            )
        if source in dict(found):
            raise DataError(f"--data {spec!r}: {source} is given twice; give it once, with the sum of its weights")
        found.append((source, weight))
    return found


def _path_source(spec: str, cache_dir: Path, text_field: str) -> Source:
    root = Path(spec).expanduser()
    if not spec or not root.exists():
        several = "; `quintic train` and `prepare` take several as one value, 'SOURCE=WEIGHT SOURCE=WEIGHT'"
        raise DataError(
            f"{spec!r}: no such file or folder; a text source is a path, 'python' or 'hf:owner/name[/config]'"
            + (several if " " in spec or "=" in spec else "")
        )
    if root.is_dir():
        paths, notes = list_folder(root, spec, cache_dir=cache_dir, text_field=text_field)
        files = tuple(_source_file(path, path.relative_to(root).as_posix(), text_field) for path in paths)
        name = slug(root.resolve().name)
    else:
        if format_of(root.name) is None:
            raise DataError(f"{spec}: unknown ending; {ENDINGS_ADVICE}")
        # Text is read more than once, and a pipe can be read only once.
        if not root.is_file():
            raise DataError(f"{spec}: a pipe or a device, not a file; write its text to a file first")
        files, notes = (_source_file(root, root.name, text_field),), ()
        name = slug(uncompressed_name(root.name).rpartition(".")[0])
    return Source(
        name=name,
        spec=spec,
        files=files,
        # The default field is not part of the identity, so that text prepared by versions without the option is found.
        identity="files" if text_field == TEXT_FIELD else f"files, field {text_field}",
        notes=notes,
    )


def _source_file(path: Path, name: str, text_field: str) -> SourceFile:
    stat = path.stat()

    def identity() -> str:
        if stat.st_size > _HASHED_BYTES:
            return f"mtime {stat.st_mtime_ns}"
        try:
            with path.open("rb") as file:
                return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error

    return SourceFile(
        name=name, size_bytes=stat.st_size, identity=identity, read=lambda: read_documents(path, text_field)
    )


def _python_source(root: Path) -> Source:
    """Return the standard library under `root`: one document per module, and one per topic of `pydoc_data`.

    Tests, files under 200 bytes, files that are not UTF-8, and tables (see `_is_table`) are left out.
    """
    names: list[str] = []
    for folder, folders, inside in walk(root) if root.is_dir() else ():
        folders[:] = [name for name in folders if name not in _LEFT_OUT_FOLDERS and not name.startswith(".")]
        modules = [name for name in inside if name.endswith(".py") and not name.startswith(".")]
        names += [(folder / name).relative_to(root).as_posix() for name in modules]
    # A zipped or stripped installation has a few build files in the folder, but no modules.
    if not {"os.py", "functools.py"} <= set(names):
        raise DataError(
            f"python: the standard library's sources are not in {root} (a zipped or stripped installation?); "
            "give a text file or folder instead"
        )
    # The version and the sizes identify an installation without hashing every module.
    files = [
        SourceFile(
            name=name, size_bytes=(root / name).stat().st_size, identity=str, read=partial(_read_module, root, name)
        )
        for name in sorted(names)
    ]
    return Source(name="python", spec="python", files=tuple(files), identity=f"python {platform.python_version()}")


def _read_module(root: Path, name: str) -> Iterator[bytes]:
    try:
        text = (root / name).read_bytes().decode()
    except OSError as error:
        raise DataError(f"{root / name}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError:  # the few that declare another encoding
        return
    if name == "pydoc_data/topics.py":
        from pydoc_data.topics import topics

        texts = [topic for _, topic in sorted(topics.items())]
    else:
        texts = [] if _is_table(text) else [text]
    yield from (text.encode() for text in texts if len(text.encode()) >= _SMALLEST_SOURCE_BYTES)


def _is_table(text: str) -> bool:
    """Return whether nearly every line begins with a number or a string, as in character maps and lists of settings."""
    lines = [line for line in text.splitlines() if line.strip()]
    literal = sum(1 for line in lines if _LITERAL_LINE.match(line))
    return literal > _TABLE_FRACTION * len(lines)
