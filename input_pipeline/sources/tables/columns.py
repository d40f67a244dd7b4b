"""Finds the columns of a table with the numbers, and those with the labels."""

import collections
import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.folder.pictures import SUFFIXES

# Rows from which a column's contents are inferred.
SAMPLE = 100

_FEATURES = "--feature_columns"
# Advice on a cell without a value.
FILL = (
    "write one, such as the column's mean, in every such row, or leave the column out "
    f"by {_FEATURES} (in Python, feature_columns)"
)
_LABELS = ("label", "class", "target")
# pandas's names for an index in CSV, when it reads that again, and in Parquet.
_OF_PANDAS = r"|Unnamed: \d+|__index_level_\d+__"
# People's names for a column that identifies rows, such as PassengerId or row_id.
_OF_IDS = r"(.*[^A-Za-z])?[iI][dD]|.*[a-z]I[dD]|[iI]ndex"
# With fewer rows, it is chance that all differ, or that numbers rise by one.
_FEW = 10


def check_named(
    where: str, columns: Sequence[str], names: Sequence[str], option: str
) -> None:
    """Checks that columns that were named exist.

    Args:
        where: file or record, for the message.
        columns: the existing columns.
        names: the names that were given.
        option: the option with the names, such as ``label_column``.

    Raises:
        ValueError: a column does not exist.
    """
    for name in names:
        if name not in columns:
            near = difflib.get_close_matches(name, columns, n=1)
            raise ValueError(
                f"{option} is {name!r}, but {where} has the columns "
                f"{', '.join(columns)}: "
                + (f"did you mean {near[0]!r}?" if near else "choose one of them")
            )


def named(columns: Sequence[str]) -> list[str]:
    """Gives columns without a name, but the first, the names that pandas gives them."""
    first = next((index for index, name in enumerate(columns) if not name), None)
    return [
        f"Unnamed: {index}" if not name and index != first else name
        for index, name in enumerate(columns)
    ]


def check_different(where: str, columns: Sequence[str]) -> None:
    """Checks that columns have different names, which identify them.

    Raises:
        ValueError: two have the same name.
    """
    counts = collections.Counter(columns)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"{where} has two columns {twice[0]!r}: expected different names, so "
            "rename one"
        )


def check_several(where: str, columns: Sequence[str]) -> None:
    """Checks that there is a column to learn from beside one to be predicted.

    Raises:
        ValueError: there are fewer than two columns.
    """
    if len(columns) < 2:
        raise ValueError(
            f"{where} has the column {', '.join(columns) or 'none'} alone: expected at "
            "least two, one of them to be predicted"
        )


def find_label(
    where: str, columns: Sequence[str], label_column: str | None
) -> tuple[str, str]:
    """Finds the column that holds the labels.

    Args:
        where: see ``check_named``.
        columns: the existing columns, at least one.
        label_column: its name; None takes the one named label, class or target, else
            the last one.

    Returns:
        Its name, and a note, empty if nothing was guessed.

    Raises:
        ValueError: there is no column of that name.
    """
    if label_column is not None:
        check_named(where, columns, [label_column], "label_column")
        return label_column, ""
    named = [name for name in columns if name.strip().lower() in _LABELS]
    if len(named) == 1:
        return named[0], ""
    # A column without a name is an index, or comes after a separator that ends each
    # row.
    others = [name for name in columns if not re.fullmatch(_OF_PANDAS, name)]
    label = named[0] if named else (others or columns)[-1]
    why = f"the first of {', '.join(named)}" if named else "the last one"
    return label, (
        f"The labels are the column {label!r}, {why}; --label_column (in Python, "
        "label_column) names another."
    )


