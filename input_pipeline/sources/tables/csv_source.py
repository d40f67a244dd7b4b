"""``csv:GLOB``: rows below a header."""

from typing import Any

import pyarrow as pa

from towers.input_pipeline.sources.tables.csv_file import CSVFile
from towers.input_pipeline.sources.tables.table_source import TableSource


class CSVSource(TableSource):
    """CSV files with a header each; see ``TableSource``.

    The header determines the separator: commas, semicolons, tabs or bars. Files may be
    compressed by gzip, zstd, bzip2 or lz4. A column has numbers, dates or truth values
    if most of its first cells have.
    """

    kind = "csv"

    def _open(self, path: str) -> CSVFile:
        return CSVFile(path, self._stored)

    def _type_of_label(self, kind: Any) -> Any:
        # As they are written: the whole column tells whether they are names of classes.
        written = self._first.dialect.decimal == "." or kind != pa.float64()
        return pa.string() if written else kind
