"""A Parquet file as blocks of columns: its row groups."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from towers.input_pipeline.local_store.store import StoredFiles
from towers.input_pipeline.sources.tables import columns
from towers.input_pipeline.sources.tables.blocks import Block, Columns
from towers.input_pipeline.sources.tables.row_groups import RowGroups


class ParquetFile:
    """A Parquet file, of which a row group is a block; see ``TableFile``.

    Args:
        path: the path of the file.
        stored: the files of the data set, if they are read through a store.

    Raises:
        ValueError: it is no whole Parquet file, or two columns have one name.
    """

    has_types = True

    def __init__(self, path: str, stored: StoredFiles | None = None):
        self.path = path
        self.groups = RowGroups([path], stored)
        self.schema = self.groups.schema(path)
        self.names = [*self.schema.names]
        columns.check_different(path, self.names)
        self.types = {field.name: field.type for field in self.schema}
        self.size = int(self.groups.row_bytes([path]) * self.groups.rows(path))

    def text_type(self, name: str) -> Any:
        """Returns the type of a column; see ``TableFile.text_type``."""
        return self.types[name]

    def blocks(self) -> Iterator[tuple[Block, bytes]]:
        """Yields the row groups, which are read when they are parsed."""
        bounds = self.groups.bounds(self.path)
        for group in range(self.groups.count(self.path)):
            yield Block(self.path, group, bounds[group + 1] - bounds[group]), b""

    def bytes_of(self, block: Block) -> int:
        """Returns the bytes of a row group; see ``TableFile.bytes_of``."""
        return self.size * block.size // max(self.groups.rows(self.path), 1)

    def load(self, block: Block) -> bytes:
        """Returns no bytes: `parse` reads the row group; see ``TableFile.load``."""
        del block
        return b""

    def parse(self, block: Block, data: bytes, types: Mapping[str, Any]) -> Columns:
        """Reads columns of a row group; see ``TableFile.parse``."""
        del data
        names = [*types]
        try:
            values = self.groups.read(self.path, block.begin, names)
        except ValueError as error:
            fault = f"cannot be read: {error}"
            return Columns(block, {}, block.size, range(block.size), fault=fault)
        return Columns(block, values, block.size)

    def lines(self, block: Block, data: bytes, rows: Sequence[int]) -> dict[int, int]:
        """Returns no lines, as rows of Parquet files have none."""
        return {}

    def missing(self, name: str, block: Block) -> np.ndarray:
        """Returns the rows of a block in which a column has no value.

        The column is read unless the file's footer tells that there are none.
        """
        if self.groups.null_count(self.path, block.begin, name) == 0:
            return np.zeros(0, np.int64)
        try:
            column = self.groups.read(self.path, block.begin, [name])[name]
        except ValueError:
            return np.zeros(0, np.int64)  # reported for the group
        return np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))

    def images(self, name: str, block: Block) -> np.ndarray:
        """Reads a column of bytes: an array of objects [rows]; no value is empty."""
        column = self.groups.read(self.path, block.begin, [name])[name]
        return column.fill_null(b"").to_numpy(zero_copy_only=False)
