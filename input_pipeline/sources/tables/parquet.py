"""``parquet:GLOB``: images as Hugging Face writes them, or columns."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from towers.input_pipeline.sources.base import Source
from towers.input_pipeline.sources.files.file_source import group_by_split
from towers.input_pipeline.sources.tables import columns
from towers.input_pipeline.sources.tables.blocks import TableFile
from towers.input_pipeline.sources.tables.parquet_file import ParquetFile
from towers.input_pipeline.sources.tables.reading import Wanted
from towers.input_pipeline.sources.tables.row_groups import described_classes
from towers.input_pipeline.sources.tables.table_pass import TablePass
from towers.input_pipeline.sources.tables.table_source import TableSource

_NAMES = ("image/encoded", "image")


def open_parquet(
    pattern: str,
    *,
    image_column: str | None = None,
    feature_columns: Sequence[str] | None = None,
    **options: Any,
) -> Source:
    """Opens Parquet files of images, or else of columns.

    Args:
        pattern: see ``FileSource``.
        image_column: column of images; None for the result of `column_of_images`.
        feature_columns: columns to learn from, in place of images.
        **options: options of ``ParquetImages`` or ``TableSource``.

    Raises:
        ValueError: the files cannot be opened.
    """
    image = column_of_images(pattern, image_column, feature_columns)
    if image is None:
        return ParquetSource(pattern, feature_columns=feature_columns, **options)
    for name in ("vocabularies", "column_kinds", "missing"):
        options.pop(name, None)
    return ParquetImages(pattern, image_column=image, **options)


def column_of_images(
    pattern: str, image_column: str | None, feature_columns: Sequence[str] | None
) -> str | None:
    """Returns the column of images of Parquet files; `None` if they have none.

    Args:
        pattern: see ``FileSource``.
        image_column: its name, if the user has named it.
        feature_columns: columns that the user has named in its place.

    Raises:
        ValueError: both are named, or there is no such column, or no file.
    """
    if image_column is not None and feature_columns is not None:
        raise ValueError(
            f"received image_column={image_column} and feature_columns="
            f"{','.join(feature_columns)}: expected images or numbers, so leave one out"
        )
    if feature_columns is not None:
        return None
    files, _ = group_by_split("parquet", pattern)
    path = next(iter(files.values()))[0]
    names = ParquetFile(path).names
    if image_column is not None:
        columns.check_named(path, names, [image_column], "image_column")
        return image_column
    return next((name for name in _NAMES if name in names), None)


class ParquetSource(TableSource):
    """Parquet files with the same columns in each; see ``TableSource``."""

    kind = "parquet"

    def _open(self, path: str) -> ParquetFile:
        return ParquetFile(path, self._stored)

    def _type_of_label(self, kind: Any) -> Any:
        # True and False by themselves are names of classes.
        return pa.string() if pa.types.is_boolean(kind) else kind

    def _is_same(self, table: TableFile, name: str) -> bool:
        return table.types[name] == self._first.types[name]

    def _described(self, label: str) -> Sequence[str] | None:
        return described_classes(self._first.schema, label)


class ParquetImages(ParquetSource):
    """Parquet files with a column of encoded images, and columns of targets.

    Columns of targets are read as those of ``TableSource``. A file is read by the row
    group. Groups come shuffled: as many as half of the buffer holds, and at least four,
    are in memory with the next ones, and their rows are shuffled together. Write small
    groups: 100 to 1000 images each.

    Args:
        pattern: see ``FileSource``.
        image_column: the column of JPEG or PNG bytes, or of structs with a field
            ``bytes``.
        **options: see ``TableSource``.

    Raises:
        ValueError: see ``TableSource``; or the column does not hold bytes.
    """

    encoded = True
    why_whole = "a group of rows is read as a whole"

    def __init__(self, pattern: str, *, image_column: str, **options: Any):
        self._image = image_column
        super().__init__(pattern, **options)
        self.reads = (image_column, *self.reads)
        records = itertools.chain.from_iterable(map(self.walk, self._paths))
        self._note(*self._notes_of_pictures(records))

    def _choose_columns(
        self, labels: list[str], feature_columns: Sequence[str] | None
    ) -> Wanted:
        first = self._tables[0]
        _check_images(first, self._image)
        if self._image in labels:
            raise ValueError(
                f"received {self._image} for the images and for the labels of "
                f"{first.path}: expected two columns, so name the labels' column by "
                "--label_column (in Python, label_column)"
            )
        for table in self._tables[1:]:
            columns.check_named(table.path, table.names, [self._image], "image_column")
        types = {name: self._type_of_label(first.types[name]) for name in labels}
        return Wanted([], [], labels, types)

    def _take_columns(
        self,
        read: TablePass,
        asked: bool,
        vocabularies: Mapping[str, Sequence[str]] | None,
    ) -> None:
        self._wanted = read.wanted
        self.image_fields, self.image_shape = [self._image], (None, None, 3)
        for place, located in enumerate(read.blocks):
            table = self._tables[located.file]
            for row in table.missing(self._image, located.block):
                fault = f"nothing in the column {self._image!r}, expected a value"
                read.faults.setdefault(place, {}).setdefault(int(row), fault)

    def in_memory(self) -> None:
        """See ``Source.in_memory``: its images are not."""

    def record_bytes(self, split: str) -> float:
        """See ``TableSource.record_bytes``."""
        paths = {*self.files(split)}
        tables = [table for table in self._tables if table.path in paths]
        rows = sum(
            located.rows
            for located in self._blocks
            if self._paths[located.file] in paths
        )
        return sum(table.size for table in tables) / max(rows, 1)

    def parse(self, records: tuple) -> tuple[tf.Tensor, tf.Tensor]:
        """See ``Source.parse``."""
        return records

    @property
    def _parts(self) -> list[tuple[tf.DType, tuple[int, ...]]]:
        """Types and shapes of a raw record: an encoded image, and a target."""
        return [(tf.string, ()), *super()._parts[-1:]]

    def _read_block(self, place: int) -> list[np.ndarray]:
        table, part = self._read_part(place)
        y, _ = self._labels.targets(part.labels)
        try:
            images = table.images(self._image, part.block)
        except ValueError as error:
            where = f"{table.path}: row group {part.block.begin}"
            raise ValueError(f"{where}: {error}") from error
        return [images, y]


def _check_images(table: ParquetFile, name: str) -> None:
    kind = table.types[name]
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if not pa.types.is_binary(kind) and not pa.types.is_large_binary(kind):
        raise ValueError(
            f"{table.path} has the columns {columns.listed(table.types)}: expected "
            f"bytes of JPEG or PNG in {name!r}, or a struct with a field of them, "
            "bytes; name the column by --image_column (in Python, image_column)"
        )
