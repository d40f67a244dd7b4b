"""Converts pyarrow columns to numbers and to categories."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute, types

# TensorFlow strips these from texts, in training as in an exported graph.
SPACES = " \t\n\v\f\r"
# The microseconds of a day; dates are counted in these.
_DAY_US = 86_400_000_000


def is_number(kind: Any) -> bool:
    """Tells whether a column of a type becomes numbers: also truth values and dates."""
    return any(
        fits(kind)
        for fits in (
            types.is_integer,
            types.is_floating,
            types.is_decimal,
            types.is_boolean,
            types.is_temporal,
            types.is_null,
        )
    ) and not types.is_interval(kind)


def is_whole(kind: Any) -> bool:
    """Tells whether a type has whole numbers, or truth values."""
    return types.is_integer(kind) or types.is_boolean(kind)


def is_date(kind: Any) -> bool:
    """Tells whether a type has days or moments."""
    return types.is_timestamp(kind) or types.is_date(kind)


def is_text(kind: Any) -> bool:
    """Tells whether a type has text, with or without a dictionary."""
    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind) or _is_view(kind)


def _is_view(kind):
    return types.is_string_view(kind)


def as_numbers(column: Any) -> np.ndarray:
    """Converts a column that `is_number` to float64; missing values are NaN.

    Days and moments become days since 1970, with a fraction. Truth values are 0 and 1.
    """
    kind = column.type
    if types.is_null(kind):
        return np.full(len(column), np.nan)
    if is_date(kind):
        # Moments with a time zone are counted from the same moment.
        moments = pa.timestamp("us", getattr(kind, "tz", None))
        # pandas's nanoseconds may lose a fraction.
        moments = column.cast(
            options=compute.CastOptions(moments, allow_time_truncate=True)
        )
        return as_numbers(moments.cast(pa.int64())) / _DAY_US
    if types.is_temporal(kind):
        column = column.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
    elif types.is_boolean(kind):
        column = column.cast(pa.uint8())
    if not types.is_floating(column.type) or column.type.bit_width != 64:
        column = compute.cast(column, pa.float64(), safe=False)
    return column.fill_null(np.nan).to_numpy(zero_copy_only=False)


def as_categories(column: Any) -> Any:
    """Encodes a column that `is_text` with a dictionary of its texts.

    `SPACES` around a text do not count. A missing value is an empty text.
    """
    if types.is_dictionary(column.type):
        texts = column.dictionary.cast(pa.string())
        column = pa.DictionaryArray.from_arrays(column.indices, texts)
        column = column.cast(pa.string())
    texts = column.cast(pa.string()).fill_null("")
    return compute.ascii_trim(texts, characters=SPACES).dictionary_encode()


def joined(parts: Sequence[Any]) -> tuple[np.ndarray, list[str]]:
    """Joins columns of `as_categories`.

    Returns:
        int32 indices of texts, and the texts, sorted.
    """
    if not parts:
        return np.zeros(0, np.int32), []
    column = pa.chunked_array(parts).unify_dictionaries().combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0)
    texts = column.dictionary.to_pylist()
    order = sorted(range(len(texts)), key=texts.__getitem__)
    place = np.empty(len(texts), np.int32)
    place[order] = np.arange(len(texts), dtype=np.int32)
    codes = column.indices.to_numpy(zero_copy_only=False)
    return place[codes], [texts[k] for k in order]
