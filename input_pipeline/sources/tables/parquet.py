"""``parquet:GLOB``: images, or columns of numbers and texts."""

from collections.abc import Sequence
from typing import Any

from towers.input_pipeline.sources.base import Source
from towers.input_pipeline.sources.tables.parquet_images import (
    ParquetImages,
    image_column,
)
from towers.input_pipeline.sources.tables.parquet_source import ParquetSource


def open_parquet(
    pattern: str,
    *,
    image_key: str | None = None,
    feature_columns: Sequence[str] | None = None,
    **options: Any,
) -> Source:
    """Opens Parquet files of images, or else of columns.

    Args:
        pattern: see ``FileSource``.
        image_key: column of images; None for what ``image_column`` finds.
        feature_columns: columns to learn from, in place of images.
        **options: of ``ParquetImages`` or ``TableSource``.

    Raises:
        ValueError: the files cannot be opened.
    """
    image = image_column(pattern, image_key, feature_columns)
    if image is None:
        return ParquetSource(pattern, feature_columns=feature_columns, **options)
    for name in ("vocabularies", "column_kinds", "missing"):
        options.pop(name, None)
    return ParquetImages(pattern, image_key=image, **options)