def find_features(
    where: str,
    columns: Sequence[str],
    labels: Sequence[str],
    feature_columns: Sequence[str] | None,
) -> list[str]:
    """Finds the columns that hold the numbers to learn from.

    Args:
        where: see ``check_named``.
        columns: the existing columns.
        labels: the columns of the targets.
        feature_columns: their names; None takes all but the labels'.

    Raises:
        ValueError: one does not exist, is named twice, or holds the labels.
    """
    if feature_columns is None:
        names = [name for name in columns if name not in labels]
    else:
        names = [*feature_columns]
        check_named(where, columns, names, "feature_columns")
    if {*labels} & {*names} or len(set(names)) < len(names) or not names:
        raise ValueError(
            f"feature_columns are {', '.join(names) or 'none'}: expected at least one, "
            f"each once, and not the labels' column {', '.join(map(repr, labels))}"
        )
    return names


def name_pictures(texts: Collection[str]) -> bool:
    """Tells whether the texts of a column are the names of pictures."""
    return bool(texts) and all(text.lower().endswith(SUFFIXES) for text in texts)


def nothing_to_learn_from(
    where: str, left_out: Sequence[str], pictures: Sequence[str]
) -> ValueError:
    """Makes an error for a table with neither numbers nor texts that repeat.

    Args:
        where: see ``check_named``.
        left_out: its columns, without the labels'.
        pictures: the columns that name pictures.
    """
    if pictures:
        return ValueError(
            f"{where} has no column of numbers: {_instead_of(pictures)}; or learn from "
            f"columns of numbers, by {_FEATURES} (in Python, feature_columns)"
        )
    text = f"--text_column={left_out[0]}" if len(left_out) == 1 else "--text_column"
    return ValueError(
        f"{where} has no column of numbers or of texts that repeat, but "
        f"{_quoted(left_out) or 'none'}: name columns to learn from by {_FEATURES}, "
        f"what is to be predicted by --label_column, text to be read by {text}, "
        "or pictures in Parquet by --image_column (in Python, feature_columns, "
        "label_column, text_column, image_column)"
    )


def _instead_of(pictures: Sequence[str]) -> str:
    """Advises, in a clause, on columns that name pictures."""
    return (
        f"{pictures[0]!r} names pictures, which no table reads: put those of each "
        "class into a folder of its own, and train on folder:DIR"
    )


def left_out_note(
    names: Sequence[str], taken: Sequence[str], pictures: Sequence[str] = ()
) -> str:
    """Notes the columns that are left out, as no columns to learn from were given.

    Args:
        names: the columns that are left out.
        taken: the other columns.
        pictures: the columns that name pictures.
    """
    note = f"Left out, because neither numbers nor texts that repeat: {_quoted(names)}."
    if pictures:
        return f"{note} {_instead_of(pictures)}."
    return (
        f"{note} {_FEATURES}={_listed([*taken, *names])} takes them as categories, and "
        "--text_column reads one of them as text (in Python, feature_columns, "
        "text_column)."
    )


def categories_note(names: Sequence[str], numbers: Sequence[str]) -> str:
    """Notes which columns of text are learnt from as categories."""
    leave = f"; {_FEATURES}={_listed(numbers)} leaves them out" if numbers else ""
    return f"Categories, because texts that repeat: {_quoted(names)}{leave}."


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:10])) + ", ..." * (len(names) > 10)


def _listed(names: Sequence[str]) -> str:
    """Lists names as a flag takes them, up to a limit."""
    listed = ",".join(names[:20]) + (",..." if len(names) > 20 else "")
    return f"'{listed}'" if any(sign in listed for sign in " '\"()&;|<>") else listed


def listed(types: Mapping[str, Any]) -> str:
    """Lists columns with their types, in a phrase."""
    return ", ".join(f"{name} ({kind})" for name, kind in types.items())


def counts_rows(values: Sequence[float]) -> bool:
    """Tells whether a column only counts the rows."""
    if len(values) < _FEW or not np.isfinite(values).all():
        return False
    return bool((np.diff(np.asarray(values, np.float64)) == 1).all())


def is_id(name: str, values: np.ndarray) -> bool:
    """Tells whether a column of numbers has the name and the form of an id of rows.

    Args:
        name: the name of the column.
        values: its values in the first rows.
    """
    if re.fullmatch(_OF_PANDAS, name):
        return True
    return (
        bool(re.fullmatch(_OF_IDS, name))
        and len(values) >= _FEW
        and bool((values % 1 == 0).all())
        and len(np.unique(values)) == len(values)
    )


