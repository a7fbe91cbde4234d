"""Reads texts from JSON: files with one record per line, and `.json` files with an array or a sequence of records.

A record is an object; its text is the string under one of its keys. Python's parser reads short records. A long record
is scanned in place instead, because a parsed copy takes up to four bytes per byte: a Python string with a single wide
character stores all of its characters wide.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from quintic.data.files.blocks import Utf8, blocks_of, check_utf8, lines_of
from quintic.data.files.fields import MissingField
from quintic.errors import DataError

__all__ = ["MAX_RECORD_BYTES", "read_json", "read_json_lines"]

MAX_RECORD_BYTES = 256 << 20
# Records of this length or more are scanned, not parsed.
_SCANNED_BYTES = 8 << 20
# Bytes of a scanned string that are decoded at a time.
_UNESCAPED_BYTES = 1 << 20

_QUOTE_OR_ESCAPE = re.compile(rb'["\\]')
_STRUCTURE = re.compile(rb'["{}\[\]]')
_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"[^\s,\]}]+")
# The longest sequence of whole characters and escapes of a string; a pair of surrogates is one escape.
_ESCAPED = re.compile(rb"(?:[^\\]++|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\[^u])++", re.DOTALL)


def read_json_lines(path: Path, field: str) -> Iterator[Utf8]:
    """Yield the text of each line's record as UTF-8.

    Args:
        path: a file with one JSON object per line; empty lines are skipped.
        field: the key of the text.

    Raises:
        MissingField: a record has no such key.
        DataError: a line is not an object, not UTF-8, or longer than `MAX_RECORD_BYTES`, or its text is not a string.
        OSError: the file cannot be read.
    """
    offset = 0
    for number, line in enumerate(lines_of(path, MAX_RECORD_BYTES), start=1):
        if offset == 0 and line.startswith(b"\xef\xbb\xbf"):
            del line[:3]
            offset = 3
        check_utf8(line, str(path), offset)
        offset += len(line)
        if line.isspace() or not line:
            continue
        text = _text_of(line, f"{path}:{number}", field)
        # The caller may keep a long text for a while: free the record before yielding.
        line.clear()
        yield text


def read_json(path: Path, field: str) -> Iterator[Utf8]:
    """Yield the text of each record as UTF-8.

    Args:
        path: a file with an array of objects, or with objects one after another, with or without line ends.
        field: the key of the text.

    Raises:
        MissingField: a record has no such key.
        DataError: a record is not an object, not UTF-8, or longer than `MAX_RECORD_BYTES`, its text is not a string, or
            the file ends within a record.
        OSError: the file cannot be read.
    """
    for number, record in enumerate(_records(path), start=1):
        text = _text_of(record, f"{path}: record {number}", field)
        record.clear()
        yield text


def _records(path: Path) -> Iterator[bytearray]:
    """Yield the bytes of each record of a `.json` file, without keeping a reference to them."""
    # `held` is the text since the last record, at `offset` of the file. Its first `scanned` bytes were looked at, and
    # `depth` brackets are open there.
    held = bytearray()
    offset = scanned = depth = 0
    in_string = in_array = begun = False
    for block in blocks_of(path):
        if offset == 0 and not held and block.startswith(b"\xef\xbb\xbf"):
            block = block[3:]
            offset = 3
        held += block
        while True:
            if depth == 0 and not in_string:
                # Between records: skip spaces, commas of an array, and the array's own brackets.
                start = _skip_between(held, scanned)
                if not begun and held[start : start + 1] == b"[":
                    begun = in_array = True
                    start = _skip_between(held, start + 1)
                if in_array and held[start : start + 1] == b"]":
                    in_array = False
                    start = _skip_between(held, start + 1)
                offset += start
                del held[:start]
                scanned = 0
                if not held:
                    break
                begun = True
                if held[0] != ord("{"):
                    given = bytes(held[:20]).decode(errors="replace")
                    raise DataError(
                        f"{path}: not JSON with records at byte offset {offset} ({given!r}); expected an array of "
                        "objects, or one object per line"
                    )
            match = (_QUOTE_OR_ESCAPE if in_string else _STRUCTURE).search(held, scanned)
            if match is None:
                scanned = len(held)
                break
            sign = match[0]
            scanned = match.end()
            if sign == b"\\":
                # The escaped character is in the next block.
                if match.end() == len(held):
                    scanned = match.start()
                    break
                scanned += 1
            elif sign == b'"':
                in_string = not in_string
            else:
                depth += 1 if sign in (b"{", b"[") else -1
                if depth == 0:
                    record = [held[:scanned]]
                    check_utf8(record[0], str(path), offset)
                    offset += scanned
                    del held[:scanned]
                    scanned = 0
                    yield record.pop()
        if len(held) > MAX_RECORD_BYTES:
            raise DataError(
                f"{path}: a record of more than {MAX_RECORD_BYTES >> 20} MiB at byte offset {offset}; write one "
                "object per line, each with a document of a sensible size"
            )
    if held:
        raise DataError(f"{path}: ends inside the record at byte offset {offset}; copy or download it again")


def _skip_between(data: bytearray, start: int) -> int:
    while start < len(data) and data[start] in b" \t\r\n,":
        start += 1
    return start


def _text_of(record: bytearray, place: str, field: str) -> Utf8:
    """Return the text of a record as UTF-8; lone halves of surrogate pairs become U+FFFD."""
    if len(record) >= _SCANNED_BYTES:
        return _scanned_text(record, place, field)
    try:
        value = json.loads(record.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not a JSON object ({error}); expected one object per line") from error
    if not isinstance(value, dict):
        raise MissingField(place, field, None)
    if field not in value:
        raise MissingField(place, field, map(str, value))
    text = value[field]
    if not isinstance(text, str):
        raise _not_a_string(place, field, json.dumps(text))
    return _utf8(text)


def _not_a_string(place: str, field: str, value: str) -> DataError:
    return DataError(f"{place}: {field!r} is {value[:40]}, not a string; leave such lines out")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _scanned_text(record: bytearray, place: str, field: str) -> Utf8:
    """Return the text of a long record by scanning it in place; of several equal keys the last one counts."""
    found: tuple[int, int] | None = None
    keys: list[str] = []
    try:
        at = _after_space(record, 0)
        if record[at : at + 1] != b"{":
            raise MissingField(place, field, None)
        at = _after_space(record, at + 1)
        while record[at : at + 1] != b"}":
            key_end = _value_end(record, at)
            key = json.loads(record[at:key_end].decode())
            at = _after_space(record, key_end)
            if not isinstance(key, str) or record[at : at + 1] != b":":
                raise ValueError(f"no key at byte {at}")
            start = _after_space(record, at + 1)
            end = _value_end(record, start)
            keys.append(key)
            if key == field:
                found = (start, end)
            at = _after_space(record, end)
            if record[at : at + 1] == b",":
                at = _after_space(record, at + 1)
            elif record[at : at + 1] != b"}":
                raise ValueError(f"no comma at byte {at}")
        if _after_space(record, at + 1) != len(record):
            raise ValueError(f"more text behind the object, at byte {at + 1}")
        if found is None:
            raise MissingField(place, field, keys)
        if record[found[0]] != ord('"'):
            raise _not_a_string(place, field, record[found[0] : min(found[1], found[0] + 40)].decode(errors="replace"))
        return _unescaped(record, found[0] + 1, found[1] - 1)
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{place}: not a JSON object ({error}); expected one object per line") from error


def _after_space(data: bytearray, start: int) -> int:
    match = _SPACE.match(data, start)
    return start if match is None else match.end()


def _value_end(data: bytearray, start: int) -> int:
    """Return the end of the JSON value that begins at `start`.

    Raises:
        ValueError: no value begins there, or it does not end.
    """
    first = bytes(data[start : start + 1])
    if first == b'"':
        return _string_end(data, start + 1)
    if first not in (b"{", b"["):
        match = _SCALAR.match(data, start)
        if match is None:
            raise ValueError(f"no value at byte {start}")
        json.loads(match[0])
        return match.end()
    depth, at = 0, start
    while (match := _STRUCTURE.search(data, at)) is not None:
        at = match.end()
        if match[0] == b'"':
            at = _string_end(data, at)
            continue
        depth += 1 if match[0] in (b"{", b"[") else -1
        if depth == 0:
            return at
    raise ValueError(f"brackets that do not close, from byte {start} on")


def _string_end(data: bytearray, start: int) -> int:
    """Return the position after the closing quotes of the string whose first character is at `start`."""
    while (match := _QUOTE_OR_ESCAPE.search(data, start)) is not None:
        if match[0] == b'"':
            return match.end()
        start = match.end() + 1
    raise ValueError(f"a string that does not end, from byte {start} on")


def _unescaped(data: bytearray, start: int, end: int) -> bytearray:
    """Return the text of a JSON string as UTF-8; `start` and `end` are the positions between its quotes."""
    text = bytearray()
    while start < end:
        stop = min(end, start + _UNESCAPED_BYTES)
        match = _ESCAPED.match(data, start, stop)
        if match is None:
            raise ValueError(f"an escape that does not end, at byte {start}")
        cut_at = match.end()
        if cut_at < end:
            while cut_at > start + 1 and data[cut_at] & 0xC0 == 0x80:
                cut_at -= 1
        part = json.loads(f'"{data[start:cut_at].decode()}"')
        # The first half of a pair whose second half lies after `stop`: decode it with the next section.
        if cut_at < end and "\ud800" <= part[-1:] <= "\udbff" and cut_at - start > 6:
            part, cut_at = part[:-1], cut_at - 6
        text += _utf8(part)
        start = cut_at
    return text
