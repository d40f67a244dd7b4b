"""Makes tensors of examples that somebody has in Python, and checks them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.targets import LARGEST
from towers.predict import arrays, tables
from towers.train.outputs.preprocessing import OWN, Preprocessing


def as_tensors(known: Preprocessing, examples: Any) -> Any:
    """Makes tensors of examples, as a `Preprocessor` takes them.

    Args:
        known: What the model is given.
        examples: As `Trained.prepare` takes them.

    Raises:
        ValueError: The examples are not as expected.
    """
    if known.input == OWN:
        return arrays.checked(known, examples)
    if known.input in ("row", "columns") and hasattr(examples, "keys"):
        return _columns(known, examples)
    if known.input == "columns":
        raise ValueError(
            f"Received a {type(examples).__name__}, but the model takes the columns "
            f"{', '.join(known.columns)}; expected a dict of these, or a DataFrame."
        )
    if known.input == "row":
        return tf.constant(_numbers(known, "rows", examples))
    array = np.asarray(examples)
    if array.dtype.kind in "SU":
        # Else NumPy cuts zeros off at the end of bytes.
        array = np.asarray(examples, object)
    if known.input == "tokens" or array.dtype.kind in "SOU":
        return _strings(known, array)
    return _pictures(known, array)


def _numbers(known, what, values):
    try:
        # None is a number that is missing, as NaN is.
        numbers = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        numbers = np.array(np.inf)
    good = np.abs(numbers) <= LARGEST
    if known.scaling is not None and known.scaling.fill:
        good |= np.isnan(numbers)
    if not good.all():
        raise ValueError(
            f"Received {what} with something that is no number, or infinite; expected "
            "numbers."
        )
    return numbers


def _strings(known, array):
    kinds, what = bytes, "the bytes of picture files"
    if known.input == "tokens":
        kinds, what = str | bytes, "texts"
    wrong = [each for each in array.flat if not isinstance(each, kinds)]
    if array.ndim != 1 or wrong:
        found = type(wrong[0]).__name__ if wrong else f"strings {list(array.shape)}"
        raise ValueError(f"Received {found}; expected a list of {what}.")
    return tf.constant(array, tf.string)


def _pictures(known, pixels):
    if pixels.shape[1:] != tuple(known.shape):
        raise ValueError(
            f"Received pictures {list(pixels.shape)}; expected pixels "
            f"[B, {', '.join(map(str, known.shape))}], or a list of the bytes of files."
        )
    if pixels.dtype.kind not in "ui":
        if known.range is not None:
            _check_range(pixels, *known.range)
        return tf.constant(pixels, tf.float32)
    if pixels.min() < 0 or pixels.max() > 255:
        raise ValueError(
            f"Received pixels of {pixels.min()} to {pixels.max()}; expected 0 to 255."
        )
    return tf.constant(pixels, tf.uint8)


def _check_range(pixels, low, high):
    least, most = float(pixels.min()), float(pixels.max())
    spare = (high - low) / 4
    if not (least >= low - spare and most <= high + spare):
        raise ValueError(
            f"Received pictures of {least:g} to {most:g}, but the model was trained on "
            f"{low:g} to {high:g}; expected uint8 pixels, which are scaled, or "
            "x / 127.5 - 1."
        )


def _columns(known: Preprocessing, examples: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    if missing := [name for name in known.columns if name not in examples.keys()]:
        raise ValueError(
            f"Received the columns {', '.join(map(str, examples.keys()))}; expected "
            f"also {', '.join(missing)}, which the model was trained on."
        )
    found = {name: _column(known, name, examples[name]) for name in known.columns}
    if len({tuple(each.shape) for each in found.values()}) > 1:
        sizes = ", ".join(f"{name} {list(each.shape)}" for name, each in found.items())
        raise ValueError(f"Received the columns {sizes}; expected lists of one length.")
    return found


def _column(known, name, values):
    values = np.atleast_1d(np.asarray(values))
    if known.is_text(name):
        return tf.constant([*map(tables.as_text, values)], tf.string)
    if name not in known.tables:
        return tf.constant(_numbers(known, f"the column {name!r}", values))
    ids, size = values.astype(np.int64), known.tables[name]
    if ((ids < 0) | (ids >= size)).any():
        raise ValueError(
            f"The column {name!r} has ids of {ids.min()} to {ids.max()}; "
            f"expected 0 to {size - 1}, as in training."
        )
    return tf.constant(ids)
