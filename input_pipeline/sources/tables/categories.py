"""Converts columns of text that a model learns from to ids."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.tables import columns, values

# The name of the columns of numbers, all together, beside categories.
_NUMBERS = "dense"


def read_vocabularies(
    names: Sequence[str], batches: Iterable[Sequence[np.ndarray]]
) -> dict[str, tuple[str, ...]]:
    """Reads the vocabularies of columns of training data.

    Args:
        names: the names of the columns.
        batches: texts in UTF-8 [B] of each column, in batches.

    Returns:
        The different texts of each, sorted, without the empty one.
    """
    different = {name: set() for name in names}
    for texts in batches:
        for name, some in zip(names, texts, strict=True):
            different[name] |= {*some.tolist()}
    return {
        name: ordered(text.decode(errors="replace") for text in texts)
        for name, texts in different.items()
    }


def ordered(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns the vocabulary of texts: each once, sorted, without the empty one."""
    return tuple(sorted({text.strip(values.SPACES) for text in texts} - {""}))


def check(where: str, names: Iterable[str], vocabularies: Iterable[str]) -> None:
    """Checks that there is a vocabulary for each column of categories.

    Raises:
        ValueError: these are of other columns, or a name is not possible for an input
            of a model.
    """
    if wrong := [name for name in names if "/" in name or not name.strip()]:
        raise ValueError(
            f"{where} has a column of categories named {wrong[0]!r}, which Keras takes "
            "for no name of an input: expected a name without a slash, so rename the "
            "column"
        )
    if _NUMBERS in names:
        raise ValueError(
            f"{where} has a column of categories named {_NUMBERS!r}, which models "
            "expect to be the columns of numbers: rename the column"
        )
    if {*names} != {*vocabularies}:
        raise ValueError(
            f"{where} has the columns of categories {', '.join(names) or 'none'}, but "
            f"there are vocabularies of {', '.join(vocabularies)}: expected the same "
            "columns, so choose them by --feature_columns (in Python, feature_columns)"
        )


def table_sizes(vocabularies: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Returns the number of ids of each column: 0 is for unknown texts."""
    return {name: len(texts) + 1 for name, texts in vocabularies.items()}


def finders(
    vocabularies: Mapping[str, Sequence[str]],
) -> dict[str, Callable[[tf.Tensor], tf.Tensor]]:
    """Makes functions of texts [B] that return ids, int64 [B]; by the columns' names.

    An id is a text's position in the vocabulary, from 1; an unknown text is 0. Spaces
    around a text do not count.
    """

    def finder(texts):
        if not texts:
            return lambda texts: tf.zeros(tf.shape(texts), tf.int64)
        find = columns.class_finder(texts)
        return lambda texts: find(tf.strings.strip(texts)) + 1

    return {name: finder(texts) for name, texts in vocabularies.items()}


def examples(
    rows: tf.Tensor | None, of_categories: Mapping[str, tf.Tensor]
) -> tf.Tensor | dict[str, tf.Tensor]:
    """Returns the input of a model: rows of numbers, or a dict with categories."""
    if not of_categories:
        return rows
    return ({} if rows is None else {_NUMBERS: rows}) | of_categories
