"""Which columns of a Parquet file are read, by their names and types."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from towers.input_pipeline.sources.tables import columns, table_targets
from towers.input_pipeline.sources.tables.row_groups import is_text

_IMAGES = ("image/encoded", "image")


@dataclasses.dataclass(frozen=True)
class ParquetColumns:
    """The columns that are read.

    Attributes:
        examples: names of the columns of numbers, or of the one of images.
        texts: names of the columns of text that are learnt from.
        labels: names of the columns of targets.
        image_shape: (None, None, 3) of encoded images, (F,) of rows of numbers.
        text_labels: whether labels are names of classes.
        note: what was guessed, a sentence; may be empty.
    """

    examples: Sequence[str]
    texts: Sequence[str]
    labels: Sequence[str]
    image_shape: tuple[int | None, ...]
    text_labels: bool
    note: str

    @property
    def names(self) -> list[str]:
        """All of them, the targets last."""
        return [*self.examples, *self.texts, *self.labels]


def choose(
    path: str,
    schema: Any,
    image_key: str | None,
    label_column: str | Sequence[str] | None,
    feature_columns: Sequence[str] | None,
) -> ParquetColumns:
    """Decides what is read.

    Args:
        path: of a file.
        schema: its columns, as pyarrow has them.
        image_key: see ``ParquetSource``.
        label_column: see ``table_targets.read_names``.
        feature_columns: see ``columns.find_features``.

    Raises:
        ValueError: a column is not there, or of another type.
    """
    kinds = {field.name: field.type for field in schema}
    if len(kinds) < 2:
        raise ValueError(
            f"{path} has the columns {_listed(kinds) or 'none'}: expected at least "
            "two, images and labels"
        )
    if image_key is not None:
        columns.check_named(path, schema.names, [image_key], "image_key")
        if feature_columns is not None:
            raise ValueError(
                f"received image_key={image_key} and feature_columns="
                f"{','.join(feature_columns)}: expected images or numbers, so "
                "leave one out"
            )
    labels, note = table_targets.read_names(path, schema.names, label_column)
    text_labels = _has_text_labels(path, kinds, labels)
    image = image_key
    if image is None and feature_columns is None:
        image = next((name for name in _IMAGES if name in kinds), None)
    if image is not None:
        _check_images(path, kinds, image)
        return ParquetColumns([image], [], labels, (None, None, 3), text_labels, note)
    names = columns.find_features(path, schema.names, labels, feature_columns)
    asked = feature_columns is not None
    # Of text that is named.
    texts = [name for name in names if asked and is_text(kinds[name])]
    names = [name for name in names if name not in texts]
    if not asked:
        left_out = {name: str(kinds[name]) for name in names if is_text(kinds[name])}
        right = [name for name in names if name not in left_out]
        if left_out and right:
            note = f"{note} {columns.left_out_note(left_out, right)}".strip()
            names = right
    _check_numbers(path, kinds, names, asked)
    return ParquetColumns(names, texts, labels, (len(names),), text_labels, note)


def _listed(kinds: dict[str, Any]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items())


def _has_text_labels(path: str, kinds: dict[str, Any], labels: Sequence[str]) -> bool:
    """Tells whether labels are names of classes; True and False are, if alone."""
    from pyarrow import types

    numbers = types.is_integer, types.is_floating, types.is_decimal, types.is_boolean
    for label in labels:
        kind = kinds[label]
        if not (is_text(kind) or any(is_kind(kind) for is_kind in numbers)):
            raise ValueError(
                f"{path} has the columns {_listed(kinds)}: expected numbers, or names "
                f"of classes, as labels in {label!r}; name another column by "
                "--label_column (in Python, label_column)"
            )
    return is_text(kinds[labels[0]]) or (
        types.is_boolean(kinds[labels[0]]) and len(labels) == 1
    )


def look_at(name: str, values: Any, rows: int | None = None) -> table_targets.Column:
    """Looks at values of a column of targets, as pyarrow has them.

    Args:
        name: of the column.
        values: of the first rows; or the different ones of all rows.
        rows: how many these are; None of the first ones.
    """
    from pyarrow import types

    values = values.drop_null()
    if is_text(values.type):
        return table_targets.Column(name, "text", rows=rows or 0)
    if types.is_boolean(values.type):
        return table_targets.Column(name, "whole", bits=True)
    found = values.to_pylist()
    if types.is_decimal(values.type):
        found = [*map(float, found)]
    return table_targets.Column.of(name, found, rows)


def _check_images(path: str, kinds: dict[str, Any], image: str) -> None:
    from pyarrow import types

    kind = kinds[image]
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if not types.is_binary(kind) and not types.is_large_binary(kind):
        raise ValueError(
            f"{path} has the columns {_listed(kinds)}: expected bytes of JPEG or PNG "
            f"in {image!r}, or a struct with a field of them, bytes; name the column "
            "by --image_key (in Python, image_key)"
        )


def _check_numbers(
    path: str, kinds: dict[str, Any], names: Sequence[str], asked: bool
) -> None:
    from pyarrow import types

    numbers = types.is_integer, types.is_floating, types.is_boolean
    wrong = {
        name: str(kinds[name])
        for name in names
        if not any(is_kind(kinds[name]) for is_kind in numbers)
    }
    if wrong:
        right = [name for name in names if name not in wrong]
        error = columns.not_numbers(path, wrong, right, asked)
        images = ", or a column of images by --image_key (in Python, image_key)"
        raise ValueError(f"{error}{images}")
