"""Columns of a TFDS data set: numbers, categories, and one to predict."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from towers.input_pipeline.sources.tables import categories, columns
from towers.input_pipeline.sources.targets import Target, TargetKind
from towers.input_pipeline.sources.tfds import features

# Names of targets in data sets, if no supervised keys name it.
_TARGETS = ("label", "class", "target", "rating", "user_rating")


@dataclasses.dataclass(frozen=True)
class Columns:
    """The features that are read, each a column.

    Attributes:
        names: the names of features that are numbers.
        classes: for each feature that is a class, the names of the classes.
        texts: names of features that are text, whose vocabulary is to be read.
        y: the name of the target.
        target: the target.
        notes: sentences on defaults that were chosen.
    """

    names: tuple[str, ...]
    classes: Mapping[str, tuple[str, ...]]
    texts: tuple[str, ...]
    y: str
    target: Target
    notes: tuple[str, ...] = ()

    encoded = False

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the numbers, as of `features.Features`."""
        return self.names

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of the numbers of a row."""
        return (len(self.names),)

    def decoders(self) -> tfds.decode.PartialDecoding:
        """Returns decoders for only these features."""
        read = (*self.names, *self.classes, *self.texts, self.y)
        return tfds.decode.PartialDecoding(dict.fromkeys(read, True), decoders={})

    def parse(
        self, records: Mapping[str, tf.Tensor], ids: Mapping[str, Any]
    ) -> tuple[Any, tf.Tensor]:
        """Returns examples and targets of a batch of records.

        Args:
            records: tensors [B] by the names of the features.
            ids: functions that turn texts into ids; see ``categories.finders``.
        """
        numbers = [tf.cast(records[name], tf.float64) for name in self.names]
        ids_of = {name: ids[name](records[name]) for name in self.texts}
        for name in self.classes:
            # As for a text of a vocabulary: from 1, and 0 for none.
            ids_of[name] = tf.cast(records[name], tf.int64) + 1
        rows = tf.stack(numbers, axis=1) if numbers else None
        y = features.as_target(self.target, records[self.y])
        return categories.examples(rows, ids_of), y


def choose(
    builder: tfds.core.DatasetBuilder,
    name: str,
    asked: TargetKind | None,
    label_column: str | Sequence[str] | None,
    feature_columns: Sequence[str] | None,
) -> Columns | None:
    """Decides which features are columns, and which one is to be predicted.

    Args:
        builder: the builder of the set.
        name: the name of the source, for messages.
        asked: the requested kind of target; None for the obvious one.
        label_column: name of the target; None for the set's supervised key, or a
            feature with a target's usual name.
        feature_columns: names of the others; None for all that can be columns.

    Returns:
        The columns; None if there are none.

    Raises:
        ValueError: a feature that is named does not exist, or cannot be a column.
    """
    by_name = features.by_name(builder)
    inputs, y = _keys(builder.info.supervised_keys, by_name)
    notes = []
    if label_column is not None:
        given = [label_column] if isinstance(label_column, str) else label_column
        columns.check_named(name, [*by_name], given, "label_column")
        y = given[0]
    elif y is None:
        y = next((key for key in _TARGETS if key in by_name), None)
        notes.append(
            f"The target is the feature {y!r}; --label_column (in Python, "
            "label_column) names another."
        )
    target = y and features.target_of(by_name[y], y, asked)
    if target is None or target.kind == "mask":
        if label_column is None:
            return None
        raise ValueError(
            f"label_column is {y!r}, but {name} has a {_type_name(by_name[y])} there: "
            "expected numbers (whole ones only with --task=regression), or classes"
        )
    chosen = inputs if feature_columns is None else feature_columns
    by_kind, note = _by_kind(name, by_name, y, chosen, feature_columns is not None)
    if note:
        notes.append(note)
    named = label_column is not None or feature_columns is not None
    if (
        not named
        and len(by_kind["text"]) == 1
        and not by_kind["number"] + by_kind["class"]
    ):
        return None  # which is text to be read, and no category
    classes = {key: tuple(by_name[key].names) for key in by_kind["class"]}
    return Columns(by_kind["number"], classes, by_kind["text"], y, target, tuple(notes))


def _keys(keys: Any, by_name: Mapping[str, Any]) -> tuple[list[str] | None, str | None]:
    """Returns the names of the inputs and of the target, from the supervised keys."""
    if not isinstance(keys, tuple) or len(keys) != 2:
        return None, None
    inputs, y = tf.nest.flatten(keys[0]), keys[1]
    if not isinstance(y, str) or not {*inputs, y} <= by_name.keys():
        return None, None
    return inputs, y


def _by_kind(
    name: str,
    by_name: Mapping[str, Any],
    y: str,
    chosen: Sequence[str] | None,
    asked: bool,
) -> tuple[dict[str, tuple[str, ...]], str]:
    """Returns the columns of each kind, and a note on the columns left out."""
    names = columns.find_features(name, [*by_name], [y], chosen)
    kinds = {key: _kind_of(by_name[key]) for key in names}
    others = [key for key in names if kinds[key] is None]
    listed = ", ".join(f"{key} ({_type_name(by_name[key])})" for key in others)
    if others and (asked or len(others) == len(names)):
        raise ValueError(
            f"{name} has {listed}: expected single numbers, texts or classes as "
            "columns, so name others by --feature_columns (in Python, feature_columns)"
        )
    note = f"Left out, because not a single number, text or class: {listed}."
    by_kind = {
        kind: tuple(key for key in names if kinds[key] == kind)
        for kind in ("number", "class", "text")
    }
    return by_kind, note if others else ""


def _kind_of(feature: Any) -> str | None:
    """Returns the kind of a feature as a column; None if it cannot be one."""
    if isinstance(feature, tfds.features.ClassLabel):
        return "class" if feature.names else None
    if getattr(feature, "shape", None) != ():
        return None
    kind = np.dtype(feature.np_dtype).kind
    if kind in "OSU":
        return "text"
    return "number" if kind in "fiub" else None


def _type_name(feature: Any) -> str:
    return type(feature).__name__
