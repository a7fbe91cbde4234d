"""Reads texts from one column of a table, CSV or Parquet: one document per row."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quintic.data.files.blocks import check_utf8, lines_of
from quintic.data.files.fields import MissingField
from quintic.errors import DataError

__all__ = ["read_csv", "read_parquet"]

# Bytes of a column that are read at a time, about, and size of the read buffer.
_BATCH_BYTES = 8 << 20
_READ_BYTES = 1 << 20
# A row group may not exceed both of these: bytes of the column, and their mean per row.
_MAX_GROUP_BYTES = 256 << 20
_MAX_MEAN_BYTES = 32 << 20
# Python's CSV reader takes four bytes per character of a cell, and doubles its buffer as the cell grows.
_MAX_CELL_BYTES = 32 << 20


def read_csv(path: Path, field: str) -> Iterator[bytes]:
    """Yield the text of each row as UTF-8.

    Args:
        path: a file with commas between cells, quotes (doubled within) around cells that need them, and the names of
            the columns in its first row.
        field: name of the column that holds the text.

    Raises:
        MissingField: the table has no such column.
        DataError: two columns have the name, a row has too few cells, a cell is longer than 32 MiB, or the file is not
            UTF-8.
        OSError: it cannot be read.
    """
    offset = 0

    def lines() -> Iterator[str]:
        nonlocal offset
        for line in lines_of(path, _MAX_CELL_BYTES):
            check_utf8(line, str(path), offset)
            yield (line.removeprefix(b"\xef\xbb\xbf") if offset == 0 else line).decode()
            offset += len(line)

    # Python's default limit is 128 KiB.
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_CELL_BYTES))
    try:
        rows = csv.reader(lines(), strict=True)
        names = next(rows, None)
        if names is None:
            return
        column = _column(path, field, names)
        for row in rows:
            if not row:  # an empty line
                continue
            if len(row) <= column:
                raise DataError(
                    f"{path}:{rows.line_num}: {len(row)} cells, but {field!r} is column {column + 1} of {len(names)}; "
                    "put quotes around cells with commas or line ends, or leave such rows out"
                )
            yield row[column].encode()
    except csv.Error as error:
        raise DataError(
            f"{path}:{rows.line_num}: not a row of CSV with cells of at most {_MAX_CELL_BYTES >> 20} MiB ({error}); "
            "write the file again"
        ) from error


def _column(path: Path, field: str, names: list[str]) -> int:
    """Return the index of the column that holds the text."""
    if field not in names:
        raise MissingField(str(path), field, names)
    if names.count(field) > 1:
        raise DataError(
            f"{path}: {names.count(field)} columns named {field!r}; rename all but the one that holds the text, or "
            "choose another column with --text-field"
        )
    return names.index(field)


def read_parquet(path: Path, field: str) -> Iterator[memoryview]:
    """Yield the text of each row as UTF-8; rows with a missing text are left out.

    Args:
        path: a Parquet file.
        field: name of the column that holds the text, as strings.

    Raises:
        MissingField: the table has no such column.
        DataError: two columns have the name, the column does not hold strings, its rows are too long, or the file is
            damaged.
        OSError: it cannot be read.
    """
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        # With a buffer, because otherwise the whole column of a row group is read at once.
        with parquet.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False) as table:
            schema = table.schema_arrow
            column = _column(path, field, list(schema.names))
            kind = schema.field(column).type
            if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                raise DataError(
                    f"{path}: column {field!r} holds {kind}, not strings; write it as strings, or choose another "
                    "column with --text-field"
                )
            for group in range(table.num_row_groups):
                rows = _rows_at_once(path, field, table.metadata.row_group(group))
                for batch in table.iter_batches(batch_size=rows, row_groups=[group], columns=[field]):
                    for text in _cells(batch.column(0)):
                        check_utf8(text, f"{path}: column {field!r}")
                        yield text
    except arrow.ArrowException as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: not a readable Parquet file ({reason}); write or download it again") from error


def _cells(strings: Any) -> Iterator[memoryview]:
    """Yield the strings of an Arrow array as views of its memory, in UTF-8; missing ones are left out."""
    _, offsets, data = strings.buffers()
    # There is no buffer if all strings are empty.
    if data is None:
        return
    wide = str(strings.type).startswith("large")
    places = memoryview(offsets).cast("q" if wide else "i")[strings.offset :]
    missing = strings.is_null().to_pylist() if strings.null_count else [False] * len(strings)
    view = memoryview(data)
    for row, is_missing in enumerate(missing):
        if not is_missing:
            yield view[places[row] : places[row + 1]]


def _rows_at_once(path: Path, field: str, group: Any) -> int:
    """Return the number of rows of a row group to read at a time, a few megabytes for rows of ordinary length.

    Raises:
        DataError: a row is so long that reading it may take more than a gigabyte, since Arrow copies it three times.
    """
    columns = (group.column(number) for number in range(group.num_columns))
    size = int(sum(column.total_uncompressed_size for column in columns if column.path_in_schema == field))
    rows = max(1, int(group.num_rows))
    if size > _MAX_GROUP_BYTES and size / rows > _MAX_MEAN_BYTES:
        raise DataError(
            f"{path}: column {field!r} has {rows} rows of {size / rows / 1e6:,.0f} MB on average; write documents of a "
            "sensible size, or the text as .txt"
        )
    if size <= 4 * _BATCH_BYTES:
        return 1024
    # Few rows at a time even if they are short on average, since a single one may be as long as the whole group.
    return max(1, min(64, _BATCH_BYTES * rows // size))
