"""What is to be learnt of a table's rows: a class, numbers, or several labels."""

import csv
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from towers.input_pipeline.sources.tables import columns
from towers.input_pipeline.sources.targets import TargetKind

KINDS = ("class", "numbers", "labels")
# Of fewer rows than that, it is chance that most differ.
FEW = 20
# A model that has learnt nothing yet tells numbers near 0.
_LARGE = 100


@dataclasses.dataclass(frozen=True)
class Column:
    """What the first rows tell of a column of labels.

    Attributes:
        name: of the column.
        form: "text", "whole" numbers or other "numbers".
        bits: whether each value is 0 or 1.
        differ: whether most of many rows have different values.
        largest: the largest number, without its sign.
    """

    name: str
    form: str
    bits: bool = False
    differ: bool = False
    largest: float = 0

    @classmethod
    def of(cls, name: str, texts: Sequence[str]) -> "Column":
        """Looks at values as they are written."""
        numbers = [number for text in texts if (number := _number(text)) is not None]
        # A number in bytes that are no text is said of its row.
        if not numbers and any("\ufffd" not in text for text in texts):
            return cls(name, "text")
        fractions = [text for text in texts if _is_fraction(text)]
        return cls(
            name,
            "numbers" if fractions else "whole",
            bool(numbers) and {*numbers} <= {0, 1},
            len(texts) >= FEW and len({*texts}) > len(texts) / 2,
            _largest(numbers),
        )


def _largest(numbers: Sequence[float]) -> float:
    return max((abs(number) for number in numbers if math.isfinite(number)), default=0)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_fraction(text: str) -> bool:
    """Whether a number is not written as a whole one, such as 1.0."""
    number = _number(text)
    whole = text.lstrip("+-").isdigit()
    return number is not None and math.isfinite(number) and not whole


def read_names(
    where: str, found: Sequence[str], label_column: str | Sequence[str] | None
) -> tuple[list[str], str]:
    """Finds the columns that hold the targets.

    Args:
        where: file, for the message.
        found: the columns there are.
        label_column: a name, or several, also as one text with commas between; None
            for what ``columns.find_label`` chooses.

    Returns:
        Their names, and a note, empty if nothing was guessed.

    Raises:
        ValueError: there is no column of a name, or one is named twice.
    """
    if label_column is None or label_column in found:
        label, note = columns.find_label(where, found, label_column)
        return [label], note
    names = [label_column] if isinstance(label_column, str) else [*label_column]
    if isinstance(label_column, str) and "," in label_column:
        names = [name.strip() for name in next(csv.reader([label_column]))]
    columns.check_named(where, found, names, "label_column")
    if len(set(names)) < len(names) or not names:
        raise ValueError(
            f"label_column is {', '.join(names) or 'empty'}: expected at least one "
            "column, each once"
        )
    return names, ""


def choose(
    where: str,
    found: Sequence[Column],
    asked: TargetKind | None,
    of_classes: Any = None,
) -> tuple[TargetKind, str]:
    """Decides what the targets are.

    Args:
        where: file, for the message.
        found: the columns of the targets.
        asked: what they are to be; None for what is clear.
        of_classes: number or names of classes, if any were given.

    Returns:
        The kind of target, and a note, empty if there is nothing to say.

    Raises:
        ValueError: these cannot be that.
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
    _check(where, found, asked)
    kind, note = (asked or "class", "") if asked or not found else _guess(found)
    if kind == "labels" and len(found) == 1:
        note = (
            f"The only label is {_listed(found)}; --label_column=a,b (in Python, "
            "label_column) names several."
        )
    largest = max((column.largest for column in found), default=0)
    if kind == "numbers" and largest > _LARGE:
        more = (
            f"Numbers to predict are as large as {largest:,.7g}, and models learn such "
            "as 1 faster: write them in a larger unit, or raise --learning_rate."
        )
        note = f"{note} {more}".strip()
    return kind, note


def _guess(found: Sequence[Column]) -> tuple[TargetKind, str]:
    """Decides what the targets are by their columns."""
    names = _listed(found)
    if len(found) > 1:
        if all(column.bits for column in found):
            return "labels", (
                f"The targets are the labels {names}, each 0 or 1, of which several "
                "may hold; --task=regression (in Python, target='numbers') takes them "
                "for numbers."
            )
        return "numbers", f"The targets are the numbers in the columns {names}."
    (column,) = found
    if column.form == "numbers":
        return "numbers", f"The target is the number in the column {names}."
    if column.form == "whole" and column.differ:
        return "class", (
            f"The whole numbers in the column {names} are taken for classes, but most "
            "rows have another one; --task=regression (in Python, target='numbers') "
            "learns them as numbers."
        )
    return "class", ""


def _check(where: str, found: Sequence[Column], asked: TargetKind | None) -> None:
    """Checks that columns can be what they are to be."""
    names = _listed(found)
    texts = [column for column in found if column.form == "text"]
    if asked == "class" and len(found) > 1:
        raise ValueError(
            f"the labels are the columns {names}: expected one column of classes, so "
            "name one by --label_column (in Python, label_column)"
        )
    if texts and (asked in ("numbers", "labels") or len(found) > 1):
        raise ValueError(
            f"{where} has text in the labels' column {texts[0].name!r}: expected "
            "numbers, so name other columns by --label_column (in Python, "
            "label_column)"
        )
    if asked == "class" and found and found[0].form == "numbers":
        raise ValueError(
            f"{where} has fractions in the labels' column {names}: expected whole "
            "numbers from 0, or names of classes; name another column by "
            "--label_column (in Python, label_column), or learn numbers by "
            "--task=regression (in Python, target='numbers')"
        )


def _listed(found: Sequence[Column]) -> str:
    return ", ".join(repr(column.name) for column in found)
