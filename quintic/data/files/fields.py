"""`MissingField`, the error for a record without the field that should hold its text."""

from collections.abc import Iterable

from quintic.errors import DataError

__all__ = ["MissingField"]

# Number of fields that the message names.
_NAMED = 20


class MissingField(DataError):
    """A record or a table lacks the field that should hold the text.

    Attributes:
        fields: names of its fields; None for a record that is not an object.
    """

    def __init__(self, place: str, field: str, fields: Iterable[str] | None) -> None:
        """Make a message with the names of the fields, and the option that chooses one of them."""
        self.fields = None if fields is None else tuple(fields)
        if self.fields is None:
            given = "the record is not an object"
        else:
            more = f" and {len(self.fields) - _NAMED} more" if len(self.fields) > _NAMED else ""
            given = f"its fields are {', '.join(self.fields[:_NAMED]) or 'none'}{more}"
        super().__init__(f"{place}: no field {field!r} ({given}); choose the one that holds the text with --text-field")
