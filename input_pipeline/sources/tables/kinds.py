"""Kinds of columns: a column is read as it was when the model was trained."""

from typing import Any

import pyarrow as pa

from towers.input_pipeline.sources.tables import values
from towers.input_pipeline.sources.tables.blocks import TableFile

# The type in which a column of a kind is read, and the word for its contents.
_TYPES = {
    "number": (pa.float64(), "numbers"),
    "date": (pa.timestamp("us"), "dates"),
    "truth": (pa.bool_(), "truth values"),
    "text": (pa.string(), "texts"),
}
NUMBERS = ("number", "date", "truth")


def kind_of(kind: Any) -> str | None:
    """Returns the kind of a pyarrow type; `None` if it cannot be learnt from."""
    if values.is_text(kind):
        return "text"
    if values.is_date(kind):
        return "date"
    if pa.types.is_boolean(kind):
        return "truth"
    return "number" if values.is_number(kind) and not pa.types.is_null(kind) else None


def read_as(table: TableFile, name: str, *kinds: str) -> Any:
    """Returns the type in which a column of a file is read.

    Args:
        table: the file.
        name: the name of the column.
        *kinds: the kinds that training had there, or may have had.

    Returns:
        The file's own type if it is of such a kind, else one of the first kind: if the
        first rows are empty, or cells only look like another kind.

    Raises:
        ValueError: the file has stored another type.
    """
    own = table.types[name]
    if kind_of(own) in kinds:
        return own
    kind, phrase = _TYPES[kinds[0]]
    if table.has_types and not pa.types.is_null(own):
        raise ValueError(
            f"{table.path} has {own} in the column {name!r}, but training had {phrase} "
            "there: expected the same, so convert the column"
        )
    return kind
