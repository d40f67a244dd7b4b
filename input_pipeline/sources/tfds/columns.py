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

# What sets call what is to be predicted, if no supervised keys say it.
_TARGETS = ("label", "class", "target", "rating", "user_rating")


@dataclasses.dataclass(frozen=True)
class Columns:
    """The features that are read, each a column.

    Attributes:
        names: of those that are numbers.
        classes: of those that are classes, the names of these, by their names.
        texts: names of those that are text, whose vocabulary is to be read.
        y: name of the target.
        target: what that is.
        notes: what was decided without being asked for, sentences.
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
        """Names of the numbers, as of `features.Features`."""
        return self.names

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of the numbers of a row."""
        return (len(self.names),)

    def decoders(self) -> tfds.decode.PartialDecoding:
        """Only these."""
        read = (*self.names, *self.classes, *self.texts, self.y)
        return tfds.decode.PartialDecoding(dict.fromkeys(read, True), decoders={})

    def parse(
        self, records: Mapping[str, tf.Tensor], ids: Mapping[str, Any]
    ) -> tuple[Any, tf.Tensor]:
        """Examples and targets of a batch of records.

        Args:
            records: tensors [B] by the names of the features.
            ids: functions that turn texts into ids; see ``categories.finders``.
        """
        numbers = [tf.cast(records[name], tf.float64) for name in self.names]
        found = {name: ids[name](records[name]) for name in self.texts}
        for name in self.classes:
            # As a text of a vocabulary: from 1, and 0 where there is none.
            found[name] = tf.cast(records[name], tf.int64) + 1
        rows = tf.stack(numbers, axis=1) if numbers else None
        y = features.as_target(self.target, records[self.y])
        return categories.examples(rows, found), y


def choose(
    builder: tfds.core.DatasetBuilder,
    name: str,
    asked: TargetKind | None,
    label_column: str | Sequence[str] | None,
    feature_columns: Sequence[str] | None,
) -> Columns | None:
    """Decides which features are columns, and which is to be predicted.

    Args:
        builder: of the set.
        name: of the source, for messages.
        asked: what a model is to give; None for what is clear.
        label_column: name of the target; None for what the set's supervised keys say,
            or what is called as targets are.
        feature_columns: names of the others; None for all that can be columns.

    Returns:
        The columns; None where nothing tells of any.

    Raises:
        ValueError: a feature that is named is not there, or can be no column.
    """
    found = features.by_name(builder)
    inputs, y = _keys(builder.info.supervised_keys, found)
    notes = []
    if label_column is not None:
        given = [label_column] if isinstance(label_column, str) else label_column
        columns.check_named(name, [*found], given, "label_column")
        y = given[0]
    elif y is None:
        y = next((key for key in _TARGETS if key in found), None)
        notes.append(
            f"The target is the feature {y!r}; --label_column (in Python, "
            "label_column) names another."
        )
    target = y and features.target_of(found[y], y, asked)
    if target is None or target.kind == "mask":
        if label_column is None:
            return None
        raise ValueError(
            f"label_column is {y!r}, but {name} has a {_type_name(found[y])} there: "
            "expected numbers (whole ones only with --task=regression), or classes"
        )
    chosen = inputs if feature_columns is None else feature_columns
    by_kind, note = _by_kind(name, found, y, chosen, feature_columns is not None)
    if note:
        notes.append(note)
    named = label_column is not None or feature_columns is not None
    if (
        not named
        and len(by_kind["text"]) == 1
        and not by_kind["number"] + by_kind["class"]
    ):
        return None  # which is text to be read, and no category
    classes = {key: tuple(found[key].names) for key in by_kind["class"]}
    return Columns(by_kind["number"], classes, by_kind["text"], y, target, tuple(notes))


def _keys(keys: Any, found: Mapping[str, Any]) -> tuple[list[str] | None, str | None]:
    """The names of the inputs and of the target, as far as supervised keys say them."""
    if not isinstance(keys, tuple) or len(keys) != 2:
        return None, None
    inputs, y = tf.nest.flatten(keys[0]), keys[1]
    if not isinstance(y, str) or not {*inputs, y} <= found.keys():
        return None, None
    return inputs, y


def _by_kind(
    name: str,
    found: Mapping[str, Any],
    y: str,
    chosen: Sequence[str] | None,
    asked: bool,
) -> tuple[dict[str, tuple[str, ...]], str]:
    """The columns of each kind, and a note on those that are left out."""
    names = columns.find_features(name, [*found], [y], chosen)
    kinds = {key: _kind_of(found[key]) for key in names}
    others = [key for key in names if kinds[key] is None]
    listed = ", ".join(f"{key} ({_type_name(found[key])})" for key in others)
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
    """What a feature is as a column; None if it can be none."""
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