def ids_note(names: Sequence[str], taken: Sequence[str]) -> str:
    """Notes the columns that are left out, as they are ids; empty if none is."""
    if not names:
        return ""
    return (
        f"Left out, because named as ids of rows are: {_quoted(names)}. "
        f"{_FEATURES}={_listed([*names, *taken])} (in Python, feature_columns) learns "
        "from them."
    )


def index_note(name: str, values: Sequence[float], taken: Sequence[str]) -> str:
    """Notes that a column counts the rows; empty if it does not.

    Args:
        name: the name of the column.
        values: its values in the first rows.
        taken: the names of all columns of features.
    """
    if not counts_rows(values):
        return ""
    others = [other for other in taken if other != name]
    return (
        f"The column {name!r} counts the rows, from {values[0]:g}, and the model "
        f"learns from it; {_FEATURES}={_listed(others)} (in Python, feature_columns) "
        "leaves it out."
    )


def check_classes(
    where: str, label: str, texts: Collection[str], rows: int, asked: bool
) -> str:
    """Checks that texts can be classes.

    Args:
        where: see ``check_named``.
        label: the labels' column.
        texts: the different texts in it.
        rows: the number of its rows.
        asked: whether the column was named; a named column is taken as it is.

    Returns:
        A note, empty if there is nothing to note.

    Raises:
        ValueError: all texts of many differ, in a column that was not named.
    """
    if rows < _FEW or len(texts) < rows:
        return ""
    if name_pictures(texts) and not asked:
        raise ValueError(f"{where}: {_instead_of([label])}")
    one, other = sorted(texts)[:2]
    fault = (
        f"another text in each row of the labels' column {label!r}, such as "
        f"{one[:60]!r} and {other[:60]!r}"
    )
    if asked:
        return f"There is {fault}: each row is a class of its own."
    raise ValueError(
        f"{where} has {fault}: expected names of classes, so name the labels' column "
        "by --label_column (in Python, label_column)"
    )


def order_classes(
    where: str,
    label: str,
    there: Collection[str],
    num_classes: int | None,
    class_names: Sequence[str] | None,
) -> tuple[str, ...]:
    """Decides which label each class has.

    Args:
        where: see ``check_named``.
        label: the labels' column.
        there: the names in that column.
        num_classes: the expected number; None for as many as there are.
        class_names: their order; None sorts them.

    Returns:
        The names, by their labels.

    Raises:
        ValueError: there are other names than requested.
    """
    names = tuple(sorted(there) if class_names is None else class_names)
    if unknown := sorted(set(there) - set(names)):
        raise ValueError(
            f"{where} has the class {unknown[0]!r} in the column {label!r}: expected "
            f"one of {_shortened(names)}"
        )
    if num_classes not in (None, len(names)):
        raise ValueError(
            f"num_classes is {num_classes}, but the column {label!r} has {len(names)} "
            f"classes, {_shortened(names)}: expected as many, so leave it out"
        )
    return names


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + ", ..." * (len(names) > 10)


def class_finder(names: Sequence[str]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Makes a function that turns names of classes into labels.

    It consists of plain operations: a lookup table would not travel to the workers of a
    tf.data service.

    Args:
        names: the names of the classes, by their labels.

    Returns:
        A function of strings [B]; it returns int64 labels [B], -1 for an unknown name.
    """
    buckets = 2**63 - 1
    hashes = tf.strings.to_hash_bucket_fast(tf.constant([*names]), buckets).numpy()
    order = np.argsort(hashes)
    hashes, ordered = hashes[order], [names[label] for label in order]

    def find(texts: tf.Tensor) -> tf.Tensor:
        hashed = tf.strings.to_hash_bucket_fast(texts, buckets)
        index = tf.searchsorted(tf.constant(hashes), hashed)
        index = tf.minimum(index, len(ordered) - 1)
        known = tf.equal(tf.gather(tf.constant(ordered), index), texts)
        labels = tf.gather(tf.constant(order, tf.int64), index)
        return tf.where(known, labels, -tf.ones_like(labels))

    return find
