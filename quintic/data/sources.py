"""Text sources: `open_source` turns a source string into documents in a fixed order.

Three kinds: the standard library of the running Python (`python`), files and folders (a path), and data sets of the
Hugging Face Hub (`hf:owner/name`, in `quintic.data.hub`). Which files of a folder are read, and how one file becomes
documents, is in `quintic.data.files`; splitting into training and validation text is in `quintic.data.shards`.
"""

import ast
import hashlib
import platform
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from quintic.data.files.blocks import Utf8, uncompressed_name
from quintic.data.files.documents import ENDINGS_ADVICE, TEXT_FIELD, is_supported, read_documents, stored_as_text
from quintic.data.files.folders import list_folder, visible_files
from quintic.data.source import Source, SourceFile, slug
from quintic.errors import DataError

__all__ = ["open_source"]

# Files up to this size are known by their content, so that a copy on another machine is the same source; larger
# ones by size and modification time, because hashing terabytes at each start would take longer than it saves.
_HASHED_BYTES = 256 << 20
_SMALLEST_SOURCE_BYTES = 200
_TABLE_FRACTION = 0.85
_LEFT_OUT_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_LITERAL_LINE = re.compile(r"""\s*[\[{(]?\s*(?:[urbURB]{0,2}['"\\]|0[xX]|-?\d)""")


def open_source(spec: str, *, cache_dir: Path, text_field: str = TEXT_FIELD) -> Source:
    """Open the text source a string names; lists files but reads no text yet.

    Args:
        spec: `python` (the running installation's standard library), `hf:owner/name` or `hf:owner/name/config` (a
            data set of the Hub), else the path of a file or folder. A folder is walked recursively in sorted order;
            `list_folder` says what is left out. A folder called `python` is `./python`.
        cache_dir: where downloads are kept; in a folder that is walked it is left out.
        text_field: the field of JSON, CSV and Parquet that holds the text.

    Raises:
        DataError: nothing of that name exists, a folder holds no file that can be read, a file has an unknown
            ending, or the Hub has no such data set or cannot be reached.
    """
    if spec == "python":
        return _python_source(Path(sysconfig.get_paths()["stdlib"]))
    if spec.startswith("hf:"):
        from quintic.data.hub import open_hub

        return open_hub(spec, cache_dir=cache_dir, text_field=text_field)
    return _path_source(spec, cache_dir, text_field)


def _path_source(spec: str, cache_dir: Path, text_field: str) -> Source:
    root = Path(spec).expanduser()
    if not spec or not root.exists():
        several = "; `quintic train` and `prepare` take several as one value, 'SOURCE=WEIGHT SOURCE=WEIGHT'"
        raise DataError(
            f"{spec!r}: no such file or folder; a text source is a path, 'python' or 'hf:owner/name[/config]'"
            + (several if " " in spec or "=" in spec else "")
        )
    if root.is_dir():
        files, notes = list_folder(root, spec, cache_dir=cache_dir, text_field=text_field)
        parts = tuple(_file_part(path, path.relative_to(root).as_posix(), text_field) for path in files)
        name = slug(root.resolve().name)
    else:
        if not is_supported(root.name):
            raise DataError(f"{spec}: unknown ending; {ENDINGS_ADVICE}")
        if not root.is_file():  # text is read more than once; a pipe gives it once, and waits for a writer
            raise DataError(f"{spec}: a pipe or a device, not a file; write its text to a file first")
        parts, notes = (_file_part(root, root.name, text_field),), ()
        name = slug(uncompressed_name(root.name).rpartition(".")[0])
    plain = all(stored_as_text(part.name) for part in parts)
    total = sum(part.size_bytes for part in parts)
    return Source(
        name=name,
        spec=spec,
        parts=parts,
        # The usual field is not named: text prepared before there was a choice is still found.
        identity="files" if text_field == TEXT_FIELD else f"files, field {text_field}",
        text_bytes=total if plain else None,
        notes=notes,
    )


def _file_part(path: Path, name: str, text_field: str) -> SourceFile:
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

    Left out: tests, files under 200 bytes, files that are not UTF-8, and tables (see `_is_table`).
    """
    files: list[str] = []
    if root.is_dir():
        visible = visible_files(root, _LEFT_OUT_FOLDERS)
        files = [path.relative_to(root).as_posix() for path in visible if path.suffix == ".py"]
    # A zipped or stripped installation keeps a few build files in the folder but not the modules themselves.
    if not {"os.py", "functools.py"} <= set(files):
        raise DataError(
            f"python: the standard library's sources are not in {root} (a zipped or stripped installation?); "
            "give a text file or folder instead"
        )
    parts = tuple(_module_part(root / name, name) for name in sorted(files))
    # The size still counts tables, which reading leaves out: good enough for a progress display, not an exact sum.
    return Source(name="python", spec="python", parts=parts, identity=f"python {platform.python_version()}")


def _module_part(path: Path, name: str) -> SourceFile:
    read = _read_topics if name == "pydoc_data/topics.py" else _read_module
    # The version and the sizes identify an installation; reading every module to hash it would add nothing.
    return SourceFile(name=name, size_bytes=path.stat().st_size, identity=str, read=lambda: read(path))


def _read_module(path: Path) -> Iterator[Utf8]:
    text = _source_text(path)
    if text is not None and not _is_table(text):
        yield text.encode()


def _read_topics(path: Path) -> Iterator[Utf8]:
    source = _source_text(path)
    if source is None:
        return
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(node.value)
            for topic in sorted(topics):
                if len(text := topics[topic].encode()) >= _SMALLEST_SOURCE_BYTES:
                    yield text


def _source_text(path: Path) -> str | None:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(data) < _SMALLEST_SOURCE_BYTES:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:  # a few modules declare another encoding
        return None


def _is_table(text: str) -> bool:
    """Return whether nearly every line begins with a number or a string: character maps, entity lists, settings."""
    lines = [line for line in text.splitlines() if line.strip()]
    literal = sum(1 for line in lines if _LITERAL_LINE.match(line))
    return literal > _TABLE_FRACTION * len(lines)
