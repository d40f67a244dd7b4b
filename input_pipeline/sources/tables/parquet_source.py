"""``parquet:GLOB`` of columns of numbers and texts."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from towers.input_pipeline.sources.tables.blocks import TableFile
from towers.input_pipeline.sources.tables.parquet_file import ParquetFile
from towers.input_pipeline.sources.tables.row_groups import described_classes
from towers.input_pipeline.sources.tables.table_source import TableSource


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
