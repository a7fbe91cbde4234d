"""The error for a record without the field that should hold its text."""

from collections.abc import Iterable

from quintic.errors import DataError

__all__ = ["MissingField"]

_NAMED = 20


class MissingField(DataError):
    """A record or a table has no field of that name.

    Attributes:
        fields: the names of the fields that it has; None where it has none at all.
    """

    def __init__(self, place: str, field: str, fields: Iterable[str] | None) -> None:
        """Name the fields there are, and the option that chooses one."""
        self.fields = None if fields is None else tuple(fields)
        if self.fields is None:
            given = "no object with fields"
        else:
            more = f" and {len(self.fields) - _NAMED} more" if len(self.fields) > _NAMED else ""
            given = f"its fields are {', '.join(self.fields[:_NAMED]) or 'none'}{more}"
        super().__init__(f"{place}: no field {field!r} ({given}); choose the one that holds the text with --text-field")
