"""Decides what models learn from a table: a class, numbers, or several labels."""

import csv
import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from towers.input_pipeline.sources.tables import columns
from towers.input_pipeline.sources.targets import TargetKind

KINDS = ("class", "numbers", "labels")
# With fewer rows, it is chance that most differ.
FEW = 20
# Whole numbers are no classes if the largest exceeds this, and the number of rows.
_MANY = 1000
# A model that has learnt nothing yet predicts numbers near 0.
_LARGE = 100


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of labels, and what its values tell.

    Attributes:
        name: the name of the column.
        form: "text", "whole" numbers, whole ones written as "decimals", such as 1.0, or
            other "numbers".
        bits: whether each value is 0 or 1.
        differ: whether most of many rows have different values.
        largest: the largest number, without its sign.
        in_turn: whether whole numbers go from 0 or 1 to the largest, without a gap.
        rows: the number of rows; 0 if only the first ones were checked.
    """

    name: str
    form: str
    bits: bool = False
    differ: bool = False
    largest: float = 0
    in_turn: bool = False
    rows: int = 0

    @classmethod
    def of(
        cls, name: str, values: Collection[str | float], rows: int | None = None
    ) -> "Column":
        """Infers the form from values, as they are written or as numbers.

        Args:
            name: the name of the column.
            values: values of the first rows; or the different values of all rows.
            rows: the number of all rows; None if these are the first ones.
        """
        read = [(value, number_of(value)) for value in values]
        # NaN alone makes no column one of numbers.
        numbers = {number for _, number in read if number == number} - {None}
        # A number in bytes without valid text is reported for its row.
        if not numbers and any("\ufffd" not in text for text in values):
            return cls(name, "text", rows=rows or 0)
        finite = {number for number in numbers if math.isfinite(number)}
        if any(number % 1 for number in finite):
            form = "numbers"
        elif any(_is_decimal(value) for value, number in read if number in finite):
            form = "decimals"
        else:
            form = "whole"
        count = len(values) if rows is None else rows
        least, most = min(finite, default=0), max(finite, default=0)
        return cls(
            name,
            form,
            bool(numbers) and numbers <= {0, 1},
            count >= FEW and len({*values}) > count / 2,
            max(-least, most),
            least in (0, 1) and most - least == len(finite) - 1,
            rows or 0,
        )


def number_of(value: str | float) -> float | None:
    """Returns the number that a text or a number is; `None` if it is none.

    Only Python reads 1_000 as a number.
    """
    if isinstance(value, str) and "_" in value:
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _is_decimal(value: str | float) -> bool:
    """Tells whether a number is not written as a whole one, such as 1.0."""
    if isinstance(value, str):
        return not value.lstrip("+-").isdigit()
    return not isinstance(value, int)


def read_names(
    where: str, names_there: Sequence[str], label_column: str | Sequence[str] | None
) -> tuple[list[str], str]:
    """Finds the columns that hold the targets.

    Args:
        where: the file, for the message.
        names_there: the existing columns.
        label_column: a name, or several, also as one text with commas between; None for
            the choice of ``columns.find_label``.

    Returns:
        Their names, and a note, empty if nothing was guessed.

    Raises:
        ValueError: there is no column of a name, or one is named twice.
    """
    if label_column is None or label_column in names_there:
        label, note = columns.find_label(where, names_there, label_column)
        return [label], note
    names = [label_column] if isinstance(label_column, str) else [*label_column]
    if isinstance(label_column, str) and "," in label_column:
        names = [name.strip() for name in next(csv.reader([label_column]))]
    columns.check_named(where, names_there, names, "label_column")
    if len(set(names)) < len(names) or not names:
        raise ValueError(
            f"label_column is {', '.join(names) or 'empty'}: expected at least one "
            "column, each once"
        )
    return names, ""


def choose(
    where: str,
    labels: Sequence[Column],
    asked: TargetKind | None,
    of_classes: Any = None,
) -> tuple[TargetKind, str]:
    """Decides the kind of the targets.

    Args:
        where: the file, for the message.
        labels: the columns of the targets.
        asked: the requested kind; None for the obvious one.
        of_classes: the number or names of classes, if any were given.

    Returns:
        The kind of target, and a note, empty if there is nothing to note.

    Raises:
        ValueError: the columns cannot have that kind.
    """
    if asked not in (None, *KINDS):
        raise ValueError(
            f"target is {asked!r}: expected one of {', '.join(KINDS)} for a table, so "
            "choose another --task (in Python, target)"
        )
    if of_classes is not None:
        if asked not in (None, "class"):
            raise ValueError(
                f"received target={asked!r}, and {of_classes} for classes: expected "
                "no number and no names of classes, so leave them out"
            )
        asked = "class"
    _check(where, labels, asked)
    kind, note = (asked or "class", "") if asked or not labels else _guess(labels)
    if kind == "labels" and len(labels) == 1:
        note = (
            f"The only label is {_listed(labels)}; --label_column=a,b (in Python, "
            "label_column) names several."
        )
    largest = max((column.largest for column in labels), default=0)
    if kind == "numbers" and largest > _LARGE:
        more = (
            f"Numbers to predict are as large as {largest:,.7g}, and models learn such "
            "as 1 faster: write them in a larger unit, or raise --learning_rate."
        )
        note = f"{note} {more}".strip()
    return kind, note


def _guess(labels: Sequence[Column]) -> tuple[TargetKind, str]:
    """Decides the kind of the targets by their columns."""
    names = _listed(labels)
    if len(labels) > 1:
        if all(column.bits for column in labels):
            return "labels", (
                f"The targets are the labels {names}, each 0 or 1, of which several "
                "may hold; --task=regression (in Python, target='numbers') takes them "
                "for numbers."
            )
        return "numbers", f"The targets are the numbers in the columns {names}."
    (column,) = labels
    if column.form == "numbers":
        return "numbers", f"The target is the number in the column {names}."
    if column.form == "decimals" and not column.in_turn:
        return "numbers", (
            f"The target is the number in the column {names}; --task=classification "
            "(in Python, target='class') takes its whole numbers for classes."
        )
    if column.rows and column.largest > max(_MANY, column.rows):
        return "numbers", (
            f"The target is the number in the column {names}, as the largest, "
            f"{column.largest:,.15g}, is more than there are rows; --num_classes (in "
            "Python, num_classes) takes whole numbers for classes."
        )
    if column.form == "decimals":
        return "class", (
            f"The numbers in the column {names} are whole, and are taken for classes; "
            "--task=regression (in Python, target='numbers') learns them as numbers."
        )
    if column.form == "whole" and column.differ:
        return "class", (
            f"The whole numbers in the column {names} are taken for classes, but most "
            "rows have another one; --task=regression (in Python, target='numbers') "
            "learns them as numbers."
        )
    return "class", ""


def _check(where: str, labels: Sequence[Column], asked: TargetKind | None) -> None:
    """Checks that columns can have the requested kind."""
    names = _listed(labels)
    texts = [column for column in labels if column.form == "text"]
    if asked == "class" and len(labels) > 1:
        raise ValueError(
            f"the labels are the columns {names}: expected one column of classes, so "
            "name one by --label_column (in Python, label_column)"
        )
    if texts and (asked in ("numbers", "labels") or len(labels) > 1):
        raise ValueError(
            f"{where} has text in the labels' column {texts[0].name!r}: expected "
            "numbers, so name other columns by --label_column (in Python, "
            "label_column)"
        )
    if asked == "class" and labels and labels[0].form == "numbers":
        raise ValueError(
            f"{where} has fractions in the labels' column {names}: expected whole "
            "numbers from 0, or names of classes; name another column by "
            "--label_column (in Python, label_column), or learn numbers by "
            "--task=regression (in Python, target='numbers')"
        )


def _listed(labels: Sequence[Column]) -> str:
    return ", ".join(repr(column.name) for column in labels)
